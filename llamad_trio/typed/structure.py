"""Typed results: a Python type to a schema for the model, and the model's JSON to a value.

`schema_of` and `structure` read types through `type_members`, so what the schema allows can
be structured.  What a schema for llguidance cannot say comes out in `structure` only: a number
too large for a `float`, an item twice in a set with a least size, pydantic's own validators and
the limits of its `Decimal`.
"""

from __future__ import annotations

import json
import math
import types
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
from llamad_trio.typed.text import describe

__all__ = ["describe", "schema_of", "structure"]

T = TypeVar("T")

_MAX_COMPLAINTS = 8
"""A model that got everything wrong is told no more than this at once."""

_Hook = Callable[[Any, Any], object]


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
    converter = _converter_for(kind)
    try:
        return converter.structure(data, cast("Any", kind))
    except Exception as error:
        # Classes run code of their own when they are made: validators, `__post_init__`.
        raise ValueError(_message(error, place)) from error


@cached_by_type
def _converter_for(_kind: object) -> cattrs.Converter:
    # A converter remembers every type it met; one for each root lets the cache forget them.
    converter = cattrs.Converter(detailed_validation=True)
    converter.register_structure_hook_factory(lambda _: True, _hook)
    # cattrs coerces these, and finds their hooks by class, before any predicate.
    for builtin in (str, int, float, bool):
        converter.register_structure_hook(builtin, _builtin)
    return converter


def _hook(kind: object, converter: cattrs.Converter) -> _Hook:
    peeled = peel(kind)
    return _RULES[sort_of(peeled)](peeled, converter)


def _builtin(data: object, kind: type) -> object:
    # Found by class, so an enum that is also a `str` ends here, too.
    values = literal_values(kind)
    return _plain(data, kind) if values is None else _literal(data, values)


def _anything_hook(_peeled: Peeled, _converter: cattrs.Converter) -> _Hook:
    return lambda data, _: data


def _scalar_hook(peeled: Peeled, _converter: cattrs.Converter) -> _Hook:
    kind = peeled.annotated
    return lambda data, _: _plain(data, kind)


def _plain(data: object, kind: object) -> Any:
    value: Any = msgspec.convert(data, cast("type", kind), strict=True)
    # `json.loads` makes infinity of 1e400; msgspec refuses as many digits.
    if isinstance(value, float) and math.isinf(value):
        raise ValueError("number out of range")
    return value


def _alias_hook(peeled: Peeled, converter: cattrs.Converter) -> _Hook:
    value: Any = alias_value(peeled.base)
    return lambda data, _: converter.structure(data, value)


def _values_hook(peeled: Peeled, _converter: cattrs.Converter) -> _Hook:
    values = literal_values(peeled.base) or ()
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


def _model_hook(peeled: Peeled, _converter: cattrs.Converter) -> _Hook:
    # From JSON, not from data: there, strict still reads dates from text and sets from lists.
    model: Any = peeled.base
    return lambda data, _: model.model_validate_json(json.dumps(data, allow_nan=False), strict=True)


def _keep(
    errors: list[Exception], error: Exception, note: Callable[..., str], place: object, kind: object
) -> None:
    """Keep an error in a part, with its place in a note: the other parts may have more."""
    # Each error is raised anew for each place, and so has one.
    error.__notes__ = [note(f"at {place!r}", place, kind)]
    errors.append(error)


def _failure(
    group: Callable[..., Exception], errors: Sequence[Exception], kind: object
) -> Exception:
    return group(f"{type_name(kind)} does not fit", errors, kind)


def _items(
    data: Sequence[object], kinds: Sequence[Any], whole: object, converter: cattrs.Converter
) -> list[Any]:
    made: list[object] = []
    errors: list[Exception] = []
    for index, (item, kind) in enumerate(zip(data, kinds, strict=True)):
        try:
            made.append(converter.structure(item, kind))
        except Exception as error:
            _keep(errors, error, IterableValidationNote, index, kind)
    if errors:
        raise _failure(IterableValidationError, errors, whole)
    return made


def _check_length(items: Sequence[object], least: int, most: int) -> None:
    if not least <= len(items) <= most:
        wanted = str(most) if least == most else f"{least} to {most}"
        raise ValueError(f"expected {wanted} items, got {len(items)}")


def _array_hook(peeled: Peeled, converter: cattrs.Converter) -> _Hook:
    shell = Peeled(list, peeled.metas).annotated
    make = ARRAYS[peeled.origin]
    (item,) = peeled.arguments or (object,)

    def hook(data: object, kind: object) -> object:
        items = _plain(data, shell)
        made: Any = make(_items(items, [item] * len(items), kind, converter))
        if peeled.constrained and make is not list:
            _plain(list(made), shell)
        return made

    return hook


def _tuple_hook(peeled: Peeled, converter: cattrs.Converter) -> _Hook:
    kinds = (object, ...) if peeled.base is tuple else peeled.arguments

    def hook(data: object, kind: object) -> object:
        items = _plain(data, list)
        if kinds[-1:] == (...,):
            return tuple(_items(items, [kinds[0]] * len(items), kind, converter))
        _check_length(items, len(kinds), len(kinds))
        return tuple(_items(items, kinds, kind, converter))

    return hook


def _mapping_hook(peeled: Peeled, converter: cattrs.Converter) -> _Hook:
    shell = Peeled(dict, peeled.metas).annotated
    key_kind, value_kind = peeled.arguments or (str, object)
    whole_keys = peel(key_kind).base is int

    def structure_key(key: object) -> object:
        if whole_keys and isinstance(key, str):
            try:
                return converter.structure(int(key), key_kind)
            except ValueError:
                raise ValueError("expected a whole number for a key") from None
        return converter.structure(key, key_kind)

    def hook(data: object, kind: object) -> object:
        made: dict[object, object] = {}
        errors: list[Exception] = []
        for key, value in _plain(data, shell).items():
            try:
                made[structure_key(key)] = converter.structure(value, value_kind)
            except Exception as error:
                _keep(errors, error, IterableValidationNote, key, value_kind)
        if errors:
            raise _failure(IterableValidationError, errors, kind)
        return made

    return hook


def _class_hook(peeled: Peeled, converter: cattrs.Converter) -> _Hook:
    kind: Any = peeled.base
    members = cast("Members", members_of(kind, type_name(kind)))
    names = [member.name for member in members.items]
    required = sum(member.required for member in members.items)

    def named(data: object) -> dict[str, object]:
        if not members.array:
            return cast("dict[str, object]", _plain(data, dict))
        items = _plain(data, list)
        _check_length(items, required, len(names))
        return dict(zip(names, items, strict=False))

    def hook(data: object, _kind: object) -> object:
        given = named(data)
        arguments: dict[str, object] = {}
        errors: list[Exception] = []
        for member in members.items:
            hint: Any = member.hint
            try:
                if member.name in given:
                    value = converter.structure(given[member.name], hint)
                    if member.attribute is not None:
                        arguments[member.attribute] = value
                elif member.required:
                    raise KeyError(member.name)
            except Exception as error:
                _keep(errors, error, AttributeValidationNote, member.name, hint)
        unknown = {str(name) for name in given.keys() - names}
        if unknown:
            errors.append(ForbiddenExtraKeysError(None, kind, unknown))
        if errors:
            raise _failure(ClassValidationError, errors, kind)
        return members.make(**arguments)

    return hook


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


_RULES: Mapping[Sort, Callable[[Peeled, cattrs.Converter], _Hook]] = {
    Sort.UNION: _union_hook,
    Sort.SCALAR: _scalar_hook,
    Sort.ARRAY: _array_hook,
    Sort.TUPLE: _tuple_hook,
    Sort.MAPPING: _mapping_hook,
    Sort.ANYTHING: _anything_hook,
    Sort.VALUES: _values_hook,
    Sort.MODEL: _model_hook,
    Sort.ALIAS: _alias_hook,
    Sort.CLASS: _class_hook,
}


_WIDTHS: Mapping[object, int] = {int: 2, float: 3, str: 4, Any: 5, object: 5}


def _width(kind: object) -> int:
    """How much else a type takes: in a union, the narrow ones are tried first."""
    peeled = peel(kind)
    return _WIDTHS.get(peeled.base, 0 if sort_of(peeled) is Sort.VALUES else 1)


@attrs.frozen
class _Alternative:
    """A member of a union, and what can be seen of it without structuring.

    Structuring every member until one fits takes time exponential in the depth of
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


def _message(error: BaseException, place: str = "") -> str:
    paths = ((path.removeprefix("."), text) for path, text in _complaints(error, place))
    complaints = [f"{path}: {text}" if path else text for path, text in paths]
    more = len(complaints) - _MAX_COMPLAINTS
    if more > 0:
        complaints[_MAX_COMPLAINTS:] = [f"and {more} more"]
    return "; ".join(complaints)


def _complaints(error: BaseException, path: str) -> Iterator[tuple[str, str]]:
    match error:
        case ClassValidationError() | IterableValidationError():
            for each in error.exceptions:
                yield from _complaints(each, path + _place(each))
        case ForbiddenExtraKeysError():
            yield path, "unknown " + ", ".join(sorted(map(repr, error.extra_fields)))
        case KeyError() if _place(error) and error.args:
            yield path, "is missing"
        case RecursionError():
            yield path, "nested too deeply"
        case msgspec.ValidationError():
            text = str(error).replace("`", "")
            yield path, text[:1].lower() + text[1:]
        case _ if callable(getattr(error, "errors", None)):
            for part in cast("Any", error).errors():
                steps = (f"[{p}]" if isinstance(p, int) else f".{p}" for p in part.get("loc", ()))
                yield path + "".join(steps), str(part.get("msg", error))
        case _:
            yield path, str(error) or type(error).__name__


def _place(error: BaseException) -> str:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return f".{note.name}"
        if isinstance(note, IterableValidationNote):
            return f"[{note.index}]"
    return ""
