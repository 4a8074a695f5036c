"""What a text may be: a constraint, and whether it is safe to compile.

Refuses what would cost llguidance its stack or minutes of work, and schemas that it would not
enforce.  Whether the rest compiles, llguidance says itself.
"""

from __future__ import annotations

import json
import re
from typing import Literal

import attrs

from llamad_trio.constraints.schema_vetting import MAX_DEPTH, vet_schema
from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.tools import JsonObject

ConstraintKind = Literal["json_schema", "regex", "lark"]

MAX_SOURCE_BYTES = 256 * 1024
"""The largest schemas people publish are of this size; llguidance refuses most above it as
too large, after reading them."""

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

    A JSON Schema is data as `json.loads` gives it, of which no container occurs twice; a regular
    expression must match the whole text; "lark" is llguidance's dialect of it.  Any text up to
    and with `after` comes first, if that is set.
    """

    kind: ConstraintKind
    source: str | JsonObject = attrs.field(hash=False)
    after: str | None = None


def check_constraint(constraint: Constraint) -> None:
    """Raise `ProtocolError`, with the reason, for what is unsafe to compile."""
    source = constraint.source
    text = source if isinstance(source, str) else json.dumps(source)
    n_bytes = len(text.encode())
    if n_bytes > MAX_SOURCE_BYTES:
        raise ProtocolError(
            f"{constraint.kind} has {n_bytes} bytes, at most {MAX_SOURCE_BYTES} are allowed"
        )
    # An expression may be of spaces.
    if not (text if constraint.kind == "regex" else text.strip()):
        raise ProtocolError(f"{constraint.kind} is empty")
    if not isinstance(source, str):
        vet_schema(source)
    elif constraint.kind == "lark":
        _check_lark(source)
    # llguidance's parser of regular expressions has a limit of its own.


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
        vet_schema(schema, in_lark=True)
    depth += len(_NESTING.findall(source, end))
    if depth > 2 * MAX_DEPTH:
        raise ProtocolError(f"lark has more than {2 * MAX_DEPTH} rules and brackets")
