"""No forged turns: text that looks like a control token stays text.

Only what a template writes itself may become a control token.  So whatever else comes into
the prompt is searched for the text of such tokens first, and where it is found, a sentinel is
put inside it: a character that means nothing to anybody.  The prompt is tokenised with it,
and its tokens are taken out again; see `engine.preprocess`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs

from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.request import Message
from llamad_trio.core.tools import JsonObject, Tool, ToolCall

SENTINELS = ("\ufdd0", "\ufdef", "\U0001fffe", "\U0010ffff", "\ue000", "\U000f0000")
"""Characters that Unicode keeps out of all text, or leaves to private use.  One may not do:
the text may have it, or a vocabulary a token that joins it to its neighbour."""


class _TokenTexts:
    """A set of token texts, and how to break them."""

    def __init__(self, texts: Iterable[str]) -> None:
        # Not one regular expression of all: a vocabulary may have 6,000 control tokens, and
        # then each `<` of a text takes it 20 µs, with Python's lock held.
        self._texts = frozenset(texts)
        self._lengths: dict[str, set[int]] = {}  # by the first two characters
        for text in self._texts:
            self._lengths.setdefault(text[:2], set()).add(len(text))
        firsts = "".join(re.escape(text[0]) for text in self._texts)
        self._candidate = re.compile(f"[{firsts}]") if firsts else None
        self._forwards = sorted(self._texts)
        self._backwards = sorted(text[::-1] for text in self._texts)
        self._longest = max(map(len, self._texts), default=1)

    def break_up(self, text: str, sentinel: str) -> str:
        """The text, with a sentinel in each token's text, and where one may be half of it."""
        if self._candidate is None or not text:
            return text
        cuts = set(self._edges(text))
        for found in self._candidate.finditer(text):
            start = found.start()
            lengths = self._lengths.get(text[start : start + 2], ())
            if any(text[start : start + n] in self._texts for n in lengths):
                cuts.add(start + 1)
        return sentinel.join(text[i:j] for i, j in pairwise([0, *sorted(cuts), len(text)]))

    def _edges(self, text: str) -> Iterator[int]:
        """Where half of a token's text is at an end, also without the whitespace there, which
        many templates take away."""
        for start in (0, len(text) - len(text.lstrip())):
            if self._is_half(self._backwards, text[start : start + self._longest][::-1]):
                yield start
        for end in (len(text), len(text.rstrip())):
            if self._is_half(self._forwards, text[max(0, end - self._longest) : end]):
                yield end

    def _is_half(self, ordered: Sequence[str], text: str) -> bool:
        """Whether the text's end is where one of the ordered ones begins, but not all of it."""
        for n in range(1, min(self._longest, len(text) + 1)):
            following = bisect_right(ordered, text[-n:])
            if following < len(ordered) and ordered[following].startswith(text[-n:]):
                return True
        return False


class Guard:
    """Breaks the texts of `control` tokens in what is not the template's own.

    So it does with `added` texts, which are one token wherever they stand and which the template
    uses; but what the assistant has said may contain these: templates look for them there.
    """

    def __init__(self, control: Iterable[str], added: Iterable[str] = ()) -> None:
        self._control = _TokenTexts(text for text in control if len(text) > 1)
        self._added = _TokenTexts(text for text in added if len(text) > 1)

    def message(self, message: Message, sentinel: str) -> Message:
        """A message, each of its texts broken.  Raises as `data`."""
        break_up = self._control.break_up if message.role == "assistant" else self._break_up

        def optional(text: str | None) -> str | None:
            return None if text is None else break_up(text, sentinel)

        return attrs.evolve(
            message,
            content=break_up(message.content, sentinel),
            tool_calls=[self._call(call, sentinel) for call in message.tool_calls],
            tool_call_id=optional(message.tool_call_id),
            name=optional(message.name),
            reasoning=optional(message.reasoning),
        )

    def tool(self, tool: Tool, sentinel: str) -> Tool:
        """A tool, its description and schema broken.  Raises as `data`."""
        return attrs.evolve(
            tool,
            description=self._break_up(tool.description, sentinel),
            schema=self.data(tool.schema, sentinel),
        )

    def data(self, data: JsonObject, sentinel: str) -> JsonObject:
        """JSON data, each text in it broken.

        Raises:
            ProtocolError: it is nested too deeply.
        """
        try:
            broken: JsonObject = self._break_value(data, sentinel)
        except RecursionError:
            raise ProtocolError("there is data that is nested too deeply for a prompt") from None
        return broken

    def _call(self, call: ToolCall, sentinel: str) -> ToolCall:
        call_id = self._break_up(call.id, sentinel)
        return ToolCall(call_id, call.name, self.data(call.arguments, sentinel))

    def _break_up(self, text: str, sentinel: str) -> str:
        return self._added.break_up(self._control.break_up(text, sentinel), sentinel)

    def _break_value(self, value: Any, sentinel: str) -> Any:
        match value:
            case str():
                return self._break_up(value, sentinel)
            case list():
                return [self._break_value(item, sentinel) for item in value]
            case Mapping():
                return {
                    self._break_up(key, sentinel): self._break_value(item, sentinel)
                    for key, item in value.items()
                }
            case _:
                return value
