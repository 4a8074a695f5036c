"""Typed results: a Python type to a schema for the model, and the model's JSON to a value.

`schema_of` and `structure` read types through `type_members`, so what the schema allows can
be structured.  What a schema for llguidance cannot say comes out in `structure` only: a number
too large for a `float`, an item twice in a set with a least size, pydantic's own validators and
the limits of its `Decimal`.
"""

from __future__ import annotations

import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast, overload

import attrs
import cattrs
import msgspec
from cattrs.errors import (
    AttributeValidationNote,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)

from llamad_trio.chat.type_members import (
    ARRAYS,
    MAPPINGS,
    Member,
    Members,
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
from llamad_trio.chat.type_schema import SCALARS, schema_of
from llamad_trio.chat.type_text import describe

__all__ = ["describe", "schema_of", "structure"]

T = TypeVar("T")

_CACHED_TYPES = 256

_MAX_COMPLAINTS = 8
"""A model that got everything wrong is told no more than this at once."""

_Hook = Callable[[Any, Any], object]
_Factory = Callable[[Any, cattrs.Converter], _Hook]


@overload
def structure(data: object, kind: type[T], *, place: str = ...) -> T: ...
@overload
def structure(data: object, kind: object, *, place: str = ...) -> object: ...
def structure(data: object, kind: object, *, place: str = "") -> object:
    """Make a value of a type from JSON data, as `json.loads` gives it.

    Nothing is coerced, but for whole numbers where a float is wanted.  Of the members
    of a union the first that fits is taken; narrower ones are tried before wider ones:
    literals and enums first, plain text last.

    Args:
        data: JSON data.
        kind: the type.
        place: what to call the data in a message, if it is a part of something.

    Raises:
        ValueError: what is wrong with the data, and where: `"kids[1].age: expected int, got str"`.
        ProtocolError: the type has no schema.
    """
    schema_of(kind)
    try:
        converter = _cached_converter(kind, repr(kind))
    except TypeError:
        converter = _new_converter()
    try:
        return converter.structure(data, cast("Any", kind))
    except Exception as error:
        # Classes run code of their own when they are made: validators, `__post_init__`.
        raise ValueError(_message(error, place)) from error


@functools.lru_cache(_CACHED_TYPES)
def _cached_converter(_kind: object, _text: str) -> cattrs.Converter:
    # A converter remembers every type it met; one for each root lets the cache forget them.
    return _new_converter()


def _new_converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=True)
    # The last that is registered goes first.
    for predicate, factory in (
        (_is_class_with_members, _members_hook),
        (_is_alias, _alias_hook),
        (_is_anything, lambda _kind, _converter: _unchanged),
        (_is_tuple, _tuple_hook),
        (_is_mapping, _mapping_hook),
        (_is_array, _array_hook),
        (_is_scalar, _scalar_hook),
        (_is_literal, _literal_hook),
        (is_model_class, _model_hook),
        (_is_wrapped, _wrapped_hook),
        (_is_union, _union_hook),
    ):
        converter.register_structure_hook_factory(predicate, cast("_Factory", factory))
    # cattrs coerces these, and finds their hooks by class, before any predicate.
    for builtin in (str, int, float, bool):
        converter.register_structure_hook(builtin, _builtin)
    return converter


def _base(kind: object) -> object:
    base = peel(kind).base
    return types.NoneType if base is None else base


def _origin(kind: object) -> object:
    base = _base(kind)
    return typing.get_origin(base) or base


def _is_class_with_members(kind: object) -> bool:
    return members_of(kind, type_name(kind)) is not None


def _is_alias(kind: object) -> bool:
    return alias_value(kind) is not None


def _is_anything(kind: object) -> bool:
    return kind is Any or kind is object


def _is_tuple(kind: object) -> bool:
    return _origin(kind) is tuple


def _is_mapping(kind: object) -> bool:
    return _origin(kind) in MAPPINGS


def _is_array(kind: object) -> bool:
    return _origin(kind) in ARRAYS


def _is_scalar(kind: object) -> bool:
    return _base(kind) in SCALARS


def _is_literal(kind: object) -> bool:
    return literal_values(kind) is not None


def _is_wrapped(kind: object) -> bool:
    peeled = peel(kind)
    return peeled.base is not kind and not peeled.constrained


def _is_union(kind: object) -> bool:
    return is_union(_base(kind))


def _unchanged(data: object, _kind: object) -> object:
    return data


def _builtin(data: object, kind: type) -> object:
    # Found by class, so an enum that is also a `str` ends here, too.
    values = literal_values(kind)
    return _plain(data, kind) if values is None else _literal(data, values)


def _scalar_hook(kind: object, _converter: cattrs.Converter) -> _Hook:
    plain = peel(kind).annotated
    return lambda data, _: _plain(data, plain)


def _plain(data: object, kind: object) -> object:
    value: object = msgspec.convert(data, cast("type", kind), strict=True)
    # `json.loads` makes infinity of 1e400; msgspec refuses as many digits.
    if isinstance(value, float) and math.isinf(value):
        raise ValueError("number out of range")
    return value


def _wrapped_hook(kind: object, converter: cattrs.Converter) -> _Hook:
    base = _base(kind)
    return lambda data, _: converter.structure(data, cast("Any", base))


def _alias_hook(kind: object, converter: cattrs.Converter) -> _Hook:
    value = alias_value(kind)
    return lambda data, _: converter.structure(data, cast("Any", value))


def _literal_hook(kind: object, _converter: cattrs.Converter) -> _Hook:
    values = literal_values(kind) or ()
    return lambda data, _: _literal(data, values)


def _literal(data: object, values: Sequence[tuple[object, object]]) -> object:
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


def _model_hook(kind: object, _converter: cattrs.Converter) -> _Hook:
    # From JSON, not from data: there, strict still reads dates from text and sets from lists.
    model = cast("Any", kind)
    return lambda data, _: model.model_validate_json(json.dumps(data, allow_nan=False), strict=True)


def _array_hook(kind: object, converter: cattrs.Converter) -> _Hook:
    peeled = peel(kind)
    shell = Peeled(list, peeled.metas).annotated
    make = ARRAYS[_origin(kind)]
    (item,) = typing.get_args(peeled.base) or (object,)

    def hook(data: object, _kind: object) -> object:
        items = cast("list[object]", _plain(data, shell))
        made = make(_items(items, [item] * len(items), kind, converter))
        if peeled.constrained and make is not list:
            _plain(list(cast("Sequence[object]", made)), shell)
        return made

    return hook


def _tuple_hook(kind: object, converter: cattrs.Converter) -> _Hook:
    base = _base(kind)
    arguments = (object, ...) if base is tuple else typing.get_args(base)

    def hook(data: object, _kind: object) -> object:
        items = cast("list[object]", _plain(data, list))
        if arguments[-1:] == (...,):
            return tuple(_items(items, [arguments[0]] * len(items), kind, converter))
        _check_length(items, len(arguments), len(arguments))
        return tuple(_items(items, arguments, kind, converter))

    return hook


def _items(
    data: Sequence[object], kinds: Sequence[object], whole: object, converter: cattrs.Converter
) -> list[object]:
    made: list[object] = []
    errors: list[Exception] = []
    for index, (item, kind) in enumerate(zip(data, kinds, strict=True)):
        try:
            made.append(converter.structure(item, cast("Any", kind)))
        except Exception as error:
            _note(error, IterableValidationNote, index, kind)
            errors.append(error)
    if errors:
        raise _failure(IterableValidationError, errors, whole)
    return made


def _check_length(items: Sequence[object], least: int, most: int) -> None:
    if not least <= len(items) <= most:
        wanted = str(most) if least == most else f"{least} to {most}"
        raise ValueError(f"expected {wanted} items, got {len(items)}")


def _mapping_hook(kind: object, converter: cattrs.Converter) -> _Hook:
    peeled = peel(kind)
    shell = Peeled(dict, peeled.metas).annotated
    key_kind, value_kind = typing.get_args(peeled.base) or (str, object)
    whole_keys = _base(key_kind) is int

    def structure_key(key: object) -> object:
        if whole_keys and isinstance(key, str):
            try:
                return converter.structure(int(key), key_kind)
            except ValueError:
                raise ValueError("expected a whole number for a key") from None
        return converter.structure(key, key_kind)

    def hook(data: object, _kind: object) -> object:
        made: dict[object, object] = {}
        errors: list[Exception] = []
        for key, value in cast("dict[str, object]", _plain(data, shell)).items():
            try:
                made[structure_key(key)] = converter.structure(value, value_kind)
            except Exception as error:
                _note(error, IterableValidationNote, key, value_kind)
                errors.append(error)
        if errors:
            raise _failure(IterableValidationError, errors, kind)
        return made

    return hook


def _members_hook(kind: object, converter: cattrs.Converter) -> _Hook:
    members = cast("Members", members_of(kind, type_name(kind)))
    names = {member.name for member in members.items}

    def from_array(data: object) -> dict[str, object]:
        items = cast("list[object]", _plain(data, list))
        required = sum(member.required for member in members.items)
        _check_length(items, required, len(members.items))
        return {m.name: item for m, item in zip(members.items, items, strict=False)}

    def hook(data: object, _kind: object) -> object:
        given = from_array(data) if members.array else cast("dict[str, object]", _plain(data, dict))
        arguments: dict[str, object] = {}
        errors: list[Exception] = []
        for member in members.items:
            try:
                if member.name in given:
                    value = converter.structure(given[member.name], cast("Any", member.hint))
                    if member.attribute is not None:
                        arguments[member.attribute] = value
                elif member.required:
                    raise KeyError(member.name)
            except Exception as error:
                _note(error, AttributeValidationNote, member.name, member.hint)
                errors.append(error)
        unknown = {str(name) for name in given.keys() - names}
        if unknown:
            errors.append(ForbiddenExtraKeysError(None, cast("Any", kind), unknown))
        if errors:
            raise _failure(ClassValidationError, errors, kind)
        return members.make(**arguments)

    return hook


def _failure(
    group: Callable[..., Exception], errors: Sequence[Exception], kind: object
) -> Exception:
    return group(f"{type_name(kind)} does not fit", errors, kind)


def _note(error: Exception, note: Callable[..., str], place: object, kind: object) -> None:
    # Each error is raised anew for each place, and so has one.
    error.__notes__ = [note(f"at {place!r}", place, kind)]


def _union_hook(kind: object, converter: cattrs.Converter) -> _Hook:
    members = sorted(alternatives(kind), key=_width)
    nullable = any(_base(member) is types.NoneType for member in members)
    others = [_Alternative.of(m) for m in members if _base(m) is not types.NoneType]

    def hook(data: object, _kind: object) -> object:
        if data is None and nullable:
            return None
        plausible = _plausible(others, data)
        errors: list[tuple[object, Exception]] = []
        for each in plausible:
            try:
                return converter.structure(data, cast("Any", each.kind))
            except Exception as error:
                if len(plausible) == 1:
                    raise
                errors.append((each.kind, error))
        names = " or ".join(dict.fromkeys(type_name(each.kind) for each in others))
        reasons = "; ".join(f"as {type_name(kind)}: {_message(error)}" for kind, error in errors)
        raise ValueError(f"expected {names}" + (f" ({reasons})" if reasons else ""))

    return hook


def _width(kind: object) -> int:
    """How much else a type takes: in a union, the narrow ones are tried first."""
    base = _base(kind)
    if literal_values(base) is not None:
        return 0
    wide = (int, float, str)
    if base in wide:
        return 2 + wide.index(cast("Any", base))
    return 5 if _is_anything(base) else 1


@attrs.frozen
class _Alternative:
    """A member of a union, and what can be seen of it without structuring.

    Structuring every member until one fits takes time exponential in the depth of
    recursive classes: they fail late, at a tag behind their deepest field.
    """

    kind: object
    is_object: bool = False
    is_never_object: bool = False
    keys: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    tags: Mapping[str, Sequence[object]] = attrs.field(factory=dict)

    @classmethod
    def of(cls, kind: object) -> _Alternative:
        base = _base(kind)
        members = members_of(base, type_name(base))
        if members is None or members.array:
            tests = (_is_scalar, _is_literal, _is_array, _is_tuple)
            return cls(kind, is_never_object=bool(members) or any(test(base) for test in tests))
        return cls(
            kind,
            is_object=True,
            keys=frozenset(member.name for member in members.items),
            required=frozenset(member.name for member in members.items if member.required),
            tags=dict(_tags(members.items)),
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
            any(_is_same(value, data[name]) for value in values)
            for name, values in self.tags.items()
            if name in data
        )


def _tags(members: Sequence[Member]) -> Iterator[tuple[str, list[object]]]:
    for member in members:
        values = literal_values(_base(member.hint))
        if values is not None:
            yield member.name, [value for value, _ in values]


def _plausible(alternatives: Sequence[_Alternative], data: object) -> Sequence[_Alternative]:
    if len(alternatives) == 1:
        return alternatives
    plausible = [each for each in alternatives if each.may_be(data)]
    if plausible or not isinstance(data, dict):
        return plausible
    meant = [each for each in alternatives if each.has_tags_of(data)]
    # One that was meant, and then written wrong: it can say what is wrong.
    return meant if len(meant) == 1 else []


def _message(error: BaseException, place: str = "") -> str:
    complaints = [f"{path}: {text}" if path else text for path, text in _complaints(error, place)]
    more = len(complaints) - _MAX_COMPLAINTS
    if more > 0:
        complaints[_MAX_COMPLAINTS:] = [f"and {more} more"]
    return "; ".join(complaints)


def _complaints(error: BaseException, path: str) -> Iterator[tuple[str, str]]:
    match error:
        case ClassValidationError() | IterableValidationError():
            for each in error.exceptions:
                yield from _complaints(each, path + _step(each, path))
        case ForbiddenExtraKeysError():
            yield path, "unknown " + ", ".join(sorted(map(repr, error.extra_fields)))
        case KeyError() if _step(error, "") and error.args:
            yield path, "is missing"
        case RecursionError():
            yield path, "nested too deeply"
        case msgspec.ValidationError():
            text = str(error).replace("`", "")
            yield path, text[:1].lower() + text[1:]
        case _ if callable(getattr(error, "errors", None)):
            for part in cast("Any", error).errors():
                inner = "".join(
                    f"[{p}]" if isinstance(p, int) else f".{p}" for p in part.get("loc", ())
                )
                yield (path + inner).removeprefix("."), str(part.get("msg", error))
        case _:
            yield path, str(error) or type(error).__name__


def _step(error: BaseException, path: str) -> str:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return f".{note.name}" if path else note.name
        if isinstance(note, IterableValidationNote):
            return f"[{note.index}]"
    return ""
