"""Which JSON Schemas are taken: those that llguidance enforces to the letter.

Text of a schema that passes validates with the library `jsonschema`.  Every keyword is in one of
three tables: `SUPPORTED`, enforced; `ANNOTATIONS`, which say nothing of what is valid; and
`REFUSED`, with the reason.  Those in none are refused as well, for a validator ignores what it
does not know, misspelt keywords included, and whoever wrote it meant something.  Only names that
begin with `x-` are free.

llguidance 1.9 compiles more than this.  What it gets wrong is refused here, each with its reason.
"""

from __future__ import annotations

import graphlib
import math
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, TypeAlias

import attrs

from llamad_trio.constraints.schema_pattern import CONTROL, fault_of_pattern
from llamad_trio.core.errors import ProtocolError

Holds: TypeAlias = Literal["a schema", "schemas", "schemas by name"]
"""What a keyword's value is made of, when of schemas."""

Fault: TypeAlias = Callable[[Any], str | None]
"""Why a value is not taken; `None` if it is."""


@attrs.frozen
class _Keyword:
    fault: Fault
    holds: Holds | None = None
    since: int = 0
    """The draft that brought it: 6, 7, 2019 or 2020; 0 is older."""


# -- Values -----------------------------------------------------------------------------------

MAX_EXACT = 2**53
"""llguidance computes with doubles; beyond this they skip whole numbers."""

MAX_DECIMALS = 15
"""Of a bound: llguidance reads them as a number of 64 bits, and as 0 when that is too small."""

MAX_CHOICES = 2_000
"""Of one `oneOf`: llguidance compares each with each."""

MAX_PROPERTIES = 2_000
"""Of one object: these take llguidance a second, twice as many three."""

MAX_PATTERNS = 30
"""In `patternProperties`, all together: llguidance compares each with each.  A hundred take it a
quarter of a second, four hundred a minute."""

MAX_PATTERN_CHARS = 32_000
"""Of all patterns together.  Python takes 8 µs for each to see whether they are any."""

MAX_COMMON_MULTIPLE = 2**32
"""llguidance computes it in 32 bits, and goes on with what is left when it is more."""

_INDEX = re.compile(r"0|[1-9][0-9]{0,6}")

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

FORMATS = frozenset(
    {
        *("date-time", "date", "time", "duration"),
        *("email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
    }
)
"""Enforced by their syntax: February has 29 days in every year, a minute may have 61 seconds."""

DRAFTS = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}


def is_number(value: object) -> bool:
    """Whether a JSON value is a number: to Python, `true` is one."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def within(value: object) -> Iterator[Any]:
    """A JSON value and all those in it, each container before what it holds."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, Mapping):
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _must_be(what: str, holds: Callable[[Any], bool]) -> Fault:
    return lambda value: None if holds(value) else f"it must be {what}"


def _is_schema(value: object) -> bool:
    return isinstance(value, bool | dict)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


_fault_of_schema = _must_be("a schema", _is_schema)

_fault_of_schemas = _must_be(
    "a list of schemas, at least one",
    lambda value: isinstance(value, list) and value != [] and all(map(_is_schema, value)),
)

_fault_of_named_schemas = _must_be(
    "an object of schemas",
    lambda value: isinstance(value, dict) and all(map(_is_schema, value.values())),
)

_fault_of_type = _must_be(
    f"one or some of {', '.join(sorted(TYPES))}",
    lambda value: value != [] and all(isinstance(t, str) and t in TYPES for t in _listed(value)),
)

_fault_of_names = _must_be(
    "a list of names",
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
)

_fault_of_count = _must_be(
    "a whole number, at least 0",
    lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
)


def _fault_of_choices(value: object) -> str | None:
    if isinstance(value, list) and len(value) > MAX_CHOICES:
        return f"at most {MAX_CHOICES} alternatives are allowed"
    return _fault_of_schemas(value)


def _fault_of_properties(value: object) -> str | None:
    if isinstance(value, dict) and len(value) > MAX_PROPERTIES:
        return f"at most {MAX_PROPERTIES} are allowed"
    return _fault_of_named_schemas(value)


def _fault_of_patterns(value: Any) -> str | None:
    if fault := _fault_of_named_schemas(value):
        return fault
    for key in value:
        if fault := fault_of_pattern(key, of_keys=True):
            return f"{_short(key)}: {fault}"
    return None


def _fault_of_pattern(value: object) -> str | None:
    return fault_of_pattern(value) if isinstance(value, str) else "it must be a text"


def _fault_of_format(value: object) -> str | None:
    if isinstance(value, str) and value in FORMATS:
        return None
    return f"{_short(value)} is not supported, only {', '.join(sorted(FORMATS))}"


def _fault_of_bound(value: Any) -> str | None:
    if not is_number(value):
        return "it must be a number"
    if not abs(value) <= MAX_EXACT:
        return f"it must be within ±2**53, {MAX_EXACT}"
    exponent = Decimal(repr(value)).as_tuple().exponent
    if not isinstance(exponent, int) or exponent < -MAX_DECIMALS:
        return f"it must have at most {MAX_DECIMALS} decimals"
    return None


def _fault_of_multiple(value: Any) -> str | None:
    if not is_number(value) or not 0 < value <= MAX_EXACT:
        return "it must be a number above 0"
    if isinstance(value, float) and math.frexp(value)[0] != 0.5:
        return (
            f"{value!r} is neither a whole number nor a power of two: validators compute "
            "with doubles, and do not take 0.3 for a multiple of 0.1"
        )
    return None


def _fault_of_values(value: object) -> str | None:
    if not isinstance(value, list) or not value:
        return "it must be a list of values, at least one"
    return _fault_of_value(value)


def _fault_of_value(value: object) -> str | None:
    for leaf in within(value):
        if is_number(leaf) and not -MAX_EXACT <= leaf <= MAX_EXACT:
            return f"numbers must be within ±2**53, {MAX_EXACT}"
        if isinstance(leaf, str) and (found := CONTROL.search(leaf)):
            return f"the control character {found[0]!r} is not supported"
    return None


def _fault_of_ref(value: object) -> str | None:
    if isinstance(value, str) and value.startswith("#"):
        return None
    return "only references within the schema are followed, such as '#/$defs/name'"


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


# -- The tables -------------------------------------------------------------------------------

SUPPORTED: Mapping[str, _Keyword] = {
    "type": _Keyword(_fault_of_type),
    "const": _Keyword(_fault_of_value, since=6),
    "enum": _Keyword(_fault_of_values),
    "allOf": _Keyword(_fault_of_schemas, "schemas"),
    "anyOf": _Keyword(_fault_of_schemas, "schemas"),
    # llguidance takes it only when it sees that no two can hold together.
    "oneOf": _Keyword(_fault_of_choices, "schemas"),
    "$ref": _Keyword(_fault_of_ref),
    "$defs": _Keyword(_fault_of_named_schemas, "schemas by name"),
    "definitions": _Keyword(_fault_of_named_schemas, "schemas by name"),
    "properties": _Keyword(_fault_of_properties, "schemas by name"),
    "patternProperties": _Keyword(_fault_of_patterns, "schemas by name"),
    "additionalProperties": _Keyword(_fault_of_schema, "a schema"),
    "required": _Keyword(_fault_of_names),
    "minProperties": _Keyword(_fault_of_count),
    "maxProperties": _Keyword(_fault_of_count),
    "items": _Keyword(_fault_of_schema, "a schema"),
    "prefixItems": _Keyword(_fault_of_schemas, "schemas", since=2020),
    "minItems": _Keyword(_fault_of_count),
    "maxItems": _Keyword(_fault_of_count),
    "minLength": _Keyword(_fault_of_count),
    "maxLength": _Keyword(_fault_of_count),
    "pattern": _Keyword(_fault_of_pattern),
    "format": _Keyword(_fault_of_format),
    "minimum": _Keyword(_fault_of_bound),
    "maximum": _Keyword(_fault_of_bound),
    "exclusiveMinimum": _Keyword(_fault_of_bound, since=6),
    "exclusiveMaximum": _Keyword(_fault_of_bound, since=6),
    "multipleOf": _Keyword(_fault_of_multiple),
}

_OF_THE_WHOLE = ("$schema", "$id", "id")

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$anchor", *_OF_THE_WHOLE),
        # OpenAPI's, which pydantic and msgspec write beside `oneOf` and `anyOf`.
        *("discriminator", "example"),
    }
)

_NOT_COMPILED = "llguidance does not compile it"
_NOT_CHECKED = "it would not be enforced"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies"),
            *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"),
            *("propertyNames", "unevaluatedProperties"),
            *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
        ),
        _NOT_COMPILED,
    ),
    **dict.fromkeys(
        ("contentEncoding", "contentMediaType", "contentSchema", "$vocabulary", "nullable"),
        _NOT_CHECKED,
    ),
    "additionalItems": "write 'prefixItems' and 'items', as in draft 2020-12",
    "x-guidance": "how JSON is written is not the request's to choose",
}


# -- Vetting ----------------------------------------------------------------------------------


@attrs.frozen
class _Place:
    """Where in a schema something is, if not at its top."""

    inside: _Place | None
    name: str | int


def vet_schema(schema: Mapping[str, Any], *, in_lark: bool = False) -> None:
    """Refuse a schema that llguidance would not enforce.

    Args:
        schema: JSON data.
        in_lark: it stands in a grammar, and may say in `x-guidance` how its JSON is written.

    Raises:
        ProtocolError: with the keyword, its place, and the reason.
    """
    draft = _check_whole(schema, in_lark=in_lark)
    parts: list[Mapping[str, Any]] = []
    n_chars = 0
    for part, place in _parts(schema):
        parts.append(part)
        n_chars += sum(map(len, _patterns(part)))
        if n_chars > MAX_PATTERN_CHARS:
            raise ProtocolError(
                f"json_schema: its patterns have more than {MAX_PATTERN_CHARS} characters"
            )
        for keyword, value in part.items():
            if place is None and in_lark and keyword == "x-guidance":
                continue
            fault = _fault(keyword, value, draft)
            if fault is None and place is not None and keyword in _OF_THE_WHOLE:
                fault = "only the whole schema may have it"
            if fault is None and keyword == "$ref" and resolve(value, schema) is None:
                fault = f"{_short(value)} leads to no schema"
            if fault is not None:
                raise _refusal(place, keyword, fault)
        _check_together(part, place)
    _check_everywhere(parts)
    _check_progress(parts, schema)


def resolve(ref: str, schema: Mapping[str, Any]) -> object:
    """The schema that a reference leads to: `#`, or `#` and a JSON pointer (RFC 6901).

    `None` if there is none, or what is there is no schema but a value.
    """
    if ref != "#" and not ref.startswith("#/"):
        return None
    node: Any = schema
    holds: Holds | None = "a schema"
    for part in urllib.parse.unquote(ref).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        match node, holds:
            case Mapping(), "a schema":
                node, holds = node.get(name), _holds(name)
            case Mapping(), "schemas by name":
                node, holds = node.get(name), "a schema"
            case list(), "schemas" if _INDEX.fullmatch(name) and int(name) < len(node):
                node, holds = node[int(name)], "a schema"
            case _:
                return None
    return node if holds == "a schema" and isinstance(node, bool | Mapping) else None


def _holds(name: str) -> Holds | None:
    return SUPPORTED[name].holds if name in SUPPORTED else None


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], _Place | None]]:
    """A schema and all those within it, but for `true` and `false`.

    A keyword's value is looked into after the schema it is in was given.
    """
    waiting: list[tuple[Any, _Place | None]] = [(schema, None)]
    while waiting:
        part, place = waiting.pop()
        if isinstance(part, bool):
            continue
        yield part, place
        for name, value in part.items():
            below = _Place(place, name)
            match _holds(name):
                case "a schema":
                    waiting.append((value, below))
                case "schemas":
                    waiting.extend((each, _Place(below, i)) for i, each in enumerate(value))
                case "schemas by name":
                    waiting.extend((each, _Place(below, key)) for key, each in value.items())
                case None:
                    pass


def _patterns(part: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(pattern := part.get("pattern"), str):
        yield pattern
    if isinstance(patterns := part.get("patternProperties"), Mapping):
        yield from patterns


def _fault(name: str, value: object, draft: int) -> str | None:
    keyword = SUPPORTED.get(name)
    if keyword is not None:
        if keyword.since > draft:
            return f"the draft that '$schema' names has no '{name}'"
        return keyword.fault(value)
    if name in REFUSED:
        return REFUSED[name]
    if name in ANNOTATIONS or name.startswith("x-"):
        return None
    return "it is no keyword of JSON Schema; names of your own must begin with 'x-'"


def _refusal(place: _Place | None, keyword: str, fault: str) -> ProtocolError:
    names: list[str] = []
    while place is not None:
        names.append(str(place.name))
        place = place.inside
    path = "/".join(("#", *reversed(names)))
    if len(path) > 120:
        path = f"{path[:80]}...{path[-37:]}"
    return ProtocolError(f"json_schema: {_short(keyword)} at {path} is refused: {fault}")


def _check_whole(schema: Mapping[str, Any], *, in_lark: bool) -> int:
    """What only the whole schema may say; return its draft."""
    for name in ("$id", "id"):
        if not isinstance(schema.get(name, ""), str):
            raise _refusal(None, name, "it must be a text")
    style = schema.get("x-guidance", {})
    if in_lark and (
        not isinstance(style, Mapping) or style.get("lenient") or style.get("coerce_one_of")
    ):
        raise _refusal(None, "x-guidance", "what is not supported must not be ignored")
    name = schema.get("$schema", "https://json-schema.org/draft/2020-12/schema")
    draft = DRAFTS.get(name.removesuffix("#")) if isinstance(name, str) else None
    if draft is None:
        raise _refusal(None, "$schema", f"{_short(name)} is no draft of JSON Schema we know")
    return draft


def _check_together(part: Mapping[str, Any], place: _Place | None) -> None:
    """What keywords beside each other must not say."""
    required = len(set(part.get("required", ())))
    if part.get("minProperties", 0) > required + 1:
        # A key may come twice; to whoever reads the text that is one.
        raise _refusal(
            place,
            "minProperties",
            f"at most {required + 1}, one more than 'required' has: other keys may repeat",
        )
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if part.get(name) and _may_be_fraction(part):
            raise _refusal(
                place,
                name,
                "of numbers that need not be whole only 0 is taken: 0.9999999999999999999 is "
                "less than 1, and read as 1.0",
            )


def _may_be_fraction(part: Mapping[str, Any]) -> bool:
    return "number" in _listed(part.get("type", "number"))


def _check_everywhere(parts: list[Mapping[str, Any]]) -> None:
    """What keywords must not say together wherever they are, for they may be combined."""
    if sum(len(part.get("patternProperties", ())) for part in parts) > MAX_PATTERNS:
        raise ProtocolError(
            f"json_schema: 'patternProperties' has more than {MAX_PATTERNS} patterns in all"
        )
    bounds = [part[name] for part in parts for name in ("minimum", "maximum") if name in part]
    for name, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        of_0 = any(part.get(name) == 0 and _may_be_fraction(part) for part in parts)
        if of_0 and any(0 < sign * bound < 1 for bound in bounds):
            raise ProtocolError(
                "json_schema: an exclusive bound of 0 together with a bound between 0 and 1 "
                "is refused: llguidance takes 0 for within both"
            )
    multiples = {Fraction(part["multipleOf"]) for part in parts if "multipleOf" in part}
    if len(multiples) > 1:
        # In steps of the finest: of tenths, hundredths, and so on.
        n_decimals = max(m.denominator.bit_length() - 1 for m in multiples)
        if math.prod(m * 10**n_decimals for m in multiples) >= MAX_COMMON_MULTIPLE:
            raise ProtocolError(
                "json_schema: the values of multipleOf are refused: they have no common multiple "
                "below 2**32"
            )


def _check_progress(parts: list[Mapping[str, Any]], schema: Mapping[str, Any]) -> None:
    """Refuse a schema of a value that comes back to itself for the same value: no end to that."""
    same_value: dict[int, list[int]] = {}
    for part in parts:
        nexts = [each for name in ("allOf", "anyOf", "oneOf") for each in part.get(name, ())]
        if "$ref" in part:
            nexts.append(resolve(part["$ref"], schema))
        same_value[id(part)] = [id(each) for each in nexts]
    try:
        graphlib.TopologicalSorter(same_value).prepare()
    except graphlib.CycleError:
        raise ProtocolError(
            "json_schema: a schema refers to itself for one and the same value"
        ) from None
