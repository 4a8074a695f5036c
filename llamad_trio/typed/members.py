"""What a Python type is made of, as its hints say: members of classes, annotations, unions.

The one place that knows how attrs, dataclasses, `TypedDict`, `NamedTuple` and
`msgspec.Struct` declare their fields.  Knows no JSON Schema and structures nothing.
"""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import inspect
import types
import typing
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

import attrs
import msgspec
import typing_extensions

from llamad_trio.core.errors import ProtocolError
from llamad_trio.typed.docstrings import Documentation, read_docstring

T = TypeVar("T")

_CACHED_TYPES = 256

ARRAYS: Mapping[object, Callable[[Sequence[object]], object]] = {
    **dict.fromkeys((list, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable), list),
    **dict.fromkeys((set, abc.Set, abc.MutableSet), set),
    frozenset: frozenset,
}
"""What a JSON array of items of one type may become, and how."""


class Sort(enum.Enum):
    """By which rule a type is written as a schema, and made from data."""

    UNION = enum.auto()
    SCALAR = enum.auto()
    ARRAY = enum.auto()
    TUPLE = enum.auto()
    MAPPING = enum.auto()
    ANYTHING = enum.auto()
    VALUES = enum.auto()
    """A `Literal` or an enum."""
    MODEL = enum.auto()
    """A class that makes its own schema and validates its own data: a pydantic model."""
    ALIAS = enum.auto()
    CLASS = enum.auto()
    """One with members, or what has no schema at all."""


_SORTS: Mapping[object, Sort] = {
    # msgspec reads each of these from one JSON scalar.
    **dict.fromkeys((bool, int, float, str, types.NoneType), Sort.SCALAR),
    **dict.fromkeys((dt.datetime, dt.date, dt.time, dt.timedelta), Sort.SCALAR),
    **dict.fromkeys((uuid.UUID, decimal.Decimal), Sort.SCALAR),
    **dict.fromkeys(ARRAYS, Sort.ARRAY),
    **dict.fromkeys((dict, abc.Mapping, abc.MutableMapping), Sort.MAPPING),
    **dict.fromkeys((Any, object), Sort.ANYTHING),
    tuple: Sort.TUPLE,
}

_CONSTRAINTS = (
    "gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length", "tz",
)  # fmt: skip

# `typing.ReadOnly` came with Python 3.13; `typing_extensions.ReadOnly` is another object before.
_QUALIFIERS = {"Required": True, "NotRequired": False, "ReadOnly": None, "Final": None}
"""What each says of whether a member must be there."""


@attrs.frozen
class Peeled:
    """A type without its annotations, and what they said.

    `metas` are constraints on it, the outermost last.  It was `required` if it was `Required`,
    and not if `NotRequired`; `None` for neither.
    """

    base: object
    metas: tuple[msgspec.Meta, ...] = ()
    description: str | None = None
    required: bool | None = None

    @property
    def constrained(self) -> bool:
        """Whether any of the annotations limits the values."""
        return any(getattr(meta, name) is not None for meta in self.metas for name in _CONSTRAINTS)

    @property
    def origin(self) -> object:
        """The generic type, or else the type itself."""
        return typing.get_origin(self.base) or self.base

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What stands in the brackets of a generic type."""
        return typing.get_args(self.base)

    @property
    def annotated(self) -> object:
        """The type again, with the constraints only."""
        return Annotated[(self.base, *self.metas)] if self.metas else self.base


@attrs.frozen
class Member:
    """A field of a class, an item of a named tuple, a parameter of a function.

    `name` is its key in JSON, `attribute` its name as a keyword argument of the class: `None`
    for a tag, which the class does not take.
    """

    name: str
    attribute: str | None
    hint: object
    required: bool
    description: str | None = None


@attrs.frozen
class Members:
    """A class with known fields; its JSON is an object, or an array.  `make` takes keywords."""

    make: Callable[..., object]
    items: tuple[Member, ...]
    array: bool = False
    description: str | None = None


def cached_by_type(build: Callable[[object], T]) -> Callable[[object], T]:
    """Remember what was made of the types met last; those without a hash are read anew."""
    # Equal unions may differ in order, which matters; their texts differ.
    cached = functools.lru_cache(_CACHED_TYPES)(lambda kind, _text: build(kind))

    def look_up(kind: object) -> T:
        try:
            hash(kind)
        except TypeError:
            return build(kind)
        return cached(kind, repr(kind))

    return look_up


def type_name(kind: object) -> str:
    """A type as its author would write it, without modules."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if _is_union(kind):
        return " | ".join(map(type_name, arguments))
    if origin is not None:
        return f"{type_name(origin)}[{', '.join(map(type_name, arguments))}]"
    if kind is None or kind is types.NoneType:
        return "None"
    name = "..." if kind is ... else getattr(kind, "__name__", None)
    return name if isinstance(name, str) else repr(kind)


def peel(kind: object) -> Peeled:
    """Take off `Annotated`, `NewType`, `Required`, `NotRequired`, `ReadOnly` and `Final`.

    What an outer annotation says of the type goes before what an inner one says.
    """
    metas: list[msgspec.Meta] = []
    description: str | None = None
    required: bool | None = None
    while True:
        origin = typing.get_origin(kind)
        if origin is Annotated:
            kind, *notes = typing.get_args(kind)
            metas[:0] = [note for note in notes if isinstance(note, msgspec.Meta)]
            description = description or next(filter(None, map(_note_text, reversed(notes))), None)
        elif isinstance(kind, typing.NewType):
            kind = kind.__supertype__
        elif (qualifier := getattr(origin, "_name", None)) in _QUALIFIERS:
            (kind,) = typing.get_args(kind)
            required = _QUALIFIERS[qualifier] if required is None else required
        else:
            base = types.NoneType if kind is None else kind
            return Peeled(base, tuple(metas), description, required)


def _note_text(note: object) -> str | None:
    # `typing_extensions.Doc` has `documentation`; `msgspec.Meta` and pydantic's `Field`
    # have `description`.
    texts = (note, getattr(note, "documentation", None), getattr(note, "description", None))
    return next((text for text in texts if isinstance(text, str)), None)


def sort_of(peeled: Peeled) -> Sort:
    """By which rule a type is read."""
    if _is_union(peeled.base):
        return Sort.UNION
    if peeled.origin in _SORTS:
        return _SORTS[peeled.origin]
    if literal_values(peeled.base) is not None:
        return Sort.VALUES
    methods = ("model_json_schema", "model_validate_json")
    if isinstance(peeled.base, type) and all(
        callable(getattr(peeled.base, name, None)) for name in methods
    ):
        return Sort.MODEL  # found out without pydantic, which may not be there
    return Sort.CLASS if alias_value(peeled.base) is None else Sort.ALIAS


def _is_union(kind: object) -> bool:
    """Whether it is `X | Y`, `Union` or `Optional`."""
    return typing.get_origin(kind) in {typing.Union, types.UnionType}


def alias_value(kind: object) -> object | None:
    """What an alias made by a `type` statement stands for; `None` if it is no such alias."""
    origin = typing.get_origin(kind)
    alias = kind if origin is None else origin
    if isinstance(alias, type) or not hasattr(alias, "__value__"):
        return None
    parameters = getattr(alias, "__type_params__", ())
    value: object = cast("Any", alias).__value__
    return _substitute(value, dict(zip(parameters, typing.get_args(kind), strict=False)))


def alternatives(kind: object) -> Iterator[object]:
    """The members of a union, and of the unions in it; of anything else, itself.

    Constraints on the whole union hold for each member but `None`.
    """
    peeled = peel(kind)
    value = alias_value(peeled.base)
    if value is not None and _is_union(peel(value).base):
        yield from alternatives(value)
    elif _is_union(peeled.base):
        for member in typing.get_args(peeled.base):
            for alternative in alternatives(member):
                if alternative is msgspec.UnsetType:
                    continue
                limited = peeled.constrained and alternative is not types.NoneType
                yield Peeled(alternative, peeled.metas).annotated if limited else alternative
    else:
        yield kind


def literal_values(kind: object) -> tuple[tuple[object, object], ...] | None:
    """Pairs of JSON scalar and Python value of a `Literal` or an enum; `None` for others."""
    if typing.get_origin(kind) is Literal:
        values = typing.get_args(kind)
    elif isinstance(kind, enum.EnumMeta):
        values = tuple(cast("Iterator[object]", iter(kind)))
    else:
        return None
    return tuple((v.value if isinstance(v, enum.Enum) else v, v) for v in values)


def resolve_hints(owner: object, where: str) -> dict[str, object]:
    """The type hints of a class, or of a function's parameters, with their annotations.

    A hint that names something unknown is a `ProtocolError`, but for what a function returns:
    that may be a name that is known to type checkers only.
    """
    try:
        if isinstance(owner, type):
            # A class made inside a function does not find its own name in the module.
            local = {owner.__name__: owner}
            return typing.get_type_hints(owner, localns=local, include_extras=True)
        hints: Mapping[str, object] = getattr(owner, "__annotations__", {})
        parameters = types.SimpleNamespace(
            __annotations__={name: hint for name, hint in hints.items() if name != "return"},
            __type_params__=getattr(owner, "__type_params__", ()),
        )
        names = getattr(inspect.unwrap(cast("Any", owner)), "__globals__", {})
        return typing.get_type_hints(parameters, globalns=names, include_extras=True)
    except Exception as error:
        # Evaluating a hint runs its author's code, which may raise anything.
        raise ProtocolError(f"{where}: its type hints cannot be read: {error}") from error


def members_of(kind: object, where: str) -> Members | None:
    """The fields of a class; `None` if it is not of a sort that declares its fields.

    Raises `ProtocolError` for a hint that cannot be read, or is not there.
    """
    cls = typing.get_origin(kind) or kind
    if not isinstance(cls, type):
        return None
    read = next((read for applies, read in _READERS if applies(cls)), None)
    if read is None:
        return None
    hints = resolve_hints(cls, where)
    documentation = _class_documentation(cls)
    arguments = _type_arguments(kind)

    def finish(member: Member) -> Member:
        if member.hint is None:
            raise ProtocolError(f"{where}.{member.name}: has no type hint")
        return attrs.evolve(
            member,
            hint=_substitute(member.hint, arguments),
            description=member.description
            or peel(member.hint).description
            or documentation.parameters.get(member.attribute or member.name),
        )

    for name, hint in hints.items():
        if isinstance(hint, dataclasses.InitVar):
            raise ProtocolError(f"{where}.{name}: an InitVar is not supported")
    config = getattr(cls, "__struct_config__", None)
    return Members(
        make=cls,
        items=tuple(map(finish, read(cls, hints))),
        array=read is _named_tuple_members or (config is not None and config.array_like),
        description=documentation.summary or None,
    )


def _attrs_members(cls: Any, hints: Mapping[str, object]) -> Iterator[Member]:
    for field in attrs.fields(cls):
        if field.init:
            hint, required = hints.get(field.name, field.type), field.default is attrs.NOTHING
            said = _note_text(field.metadata.get("description"))
            yield Member(field.alias, field.alias, hint, required, said)


def _dataclass_members(cls: Any, hints: Mapping[str, object]) -> Iterator[Member]:
    missing = dataclasses.MISSING
    for field in dataclasses.fields(cls):
        if field.init:
            required = field.default is missing and field.default_factory is missing
            said = _note_text(field.metadata.get("description"))
            yield Member(field.name, field.name, hints[field.name], required, said)


def _typed_dict_members(cls: Any, hints: Mapping[str, object]) -> Iterator[Member]:
    for name, hint in hints.items():
        # `__required_keys__` is wrong where the hints were strings: they hid `NotRequired`.
        required = peel(hint).required
        required = name in cls.__required_keys__ if required is None else required
        yield Member(name, name, hint, required)


def _named_tuple_members(cls: Any, hints: Mapping[str, object]) -> Iterator[Member]:
    for name in cls._fields:
        yield Member(name, name, hints.get(name), required=name not in cls._field_defaults)


def _struct_members(cls: Any, hints: Mapping[str, object]) -> Iterator[Member]:
    config = cls.__struct_config__
    if config.tag_field is not None:
        yield Member(config.tag_field, None, Literal[config.tag], required=True)
    for field in msgspec.structs.fields(cls):
        yield Member(field.encode_name, field.name, hints[field.name], required=field.required)


_Reader = Callable[[Any, Mapping[str, object]], Iterator[Member]]
_READERS: Sequence[tuple[Callable[[type], bool], _Reader]] = (
    (attrs.has, _attrs_members),
    (dataclasses.is_dataclass, _dataclass_members),
    (typing_extensions.is_typeddict, _typed_dict_members),
    (lambda cls: issubclass(cls, tuple) and hasattr(cls, "_field_defaults"), _named_tuple_members),
    (lambda cls: issubclass(cls, msgspec.Struct), _struct_members),
)
"""How to find that a class is of a sort, and what then reads its fields."""


def _class_documentation(cls: type) -> Documentation:
    docstring = cls.__dict__.get("__doc__")
    # Dataclasses and named tuples without a docstring get their signature for one.
    if isinstance(docstring, str) and docstring.startswith(f"{cls.__name__}("):
        docstring = None
    return read_docstring(docstring)


def _type_arguments(kind: object) -> dict[object, object]:
    """What each type variable of a generic class, and of its bases, stands for."""
    origin = typing.get_origin(kind) or kind
    parameters = getattr(origin, "__parameters__", ())
    mapping: dict[object, object] = dict(zip(parameters, typing.get_args(kind), strict=False))
    for base in getattr(origin, "__orig_bases__", ()):
        for parameter, argument in _type_arguments(base).items():
            mapping.setdefault(parameter, _substitute(argument, mapping))
    return mapping


def _substitute(hint: object, mapping: Mapping[object, object]) -> object:
    if isinstance(hint, TypeVar):
        return mapping.get(hint, hint)
    parameters = getattr(hint, "__parameters__", ())
    is_class = isinstance(hint, type) and typing.get_origin(hint) is None
    if is_class or not parameters:
        return hint
    arguments = tuple(mapping.get(parameter, parameter) for parameter in parameters)
    return cast("Any", hint)[arguments]
