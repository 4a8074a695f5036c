"""The JSON Schema of a Python type, in the part of draft 2020-12 that llguidance compiles.

What only annotates is left out, but for descriptions; objects of classes are closed.
A class used once stands where it is used; others stand in `$defs`.
"""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import json
import re
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from llamad_trio.constraints.schema_keywords import FORMATS, SUPPORTED, holds, parts_of
from llamad_trio.constraints.schema_pattern import looks_around
from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.tools import JsonObject
from llamad_trio.typed.members import (
    ARRAYS,
    Member,
    Peeled,
    Sort,
    alias_value,
    alternatives,
    cached_by_type,
    literal_values,
    members_of,
    peel,
    sort_of,
    type_name,
)

Schema = dict[str, Any]

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

_PATTERNS: Mapping[object, str] = {
    dt.datetime: _ZONED,
    (dt.datetime, False): _NAIVE,
    dt.time: _TIME,
    (dt.time, True): _ZONED_TIME,
    decimal.Decimal: _DECIMAL,
}
"""Of scalars that msgspec's schema says too little of; those with a zone, or without, apart."""

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
_REF = "#/$defs/"


@cached_by_type
def schema_of(kind: object) -> JsonObject:
    """The JSON Schema of a type.

    Takes classes of attrs, dataclasses and pydantic, `TypedDict`, `NamedTuple`,
    `msgspec.Struct`, enums, `Literal`, unions, lists, sets, tuples, dictionaries, the
    scalars of JSON, dates and times, `UUID`, `Decimal`, and `Annotated` with `msgspec.Meta`.

    Raises:
        ProtocolError: a type, named with its place, that no schema describes.
    """
    builder = _Builder()
    return builder.finish(builder.schema(kind, type_name(peel(kind).base)))


def schema_of_members(name: str, members: Sequence[Member]) -> JsonObject:
    """The schema of an object with these members; raises as `schema_of`."""
    builder = _Builder()
    return builder.finish(builder.object_of(members, name))


class _Builder:
    """One schema being built, with its definitions."""

    def __init__(self) -> None:
        self._definitions: dict[str, Schema] = {}
        self._names: dict[object, str] = {}

    def finish(self, root: Schema) -> Schema:
        """The whole schema: definitions used once stand where they are used."""
        uses: Counter[str] = Counter()

        def count(schema: Schema) -> None:
            for part, _ in parts_of(schema):
                name = reference(part)
                if name is not None:
                    uses[name] += 1
                    if uses[name] == 1:
                        count(self._definitions[name])

        def inline(schema: Schema) -> Schema:
            name = reference(schema)
            # One used once is in no cycle: a cycle that can be reached is used from outside, too.
            if name is None or uses[name] > 1:
                return _with_parts(schema, inline)
            beside = {key: part for key, part in schema.items() if key != "$ref"}
            return inline({**self._definitions[name], **beside})

        count(root)
        kept = {
            name: inline(definition)
            for name, definition in self._definitions.items()
            if uses[name] > 1
        }
        return {**inline(root), "$defs": kept} if kept else inline(root)

    def schema(self, kind: object, where: str) -> Schema:
        """The schema of a type at a place; classes are references."""
        peeled = peel(kind)
        sort = sort_of(peeled)
        if peeled.constrained and sort not in _CONSTRAINABLE:
            raise ProtocolError(
                f"{where}: constraints on {type_name(peeled.base)} are not supported"
            )
        schema = self._bare_schema(sort, peeled, where)
        if not peeled.description:
            return schema
        said = {"description": peeled.description}
        return {**said, **schema} if sort is Sort.SCALAR else {**schema, **said}

    def _bare_schema(self, sort: Sort, peeled: Peeled, where: str) -> Schema:
        match sort:
            case Sort.ANYTHING:
                return {}
            case Sort.SCALAR:
                schema = _msgspec_schema(peeled.base, peeled, where)
                zoned = next((meta.tz for meta in peeled.metas if meta.tz is not None), None)
                pattern = _PATTERNS.get((peeled.base, zoned)) or _PATTERNS.get(peeled.base)
                return {**schema, "pattern": pattern} if pattern else schema
            case Sort.UNION:
                found = [self.schema(each, where) for each in alternatives(peeled.annotated)]
                return found[0] if len(found) == 1 else {"anyOf": found}
            case Sort.ALIAS:
                alias = peeled.base
                if alias not in self._names:
                    name = self._reserve(alias, type_name(alias))
                    self._definitions[name] = self.schema(alias_value(alias), where)
                return {"$ref": _REF + self._names[alias]}
            case Sort.ARRAY:
                return self._array(peeled, where)
            case Sort.TUPLE:
                return self._tuple(peeled, where)
            case Sort.MAPPING:
                return self._mapping(peeled, where)
            case Sort.VALUES:
                return self._values(peeled, where)
            case Sort.MODEL:
                return self._model(peeled.base, where)
            case Sort.CLASS:
                return self._class(peeled.base, where)

    def _array(self, peeled: Peeled, where: str) -> Schema:
        schema = _msgspec_schema(list, peeled, where)
        if not peeled.arguments:
            return schema
        (item,) = peeled.arguments
        if ARRAYS[peeled.origin] is not list and not _is_hashable(item):
            raise ProtocolError(f"{where}: {type_name(item)} cannot stand in a set")
        return {**schema, "items": self.schema(item, f"{where}[]")}

    def _mapping(self, peeled: Peeled, where: str) -> Schema:
        schema = _msgspec_schema(dict, peeled, where)
        if not peeled.arguments:
            return schema
        key, value = peeled.arguments
        values = self.schema(value, f"{where}[…]")
        keys = self.schema(key, f"{where}: key")
        keys.pop("description", None)
        return {**schema, **_limit_keys(keys, values, where)}

    def _tuple(self, peeled: Peeled, where: str) -> Schema:
        items = peeled.arguments
        if items and items[-1] is ...:
            return {"type": "array", "items": self.schema(items[0], f"{where}[]")}
        if not items:
            # `tuple[()]` is empty, `tuple` is anything.
            return {"type": "array"} if peeled.base is tuple else {"type": "array", "maxItems": 0}
        return _fixed_array(
            [self.schema(item, f"{where}[{i}]") for i, item in enumerate(items)], len(items)
        )

    def _values(self, peeled: Peeled, where: str) -> Schema:
        values = literal_values(peeled.base)
        if not values:
            raise ProtocolError(f"{where}: an enum without members has no values")
        for value, member in values:
            if not isinstance(value, str | int | float | None):
                raise ProtocolError(f"{where}: {member!r} cannot be written as a JSON scalar")
        return {"enum": [value for value, _ in values]}

    def _class(self, kind: object, where: str) -> Schema:
        if kind not in self._names:
            members = members_of(kind, where)
            if members is None:
                raise ProtocolError(f"{where}: {_kind_of(kind)} has no JSON schema")
            name = self._reserve(kind, type_name(kind))
            place = where if where == type_name(kind) else f"{where} ({type_name(kind)})"
            said = {"description": members.description} if members.description else {}
            if members.array:
                items = [self._member(member, place) for member in members.items]
                schema = _fixed_array(items, sum(member.required for member in members.items))
            else:
                schema = self.object_of(members.items, place)
            self._definitions[name] = {**said, **schema}
        return {"$ref": _REF + self._names[kind]}

    def object_of(self, members: Sequence[Member], where: str) -> Schema:
        """An object that holds these members and no others."""
        return {
            "type": "object",
            "properties": {member.name: self._member(member, where) for member in members},
            "required": [member.name for member in members if member.required],
            "additionalProperties": False,
        }

    def _member(self, member: Member, where: str) -> Schema:
        schema = self.schema(member.hint, f"{where}.{member.name}")
        return {**schema, "description": member.description} if member.description else schema

    def _model(self, model: Any, where: str) -> Schema:
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

        def named(name: str, definition: Schema) -> str:
            # The same model reached from two sides has the same text, and gets one name.
            text = f"{name}: {json.dumps(definition)}"
            return self._names.get(text) or self._reserve(text, name)

        names = {name: named(name, definition) for name, definition in definitions.items()}
        for name, definition in definitions.items():
            self._definitions[names[name]] = _clean_schema(definition, definitions, names, where)
        root = _clean_schema(raw, definitions, names, where)
        if "$ref" in raw:
            return root
        name = named(type_name(model), raw)
        self._definitions[name] = root
        return {"$ref": _REF + name}

    def _reserve(self, key: object, name: str) -> str:
        stem = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "type"
        numbered = (f"{stem}_{number}" for number in itertools.count(2))
        taken = set(self._names.values())
        self._names[key] = next(n for n in itertools.chain([stem], numbered) if n not in taken)
        return self._names[key]


_CONSTRAINABLE = frozenset({Sort.UNION, Sort.SCALAR, Sort.ARRAY, Sort.MAPPING})


def _kind_of(kind: object) -> str:
    if isinstance(kind, typing.TypeVar):
        return f"the open type variable {kind.__name__}"
    if isinstance(kind, str | typing.ForwardRef):
        return f"the unresolved name {kind!r}"
    if isinstance(kind, type) or typing.get_origin(kind) is not None:
        return f"the type {type_name(kind)}"
    return f"{kind!r}, which is no type,"


def _is_hashable(kind: object) -> bool:
    members = [peel(each).base for each in alternatives(kind)]
    return all(getattr(typing.get_origin(m) or m, "__hash__", None) is not None for m in members)


def _msgspec_schema(bare: object, peeled: Peeled, where: str) -> Schema:
    try:
        schema = msgspec.json.schema(Peeled(bare, peeled.metas).annotated)
    except TypeError as error:
        raise ProtocolError(f"{where}: {error}") from error
    return _clean_schema(schema, {}, {}, where)


def _fixed_array(items: list[Schema], required: int) -> Schema:
    return {
        "type": "array",
        "prefixItems": items,
        "items": False,
        "minItems": required,
        "maxItems": len(items),
    }


def _limit_keys(keys: Schema, value: Schema | bool, where: str) -> Schema:
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


def reference(schema: Mapping[str, object]) -> str | None:
    """The name of the definition that a schema refers to, if it does."""
    target = schema.get("$ref")
    return target.removeprefix(_REF) if isinstance(target, str) else None


def _with_parts(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """A schema whose own schemas, one level down, are changed."""

    def changed(part: Any) -> Any:
        return change(part) if isinstance(part, dict) else part

    result: Schema = {}
    for key, part in schema.items():
        match holds(key):
            case "schemas by name":
                result[key] = {name: changed(value) for name, value in part.items()}
            case "schemas":
                result[key] = [changed(each) for each in part]
            case "a schema":
                result[key] = changed(part)
            case None:
                result[key] = part
    return result


def _clean_schema(
    schema: Schema, definitions: Mapping[str, Schema], names: Mapping[str, str], where: str
) -> Schema:
    """A foreign schema in our words: closed objects, no `oneOf`, nothing llguidance refuses."""

    def clean(part: Schema) -> Schema:
        return _clean_schema(part, definitions, names, where)

    result: Schema = {}
    for key, part in schema.items():
        match key:
            case "$ref":
                name = part.removeprefix(_REF)
                result[key] = _REF + names.get(name, name)
            case "oneOf" | "anyOf":
                # llguidance cannot look around, as a pattern of pydantic's `Decimal` does.
                kept = [each for each in part if not looks_around(each.get("pattern", ""))]
                result["anyOf"] = kept or part
            case "format" if part in _DATE_FORMATS:
                result.setdefault("pattern", _DATE_FORMATS[part])
            case "format" if part not in FORMATS:
                pass
            case _ if key in SUPPORTED or key == "description":
                result[key] = part
    result = _with_parts(result, clean)
    if "propertyNames" in schema:
        keys = schema["propertyNames"]
        target = definitions.get(reference(keys) or "", keys)
        value = result.pop("additionalProperties", {})
        result |= _limit_keys(_shape_of_keys(clean(target)), value, where)
    elif "properties" in result or "patternProperties" in result:
        result.setdefault("additionalProperties", False)
    return result


def _shape_of_keys(keys: Schema) -> Schema:
    values = keys.get("enum", [keys["const"]] if "const" in keys else [])
    names = [value for value in values if isinstance(value, str)]
    if names:
        return {"enum": names}
    return {"type": "string", **{k: part for k, part in keys.items() if k != "description"}}


def _types_of_keys(model: object) -> Iterator[str]:
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
