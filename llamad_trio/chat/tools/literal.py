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

Write: TypeAlias = Callable[[str], None]
"""Takes more of the JSON text."""

WHITESPACE = " \t\r\n"

_CLOSERS = {"{": "}", "[": "]"}

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
    """What differs between the two languages."""

    words: dict[str, str]
    """The constants, and what each is in JSON."""
    quotes: str
    """The characters that begin, and end, a string."""
    string: Callable[[str, Write], Scan[None]]
    """Follows a string's inside up to its closing quote."""
    trailing_comma: bool
    """Whether a comma may come before a closing bracket."""


def skip_space(char: str = "", write: Write = lambda _: None) -> Scan[str]:
    """Return the next character that is no whitespace: `char`, if it is there and none.

    The whitespace is given to `write`.
    """
    while char in WHITESPACE:  # as nothing is
        if char:
            write(char)
        char = yield
    return char


def literal(dialect: Dialect, char: str, write: Write) -> Scan[str]:
    """Follow one value that begins with `char`, writing it as JSON text.

    Returns the character after the value if the value's end shows only there
    (numbers and words), else nothing.
    """
    if char not in _CLOSERS:
        return (yield from _scalar(dialect, char, write))
    closers: list[str] = []  # of the collections that are open
    while True:
        if char in _CLOSERS:
            if len(closers) == _MAX_DEPTH:
                raise Malformed
            write(char)
            closers.append(_CLOSERS[char])
            char = yield from skip_space(write=write)
            is_complete = char == closers[-1]
        else:
            char = yield from skip_space((yield from _scalar(dialect, char, write)), write)
            is_complete = True
        if is_complete:
            char = yield from _close(dialect, closers, char, write)
        if not closers:
            return ""
        if closers[-1] == "}":
            yield from _string(dialect, char, write)
            if (yield from skip_space(write=write)) != ":":
                raise Malformed
            write(":")
            char = yield from skip_space(write=write)


def _close(dialect: Dialect, closers: list[str], char: str, write: Write) -> Scan[str]:
    """Follow what is behind a member, from `char` on: brackets that close, and a comma.

    Returns the first character of the next member, or nothing when all brackets are closed.
    """
    while True:
        if char == ",":
            char = yield from skip_space()
            if char != closers[-1]:
                write(", ")
                return char
            if not dialect.trailing_comma:
                raise Malformed
        if char != closers[-1]:
            raise Malformed
        write(closers.pop())
        if not closers:
            return ""
        char = yield from skip_space(write=write)


def _string(dialect: Dialect, char: str, write: Write) -> Scan[None]:
    if char not in dialect.quotes:
        raise Malformed
    write('"')
    yield from dialect.string(char, write)
    write('"')


def _scalar(dialect: Dialect, char: str, write: Write) -> Scan[str]:
    """Follow a string, a number or a word; return as `literal` does."""
    if char not in _ATOM_CHARS:
        yield from _string(dialect, char, write)
        return ""
    chars: list[str] = []
    while char in _ATOM_CHARS:
        chars.append(char)
        if len(chars) > _MAX_ATOM_CHARS:
            raise Malformed
        char = yield
    atom = "".join(chars)
    if atom not in dialect.words and not _NUMBER.fullmatch(atom):
        raise Malformed
    write(dialect.words.get(atom, atom))
    return char


def _json_string(quote: str, write: Write) -> Scan[None]:
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


_PYTHON_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_PYTHON_ESCAPES |= {"\\": "\\", "'": "'", '"': '"', "\n": ""}


def _python_string(quote: str, write: Write) -> Scan[None]:
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
