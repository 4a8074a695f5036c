"""Converters for the fields of `Request` and `EngineConfig`.

The rule of the whole library: a number out of range is clamped, NaN becomes the
default, and a wrong *type* is an error (`ProtocolError`).  `bool` is not a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from llamad_trio.core.errors import ProtocolError

T = TypeVar("T")

CONVERT = "llamad_trio.convert"
"""Key of a field's metadata under which its converter stands."""


def apply_converters(_cls: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """A field transformer for attrs: give each field the converter in its metadata.

    Declared as a converter, it would hide the field's type from type checkers: the
    caller's mistake would be found at run time only.
    """
    return [
        field.evolve(converter=field.metadata[CONVERT]) if CONVERT in field.metadata else field
        for field in fields
    ]


def whole_number(name: str, low: int, high: int) -> Callable[[object], int]:
    """A converter to an `int` clamped to `low`..`high`."""

    def convert(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ProtocolError(f"{name} must be an integer, not {type(value).__name__}")
        return min(max(value, low), high)

    return convert


def number(name: str, default: float, low: float, high: float) -> Callable[[object], float]:
    """A converter to a `float` clamped to `low`..`high`; NaN becomes `default`."""

    def convert(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ProtocolError(f"{name} must be a number, not {type(value).__name__}")
        if isinstance(value, float) and math.isnan(value):
            return default
        # Clamped before float(): an integer may be too large for a float.
        return float(min(max(value, low), high))

    return convert


def boolean(name: str) -> Callable[[object], bool]:
    """A converter that accepts only `True` and `False`."""

    def convert(value: object) -> bool:
        if not isinstance(value, bool):
            raise ProtocolError(f"{name} must be true or false, not {type(value).__name__}")
        return value

    return convert


def text(name: str) -> Callable[[object], str]:
    """A converter to text that llama.cpp can take: no NUL, no lone surrogate."""

    def convert(value: object) -> str:
        if not isinstance(value, str):
            raise ProtocolError(f"{name} must be text, not {type(value).__name__}")
        if "\0" in value:
            raise ProtocolError(f"{name} contains a NUL byte")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ProtocolError(f"{name} contains a lone surrogate") from None
        return value

    return convert


def optional(convert: Callable[[object], T]) -> Callable[[object], T | None]:
    """`convert`, but `None` stays `None`."""

    def convert_optional(value: object) -> T | None:
        return None if value is None else convert(value)

    return convert_optional
