"""What a docstring says about a function or a class, and about each of its parameters.

Reads Google style (`Args:`, `Attributes:`), reST fields (`:param x:`) and numpy sections.
A docstring in no style at all has a summary and nothing else.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping

import attrs

_TITLE = r"(?:Args|Arguments|Parameters|Params|Keyword Args|Other Parameters|Attributes|Fields)"
_NAME = r"`{0,2}(?:\\?\*){0,2}[^\W\d]\w*`{0,2}"  # *args, or \*args, in backticks or not
_NAMES = rf"({_NAME}(?:[ \t]*,[ \t]*{_NAME})*)"
_RULE = r"-{3,}[ \t]*$"
_REST_WORD = r"(?:param|parameter|arg|argument|key|keyword|ivar|var|cvar|attr)"

_STYLES = tuple(
    (re.compile(section, re.MULTILINE), re.compile(entry, re.MULTILINE))
    for section, entry in (
        # Google: indented lines; of `name: text` or `name (type): text`.
        (
            rf"^{_TITLE}:[ \t]*\n((?:[ \t]+\S.*\n|[ \t]*\n)*)",
            rf"^{_NAMES}[ \t]*(?:\(.*?\)[ \t]*)?:",
        ),
        # numpy: up to the next title; of `name` or `name : type`.
        (rf"^{_TITLE}[ \t]*\n{_RULE}((?:\n(?!.*\n{_RULE}).*)*)", rf"^{_NAMES}[ \t]*(?::.*)?$"),
        # reST: a field, and what is indented below it.
        (
            rf"^(:{_REST_WORD}\s.*\n(?:[ \t]+\S.*\n|[ \t]*\n)*)",
            rf"\A:\w+\s(?:[^:\n]*\s)?({_NAME}(?:,{_NAME})*)[ \t]*:",
        ),
    )
)
"""For each style what holds entries, and what an entry begins with: its names in a group."""

_END_OF_SUMMARY = re.compile(
    rf"^[ \t]*$|^.*\n{_RULE}|^[A-Z]\w*(?: \w+)?:[ \t]*\n[ \t]+\S|^:[a-z]+(?:\s[^:\n]*)?:(?:\s|$)",
    re.MULTILINE,
)


@attrs.frozen
class Documentation:
    """A docstring's first paragraph, on one line, and what it says about each name."""

    summary: str = ""
    parameters: Mapping[str, str] = attrs.field(factory=dict)


def read_docstring(docstring: str | None) -> Documentation:
    """Read a docstring; `None` is an empty one."""
    text = inspect.cleandoc(docstring or "") + "\n"
    summary = _END_OF_SUMMARY.split(text, maxsplit=1)[0]
    return Documentation(_one_line(summary), dict(_entries(text)))


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Each parameter's name, and what is said about it."""
    for section, entry in _STYLES:
        for block in section.findall(text):
            # What is no entry continues the one above.
            _, *parts = entry.split(textwrap.dedent(block))
            for names, said in zip(parts[::2], parts[1::2], strict=True):
                for name in names.split(","):
                    yield name.strip("`*\\ \t"), _one_line(said)


def _one_line(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines() if line.strip())
