"""A reply, taken apart while it comes: reasoning, answer text and tool calls.

Every decision is made at one character of the text, so it does not matter how
the text was cut into pieces.
"""

from __future__ import annotations

import enum
import itertools
import secrets
import string
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from llamad_trio.chat.template import ReasoningTags
from llamad_trio.chat.tools.base import ToolFormat
from llamad_trio.chat.tools.literal import WHITESPACE, Malformed, Scan
from llamad_trio.chat.tools.scan import CallSink
from llamad_trio.core.completion import (
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from llamad_trio.core.tools import ToolCall


def new_call_id() -> str:
    """Return nine random letters and digits, which is the form Mistral's templates insist on."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class _State(enum.Enum):
    LEAD = "before the answer or the tag that opens reasoning"
    REASONING = "inside reasoning"
    BEGINNING = "before the first character of the answer"
    TEXT = "inside answer text"
    CALLS = "behind the marker of a call"


@attrs.define
class _Input:
    """Text that is still to be read, from `pos` on."""

    text: str
    pos: int = 0


@attrs.define
class _MarkerFinder:
    """Passes text through up to the next marker, or all if the marker is empty.

    Withholds text only while it is the beginning of the marker.
    """

    marker: str
    _held: str = attrs.field(default="", init=False)

    def scan(self, source: _Input) -> tuple[str, bool]:
        """Read the input, up to its end or to behind the marker.

        Returns what is not part of the marker, and whether that has come.
        """
        if self._held:
            source.text, source.pos = self.take() + source.text[source.pos :], 0
        text, begin = source.text, source.pos
        found = text.find(self.marker, begin) if self.marker else -1
        if found >= 0:
            source.pos = found + len(self.marker)
            return text[begin:found], True
        source.pos = len(text)
        n_held = min(len(self.marker), len(text) - begin)
        while not text.endswith(self.marker[:n_held]):
            n_held -= 1
        self._held = self.marker[:n_held]
        return text[begin : len(text) - n_held], False

    def take(self) -> str:
        """The text has ended: return what was withheld."""
        held, self._held = self._held, ""
        return held


@attrs.define
class _Gap:
    """Text without the whitespace at its end, of which only what follows tells what it is."""

    _parts: list[str] = attrs.field(factory=list, init=False)

    def push(self, text: str) -> str:
        """Take more text; return what can be shown."""
        kept = len(text.rstrip(WHITESPACE))
        shown = self.take() + text[:kept] if kept else ""
        if kept < len(text):
            self._parts.append(text[kept:])
        return shown

    def take(self) -> str:
        """Return the whitespace that was withheld, and forget it."""
        space = "".join(self._parts)
        self._parts.clear()
        return space


class ReplyParser:
    """Takes a reply apart while it comes.

    The tag that opens reasoning counts only at the reply's beginning, later it is text; with
    `in_reasoning` the prompt has opened it already.  `new_id` gives the id of a call that the
    model has given none.

    What is dropped, other than tags and the syntax of calls: whitespace just inside the tags,
    between them and the answer, before and between calls, and after the last call.  Text that
    only looked like a call is answer text, unchanged.  It may have been announced by
    `ToolCallStart`: the next call then has the same index and takes its place.

    A call is complete when its arguments are, whether or not the syntax around it was closed.
    """

    def __init__(
        self,
        reasoning: ReasoningTags | None = None,
        in_reasoning: bool = False,
        tool_format: ToolFormat | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._tool_format = tool_format
        self._opening_tag = _MarkerFinder("" if reasoning is None else reasoning.open)
        self._closing_tag = _MarkerFinder("" if reasoning is None else reasoning.close)
        self._openers = _MarkerFinder("" if tool_format is None else tool_format.opener)
        self._read = {
            _State.LEAD: self._read_lead,
            _State.REASONING: self._read_reasoning,
            _State.BEGINNING: self._read_beginning,
            _State.TEXT: self._read_text,
            _State.CALLS: self._read_call,
        }
        if reasoning is None:
            self._state = _State.BEGINNING
        else:
            self._state = _State.REASONING if in_reasoning else _State.LEAD
        self._inputs: list[_Input] = []
        self._lead: list[str] = []
        self._gap = _Gap()
        # Whitespace is dropped before text when only reasoning or calls came before it, and at
        # the end when a call did.
        self._drop_before = False
        self._drop_at_end = False

        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._events: list[ReplyEvent] = []

        self._scan: Scan[None] | None = None
        self._sink = CallSink(new_id, self._events.append)
        # The opener, until a call behind it is complete, and what has been read since.
        self._opener = ""
        self._raw: list[str] = []
        self.unfinished = ""
        """A call that was cut off by the reply's end, as the model wrote it."""

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str | None:
        """The reasoning so far; `None` if there is none, or nothing in it."""
        return "".join(self._reasoning) or None

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that are complete."""
        return tuple(self._sink.calls)

    def push(self, text: str) -> list[ReplyEvent]:
        """Take more of the reply; return what is certain now."""
        self._consume(text)
        return self._take_events()

    def finish(self) -> list[ReplyEvent]:
        """The reply has ended: return what was withheld.  To be called once."""
        if self._state is _State.LEAD:
            self._state = _State.BEGINNING
            self._consume("".join(self._lead) + self._opening_tag.take())
        if self._state is _State.REASONING:
            self._add_reasoning(self._closing_tag.take())
        elif self._state is _State.CALLS:
            if self._sink.is_open:
                self.unfinished = self._opener + "".join(self._raw)
        else:
            begun = self._openers.take()
            if begun and self._sink.calls:
                self.unfinished = begun  # after a call, half a marker is half of another
            else:
                self._add_answer(begun)
            space = self._gap.take()
            if not self._drop_before and not self._drop_at_end:
                self._show_text(space)
        return self._take_events()

    def _consume(self, text: str) -> None:
        self._inputs.append(_Input(text))
        while self._inputs:
            source = self._inputs[-1]
            if source.pos == len(source.text):
                self._inputs.pop()
            else:
                self._read[self._state](source)

    def _read_lead(self, source: _Input) -> None:
        """White space, withheld while an opening tag may follow it."""
        plain, is_opened = self._opening_tag.scan(source)
        self._lead.append(plain)
        if plain.strip(WHITESPACE):
            held = self._opening_tag.marker if is_opened else self._opening_tag.take()
            self._inputs.append(_Input("".join(self._lead) + held))
            self._state = _State.BEGINNING
        elif is_opened:
            self._state = _State.REASONING

    def _read_reasoning(self, source: _Input) -> None:
        plain, is_closed = self._closing_tag.scan(source)
        self._add_reasoning(plain)
        if is_closed:
            self._gap.take()
            self._drop_before = True
            self._state = _State.BEGINNING

    def _read_beginning(self, source: _Input) -> None:
        """The whitespace before the answer, and the character that may make it a call."""
        rest = source.text[source.pos :].lstrip(WHITESPACE)
        start = len(source.text) - len(rest)
        self._add_answer(source.text[source.pos : start])
        source.pos = start
        if not rest:
            return
        self._state = _State.TEXT
        if self._tool_format is not None and rest[0] == self._tool_format.bare_opener:
            source.pos += 1
            self._begin_calls(self._tool_format, rest[0])

    def _read_text(self, source: _Input) -> None:
        plain, is_opened = self._openers.scan(source)
        self._add_answer(plain)
        if is_opened and self._tool_format is not None:
            self._begin_calls(self._tool_format, self._tool_format.opener)

    def _begin_calls(self, tool_format: ToolFormat, opener: str) -> None:
        self._opener = opener
        self._raw = []
        self._sink.begin()
        self._scan = tool_format.scan(opener, self._sink)
        self._state = _State.CALLS
        next(self._scan)

    def _read_call(self, source: _Input) -> None:
        assert self._scan is not None
        n_calls = len(self._sink.calls)
        while source.pos < len(source.text):
            char = source.text[source.pos]
            try:
                self._scan.send(char)
            except Malformed:
                # What came since the last complete call is no call.  The marker is text, not to
                # be found again; the rest is read once more as text, where markers may be.
                opener, raw = self._opener, "".join(self._raw)
                self._leave_calls()
                self._add_answer(opener)
                self._inputs.append(_Input(raw))
                return
            except StopIteration:
                self._scan = None
            source.pos += 1
            self._raw.append(char)
            if len(self._sink.calls) > n_calls:
                n_calls += 1
                self._gap.take()
                self._opener = ""
                self._raw = []
            if self._scan is None:
                self._leave_calls()
                return

    def _leave_calls(self) -> None:
        self._state = _State.TEXT
        self._scan = None
        if not self._opener:
            self._drop_before = not self._text
            self._drop_at_end = True

    def _add_reasoning(self, text: str) -> None:
        shown = self._gap.push(text)
        if not self._reasoning:
            shown = shown.lstrip(WHITESPACE)
        if shown:
            self._reasoning.append(shown)
            self._events.append(ReasoningDelta(shown))

    def _add_answer(self, text: str) -> None:
        # Without calls there is no whitespace before them.
        shown = text if self._tool_format is None else self._gap.push(text)
        self._show_text(shown.lstrip(WHITESPACE) if self._drop_before else shown)

    def _show_text(self, text: str) -> None:
        if text:
            self._drop_before = self._drop_at_end = False
            self._text.append(text)
            self._events.append(TextDelta(text))

    def _take_events(self) -> list[ReplyEvent]:
        events = list(_join_runs(self._events))
        self._events.clear()
        return events


def _join_runs(events: Iterable[Any]) -> Iterator[ReplyEvent]:
    """The reply's events, each with more of the same that follows it."""
    for (kind, index), run in itertools.groupby(
        events, lambda event: (type(event), getattr(event, "index", 0))
    ):
        if kind is ToolCallStart:
            yield from run
        elif kind is ToolCallDelta:
            yield ToolCallDelta(index, "".join(event.arguments for event in run))
        else:
            yield kind("".join(event.text for event in run))
