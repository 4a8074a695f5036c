"""JSON Schema's keywords as llguidance enforces them: which are taken, and of which values.

Every keyword is in one of three tables: `SUPPORTED`, enforced; `ANNOTATIONS`, which say nothing
of what is valid; and `REFUSED`, with the reason.  Those in none are refused as well, for a
validator ignores what it does not know, misspelt keywords included, and whoever wrote it meant
something.  Only names that begin with `x-` are free.

Knows one keyword at a time, and where a schema holds others; what keywords say together is
`schema_vetting`'s.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import attrs

from llamad_trio.constraints.schema_pattern import CONTROL, fault_of_pattern

Holds: TypeAlias = Literal["a schema", "schemas", "schemas by name"]
"""What a keyword's value is made of, when of schemas."""

Fault: TypeAlias = Callable[[Any], str | None]
"""Why a value is not taken; `None` if it is."""

Place: TypeAlias = tuple["Place", str | int] | None
"""Where in a schema something is: in what, and there under which name.  `None` is its top."""

MAX_EXACT = 2**53
"""llguidance computes with doubles; beyond this they skip whole numbers."""

MAX_DECIMALS = 15
"""Of a bound: llguidance reads them as a number of 64 bits, and as 0 when that is too small."""

MAX_CHOICES = 2_000
"""Of one `oneOf`: llguidance compares each with each."""

MAX_PROPERTIES = 2_000
"""Of one object: these take llguidance a second, twice as many three."""

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

FORMATS = frozenset(
    {
        *("date-time", "date", "time", "duration"),
        *("email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
    }
)
"""Enforced by their syntax: February has 29 days in every year, a minute may have 61 seconds."""


def is_number(value: object) -> bool:
    """Whether a JSON value is a number: to Python, `true` is one."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def nodes_within(value: object) -> Iterator[Any]:
    """A JSON value and all those in it, each container before what it holds."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, Mapping):
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def as_list(value: object) -> list[Any]:
    """The value, if it is a list; else a list of it alone, as with `type`."""
    return value if isinstance(value, list) else [value]


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def shortened(value: object) -> str:
    """A value as a message shows it, however large and deep it is."""
    shown = _REPR.repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


# -- Values -----------------------------------------------------------------------------------


def _must_be(what: str, holds: Callable[[Any], bool]) -> Fault:
    return lambda value: None if holds(value) else f"{shortened(value)}: it must be {what}"


def _is_schema(value: object) -> bool:
    return isinstance(value, bool | dict)


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
    lambda value: value != [] and all(isinstance(t, str) and t in TYPES for t in as_list(value)),
)
_fault_of_names = _must_be(
    "a list of names",
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
)
_fault_of_count = _must_be(
    "a whole number, at least 0",
    lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
)
_fault_of_format = _must_be(
    f"one of {', '.join(sorted(FORMATS))}",
    lambda value: isinstance(value, str) and value in FORMATS,
)
_fault_of_ref = _must_be(
    "a reference within the schema, such as '#/$defs/name'; no others are followed",
    lambda value: isinstance(value, str) and value.startswith("#"),
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
            return f"{shortened(key)}: {fault}"
    return None


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
    for leaf in nodes_within(value):
        if is_number(leaf) and not -MAX_EXACT <= leaf <= MAX_EXACT:
            return f"numbers must be within ±2**53, {MAX_EXACT}"
        if isinstance(leaf, str) and (found := CONTROL.search(leaf)):
            return f"the control character {found[0]!r} is not supported"
    return None


# -- The tables -------------------------------------------------------------------------------


@attrs.frozen
class Keyword:
    """A keyword that is enforced.

    Args:
        limits: the type of which it says something; `None` for any.
        since: the draft that brought it: 6, 7, 2019 or 2020; 0 is older.
    """

    fault: Fault
    limits: str | None = None
    holds: Holds | None = None
    since: int = 0


SUPPORTED: Mapping[str, Keyword] = {
    "type": Keyword(_fault_of_type),
    "const": Keyword(_fault_of_value, since=6),
    "enum": Keyword(_fault_of_values),
    "allOf": Keyword(_fault_of_schemas, holds="schemas"),
    "anyOf": Keyword(_fault_of_schemas, holds="schemas"),
    # llguidance takes it only when it sees that no two can hold together.
    "oneOf": Keyword(_fault_of_choices, holds="schemas"),
    "$ref": Keyword(_fault_of_ref),
    "$defs": Keyword(_fault_of_named_schemas, holds="schemas by name"),
    "definitions": Keyword(_fault_of_named_schemas, holds="schemas by name"),
    "properties": Keyword(_fault_of_properties, "object", "schemas by name"),
    "patternProperties": Keyword(_fault_of_patterns, "object", "schemas by name"),
    "additionalProperties": Keyword(_fault_of_schema, "object", "a schema"),
    "required": Keyword(_fault_of_names, "object"),
    "minProperties": Keyword(_fault_of_count, "object"),
    "maxProperties": Keyword(_fault_of_count, "object"),
    "items": Keyword(_fault_of_schema, "array", "a schema"),
    "prefixItems": Keyword(_fault_of_schemas, "array", "schemas", since=2020),
    "minItems": Keyword(_fault_of_count, "array"),
    "maxItems": Keyword(_fault_of_count, "array"),
    "minLength": Keyword(_fault_of_count, "string"),
    "maxLength": Keyword(_fault_of_count, "string"),
    "pattern": Keyword(
        lambda value: fault_of_pattern(value) if isinstance(value, str) else "it must be a text",
        "string",
    ),
    "format": Keyword(_fault_of_format, "string"),
    "minimum": Keyword(_fault_of_bound, "number"),
    "maximum": Keyword(_fault_of_bound, "number"),
    "exclusiveMinimum": Keyword(_fault_of_bound, "number", since=6),
    "exclusiveMaximum": Keyword(_fault_of_bound, "number", since=6),
    "multipleOf": Keyword(_fault_of_multiple, "number"),
}

OF_THE_WHOLE = ("$schema", "$id", "id")
"""Annotations that only the top of a schema may have."""

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$anchor", *OF_THE_WHOLE),
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


def says_nothing(name: str) -> bool:
    """Whether a keyword has no part in what is valid where it stands."""
    is_definitions = name in ("$defs", "definitions")
    is_free = name.startswith("x-") and name not in REFUSED
    return name in ANNOTATIONS or is_definitions or is_free


def fault_of_keyword(name: str, value: object, draft: int) -> str | None:
    """Why a keyword with this value is not taken in this draft; `None` if it is."""
    keyword = SUPPORTED.get(name)
    if keyword is not None:
        if keyword.since > draft:
            return f"the draft that '$schema' names has no '{name}'"
        return keyword.fault(value)
    if name in REFUSED:
        return REFUSED[name]
    if says_nothing(name):
        return None
    return "it is no keyword of JSON Schema; names of your own must begin with 'x-'"


# -- Schemas in schemas -----------------------------------------------------------------------

_INDEX = re.compile(r"0|[1-9][0-9]{0,6}")


def holds(name: str) -> Holds | None:
    """What a keyword's value is made of, when of schemas."""
    return SUPPORTED[name].holds if name in SUPPORTED else None


def resolve(ref: str, schema: Mapping[str, Any]) -> bool | Mapping[str, Any] | None:
    """The schema that a reference leads to: `#`, or `#` and a JSON pointer (RFC 6901).

    `None` if there is none, or what is there is no schema but a value.
    """
    if ref != "#" and not ref.startswith("#/"):
        return None
    node: Any = schema
    held: Holds | None = "a schema"
    for part in urllib.parse.unquote(ref).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        match node, held:
            case Mapping(), "a schema":
                node, held = node.get(name), holds(name)
            case Mapping(), "schemas by name":
                node, held = node.get(name), "a schema"
            case list(), "schemas" if _INDEX.fullmatch(name) and int(name) < len(node):
                node, held = node[int(name)], "a schema"
            case _:
                return None
    return node if held == "a schema" and isinstance(node, bool | Mapping) else None


def parts_of(schema: Any) -> Iterator[tuple[Any, Place]]:
    """A schema and all those within it, but for `true` and `false`, each with its place.

    A keyword's value is looked into after the schema it is in was given.
    """
    waiting: list[tuple[Any, Place]] = [(schema, None)]
    while waiting:
        part, place = waiting.pop()
        if isinstance(part, bool):
            continue
        yield part, place
        for name, value in part.items():
            below = (place, name)
            match holds(name):
                case "a schema":
                    waiting.append((value, below))
                case "schemas":
                    waiting.extend((each, (below, i)) for i, each in enumerate(value))
                case "schemas by name":
                    waiting.extend((each, (below, key)) for key, each in value.items())
                case None:
                    pass


def standing_alone(part: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a schema as a schema of its own: what it refers to in `document` comes with it.

    Both must be sound, as `vet_schema` has it.
    """
    draft = {"$schema": document["$schema"]} if "$schema" in document else {}
    if not any("$ref" in each for each, _ in parts_of(part)):
        return {**part, **draft}
    inner = {name: value for name, value in document.items() if name not in OF_THE_WHOLE}
    alone: dict[str, Any] = json.loads(json.dumps({**part, "$defs": {"whole": inner}, **draft}))
    for each, _ in parts_of(alone):
        if "$ref" in each:
            each["$ref"] = f"#/$defs/whole{each['$ref'][1:]}"
    return alone
