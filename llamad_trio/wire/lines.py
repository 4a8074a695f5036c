"""Bytes to lines, however they are cut, and lines to JSON objects: nothing beyond the standard,
no key twice, nothing lost.  Decides what an object is, not what it says."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NoReturn

import msgspec

from llamad_trio.core.errors import ProtocolError


class LineTooLong(Exception):
    """A line is longer than it may be."""


class LineBuffer:
    """Takes bytes as they come and gives whole lines.

    None is longer than `max_bytes`, its newline not counted; `None` is no limit.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()
        self._searched = 0  # no newline before this

    @property
    def is_empty(self) -> bool:
        """Whether no line has begun."""
        return not self._data

    def push(self, data: bytes) -> None:
        """Take what has arrived."""
        self._data += data

    def pop(self) -> bytes | None:
        """The next whole line without its newline, if there is one.

        Raises:
            LineTooLong: it is too long, or will be.
        """
        end = self._data.find(b"\n", self._searched)
        self._searched = len(self._data) if end < 0 else end
        if self._max_bytes is not None and self._searched > self._max_bytes:
            raise LineTooLong
        if end < 0:
            return None
        line = bytes(self._data[:end])
        del self._data[: end + 1]
        self._searched = 0
        return line

    def pop_rest(self) -> bytes:
        """The last line, which the end of the input has ended.  Raises as `pop`."""
        line = self.pop()
        if line is None:
            line = bytes(self._data)
            self._data.clear()
            self._searched = 0
        return line


def decode_object(line: bytes) -> dict[str, object]:
    """A line as a JSON object.

    Raises:
        ProtocolError: it is something else, or not JSON.
    """
    try:
        value = _DECODER.decode(line.decode())
    except RecursionError:
        raise ProtocolError("the JSON is nested too deeply") from None
    except ValueError as error:  # of JSON, of UTF-8, and integers of too many digits
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ProtocolError(f"must be a JSON object, not {_NAMES[type(value)]}")
    return value


def encode_line(reply: Mapping[str, object]) -> bytes:
    """A reply as a line, its newline included.

    Lone surrogates, which UTF-8 has not, become question marks.
    """
    try:
        return msgspec.json.encode(reply) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(reply, ensure_ascii=False).encode(errors="replace") + b"\n"


def _refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"duplicate field {name[:64]!r}")
            seen.add(name)
    return found


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"number out of range: {text[:32]}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_refuse_duplicates, parse_float=_finite_float, parse_constant=_refuse_constant
)

_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}
