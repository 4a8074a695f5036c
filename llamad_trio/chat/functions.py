"""What a chat template can call: the filters, tests and methods that such templates use.

What is not here is not there.  C code cannot be interrupted, so what one call could make,
and the steps it could take, are checked before it, and what it returns is counted.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Mapping, Sized
from typing import Any

from jinja2.filters import FILTERS
from jinja2.tests import TESTS
from markupsafe import Markup

from llamad_trio.chat.meter import NODE_CHARS, Meter, TooLarge, current_meter

Function = Callable[..., Any]

Check = Callable[..., None]
"""Takes the meter, and what the function it is for takes."""

_MAX_NUMBER_CHARS = 1000
"""Longest text that is read as a number."""

_LOOKUP_CHARS = 128
"""What a character of a name counts for: `a.a.a` are three lookups, of a microsecond each."""

_SORT_STEPS = 8
"""How often an item is looked at while sorting."""

_PLAIN_FORMAT = re.compile(r"(?:[^{}]|\{\{|\}\}|\{\w*\})*+")
"""A format whose fields have no attributes, items, conversions or widths."""


# -- checks -------------------------------------------------------------------------------------


def _check_weight(meter: Meter, *args: object, **kwargs: object) -> None:
    """For what compares, hashes or writes out its arguments."""
    meter.weigh(*args, *kwargs.values())


def _check_product(meter: Meter, value: object, *args: object, **kwargs: object) -> None:
    """For what may search for, strip or insert each argument at each character of `value`.

    Alone, one character may become four: `\\x00` for a control character in a list.
    """
    size = len(value) if type(value) is str else meter.weigh(value)
    more = meter.weigh(*args, *kwargs.values()) if args or kwargs else 0
    meter.check((1 + size) * (4 + more))


def _check_items(meter: Meter, value: object, *args: object, **kwargs: object) -> None:
    """For what goes through the items or characters of `value`, and may look up names on each."""
    meter.check(_lookups(meter, value, *args, **kwargs))


def _lookups(meter: Meter, value: object, *args: object, **kwargs: object) -> int:
    n_items = len(value) if isinstance(value, Sized) else 1
    more = meter.weigh(*args, *kwargs.values()) if args or kwargs else 0
    return n_items * (NODE_CHARS + _LOOKUP_CHARS * more)


def _check_sorting(meter: Meter, *args: object, **kwargs: object) -> None:
    meter.check(_SORT_STEPS * _lookups(meter, *args, **kwargs))
    _check_product(meter, *args, **kwargs)


def _check_splitting(meter: Meter, value: Sized, *args: object, **kwargs: object) -> None:
    """For what goes through the characters of `value` to find, or to insert, each argument."""
    meter.check(_lookups(meter, value))
    _check_product(meter, value, *args, **kwargs)
    meter.spend(len(value))


def _check_key(meter: Meter, _value: object, *args: object) -> None:
    meter.weigh(*args)


def _check_indenting(meter: Meter, value: object, *args: object, **kwargs: object) -> None:
    """For what may insert each argument, or as many spaces, several times at each item."""
    given = [arg for arg in (*args, *kwargs.values()) if arg is not None]
    width = sum(abs(arg) if isinstance(arg, int) else meter.weigh(arg) for arg in given)
    # `\ud83c\udf0d` is what becomes of one character.
    meter.check((1 + meter.weigh(value)) * (NODE_CHARS + 2 * width))


def _check_digits(_meter: Meter, value: object, *_args: object, **_kwargs: object) -> None:
    if isinstance(value, str) and len(value) > _MAX_NUMBER_CHARS:
        raise TooLarge("a number is too large")


def _check_operands(_meter: Meter, *values: object) -> None:
    if any(isinstance(value, str) for value in values):  # `%` would format them
        raise TypeError("a number is needed, not text")


# -- functions of our own -----------------------------------------------------------------------


def is_in(value: object, container: Any) -> bool:
    """`value in container`."""
    meter = current_meter()
    if isinstance(container, str):
        _check_product(meter, container, value)
    elif not isinstance(container, dict):
        meter.weigh(container)
    meter.allow_comparing(value)
    return operator.contains(container, value)


def _format(template: str, *args: object, **kwargs: object) -> str:
    if not _PLAIN_FORMAT.fullmatch(template):
        raise ValueError("a format may only have fields such as {}, {0} and {name}")
    return template.format(*args, **kwargs)


def _tojson(value: object, ensure_ascii: bool = False, *args: Any, **kwargs: Any) -> str:
    # Jinja's own filter escapes `<`, `>`, `&` and `'` for HTML, which a model has never seen.
    names = dict(zip(("indent", "separators", "sort_keys"), args, strict=False))
    return json.dumps(value, ensure_ascii=ensure_ascii, **names, **kwargs)


# -- tables -------------------------------------------------------------------------------------


def _with_check(function: Function, check: Check) -> Function:
    # Jinja passes a context or itself first to functions that are marked so.
    n_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        meter = current_meter()
        meter.tick()
        check(meter, *args[n_passed:], **kwargs)
        return meter.count_made(function(*args, **kwargs))

    return checked


def _with_checks(
    source: Mapping[str, Any], names: Mapping[Check | None, str]
) -> dict[str, Function]:
    """The functions with these names, each with its check.

    Those with none make nothing, and look at types, lengths or one item only.
    """
    return {
        name: source[name] if check is None else _with_check(source[name], check)
        for check, some in names.items()
        for name in some.split()
    }


_TEXT_METHODS = _with_checks(
    {**vars(str), "format": _format},
    {
        _check_product: """
            capitalize count endswith find format index isalnum isalpha isdigit islower isnumeric
            isspace istitle isupper lower lstrip removeprefix removesuffix replace rfind rindex
            rstrip startswith strip swapcase title upper
        """,
        _check_splitting: "rsplit split splitlines",
    },
)
_DICT_METHODS = _with_checks(
    {
        "get": dict.get,
        "items": lambda value: list(value.items()),
        "keys": list,
        "values": lambda value: list(value.values()),
    },
    {_check_key: "get", _check_items: "items keys values"},
)
METHODS: Mapping[type, Mapping[str, Function]] = {
    str: _TEXT_METHODS,
    Markup: _TEXT_METHODS,
    dict: _DICT_METHODS,
}

TEMPLATE_FILTERS = _with_checks(
    {**FILTERS, "join": lambda value, d="": d.join(map(str, value)), "tojson": _tojson},
    {
        None: "abs count d default first last length",
        _check_product: "capitalize lower replace safe string trim upper",
        _check_items: "items list map reject rejectattr reverse select selectattr title",
        _check_sorting: "dictsort max min sort unique",
        _check_splitting: "join",
        _check_indenting: "indent tojson",
        _check_digits: "float int",
    },
)

TEMPLATE_TESTS = _with_checks(
    {**TESTS, "in": is_in},
    {
        None: """
            boolean callable defined false float integer iterable mapping none number sameas
            sequence string true undefined
        """,
        _check_weight: """
            != < <= == > >= eq equalto filter ge greaterthan gt in le lessthan lower lt ne test
            upper
        """,
        _check_operands: "divisibleby even odd",
    },
)
