"""What a docstring says about a function or a class, and about each of its parameters.

Reads Google style (`Args:`, `Attributes:`), reST fields (`:param x:`) and numpy sections.
A docstring in no style at all has a summary and nothing else.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence

import attrs

__all__ = ["Documentation", "read_docstring"]

_TITLES = r"(?:Args|Arguments|Parameters|Params|Keyword Args|Other Parameters|Attributes|Fields)"
_GOOGLE_TITLE = re.compile(rf"{_TITLES}:\s*")
_NUMPY_TITLE = re.compile(rf"{_TITLES}\s*")
_ANY_GOOGLE_TITLE = re.compile(r"[A-Z]\w*(?: \w+)?:\s*")
_RULE = re.compile(r"-{3,}\s*")
_NAME = r"`{0,2}\*{0,2}(?P<name>[A-Za-z_]\w*)`{0,2}"
_GOOGLE_ENTRY = re.compile(rf"{_NAME}(?:\s*\([^)]*\))?\s*:\s*(?P<text>.*)")
_NUMPY_ENTRY = re.compile(rf"{_NAME}(?:\s*:.*)?(?P<text>)")
_REST_ENTRY = re.compile(
    r":(?:param|parameter|arg|argument|key|keyword|ivar|var|cvar|attr)\s+(?:[^:]*\s)?"
    r"(?P<name>[A-Za-z_]\w*)\s*:\s*(?P<text>.*)"
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
    lines = inspect.cleandoc(docstring or "").splitlines()
    return Documentation(
        summary=_summary(lines),
        parameters=dict(
            [*_section_entries(lines), *_rest_entries(lines)],
        ),
    )


def _summary(lines: Sequence[str]) -> str:
    paragraph: list[str] = []
    for index, line in enumerate(lines):
        underlined = index + 1 < len(lines) and _RULE.fullmatch(lines[index + 1])
        if not line.strip() or _REST_FIELD.match(line) or underlined:
            break
        if _ANY_GOOGLE_TITLE.fullmatch(line) and _indent(lines[index + 1 : index + 2]):
            break
        paragraph.append(line.strip())
    return " ".join(paragraph)


def _section_entries(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    index = 0
    while index < len(lines):
        line, index = lines[index], index + 1
        if _GOOGLE_TITLE.fullmatch(line):
            end = _end_of_indented(lines, index)
            yield from _entries(lines[index:end], _GOOGLE_ENTRY)
            index = end
        elif _NUMPY_TITLE.fullmatch(line) and _RULE.fullmatch("".join(lines[index : index + 1])):
            end = _end_of_numpy(lines, index + 1)
            yield from _entries(lines[index + 1 : end], _NUMPY_ENTRY)
            index = end


def _end_of_indented(lines: Sequence[str], start: int) -> int:
    for index in range(start, len(lines)):
        if lines[index].strip() and not _indent(lines[index : index + 1]):
            return index
    return len(lines)


def _end_of_numpy(lines: Sequence[str], start: int) -> int:
    for index in range(start, len(lines) - 1):
        if _RULE.fullmatch(lines[index + 1]):
            return index
    return len(lines)


def _entries(block: Sequence[str], pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Entries stand at the block's own indent; what is deeper continues the one above."""
    margin = _indent(block)
    name, texts = "", list[str]()
    for line in block:
        entry = pattern.fullmatch(line.strip()) if _indent([line]) == margin else None
        if entry:
            if name:
                yield name, _joined(texts)
            name, texts = entry["name"], [entry["text"]]
        else:
            texts.append(line)
    if name:
        yield name, _joined(texts)


def _rest_entries(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    for index, line in enumerate(lines):
        entry = _REST_ENTRY.fullmatch(line)
        if entry:
            end = _end_of_indented(lines, index + 1)
            yield entry["name"], _joined([entry["text"], *lines[index + 1 : end]])


def _joined(texts: Sequence[str]) -> str:
    return " ".join(text.strip() for text in texts if text.strip())


def _indent(lines: Sequence[str]) -> int:
    """Of the first line that is not blank."""
    for line in lines:
        if line.strip():
            return len(line) - len(line.lstrip())
    return 0
