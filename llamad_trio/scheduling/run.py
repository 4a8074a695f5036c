"""A request on its way: its tokens, how its text comes together, and how it ends.

Holds all that survives preemption.  Knows nothing of slots, cells and other requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from enum import Enum, auto

import attrs

from llamad_trio.core.completion import FinishReason, TokenLogprob
from llamad_trio.core.errors import LlamadError
from llamad_trio.scheduling.plan import Prepared, Sampled


class _Candidate:
    """A stop sequence, and how much of it the text's end matches (Knuth-Morris-Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self.fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self.fallback[length - 1]
            length += text[i] == text[length]
            self.fallback[i] = length

    def feed(self, char: str) -> bool:
        """Take one character; true if it completes the sequence."""
        while self.matched and char != self.text[self.matched]:
            self.matched = self.fallback[self.matched - 1]
        self.matched += char == self.text[self.matched]
        return self.matched == len(self.text)


class StopMatcher:
    """Passes text through until a stop sequence is complete; empty ones are ignored.

    The same for every way of cutting the text into pieces: read character by character, it ends
    at the first character that completes any stop sequence; if it completes several, the longest
    counts.  Text is withheld only while it is a proper prefix of some stop sequence.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        # Longest first, so that the first to complete at a character is the longest.
        unique = sorted({s for s in stops if s}, key=len, reverse=True)
        self._candidates = [_Candidate(s) for s in unique]
        self._withheld = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return what can be shown.  After a match, always `""`."""
        if self.matched is not None:
            return ""
        if not self._candidates:
            return text
        buffer = self._withheld + text
        for end, char in enumerate(text, len(self._withheld) + 1):
            # Every sequence must see every character: no short circuit.
            complete = [s for s in self._candidates if s.feed(char)]
            if complete:
                self.matched = complete[0].text
                self._withheld = ""
                return buffer[: end - len(self.matched)]
        keep = max(s.matched for s in self._candidates)
        shown = len(buffer) - keep
        self._withheld = buffer[shown:]
        return buffer[:shown]

    def flush(self) -> str:
        """The text has ended: return what was withheld and is no stop sequence."""
        rest, self._withheld = self._withheld, ""
        return rest


@attrs.frozen
class Piece:
    """Text to hand to the reader of request `id`; never empty."""

    id: int
    text: str


@attrs.frozen(kw_only=True)
class Finished:
    """Request `id` is complete."""

    id: int
    text: str
    prompt_tokens: int
    generated_tokens: int
    finish_reason: FinishReason
    stop_sequence: str | None
    cached_tokens: int
    logprobs: Sequence[TokenLogprob] = ()
    scores: Sequence[float] = ()


@attrs.frozen
class Failed:
    """Request `id` ended with an error."""

    id: int
    error: LlamadError


Event = Piece | Finished | Failed


class RunState(Enum):
    """Where a request stands."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


_MOVES = {
    (RunState.WAITING, RunState.RUNNING),  # admitted
    (RunState.RUNNING, RunState.WAITING),  # preempted
    (RunState.WAITING, RunState.ENDED),  # cancelled, or the engine closed
    (RunState.RUNNING, RunState.ENDED),  # finished, failed, cancelled
}


@attrs.define(eq=False)
class Run:
    """A request on its way.

    Attributes:
        arrival: its age: the lower, the older.
        seq: the llama.cpp sequence it runs in, -1 if it does not run.
        begun: whether it has taken over what others have computed of its prompt.
        n_new: tokens that the last sampling gave.
        ends: why its text is complete, once it is.
        scores: by the position of the token they are for.
    """

    prepared: Prepared
    arrival: int
    state: RunState = RunState.WAITING
    seq: int = -1
    begun: bool = False
    has_sampler: bool = False
    paused: bool = False
    cancelled: bool = False
    cached_tokens: int = 0
    tokens: list[int] = attrs.field(init=False)
    n_new: int = 0
    ends: FinishReason | None = None
    scores: dict[int, float] = attrs.field(factory=dict)
    _text: list[str] = attrs.field(factory=list)
    _logprobs: list[TokenLogprob] = attrs.field(factory=list)
    _stop: StopMatcher = attrs.field(init=False)
    # A piece may end in the middle of a character; what is no UTF-8 becomes U+FFFD.
    _utf8: codecs.IncrementalDecoder = attrs.field(
        factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def __attrs_post_init__(self) -> None:
        self.tokens = list(self.prepared.tokens)
        self._stop = StopMatcher(self.prepared.stop)

    @property
    def id(self) -> int:
        """The request's."""
        return self.prepared.id

    @property
    def n_generated(self) -> int:
        """Tokens beyond the prompt."""
        return len(self.tokens) - len(self.prepared.tokens)

    @property
    def n_reusable(self) -> int:
        """Tokens that may come from others: those before the first whose logits are wanted."""
        return len(self.tokens) - max(1, len(self.prepared.targets))

    def move(self, state: RunState) -> None:
        """Change its state, as `_MOVES` allows."""
        assert (self.state, state) in _MOVES, f"{self.state} -> {state}"
        self.state = state

    def targets_between(self, start: int, end: int) -> Sequence[int]:
        """What is to be scored after the tokens at these positions."""
        if not self.prepared.targets:
            return ()
        first = self.n_reusable
        return self.prepared.targets[max(0, start - first) : max(0, end - first)]

    def take(self, sampled: Sampled) -> list[Event]:
        """A token was sampled: it, and those it forces, are the next ones."""
        if sampled.logprobs is not None:
            self._logprobs.append(sampled.logprobs)
        if sampled.ends:
            self.tokens.append(sampled.token)
            self.ends = "stop"
            return []
        pieces = ((sampled.token, sampled.piece), *sampled.forced)
        self.n_new = 0
        shown = ""
        for token, piece in pieces:
            self.tokens.append(token)
            self.n_new += 1
            shown += self._stop.push(self._utf8.decode(piece))
            if self._stop.matched is not None:
                self.ends = "stop"
            elif self.n_generated >= self.prepared.max_tokens:
                self.ends = "length"
            if self.ends:
                break
        if sampled.is_complete and self.n_new == len(pieces):
            self.ends = "stop"
        return self._show(shown)

    def finish(self) -> list[Event]:
        """It ends here: what was withheld is shown, and the outcome told."""
        assert self.ends is not None
        withheld = self._stop.push(self._utf8.decode(b"", final=True)) + self._stop.flush()
        events = self._show(withheld)
        finished = Finished(
            id=self.id,
            text="".join(self._text),
            prompt_tokens=len(self.prepared.tokens),
            generated_tokens=self.n_generated,
            finish_reason="stop" if self._stop.matched is not None else self.ends,
            stop_sequence=self._stop.matched,
            cached_tokens=self.cached_tokens,
            logprobs=tuple(self._logprobs),
            scores=tuple(self.scores[position] for position in sorted(self.scores)),
        )
        return [*events, finished]

    def _show(self, text: str) -> list[Event]:
        self._text.append(text)
        return [Piece(self.id, text)] if text and self.prepared.streams else []
