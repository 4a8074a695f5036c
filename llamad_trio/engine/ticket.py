"""One request from the caller's side: where its text and its one outcome arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from itertools import count

import attrs
import trio

from llamad_trio.chat.conversation import Turn
from llamad_trio.chat.reply import ReplyParser, new_call_id
from llamad_trio.core.completion import Completion, ReplyEvent, is_cut_off, json_value
from llamad_trio.core.engine_events import RequestKind
from llamad_trio.core.errors import LlamadError
from llamad_trio.core.request import Request
from llamad_trio.scheduling.run import Finished

STREAM_BUFFER = 64
"""Pieces a reader may lag behind before its slot pauses."""

IN_FLIGHT = 4
"""Room beyond that for what is under way when the slot pauses: one step's piece, and the
rest that the end of a request releases."""


class Ticket:
    """A submitted request, shared by its caller and the actors.

    Gets any number of pieces, then exactly one outcome: a `Completion` or an error.  Its id is
    unique, in order of submission; `streams` says whether the caller reads pieces; `holder` and
    `targets` are those of `Prepared`.  `on_room` is called when a reader that had fallen behind
    has caught up.
    """

    def __init__(
        self,
        ticket_id: int,
        request: Request,
        *,
        streams: bool,
        on_room: Callable[[int], None],
        holder: str | None = None,
        targets: Sequence[int] = (),
    ) -> None:
        self.id = ticket_id
        self.request = request
        self.streams = streams
        self.holder = holder
        self.targets = targets
        self.context = copy_context()  # its caller's, for whoever traces
        self.submitted_at = trio.current_time()
        self.turn: Turn | None = None  # once it is prepared
        self.prompt_tokens = 0  # once it is prepared
        self.has_begun = False
        self.scores: Sequence[float] = ()
        self.error: LlamadError | None = None
        self._raw: Completion | None = None
        self._completion: Completion | None = None
        self._call_ids: list[str] = []
        self._first_token_at: float | None = None
        self._on_room = on_room
        self._behind = False
        self._ended = trio.Event()
        self._send, self._receive = trio.open_memory_channel[str](STREAM_BUFFER + IN_FLIGHT)

    @property
    def is_constrained(self) -> bool:
        """Whether its text must be of some form, which takes time to compile."""
        return self.request.is_constrained

    @property
    def n_chars(self) -> int:
        """How much text there is to prepare."""
        return self.request.n_chars

    @property
    def kind(self) -> RequestKind:
        """What is asked for."""
        if self.holder is not None:
            return "prefill"
        if self.targets:
            return "score"
        of_text = isinstance(self.request.prompt, str | None) and not self.request.raw
        return "chat" if of_text else "completion"

    @property
    def ttft_s(self) -> float:
        """Seconds from submission to the first token; without one, to now."""
        first = trio.current_time() if self._first_token_at is None else self._first_token_at
        return first - self.submitted_at

    # -- the actors' side: never blocks -------------------------------------------------

    def begin(self) -> bool:
        """It is in a step.  True for the first."""
        is_first = not self.has_begun
        self.has_begun = True
        return is_first

    def token_sampled(self) -> bool:
        """Note the time of the first token.  True for that one."""
        is_first = self._first_token_at is None
        if is_first:
            self._first_token_at = trio.current_time()
        return is_first

    def put(self, text: str) -> bool:
        """Hand over a piece.  False when the reader has fallen behind."""
        self._send.send_nowait(text)
        if self._send.statistics().current_buffer_used >= STREAM_BUFFER:
            self._behind = True
        return not self._behind

    def finish(self, finished: Finished) -> Completion:
        """The request is complete.  Returns its numbers; the text is not taken apart yet."""
        self.scores = finished.scores
        self._raw = Completion(
            text=finished.text,
            prompt_tokens=finished.prompt_tokens,
            generated_tokens=finished.generated_tokens,
            finish_reason=finished.finish_reason,
            stop_sequence=finished.stop_sequence,
            cached_tokens=finished.cached_tokens,
            ttft_s=self.ttft_s,
            duration_s=trio.current_time() - self.submitted_at,
            logprobs=None if self.request.logprobs is None else finished.logprobs,
        )
        self._end()
        return self._raw

    def fail(self, error: LlamadError) -> None:
        """The request ended with an error."""
        self.error = error
        self._end()

    def _end(self) -> None:
        assert not self._ended.is_set(), "a request has one outcome"
        self._ended.set()
        self._send.close()

    # -- the caller's side ----------------------------------------------------------------

    @property
    def completion(self) -> Completion | None:
        """The outcome, once the request is complete: its text taken apart.

        Raises:
            InferenceError: text of a JSON schema that is no JSON to Python.
        """
        if self._completion is None and self._raw is not None:
            self._completion = self._read(self._raw)
        return self._completion

    def parser(self) -> ReplyParser:
        """A new parser for the reply.  All of a ticket's give a call the same id."""
        assert self.turn is not None, "a request gets text only when it is prepared"
        return self.turn.parser(map(self._call_id, count()).__next__)

    def _call_id(self, index: int) -> str:
        while index >= len(self._call_ids):
            self._call_ids.append(new_call_id())
        return self._call_ids[index]

    def _read(self, raw: Completion) -> Completion:
        parser = self.parser()
        parser.push(raw.text)
        parser.finish()
        has_value = self.request.json_schema is not None and not is_cut_off(raw)
        return attrs.evolve(
            raw,
            text=parser.text,
            reasoning=parser.reasoning,
            tool_calls=parser.tool_calls,
            unfinished=parser.unfinished,
            value=json_value(parser.text) if has_value else None,
        )

    async def receive(self) -> str:
        """The next piece.

        A checkpoint; cancelled, it leaves the pieces as they are.

        Raises:
            trio.EndOfChannel: the request is complete and all pieces are read.
            LlamadError: the request failed; all pieces before that were read.
        """
        try:
            text = await self._receive.receive()
        except trio.EndOfChannel:
            if self.error is not None:
                raise self.error from None
            raise
        if self._behind and self._receive.statistics().current_buffer_used <= STREAM_BUFFER // 2:
            self._behind = False
            self._on_room(self.id)
        return text

    async def outcome(self) -> Completion:
        """Wait for the end, without reading pieces.  A checkpoint."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error
        completion = self.completion
        assert completion is not None
        return completion

    def close(self) -> None:
        """Nobody reads any more."""
        self._receive.close()


class TicketSource:
    """The reply to a request of this program."""

    def __init__(self, ticket: Ticket, *, withdraw: Callable[[], None]) -> None:
        self._ticket = ticket
        self._withdraw = withdraw
        self._parser: ReplyParser | None = None
        self._events: deque[ReplyEvent] = deque()
        self._is_read = False

    @property
    def completion(self) -> Completion | None:
        return self._ticket.completion

    async def next_event(self) -> ReplyEvent:
        if self._events:
            await trio.lowlevel.checkpoint()
        while not self._events:
            try:
                text = await self._ticket.receive()
            except trio.EndOfChannel:
                if self._is_read:
                    raise
                self._is_read = True
                self._events.extend(self._its_parser().finish())
            else:
                self._events.extend(self._its_parser().push(text))
        return self._events.popleft()

    async def outcome(self) -> Completion:
        return await self._ticket.outcome()

    def close(self) -> None:
        self._withdraw()
        self._ticket.close()
        self._events.clear()

    def _its_parser(self) -> ReplyParser:
        if self._parser is None:
            self._parser = self._ticket.parser()
        return self._parser
