"""The JSON Schema of a Python type, in the part of draft 2020-12 that llguidance compiles.

What only annotates is left out, but for descriptions; objects of classes are closed.
A class used once stands where it is used; others stand in `$defs`.
"""

from __future__ import annotations

import copy
import datetime as dt
import decimal
import functools
import json
import re
import types
import typing
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from llamad_trio.chat.type_members import (
    ARRAYS,
    MAPPINGS,
    Member,
    ModelClass,
    Peeled,
    alias_value,
    alternatives,
    is_model_class,
    is_union,
    literal_values,
    members_of,
    peel,
    type_name,
)
from llamad_trio.core.errors import ProtocolError

__all__ = ["SCALARS", "WRITTEN_AS", "schema_of", "schema_of_members"]

Schema = dict[str, Any]

_CACHED_TYPES = 256

SCALARS = frozenset(
    {
        *(bool, int, float, str, types.NoneType),
        *(dt.datetime, dt.date, dt.time, dt.timedelta, uuid.UUID, decimal.Decimal),
    }
)
"""Types that msgspec reads from one JSON scalar."""

_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_CLOCK_SPAN = (
    r"(?:[0-9]{1,6}H(?:[0-9]{1,6}M)?(?:[0-9]{1,6}(?:\.[0-9]{1,6})?S)?"
    r"|[0-9]{1,6}M(?:[0-9]{1,6}(?:\.[0-9]{1,6})?S)?|[0-9]{1,6}(?:\.[0-9]{1,6})?S)"
)
_OFFSET = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DAY_OF_EVERY_YEAR = (
    r"(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
    r"|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
)
_BY_FOUR = r"(?:0[48]|[2468][048]|[13579][26])"  # two digits, and not 00
_CALENDAR = rf"(?:{_YEAR}-{_DAY_OF_EVERY_YEAR}|(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)-02-29)"
_DATE = rf"^{_CALENDAR}$"
_NAIVE = rf"^{_CALENDAR}T{_CLOCK}$"
_ZONED = rf"^{_CALENDAR}T{_CLOCK}{_OFFSET}$"
_TIME = rf"^{_CLOCK}$"
_ZONED_TIME = rf"^{_CLOCK}{_OFFSET}$"
# Years and months have no fixed length, so no timedelta holds them.
_DURATION = rf"^-?P(?:[0-9]{{1,8}}D(?:T{_CLOCK_SPAN})?|T{_CLOCK_SPAN})$"
_DECIMAL = r"^-?[0-9]+(?:\.[0-9]+)?(?:E[+-]?[0-9]{1,3})?$"
_INTEGER = r"^-?(?:0|[1-9][0-9]*)$"

WRITTEN_AS: Mapping[str, str] = {
    _DATE: "date",
    _ZONED: "date-time",
    _ZONED_TIME: "time",
    _NAIVE: "YYYY-MM-DDTHH:MM:SS",
    _TIME: "HH:MM:SS",
    _DURATION: "ISO 8601 duration, like P1DT2H30M",
    _DECIMAL: "decimal number",
    _INTEGER: "integer",
}
"""In words, patterns of this module."""

_KEYWORDS = frozenset(
    {
        *("type", "enum", "const", "description", "$ref", "anyOf", "allOf"),
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
_FORMATS = frozenset({"uuid", "email", "uri", "ipv4", "ipv6", "hostname"})
# As formats they are checked by their syntax only, which has a year 0 and a second 60.
_DATE_FORMATS = {"date-time": _ZONED, "date": _DATE, "time": _ZONED_TIME, "duration": _DURATION}
# A reference is to a class, such as an enum, of which the JSON Schema tells.
_TEXT_KEYS = frozenset(
    {
        *("any", "str", "literal", "enum", "definition-ref"),
        *("date", "datetime", "time", "timedelta", "uuid", "url"),
    }
)
_NO_CORE_SCHEMAS = frozenset({"metadata", "serialization", "default"})
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")
_REF = "#/$defs/"


def schema_of(kind: object) -> dict[str, object]:
    """The JSON Schema of a type.

    Takes classes of attrs, dataclasses and pydantic, `TypedDict`, `NamedTuple`,
    `msgspec.Struct`, enums, `Literal`, unions, lists, sets, tuples, dictionaries, the
    scalars of JSON, dates and times, `UUID`, `Decimal`, and `Annotated` with `msgspec.Meta`.

    Raises:
        ProtocolError: a type, named with its place, that no schema describes.
    """
    try:
        # Equal unions may differ in order, which the schema keeps; their texts differ.
        return copy.deepcopy(_cached_schema(kind, repr(kind)))
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _build_schema(kind)


def schema_of_members(name: str, members: Sequence[Member]) -> dict[str, object]:
    """The schema of an object with these members, which is not itself in `$defs`.

    Raises:
        ProtocolError: as of `schema_of`.
    """
    builder = _Builder()
    return builder.finish(builder.object_of(members, name))


@functools.lru_cache(_CACHED_TYPES)
def _cached_schema(kind: object, _text: str) -> Schema:
    return _build_schema(kind)


def _build_schema(kind: object) -> Schema:
    builder = _Builder()
    return builder.finish(builder.schema(kind, type_name(peel(kind).base)))


class _Builder:
    """One schema being built, with its definitions."""

    def __init__(self) -> None:
        self._definitions: dict[str, Schema] = {}
        self._names: dict[object, str] = {}

    def finish(self, root: Schema) -> Schema:
        """The whole schema: definitions used once stand where they are used."""
        uses: dict[str, int] = {}
        pending = [root]
        while pending:
            for name in _references(pending.pop()):
                uses[name] = uses.get(name, 0) + 1
                if uses[name] == 1:
                    pending.append(self._definitions[name])
        # One used once is in no cycle: a cycle that can be reached is used from outside, too.
        inlined = {name for name, count in uses.items() if count == 1}
        result = self._inline(root, inlined)
        kept = {
            name: self._inline(definition, inlined)
            for name, definition in self._definitions.items()
            if uses.get(name, 0) > 1
        }
        return {**result, "$defs": kept} if kept else result

    def _inline(self, schema: Any, inlined: set[str]) -> Any:
        if isinstance(schema, list):
            return [self._inline(item, inlined) for item in schema]
        if not isinstance(schema, dict):
            return schema
        name = _reference(schema)
        if name in inlined:
            definition = self._definitions[name]
            schema = {**definition, **{k: v for k, v in schema.items() if k != "$ref"}}
        # Properties may be called anything: under their key stand names, not keywords.
        return {
            key: {name: self._inline(value, inlined) for name, value in part.items()}
            if key in {"properties", "patternProperties"}
            else part
            if key in {"enum", "const"}
            else self._inline(part, inlined)
            for key, part in schema.items()
        }

    def schema(self, kind: object, where: str) -> Schema:
        """The schema of a type at a place; classes are references."""
        peeled = peel(kind)
        schema = self._bare_schema(peeled, where)
        if peeled.description and peeled.base not in SCALARS:
            return {**schema, "description": peeled.description}
        if peeled.description:
            return {"description": peeled.description, **schema}
        return schema

    def _bare_schema(self, peeled: Peeled, where: str) -> Schema:
        base = peeled.base
        origin = typing.get_origin(base) or base
        if base is None:
            base = types.NoneType
        if is_union(base):
            return self._union(peeled, where)
        if _is_scalar(base):
            return _scalar(base, peeled, where)
        if origin in ARRAYS:
            return self._array(peeled, where)
        if origin in MAPPINGS:
            return self._mapping(peeled, where)
        if peeled.constrained:
            raise ProtocolError(f"{where}: constraints on {type_name(base)} are not supported")
        if base is Any or base is object:
            return {}
        values = literal_values(base)
        if values is not None:
            return _enumeration(values, where)
        if is_model_class(base):
            return self._model(base, where)
        value = alias_value(base)
        if value is not None:
            return self._alias(base, value, where)
        if origin is tuple:
            return self._tuple(base, where)
        return self._class(base, where)

    def _union(self, peeled: Peeled, where: str) -> Schema:
        found = [self.schema(each, where) for each in alternatives(peeled.annotated)]
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _array(self, peeled: Peeled, where: str) -> Schema:
        schema = _constrained(list, peeled, where)
        arguments = typing.get_args(peeled.base)
        if not arguments:
            return schema
        make = ARRAYS[typing.get_origin(peeled.base)]
        if make in {set, frozenset} and not _is_hashable(arguments[0]):
            raise ProtocolError(f"{where}: {type_name(arguments[0])} cannot stand in a set")
        return {**schema, "items": self.schema(arguments[0], f"{where}[]")}

    def _mapping(self, peeled: Peeled, where: str) -> Schema:
        schema = _constrained(dict, peeled, where)
        arguments = typing.get_args(peeled.base)
        if not arguments:
            return schema
        value = self.schema(arguments[1], f"{where}[…]")
        keys = self.schema(arguments[0], f"{where}: key")
        keys.pop("description", None)
        return {**schema, **_keyed(keys, value, where)}

    def _tuple(self, base: object, where: str) -> Schema:
        items = typing.get_args(base)
        if items and items[-1] is ...:
            return {"type": "array", "items": self.schema(items[0], f"{where}[]")}
        if not items:
            # `tuple[()]` is empty, `tuple` is anything.
            return {"type": "array"} if base is tuple else {"type": "array", "maxItems": 0}
        return _fixed_array(
            [self.schema(item, f"{where}[{i}]") for i, item in enumerate(items)], len(items)
        )

    def _alias(self, alias: object, value: object, where: str) -> Schema:
        if alias not in self._names:
            name = self._reserve(alias, type_name(alias))
            self._definitions[name] = self.schema(value, where)
        return {"$ref": _REF + self._names[alias]}

    def _class(self, kind: object, where: str) -> Schema:
        if kind not in self._names:
            members = members_of(kind, where)
            if members is None:
                raise ProtocolError(f"{where}: {_kind_of(kind)} has no JSON schema")
            name = self._reserve(kind, type_name(kind))
            place = where if where == type_name(kind) else f"{where} ({type_name(kind)})"
            definition = (
                self._array_of(members.items, place)
                if members.array
                else self.object_of(members.items, place)
            )
            if members.description:
                definition = {"description": members.description, **definition}
            self._definitions[name] = definition
        return {"$ref": _REF + self._names[kind]}

    def object_of(self, members: Sequence[Member], where: str) -> Schema:
        """An object that holds these members and no others."""
        return {
            "type": "object",
            "properties": {member.name: self._member(member, where) for member in members},
            "required": [member.name for member in members if member.required],
            "additionalProperties": False,
        }

    def _array_of(self, members: Sequence[Member], where: str) -> Schema:
        required = sum(member.required for member in members)
        return _fixed_array([self._member(member, where) for member in members], required)

    def _member(self, member: Member, where: str) -> Schema:
        schema = self.schema(member.hint, f"{where}.{member.name}")
        return {**schema, "description": member.description} if member.description else schema

    def _model(self, model: ModelClass, where: str) -> Schema:
        """A pydantic model's own schema, with its definitions among ours."""
        try:
            raw = model.model_json_schema()
        except Exception as error:
            # Models may have hooks of their own, which may raise anything.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ProtocolError(f"{where}: {type_name(model)} has no schema: {reason}") from error
        for key_type in _types_of_keys(model):
            if key_type not in _TEXT_KEYS:
                raise ProtocolError(
                    f"{where}: {type_name(model)} has a dictionary with keys of type {key_type!r}; "
                    "pydantic's schema tells of text, dates and names only"
                )
        definitions: Mapping[str, Schema] = raw.pop("$defs", {})
        # The same model reached from two sides has the same text, and gets one name.
        names = {
            name: self._names.get(key) or self._reserve(key, name)
            for name, key in ((n, f"{n}: {json.dumps(d)}") for n, d in definitions.items())
        }
        for name, definition in definitions.items():
            self._definitions[names[name]] = _cleaned(definition, definitions, names, where)
        if "$ref" in raw:
            return dict(_cleaned(raw, definitions, names, where))
        key = f"{type_name(model)}: {json.dumps(raw)}"
        name = self._names.get(key) or self._reserve(key, type_name(model))
        self._definitions[name] = _cleaned(raw, definitions, names, where)
        return {"$ref": _REF + name}

    def _reserve(self, key: object, name: str) -> str:
        stem = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "type"
        taken = set(self._names.values())
        count, unique = 1, stem
        while unique in taken:
            count += 1
            unique = f"{stem}_{count}"
        self._names[key] = unique
        return unique


def _kind_of(kind: object) -> str:
    if isinstance(kind, typing.TypeVar):
        return f"the open type variable {kind.__name__}"
    if isinstance(kind, str | typing.ForwardRef):
        return f"the unresolved name {kind!r}"
    if isinstance(kind, type) or typing.get_origin(kind) is not None:
        return f"the type {type_name(kind)}"
    return f"{kind!r}, which is no type,"


def _is_scalar(base: object) -> bool:
    return isinstance(base, type) and base in SCALARS


def _is_hashable(kind: object) -> bool:
    members = [peel(each).base for each in alternatives(kind)]
    return all(getattr(typing.get_origin(m) or m, "__hash__", None) is not None for m in members)


def _constrained(bare: object, peeled: Peeled, where: str) -> Schema:
    try:
        schema = msgspec.json.schema(
            Annotated[(bare, *peeled.metas)] if peeled.metas else bare
        )  # a type known at run time
    except TypeError as error:
        raise ProtocolError(f"{where}: {error}") from error
    return dict(_cleaned(schema, {}, {}, where))


def _scalar(base: object, peeled: Peeled, where: str) -> Schema:
    schema = _constrained(base, peeled, where)
    zoned = [meta.tz for meta in peeled.metas if meta.tz is not None]
    if base is dt.datetime:
        return schema | {"pattern": _NAIVE if zoned == [False] else _ZONED}
    if base is dt.time:
        return schema | {"pattern": _ZONED_TIME if zoned == [True] else _TIME}
    if base is decimal.Decimal:
        return {"type": "string", "pattern": _DECIMAL}
    return schema


def _enumeration(values: Sequence[tuple[object, object]], where: str) -> Schema:
    if not values:
        raise ProtocolError(f"{where}: an enum without members has no values")
    for value, member in values:
        if not isinstance(value, str | int | float | None):
            raise ProtocolError(f"{where}: {member!r} cannot be written as a JSON scalar")
    return {"enum": [value for value, _ in values]}


def _fixed_array(items: list[Schema], required: int) -> Schema:
    return {
        "type": "array",
        "prefixItems": items,
        "items": False,
        "minItems": required,
        "maxItems": len(items),
    }


def _keyed(keys: Schema, value: Schema | bool, where: str) -> Schema:
    """Keywords for an object with such keys; llguidance has no `propertyNames`."""
    match keys:
        case {"type": "string", **rest} if not rest:
            return {"additionalProperties": value}
        case {"type": "string", "pattern": pattern, **rest} if not rest:
            return {"patternProperties": {pattern: value}, "additionalProperties": False}
        case {"type": "integer", **rest} if not rest:
            return {"patternProperties": {_INTEGER: value}, "additionalProperties": False}
        case {"enum": names, **rest} if not rest and all(isinstance(n, str) for n in names):
            return {"properties": dict.fromkeys(names, value), "additionalProperties": False}
    raise ProtocolError(f"{where}: keys of an object can be text, integers or one of some names")


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, list):
        for item in schema:
            yield from _references(item)
    elif isinstance(schema, dict):
        name = _reference(schema)
        if name is not None:
            yield name
        for key, part in schema.items():
            if key in {"properties", "patternProperties"}:
                yield from _references(list(part.values()))
            elif key not in {"enum", "const"}:
                yield from _references(part)


def _reference(schema: Schema) -> str | None:
    reference = schema.get("$ref")
    return reference.removeprefix(_REF) if isinstance(reference, str) else None


def _cleaned(
    schema: Any, definitions: Mapping[str, Schema], names: Mapping[str, str], where: str
) -> Any:
    """A foreign schema in our words: closed objects, no `oneOf`, nothing llguidance refuses."""

    def clean(part: Any) -> Any:
        return _cleaned(part, definitions, names, where)

    if not isinstance(schema, dict):
        return schema
    result: Schema = {}
    for key, part in schema.items():
        match key:
            case "$ref":
                name = part.removeprefix(_REF)
                result[key] = _REF + names.get(name, name)
            case "properties" | "patternProperties":
                result[key] = {name: clean(value) for name, value in part.items()}
            case "oneOf" | "anyOf":
                result["anyOf"] = [clean(each) for each in _expressible(part)]
            case "allOf" | "prefixItems":
                result[key] = [clean(each) for each in part]
            case "format" if part in _DATE_FORMATS:
                result.setdefault("pattern", _DATE_FORMATS[part])
            case "format" if part not in _FORMATS:
                pass
            case "items" | "additionalProperties":
                result[key] = clean(part)
            case _ if key in _KEYWORDS:
                result[key] = part
    if "propertyNames" in schema:
        keys = schema["propertyNames"]
        target = definitions.get(_reference(keys) or "", keys)
        value = result.pop("additionalProperties", {})
        result |= _keyed(_shape_of_keys(clean(target)), value, where)
    elif "properties" in result or "patternProperties" in result:
        result.setdefault("additionalProperties", False)
    return result


def _shape_of_keys(keys: Schema) -> Schema:
    values = keys.get("enum", [keys["const"]] if "const" in keys else [])
    names = [value for value in values if isinstance(value, str)]
    if names:
        return {"enum": names}
    return {"type": "string", **{k: part for k, part in keys.items() if k != "description"}}


def _types_of_keys(model: ModelClass) -> Iterator[str]:
    """The type of the keys of each dictionary in a pydantic model, in pydantic's words.

    Its JSON Schema has keys of text only; how it validates is said in its core schema.
    """
    pending: list[object] = [getattr(model, "__pydantic_core_schema__", None)]
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, list | tuple):
            pending.extend(part)
        elif isinstance(part, dict):
            pending.extend(value for key, value in part.items() if key not in _NO_CORE_SCHEMAS)
            keys = part.get("keys_schema") if part.get("type") == "dict" else None
            while isinstance(keys, dict) and isinstance(keys.get("schema"), dict):
                keys = keys["schema"]  # a validator's, around the type
            if isinstance(keys, dict):
                yield str(keys.get("type"))


def _expressible(alternatives: Sequence[Schema]) -> Sequence[Schema]:
    """Without those whose pattern looks around, which llguidance cannot: pydantic's `Decimal`."""
    kept = [each for each in alternatives if not _LOOKS_AROUND.search(each.get("pattern", ""))]
    return kept or alternatives
