"""Converters for the fields of `Request`, `EngineConfig` and their kin.

The rule of the whole library: a number out of range is clamped, NaN becomes the
default, and a wrong *type* is an error (`ProtocolError`).  `bool` is not a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

import attrs

from llamad_trio.core.errors import ProtocolError

T = TypeVar("T")
ClassT = TypeVar("ClassT", bound=type[Any])

Convert = Callable[[object, str], T]
"""Makes a value of a caller's into one of ours.  The text is what errors call it."""

_CONVERT = "llamad_trio.convert"


def checked(convert: Convert[Any]) -> Mapping[str, Convert[Any]]:
    """The metadata of an attrs field that has a converter: see `apply_converters`."""
    return {_CONVERT: convert}


def apply_converters(_cls: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """A field transformer for attrs: give each field the converter in its metadata.

    Declared as a converter, it would hide the field's type from type checkers: the
    caller's mistake would be found at run time only.
    """
    return [
        field.evolve(converter=_bind_name(field.metadata[_CONVERT], field.name))
        if _CONVERT in field.metadata
        else field
        for field in fields
    ]


def _bind_name(convert: Convert[T], name: str) -> Callable[[object], T]:
    return lambda value: convert(value, name)


def typed_init(cls: ClassT) -> ClassT:
    """A decorator of attrs classes: `help` tells the types of their arguments.

    attrs leaves out those of fields with a converter.
    """
    init = cls.__init__ if "__init__" in vars(cls) else cls.__attrs_init__
    init.__annotations__ |= {f.name: f.type for f in attrs.fields(cls) if f.init}
    return cls


def whole_number(low: int, high: int) -> Convert[int]:
    """A converter to an `int` clamped to `low`..`high`."""

    def convert(value: object, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ProtocolError(f"{name} must be an integer, not {type(value).__name__}")
        return min(max(value, low), high)

    return convert


def number(default: float, low: float, high: float) -> Convert[float]:
    """A converter to a `float` clamped to `low`..`high`; NaN becomes `default`."""

    def convert(value: object, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ProtocolError(f"{name} must be a number, not {type(value).__name__}")
        if isinstance(value, float) and math.isnan(value):
            return default
        # Clamped before float(): an integer may be too large for a float.
        return float(min(max(value, low), high))

    return convert


def boolean(value: object, name: str) -> bool:
    """A converter that accepts only `True` and `False`."""
    if not isinstance(value, bool):
        raise ProtocolError(f"{name} must be true or false, not {type(value).__name__}")
    return value


def text(value: object, name: str) -> str:
    """A converter to text that llama.cpp can take: no NUL, no lone surrogate."""
    if not isinstance(value, str):
        raise ProtocolError(f"{name} must be text, not {type(value).__name__}")
    if "\0" in value:
        raise ProtocolError(f"{name} contains a NUL byte")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ProtocolError(f"{name} contains a lone surrogate") from None
    return value


def one_of(*choices: str) -> Convert[str]:
    """A converter that accepts only these texts."""

    def convert(value: object, name: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ProtocolError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        return value

    return convert


def optional(convert: Convert[T]) -> Convert[T | None]:
    """`convert`, but `None` stays `None`."""
    return lambda value, name: None if value is None else convert(value, name)


def unknown_names(
    unknown: Iterable[str], known: Iterable[str], show: Callable[[str], str] = str
) -> str:
    """Names that nobody knows, for an error: each with the known one that it is most like.

    `show` makes a name fit for the text: `repr`, where it may hold anything.
    """
    known = list(known)

    def tell(name: str) -> str:
        near = get_close_matches(name.lower(), known, n=1)
        return f"{show(name)} (did you mean {show(near[0])}?)" if near else show(name)

    return ", ".join(map(tell, sorted(unknown)))
