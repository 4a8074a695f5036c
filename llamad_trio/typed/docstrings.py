"""What a docstring says about a function or a class, and about each of its parameters.

Reads Google style (`Args:`, `Attributes:`), reST fields (`:param x:`) and numpy sections.
A docstring in no style at all has a summary and nothing else.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import attrs

_TITLES = r"(?:Args|Arguments|Parameters|Params|Keyword Args|Other Parameters|Attributes|Fields)"
_GOOGLE_TITLE = re.compile(rf"{_TITLES}:\s*")
_NUMPY_TITLE = re.compile(rf"{_TITLES}\s*")
_ANY_GOOGLE_TITLE = re.compile(r"[A-Z]\w*(?: \w+)?:\s*")
_RULE = re.compile(r"-{3,}\s*")
_MARKED_NAME = r"`{0,2}(?:\\?\*){0,2}[^\W\d]\w*`{0,2}"  # *args, or \*args, in backticks or not
_NAMES = re.compile(rf"{_MARKED_NAME}(?:\s*,\s*{_MARKED_NAME})*")
_MARKS = "`*\\"
_CLOSED_BY = {"(": ")", "[": "]", "{": "}"}
_REST_ENTRY = re.compile(
    r":(?:param|parameter|arg|argument|key|keyword|ivar|var|cvar|attr)\s(?P<head>[^:]*):(?P<text>.*)"
)
_REST_FIELD = re.compile(r":[a-z]+(?:\s[^:]*)?:(?:\s|$)")


@attrs.frozen
class Documentation:
    """A docstring, read.

    Args:
        summary: its first paragraph, on one line.
        parameters: what it says about each parameter or attribute it names.
    """

    summary: str = ""
    parameters: Mapping[str, str] = attrs.field(factory=dict)


def read_docstring(docstring: str | None) -> Documentation:
    """Read a docstring; `None` is an empty one."""
    # A blank line at the end, so that there is one below every other.
    lines = [*inspect.cleandoc(docstring or "").splitlines(), ""]
    entries = [*_section_entries(lines), *_rest_entries(lines)]
    return Documentation(
        summary=_summary(lines),
        parameters={name: text for names, text in entries for name in names},
    )


_Entry = tuple[Sequence[str], str]
"""Some names, and the text that is about each of them."""


def _summary(lines: Sequence[str]) -> str:
    paragraph: list[str] = []
    for line, below in pairwise(lines):
        google_title = _ANY_GOOGLE_TITLE.fullmatch(line) and _indent(below)
        if google_title or _RULE.fullmatch(below) or _REST_FIELD.match(line) or not line.strip():
            break
        paragraph.append(line)
    return _joined(paragraph)


def _section_entries(lines: Sequence[str]) -> Iterator[_Entry]:
    index = 0
    while index < len(lines):
        line, index = lines[index], index + 1
        if _GOOGLE_TITLE.fullmatch(line):
            end = _end_of_indented(lines, index)
            yield from _entries(lines[index:end], _google_entry)
            index = end
        elif _NUMPY_TITLE.fullmatch(line) and _RULE.fullmatch(lines[index]):
            end = _end_of_numpy(lines, index + 1)
            yield from _entries(lines[index + 1 : end], _numpy_entry)
            index = end


def _end_of_indented(lines: Sequence[str], start: int) -> int:
    rest = range(start, len(lines))
    return next((i for i in rest if lines[i].strip() and not _indent(lines[i])), len(lines))


def _end_of_numpy(lines: Sequence[str], start: int) -> int:
    rest = range(start, len(lines) - 1)
    return next((i for i in rest if _RULE.fullmatch(lines[i + 1])), len(lines))


def _entries(block: Sequence[str], read: Callable[[str], _Entry | None]) -> Iterator[_Entry]:
    """Entries stand at the block's own indent; what is deeper continues the one above."""
    margin = next((_indent(line) for line in block if line.strip()), 0)
    names: Sequence[str] = ()
    texts: list[str] = []
    for line in block:
        entry = read(line.strip()) if _indent(line) == margin else None
        if entry:
            yield names, _joined(texts)
            names, texts = entry[0], [entry[1]]
        else:
            texts.append(line)
    yield names, _joined(texts)


def _google_entry(line: str) -> _Entry | None:
    """`name: text`, `name (type): text`, of names with commas, too."""
    names, rest = _leading_names(line)
    if rest.startswith("("):
        rest = rest[_end_of_brackets(rest) :].lstrip()
    return (names, rest[1:]) if names and rest.startswith(":") else None


def _numpy_entry(line: str) -> _Entry | None:
    """`name`, `name : type`, of names with commas, too."""
    names, rest = _leading_names(line)
    return (names, "") if names and rest[:1] in {"", ":"} else None


def _leading_names(line: str) -> tuple[Sequence[str], str]:
    found = _NAMES.match(line)
    if found is None:
        return (), line
    names = [name.strip().strip(_MARKS) for name in found[0].split(",")]
    return names, line[found.end() :].lstrip()


def _end_of_brackets(text: str) -> int:
    """Where the bracket that it begins with is closed; where any is if it is not."""
    closing: list[str] = []
    for index, character in enumerate(text):
        if character in _CLOSED_BY:
            closing.append(_CLOSED_BY[character])
        elif character == closing[-1]:
            closing.pop()
            if not closing:
                return index + 1
    return text.find(")") + 1 or len(text)


def _rest_entries(lines: Sequence[str]) -> Iterator[_Entry]:
    for index, line in enumerate(lines):
        entry = _REST_ENTRY.fullmatch(line)
        words = entry["head"].split() if entry else []
        names, rest = _leading_names(words[-1] if words else "")
        if entry and not rest:
            end = _end_of_indented(lines, index + 1)
            yield names, _joined([entry["text"], *lines[index + 1 : end]])


def _joined(texts: Sequence[str]) -> str:
    return " ".join(text.strip() for text in texts if text.strip())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip()) if line.strip() else 0
