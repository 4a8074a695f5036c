"""Literals of JSON and of Python, followed character by character, as JSON text.

A pushdown automaton instead of a parser: it tells at once when a character does
not fit, remembers no more than how deep it is, and costs the same for every
character however the text arrives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

import attrs

T = TypeVar("T")

Scan: TypeAlias = Generator[None, str, T]
"""Takes one character per `send`.  Raises `Malformed` at the first that does not fit."""

WHITESPACE = " \t\r\n"

# The standard library's decoder takes one frame of the stack per level.
_MAX_DEPTH = 128

# Longer ones are no numbers that any tool takes, and Python refuses to read them.
_MAX_ATOM_CHARS = 400

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ATOM_CHARS = frozenset("+-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_")
_HEX = frozenset("0123456789abcdefABCDEF")


class Malformed(Exception):
    """The text is not what it looked like."""


@attrs.frozen
class Dialect:
    """What differs between the two languages.

    Args:
        words: the constants, and what each is in JSON.
        quotes: the characters that begin, and end, a string.
        string: follows a string's inside up to its closing quote.
        trailing_comma: whether a comma may come before a closing bracket.
    """

    words: dict[str, str]
    quotes: str
    string: Callable[[str, Callable[[str], None]], Scan[None]]
    trailing_comma: bool


def skip_space() -> Scan[str]:
    """Return the next character that is no whitespace."""
    while (char := (yield)) in WHITESPACE:
        pass
    return char


def literal(dialect: Dialect, char: str, write: Callable[[str], None]) -> Scan[str | None]:
    """Follow one value that begins with `char`, writing it as JSON text.

    Returns the character after the value if the value's end shows only there
    (numbers and words), else `None`.
    """
    closers: list[str] = []
    # What may come next: a value, a key, a colon, or what separates and closes.
    expect, may_close = "value", False
    while True:
        after: str | None = None
        if char in WHITESPACE:
            write(char)
        elif closers and char == closers[-1] and (expect == "comma" or may_close):
            write(char)
            closers.pop()
            expect, may_close = "comma", False
        elif expect == "value" and char in "{[":
            if len(closers) == _MAX_DEPTH:
                raise Malformed
            write(char)
            closers.append("}" if char == "{" else "]")
            expect, may_close = ("key" if char == "{" else "value"), True
        elif expect in ("value", "key") and char in dialect.quotes:
            write('"')
            yield from dialect.string(char, write)
            write('"')
            expect, may_close = ("colon" if expect == "key" else "comma"), False
        elif expect == "value" and char in _ATOM_CHARS:
            after = yield from _atom(dialect, char, write)
            expect, may_close = "comma", False
        elif expect == "colon" and char == ":":
            write(char)
            expect = "value"
        elif expect == "comma" and char == "," and closers:
            char = yield from skip_space()
            if dialect.trailing_comma and char == closers[-1]:
                continue
            write(", ")
            expect = "key" if closers[-1] == "}" else "value"
            continue
        else:
            raise Malformed
        if expect == "comma" and not closers:
            return after
        char = (yield) if after is None else after


def _atom(dialect: Dialect, char: str, write: Callable[[str], None]) -> Scan[str]:
    """Follow a number or a word; return the character after it."""
    chars: list[str] = []
    while char in _ATOM_CHARS:
        chars.append(char)
        if len(chars) > _MAX_ATOM_CHARS:
            raise Malformed
        char = yield
    atom = "".join(chars)
    if atom in dialect.words:
        write(dialect.words[atom])
    elif _NUMBER.fullmatch(atom):
        write(atom)
    else:
        raise Malformed
    return char


def _json_string(quote: str, write: Callable[[str], None]) -> Scan[None]:
    while (char := (yield)) != quote:
        if char < " ":
            raise Malformed
        write(char)
        if char == "\\":
            char = yield
            if char not in '"\\/bfnrtu':
                raise Malformed
            write(char)
            if char == "u":
                write((yield from _hex(4)))


_PYTHON_ESCAPES = {
    "\\": "\\",
    "'": "'",
    '"': '"',
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\n": "",
}


def _python_string(quote: str, write: Callable[[str], None]) -> Scan[None]:
    # Python wants a newline in a string escaped; models that write code often do not.
    while (char := (yield)) != quote:
        if char != "\\":
            write(_inside(char))
            continue
        char = yield
        match char:
            case "u":
                # As it is: two of them may be one character, which JSON's rules put together.
                write("\\u" + (yield from _hex(4)))
            case "x":
                write("\\u00" + (yield from _hex(2)))
            case "U":
                code = int((yield from _hex(8)), 16)
                if code > 0x10FFFF:
                    raise Malformed
                write(_inside(chr(code)))
            case "N" | "0" | "1" | "2" | "3" | "4" | "5" | "6" | "7":
                raise Malformed  # names and octal numbers, which no model is known to write
            case _:
                write(_inside(_PYTHON_ESCAPES.get(char, "\\" + char)))


def _inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _hex(n_digits: int) -> Scan[str]:
    digits: list[str] = []
    for _ in range(n_digits):
        digit = yield
        if digit not in _HEX:
            raise Malformed
        digits.append(digit)
    return "".join(digits)


JSON = Dialect({"true": "true", "false": "false", "null": "null"}, '"', _json_string, False)

# Templates of this family write what is nested as JSON, so its models do, too.
PYTHON = Dialect(
    {"True": "true", "False": "false", "None": "null"} | JSON.words, "\"'", _python_string, True
)
