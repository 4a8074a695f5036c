"""Reasoning: the part of a reply that the model thinks before it answers.

Decides which tags a template sets around it.  Knows nothing of how a reply is
taken apart; see `reply.py`.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class ReasoningTags:
    """The texts around a model's reasoning, which may be control tokens of its vocabulary."""

    open: str
    close: str

    def end_of(self, prompt: str) -> str | None:
        """The tag that a prompt ends in, white space aside; `None` if it ends in neither.

        After the opening one the reply begins inside reasoning; after the closing one there
        shall be none.
        """
        end = prompt.rstrip()
        return next((tag for tag in (self.open, self.close) if end.endswith(tag)), None)


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
