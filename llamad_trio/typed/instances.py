"""JSON data as an instance of a Python type.

Reads types through `members`, as `schema` does, so what a type's schema allows makes an instance.
What a schema for llguidance cannot say comes out here only: a number too large for a `float`, an
item twice in a set with a least size, pydantic's own validators and the limits of its `Decimal`.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import attrs
import cattrs
import msgspec

from llamad_trio.typed.members import (
    ARRAYS,
    Members,
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
from llamad_trio.typed.schema import schema_of

T = TypeVar("T")

_MAX_COMPLAINTS = 8
"""A model that got everything wrong is told no more than this at once."""

_Hook = Callable[[Any, Any], object]


def instance_of_type(data: object, kind: object, *, place: str = "") -> Any:
    """Make a value of a type from JSON data, as `json.loads` gives it.

    Nothing is coerced, but for whole numbers where a float is wanted.  Of the members
    of a union the first that fits is taken; narrower ones are tried before wider ones:
    literals and enums first, plain text last.  A message calls the data `place`.

    Raises:
        ValueError: what is wrong with the data, and where: `"kids[1].age: expected int, got str"`.
        ProtocolError: the type has no schema.
    """
    schema_of(kind)
    converter = _converter_for(kind)
    try:
        return converter.structure(data, cast("Any", kind))
    except Exception as error:
        # Classes run code of their own when they are made: validators, `__post_init__`.
        raise ValueError(_message(error, place)) from error


@cached_by_type
def _converter_for(_kind: object) -> cattrs.Converter:
    # A converter remembers every type it met; one for each root lets the cache forget them.
    converter = cattrs.Converter()
    converter.register_structure_hook_factory(lambda _: True, _hook_for)
    # cattrs coerces these, and finds their hooks by class, before any predicate.
    for builtin in (str, int, float, bool):
        converter.register_structure_hook(builtin, _builtin_hook)
    return converter


def _hook_for(kind: object, converter: cattrs.Converter) -> _Hook:
    peeled = peel(kind)
    base: Any = peeled.base
    match sort_of(peeled):
        case Sort.ANYTHING:
            return lambda data, _: data
        case Sort.SCALAR:
            annotated = peeled.annotated
            return lambda data, _: _convert(data, annotated)
        case Sort.VALUES:
            values = literal_values(base) or ()
            return lambda data, _: _value_written_as(data, values)
        case Sort.MODEL:
            # From JSON, not from data: there, strict still reads dates from text, sets from lists.
            return lambda data, _: base.model_validate_json(
                json.dumps(data, allow_nan=False), strict=True
            )
        case Sort.ALIAS:
            value: Any = alias_value(base)
            return lambda data, _: converter.structure(data, value)
        case Sort.UNION:
            return _union_hook(peeled, converter)
        case Sort.ARRAY:
            return _array_hook(peeled, converter)
        case Sort.TUPLE:
            return _tuple_hook(peeled, converter)
        case Sort.MAPPING:
            return _mapping_hook(peeled, converter)
        case Sort.CLASS:
            return _class_hook(peeled, converter)


# -- What is wrong ----------------------------------------------------------------------------


class _MisfitError(Exception):
    """Data that does not fit: all that is wrong with it, each with its place."""

    def __init__(self, complaints: Sequence[tuple[str, str]]) -> None:
        super().__init__(complaints)
        self.complaints = complaints


def _make_all(parts: Iterable[tuple[str, Callable[[], T]]]) -> list[T]:
    """Make each of the parts; where any does not fit, complain of all that do not."""
    made: list[T] = []
    complaints: list[tuple[str, str]] = []
    for place, make in parts:
        try:
            made.append(make())
        except Exception as error:
            complaints += [(place + below, text) for below, text in _complaints(error)]
    if complaints:
        raise _MisfitError(complaints)
    return made


def _complaints(error: Exception) -> Sequence[tuple[str, str]]:
    match error:
        case _MisfitError():
            return error.complaints
        case RecursionError():
            text = "nested too deeply"
        case msgspec.ValidationError():
            text = str(error).replace("`", "")
            text = text[:1].lower() + text[1:]
        case _ if callable(getattr(error, "errors", None)):  # pydantic's
            return [
                (_path(part.get("loc", ())), str(part.get("msg", error)))
                for part in cast("Any", error).errors()
            ]
        case _:
            text = str(error) or type(error).__name__
    return [("", text)]


def _path(names: Iterable[object]) -> str:
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)


def _message(error: Exception, place: str = "") -> str:
    found = [((place + path).removeprefix("."), text) for path, text in _complaints(error)]
    said = [f"{path}: {text}" if path else text for path, text in found[:_MAX_COMPLAINTS]]
    more = len(found) - _MAX_COMPLAINTS
    return "; ".join([*said, f"and {more} more"] if more > 0 else said)


# -- Values -----------------------------------------------------------------------------------


def _builtin_hook(data: object, kind: type) -> object:
    # Found by class, so an enum that is also a `str` ends here, too.
    values = literal_values(kind)
    return _convert(data, kind) if values is None else _value_written_as(data, values)


def _convert(data: object, kind: object) -> Any:
    value: Any = msgspec.convert(data, cast("type", kind), strict=True)
    # `json.loads` makes infinity of 1e400; msgspec refuses as many digits.
    if isinstance(value, float) and math.isinf(value):
        raise ValueError("number out of range")
    return value


def _value_written_as(data: object, values: Sequence[tuple[object, object]]) -> object:
    for value, member in values:
        if _is_same(value, data):
            return member
    expected = ", ".join(json.dumps(value) for value, _ in values)
    raise ValueError(f"expected one of {expected}")


def _is_same(value: object, data: object) -> bool:
    # `True == 1`, and they are different JSON.  A whole float is written without a point:
    # 2.0 as 2, and -0.0 as -0.
    same_type = type(value) is type(data) or (type(value) is float and type(data) is int)
    return same_type and value == data


# -- Containers -------------------------------------------------------------------------------


def _items(
    data: Sequence[object], kinds: Sequence[Any], converter: cattrs.Converter
) -> list[object]:
    return _make_all(
        (f"[{index}]", partial(converter.structure, item, kind))
        for index, (item, kind) in enumerate(zip(data, kinds, strict=True))
    )


def _check_length(items: Sequence[object], least: int, most: int) -> None:
    if not least <= len(items) <= most:
        wanted = str(most) if least == most else f"{least} to {most}"
        raise ValueError(f"expected {wanted} items, got {len(items)}")


def _array_hook(peeled: Peeled, converter: cattrs.Converter) -> _Hook:
    shell = Peeled(list, peeled.metas).annotated
    make = ARRAYS[peeled.origin]
    (item,) = peeled.arguments or (object,)

    def hook(data: object, _kind: object) -> object:
        items = _convert(data, shell)
        made: Any = make(_items(items, [item] * len(items), converter))
        if peeled.constrained and make is not list:
            _convert(list(made), shell)
        return made

    return hook


def _tuple_hook(peeled: Peeled, converter: cattrs.Converter) -> _Hook:
    kinds = (object, ...) if peeled.base is tuple else peeled.arguments

    def hook(data: object, _kind: object) -> object:
        items = _convert(data, list)
        if kinds[-1:] == (...,):
            return tuple(_items(items, [kinds[0]] * len(items), converter))
        _check_length(items, len(kinds), len(kinds))
        return tuple(_items(items, kinds, converter))

    return hook


def _mapping_hook(peeled: Peeled, converter: cattrs.Converter) -> _Hook:
    shell = Peeled(dict, peeled.metas).annotated
    key_kind, value_kind = peeled.arguments or (str, object)
    whole_keys = peel(key_kind).base is int

    def pair(key: object, value: object) -> tuple[object, object]:
        if whole_keys and isinstance(key, str):
            try:
                key = int(key)
            except ValueError:
                raise ValueError("expected a whole number for a key") from None
        return converter.structure(key, key_kind), converter.structure(value, value_kind)

    def hook(data: object, _kind: object) -> object:
        items = _convert(data, shell).items()
        return dict(_make_all((f"[{key}]", partial(pair, key, value)) for key, value in items))

    return hook


def _class_hook(peeled: Peeled, converter: cattrs.Converter) -> _Hook:
    members = cast("Members", members_of(peeled.base, type_name(peeled.base)))
    names = [member.name for member in members.items]
    required = sum(member.required for member in members.items)

    def value_of(name: str, hint: Any, given: Mapping[str, object]) -> object:
        if name not in given:
            raise ValueError("is missing")
        return converter.structure(given[name], hint)

    def refuse_unknown(given: Mapping[str, object]) -> None:
        if unknown := given.keys() - names:
            raise ValueError("unknown " + ", ".join(sorted(map(repr, unknown))))

    def hook(data: object, _kind: object) -> object:
        given: dict[str, object] = {}
        if members.array:
            items = _convert(data, list)
            _check_length(items, required, len(names))
            given.update(zip(names, items, strict=False))
        else:
            given = _convert(data, dict)
        wanted = [member for member in members.items if member.required or member.name in given]
        parts: list[tuple[str, Callable[[], object]]] = [
            (f".{member.name}", partial(value_of, member.name, member.hint, given))
            for member in wanted
        ]
        parts.append(("", partial(refuse_unknown, given)))
        values = _make_all(parts)
        # A tag is no argument.
        arguments = {m.attribute: v for m, v in zip(wanted, values, strict=False) if m.attribute}
        return members.make(**arguments)

    return hook


# -- Unions -----------------------------------------------------------------------------------


def _union_hook(peeled: Peeled, converter: cattrs.Converter) -> _Hook:
    members = sorted(alternatives(peeled.annotated), key=_width)
    others = [_Alternative.of(each) for each in members if peel(each).base is not types.NoneType]
    nullable = len(others) < len(members)
    names = " or ".join(dict.fromkeys(type_name(each.kind) for each in others))

    def hook(data: object, _kind: object) -> object:
        if data is None and nullable:
            return None
        plausible = _plausible(others, data)
        reasons: list[str] = []
        for each in plausible:
            try:
                return converter.structure(data, each.kind)
            except Exception as error:
                if len(plausible) == 1:
                    raise
                reasons.append(f"as {type_name(each.kind)}: {_message(error)}")
        raise ValueError(f"expected {names}" + (f" ({'; '.join(reasons)})" if reasons else ""))

    return hook


_WIDTHS: Mapping[object, int] = {int: 2, float: 3, str: 4, Any: 5, object: 5}


def _width(kind: object) -> int:
    """How much else a type takes: in a union, the narrow ones are tried first."""
    peeled = peel(kind)
    return _WIDTHS.get(peeled.base, 0 if sort_of(peeled) is Sort.VALUES else 1)


@attrs.frozen
class _Alternative:
    """A member of a union, and what can be seen of it without making it.

    Making every member until one fits takes time exponential in the depth of
    recursive classes: they fail late, at a tag behind their deepest field.
    """

    kind: Any
    is_object: bool = False
    is_never_object: bool = False
    keys: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    tags: Mapping[str, Sequence[tuple[object, object]]] = attrs.field(factory=dict)

    @classmethod
    def of(cls, kind: object) -> _Alternative:
        peeled = peel(kind)
        members = members_of(peeled.base, type_name(peeled.base))
        if members is None or members.array:
            sorts = {Sort.SCALAR, Sort.VALUES, Sort.ARRAY, Sort.TUPLE}
            return cls(kind, is_never_object=bool(members) or sort_of(peeled) in sorts)
        values = {member.name: literal_values(peel(member.hint).base) for member in members.items}
        return cls(
            kind,
            is_object=True,
            keys=frozenset(values),
            required=frozenset(member.name for member in members.items if member.required),
            tags={name: pairs for name, pairs in values.items() if pairs is not None},
        )

    def may_be(self, data: object) -> bool:
        """Whether its members and its tags are there, and no other members."""
        if not isinstance(data, dict):
            return not self.is_object
        if not self.is_object:
            return not self.is_never_object
        return self.required <= data.keys() <= self.keys and self.has_tags_of(data)

    def has_tags_of(self, data: Mapping[str, object]) -> bool:
        """Whether those of its tags that are there are right."""
        return self.is_object and all(
            any(_is_same(value, data[name]) for value, _ in pairs)
            for name, pairs in self.tags.items()
            if name in data
        )


def _plausible(alternatives: Sequence[_Alternative], data: object) -> Sequence[_Alternative]:
    if len(alternatives) == 1:
        return alternatives
    plausible = [each for each in alternatives if each.may_be(data)]
    if plausible or not isinstance(data, dict):
        return plausible
    meant = [each for each in alternatives if each.has_tags_of(data)]
    # One that was meant, and then written wrong: it can say what is wrong.
    return meant if len(meant) == 1 else []
