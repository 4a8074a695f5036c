"""What a Python type is made of, as its hints say: members of classes, annotations, unions.

The one place that knows how attrs, dataclasses, `TypedDict`, `NamedTuple` and
`msgspec.Struct` declare their fields.  Knows no JSON Schema and structures nothing.
"""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import enum
import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeGuard, TypeVar, cast

import attrs
import msgspec

from llamad_trio.chat.docstrings import Documentation, read_docstring
from llamad_trio.core.errors import ProtocolError

__all__ = [
    "ARRAYS",
    "MAPPINGS",
    "Member",
    "Members",
    "ModelClass",
    "Peeled",
    "alias_value",
    "alternatives",
    "is_model_class",
    "is_union",
    "literal_values",
    "members_of",
    "peel",
    "resolved_hints",
    "type_name",
]

ARRAYS: Mapping[object, Callable[[Sequence[object]], object]] = {
    list: list,
    abc.Sequence: list,
    abc.MutableSequence: list,
    abc.Collection: list,
    abc.Iterable: list,
    set: set,
    abc.Set: set,
    abc.MutableSet: set,
    frozenset: frozenset,
}
"""What a JSON array of items of one type may become, and how."""

MAPPINGS = frozenset({dict, abc.Mapping, abc.MutableMapping})

_CONSTRAINTS = (
    "gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length", "tz",
)  # fmt: skip

# `typing.ReadOnly` came with Python 3.13; `typing_extensions.ReadOnly` is another object before.
_QUALIFIER_NAMES = frozenset({"Required", "NotRequired", "ReadOnly", "Final"})


class ModelClass(typing.Protocol):
    """A class that makes its own schema and validates its own data: a pydantic model."""

    def model_json_schema(self) -> dict[str, Any]: ...

    def model_validate_json(self, json_data: str, *, strict: bool) -> object: ...


@attrs.frozen
class Peeled:
    """A type without its annotations, and what they said.

    Args:
        base: the type.
        metas: constraints on it, the outermost last.
        description: for whoever produces a value of it.
    """

    base: object
    metas: tuple[msgspec.Meta, ...] = ()
    description: str | None = None

    @property
    def constrained(self) -> bool:
        """Whether any of the annotations limits the values."""
        return any(getattr(meta, name) is not None for meta in self.metas for name in _CONSTRAINTS)

    @property
    def annotated(self) -> object:
        """The type again, with the constraints only."""
        return (
            Annotated[(self.base, *self.metas)] if self.metas else self.base
        )  # mypy takes the tuple for the type


@attrs.frozen
class Member:
    """A field of a class, an item of a named tuple, a parameter of a function.

    Args:
        name: its key in JSON.
        attribute: its name as a keyword argument of the class; `None` for a tag,
            which the class does not take.
        hint: its type.
        required: whether it has no default.
        description: for whoever produces a value of it.
    """

    name: str
    attribute: str | None
    hint: object
    required: bool
    description: str | None = None


@attrs.frozen
class Members:
    """A class with known fields.

    Args:
        make: makes an instance from keyword arguments.
        items: its fields, in order.
        array: whether its JSON is an array, not an object.
        description: of the class.
    """

    make: Callable[..., object]
    items: tuple[Member, ...]
    array: bool = False
    description: str | None = None


def type_name(kind: object) -> str:
    """A type as its author would write it, without modules."""
    origin = typing.get_origin(kind)
    if kind is None or kind is types.NoneType:
        return "None"
    if origin is Annotated:
        return type_name(typing.get_args(kind)[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, typing.get_args(kind)))}]"
    if is_union(kind):
        return " | ".join(map(type_name, typing.get_args(kind)))
    if origin is not None:
        arguments = ", ".join(map(type_name, typing.get_args(kind)))
        return f"{type_name(origin)}[{arguments}]"
    if kind is ...:
        return "..."
    name = getattr(kind, "__name__", None)
    return name if isinstance(name, str) else repr(kind)


def peel(kind: object) -> Peeled:
    """Take off `Annotated`, `NewType`, `Required`, `NotRequired`, `ReadOnly` and `Final`.

    What an outer annotation says of the type goes before what an inner one says.
    """
    metas: list[msgspec.Meta] = []
    description: str | None = None
    while True:
        origin = typing.get_origin(kind)
        if origin is Annotated:
            kind, *notes = typing.get_args(kind)
            metas[:0] = [note for note in notes if isinstance(note, msgspec.Meta)]
            description = description or next(filter(None, map(_note_text, reversed(notes))), None)
        elif isinstance(kind, typing.NewType):
            kind = kind.__supertype__
        elif getattr(origin, "_name", None) in _QUALIFIER_NAMES:
            (kind,) = typing.get_args(kind)
        else:
            return Peeled(kind, tuple(metas), description)


def _note_text(note: object) -> str | None:
    # `typing_extensions.Doc` has `documentation`; `msgspec.Meta` and pydantic's `Field`
    # have `description`.
    for text in (
        note,
        getattr(note, "documentation", None),
        getattr(note, "description", None),
    ):
        if isinstance(text, str):
            return text
    return None


def is_union(kind: object) -> bool:
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
    if value is not None and is_union(peel(value).base):
        yield from alternatives(value)
    elif is_union(peeled.base):
        for member in typing.get_args(peeled.base):
            for alternative in alternatives(member):
                if alternative is msgspec.UnsetType:
                    continue
                if peeled.constrained and alternative is not types.NoneType:
                    yield Annotated[(alternative, *peeled.metas)]  # as above
                else:
                    yield alternative
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


def is_model_class(kind: object) -> TypeGuard[ModelClass]:
    """Whether it is a pydantic model; found out without pydantic, which may not be there."""
    return isinstance(kind, type) and all(
        callable(getattr(kind, name, None)) for name in ("model_json_schema", "model_validate_json")
    )


def resolved_hints(owner: object, where: str) -> dict[str, object]:
    """The type hints of a class, or of a function's parameters, with their annotations.

    What a function returns may be hinted by a name that is known to type checkers only.

    Raises:
        ProtocolError: a hint that names something unknown.
    """
    # A class made inside a function does not find its own name in the module.
    local = {owner.__name__: owner} if isinstance(owner, type) else None
    try:
        if isinstance(owner, type):
            return typing.get_type_hints(owner, localns=local, include_extras=True)
        return _parameter_hints(owner)
    except Exception as error:
        # Evaluating a hint runs its author's code, which may raise anything.
        raise ProtocolError(f"{where}: its type hints cannot be read: {error}") from error


def _parameter_hints(function: object) -> dict[str, object]:
    defined = inspect.unwrap(cast("Callable[..., object]", function))
    hints: Mapping[str, object] = getattr(function, "__annotations__", {})
    only_parameters = types.SimpleNamespace(
        __annotations__={name: hint for name, hint in hints.items() if name != "return"},
        __type_params__=getattr(function, "__type_params__", ()),
    )
    return typing.get_type_hints(
        only_parameters, globalns=getattr(defined, "__globals__", {}), include_extras=True
    )


def members_of(kind: object, where: str) -> Members | None:
    """The fields of a class; `None` if it is not of a sort that declares its fields.

    Raises:
        ProtocolError: a hint that cannot be read, or is not there.
    """
    origin = typing.get_origin(kind) or kind
    reader = _reader(origin) if isinstance(origin, type) else None
    if reader is None or not isinstance(origin, type):
        return None
    documentation = _class_documentation(origin)
    hints = resolved_hints(origin, where)
    mapping = _type_arguments(kind)
    members = reader(origin, hints)
    for member in members.items:
        if member.hint is None and member.name not in hints:
            raise ProtocolError(f"{where}.{member.name}: has no type hint")
        if isinstance(member.hint, dataclasses.InitVar):
            raise ProtocolError(f"{where}.{member.name}: an InitVar is not supported")
    return attrs.evolve(
        members,
        description=documentation.summary or None,
        items=tuple(
            attrs.evolve(
                member,
                hint=_substitute(member.hint, mapping),
                description=member.description
                or peel(member.hint).description
                or documentation.parameters.get(member.attribute or member.name),
            )
            for member in members.items
        ),
    )


_Reader = Callable[[type, Mapping[str, object]], Members]


def _reader(cls: type) -> _Reader | None:
    if attrs.has(cls):
        return _attrs_members
    if dataclasses.is_dataclass(cls):
        return _dataclass_members
    if typing.is_typeddict(cls) or hasattr(cls, "__required_keys__"):
        return _typed_dict_members
    if issubclass(cls, tuple) and hasattr(cls, "_field_defaults"):
        return _named_tuple_members
    if issubclass(cls, msgspec.Struct):
        return _struct_members
    return None


def _attrs_members(cls: type, hints: Mapping[str, object]) -> Members:
    fields = attrs.fields(cast("type[attrs.AttrsInstance]", cls))
    return Members(
        cls,
        tuple(
            Member(
                name=field.alias or field.name,
                attribute=field.alias or field.name,
                hint=hints.get(field.name, field.type),
                required=field.default is attrs.NOTHING,
                description=_text_or_none(field.metadata.get("description")),
            )
            for field in fields
            if field.init
        ),
    )


def _dataclass_members(cls: type, hints: Mapping[str, object]) -> Members:
    fields = [field for field in dataclasses.fields(cls) if field.init]
    names = {field.name for field in fields}
    return Members(
        cls,
        (
            *(
                Member(
                    name=field.name,
                    attribute=field.name,
                    hint=hints[field.name],
                    required=field.default is dataclasses.MISSING
                    and field.default_factory is dataclasses.MISSING,
                    description=_text_or_none(field.metadata.get("description")),
                )
                for field in fields
            ),
            *(
                Member(name, name, hint, required=True)
                for name, hint in hints.items()
                if isinstance(hint, dataclasses.InitVar) and name not in names
            ),
        ),
    )


def _typed_dict_members(cls: type, hints: Mapping[str, object]) -> Members:
    required_keys: frozenset[str] = cls.__required_keys__  # type: ignore[attr-defined]
    return Members(
        dict,
        tuple(
            # `__required_keys__` is wrong where the hints were strings: they hid `NotRequired`.
            Member(name, name, hint, required=_requirement(hint, name in required_keys))
            for name, hint in hints.items()
        ),
    )


def _requirement(hint: object, otherwise: bool) -> bool:
    while True:
        match getattr(typing.get_origin(hint), "_name", None):
            case "Required":
                return True
            case "NotRequired":
                return False
        if typing.get_origin(hint) is not Annotated and peel(hint).base is hint:
            return otherwise
        hint = typing.get_args(hint)[0]


def _named_tuple_members(cls: type, hints: Mapping[str, object]) -> Members:
    defaults: Mapping[str, object] = cls._field_defaults  # type: ignore[attr-defined]
    names: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]
    return Members(
        cls,
        tuple(Member(n, n, hints.get(n), required=n not in defaults) for n in names),
        array=True,
    )


def _struct_members(cls: type, hints: Mapping[str, object]) -> Members:
    struct = cast("type[msgspec.Struct]", cls)
    config = struct.__struct_config__
    tag = (
        (
            Member(config.tag_field, None, Literal[config.tag], required=True),
        )  # a value known at run time
        if config.tag_field is not None
        else ()
    )
    return Members(
        cls,
        (
            *tag,
            *(
                Member(field.encode_name, field.name, hints[field.name], required=field.required)
                for field in msgspec.structs.fields(struct)
            ),
        ),
        array=config.array_like,
    )


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


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
    if isinstance(hint, types.UnionType):
        members = (_substitute(member, mapping) for member in typing.get_args(hint))
        return functools.reduce(operator.or_, cast("Iterator[type]", members))
    subscript = cast("Any", hint)
    return subscript[tuple(mapping.get(parameter, parameter) for parameter in parameters)]
