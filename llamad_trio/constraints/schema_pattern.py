r"""The regular expressions that mean the same to llguidance, Python and ECMAScript.

A schema's `pattern` is compiled by llguidance, whose syntax is Rust's, and checked by whoever
validates the text, in Python by `re.search`.  Where the two differ a text could pass one and
fail the other, so only what they share is taken:

- characters, `.`, `^`, `$`, `|`, groups that capture or not, and quantifiers, lazy ones too;
- the classes `[…]` of characters and ranges, without sets in sets;
- the escapes of `_ESCAPES`, and of punctuation.  `\d` and `\w` are ASCII to llguidance, which is
  less than to Python; so what is *not* a digit or a letter is not the same to both;
- control characters only where they are excluded, but for those with an escape of their own in
  JSON: without `\u` llguidance leaves them out where they are the only choice.
"""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON can only write as `\\u` and a number, or better does."""

_ESCAPES = frozenset("dwsSnrtfv")
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^\n])", re.DOTALL)
_QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]{1,9}(?:,(?:[0-9]{1,9})?)?\})\??")
_GROUP = re.compile(r"\((?:\?:|\?P<[A-Za-z_][A-Za-z0-9_]*>|(?!\?))")
_LOOK = re.compile(r"\(\?<?[=!]")


def fault_of_pattern(pattern: str, *, of_keys: bool = False) -> str | None:
    """Why a regular expression is not taken; `None` if it is.

    Where it is `of_keys`, as in `patternProperties`, what it does *not* match matters as well.
    """
    try:
        _scan(pattern)
        re.compile(pattern)
        escapes = {found[0] for found in _ESCAPE.finditer(pattern)} & {"\\d", "\\w", "\\s", "\\S"}
        if of_keys and escapes:
            raise _Fault(
                f"{min(escapes)!r} is not supported where keys are told apart: validators do "
                "not agree on what it takes beyond ASCII"
            )
    except _Fault as fault:
        return str(fault)
    except (re.error, OverflowError, RecursionError) as error:
        return f"it is no regular expression of Python's: {error}"
    return None


def looks_around(pattern: str) -> bool:
    """Whether a regular expression looks ahead or behind, as far as can be seen."""
    return _LOOK.search(pattern) is not None


class _Fault(Exception):
    pass


def _scan(pattern: str) -> None:
    at = 0
    may_repeat = False
    while at < len(pattern):
        match character := pattern[at]:
            case "\\":
                at = _escape(pattern, at, negated=False)
            case "[":
                at = _class(pattern, at)
            case "(":
                at = _group(pattern, at)
            case "*" | "+" | "?" | "{":
                at = _quantifier(pattern, at, may_repeat=may_repeat)
            case _:
                _refuse_control(character)
                at += 1
        may_repeat = character not in "(*+?{^$|"


def _group(pattern: str, at: int) -> int:
    found = _GROUP.match(pattern, at)
    if found is not None:
        return found.end()
    if _LOOK.match(pattern, at):
        raise _Fault("look-around is not supported")
    raise _Fault(f"groups that begin with {pattern[at : at + 3]!r} are not supported")


def _quantifier(pattern: str, at: int, *, may_repeat: bool) -> int:
    found = _QUANTIFIER.match(pattern, at)
    if found is None:
        raise _Fault("a '{' that is no quantifier must be written '\\{'")
    if not may_repeat:
        raise _Fault(f"there is nothing that {found[0]!r} could repeat")
    return found.end()


def _escape(pattern: str, at: int, *, negated: bool) -> int:
    found = _ESCAPE.match(pattern, at)
    if found is None:
        raise _Fault("it ends in the middle of an escape, or escapes the end of a line")
    kind, code = found[0][1], found[0][2:]
    if not negated and (code or kind == "v"):
        _refuse_control(chr(int(code, 16)) if code else "\v")
    if code:
        return found.end()
    if kind in "DW" or (negated and kind in "dw"):
        raise _Fault(
            f"{found[0]!r} {'in a negated class ' if negated else ''}is not supported: "
            "validators do not agree whether it takes letters and digits beyond ASCII"
        )
    known = kind in _ESCAPES and not (negated and kind == "S")
    if not (known if kind.isalnum() else kind.isascii()):
        raise _Fault(f"the escape {found[0]!r} is not supported")
    return found.end()


def _class(pattern: str, at: int) -> int:
    at += 1
    negated = pattern.startswith("^", at)
    at += negated
    first = at
    while at < len(pattern):
        match character := pattern[at]:
            case "]" if at == first:
                raise _Fault("a ']' in a class must be written '\\]'")
            case "]":
                return at + 1
            case "\\":
                at = _escape(pattern, at, negated=negated)
            case "[":
                raise _Fault("a '[' in a class must be written '\\['")
            case "&" | "~" | "-" if pattern.startswith(character * 2, at):
                raise _Fault(f"{character * 2!r} in a class must be written apart")
            case _:
                if not negated:
                    _refuse_control(character)
                at += 1
    raise _Fault("a class has no end")


def _refuse_control(character: str) -> None:
    if CONTROL.match(character):
        raise _Fault(f"the control character {character!r} is only supported in negated classes")
