"""Reasoning: the part of a reply that the model thinks before it answers.

Decides which tags a template sets around it.  Knows nothing of how a reply is
taken apart; see `reply.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import attrs


@attrs.frozen
class ReasoningTags:
    """The texts around a model's reasoning, which may be control tokens of its vocabulary."""

    open: str
    close: str


_KNOWN = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
)


def detect_reasoning(template_source: str) -> ReasoningTags | None:
    """Return the tags that the template sets around reasoning; `None` if it knows none.

    A template need not name both: one that only cuts old reasoning out of the
    conversation looks for the closing tag, one that only begins it writes the
    opening tag.
    """
    for tags in _KNOWN:
        if tags.open in template_source or tags.close in template_source:
            return tags
    return None


def opened_by(prompt_text: str, tags: ReasoningTags) -> bool:
    """Whether the prompt ends in an opening tag, so that the reply begins inside reasoning."""
    return prompt_text.rstrip().endswith(tags.open)


def reasoning_lead(tags: ReasoningTags, marker: Callable[[str], str], *, opened: bool) -> str:
    """Return a Lark expression for reasoning, to come before whatever a grammar allows.

    `marker` gives the expression of a tag's text; see `ToolFormat.grammar`.
    When the prompt has opened the reasoning, the reply must close it; else
    reasoning may be left out, but not left open.
    """
    close = marker(tags.close)
    inside = f"/(.|\\n)*/ {close}" if close.startswith("<") else f"/{_until(tags.close)}/"
    lead = f"{inside} /[ \\t\\r\\n]*/"
    return lead if opened else f"({marker(tags.open)} {lead})?"


def _until(literal: str) -> str:
    """A regular expression of every text that ends with the first `literal` in it.

    The states of the matching automaton, written out.  It counts on the first
    character coming no second time, which makes every mismatch start over.
    """
    first, rest = literal[0], literal[1:]
    if first in rest:
        raise ValueError(f"{first!r} comes twice in {literal!r}")
    again = "|".join(_escape(rest[:i] + first) for i in range(len(rest)))
    away = "|".join(f"{_escape(rest[:i])}[^{_escape(first + rest[i])}]" for i in range(len(rest)))
    begun = f"{_escape(first)}({again})*"
    return f"([^{_escape(first)}]|{begun}({away}))*{begun}{_escape(rest)}"


def _escape(text: str) -> str:
    return re.escape(text).replace("/", "\\/")
