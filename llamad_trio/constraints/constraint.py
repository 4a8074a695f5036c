"""What a text may be: a constraint, and whether it is safe to compile.

Refuses what would cost llguidance its stack or minutes of work, and schemas that it would not
enforce.  Whether the rest compiles, llguidance says itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from math import prod
from typing import Literal

import attrs

from llamad_trio.constraints.schema_depth import depth_bound
from llamad_trio.constraints.schema_vetting import is_number, resolve, vet_schema, within
from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.tools import JsonObject

ConstraintKind = Literal["json_schema", "regex", "lark"]

MAX_SOURCE_BYTES = 256 * 1024
"""The largest schemas people publish are of this size; llguidance refuses most above it as
too large, after reading them."""

MAX_DEPTH = 500
"""llguidance follows nesting and references by recursion.  On a thread's usual stack of 8 MiB
it survives 1,200 levels and not 4,000."""

MAX_MULTIPLE = 100_000
"""`multipleOf` becomes an automaton of as many states; combined ones multiply.  This many
take a third of a second, ten times as many eight."""

JSON_STYLE = {
    # As `json.dumps` writes, which models have read most of.  With white space left to the
    # model little would be forced, and small models never stop writing it.
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    # No `\uXXXX`: by that a key could be written so that it is not known for what it is.
    "json_allowed_escapes": 'nrbtf\\"',
    # What it does not know it must refuse, whatever the schema says.
    "lenient": False,
}
"""llguidance's options for the JSON of a schema."""


@attrs.frozen
class Constraint:
    """A language that the generated text must be of.

    Args:
        kind: what `source` is: JSON Schema as JSON text, a regular expression (the whole
            text must match), or a grammar in llguidance's dialect of Lark.
        source: its text.
        after: if set, any text up to and with this comes first.
    """

    kind: ConstraintKind
    source: str
    after: str | None = None


def check_constraint(constraint: Constraint) -> None:
    """Refuse what is unsafe to compile.

    Raises:
        ProtocolError: with the reason.
    """
    n_bytes = len(constraint.source.encode())
    if n_bytes > MAX_SOURCE_BYTES:
        raise ProtocolError(
            f"{constraint.kind} has {n_bytes} bytes, at most {MAX_SOURCE_BYTES} are allowed"
        )
    # An expression may be of spaces.
    text = constraint.source if constraint.kind == "regex" else constraint.source.strip()
    if not text:
        raise ProtocolError(f"{constraint.kind} is empty")
    match constraint.kind:
        case "json_schema":
            _check_schema(json.loads(constraint.source))
        case "lark":
            _check_lark(constraint.source)
        case "regex":
            pass  # llguidance's parser of those has a limit of its own


# -- JSON Schema ------------------------------------------------------------------------------


def _check_schema(schema: JsonObject, *, in_lark: bool = False) -> None:
    vet_schema(schema, in_lark=in_lark)
    if depth_bound(schema, lambda ref: resolve(ref, schema)) > MAX_DEPTH:
        raise ProtocolError(
            f"json_schema is nested more than {MAX_DEPTH} deep, references included"
        )
    # Of all objects, those in data included.
    values = (node.get("multipleOf") for node in within(schema) if isinstance(node, Mapping))
    multiples = {Decimal(str(value)) for value in values if is_number(value)}
    # 0.25 counts in steps of 25 hundredths.
    if prod(int("".join(map(str, m.as_tuple().digits))) for m in multiples) > MAX_MULTIPLE:
        raise ProtocolError(f"json_schema: multipleOf above {MAX_MULTIPLE}, all of them multiplied")


# -- Lark -------------------------------------------------------------------------------------

_EMBEDDED_JSON = re.compile(r"%json\s*(?=\{)")
_NESTING = re.compile(r"[(\[{:]")


def _check_lark(source: str) -> None:
    # An upper bound of the depth: as if each rule led to the next, and each bracket held it.
    depth = end = 0
    while embedded := _EMBEDDED_JSON.search(source, end):
        depth += len(_NESTING.findall(source, end, embedded.start()))
        try:
            schema, end = json.JSONDecoder().raw_decode(source, embedded.end())
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"lark: the schema after %json is no JSON: {error}") from None
        _check_schema(schema, in_lark=True)
    depth += len(_NESTING.findall(source, end))
    if depth > 2 * MAX_DEPTH:
        raise ProtocolError(f"lark has more than {2 * MAX_DEPTH} rules and brackets")
