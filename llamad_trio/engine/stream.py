"""The streams of one request: its text, or all that its reply is made of."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, TypeVar

import trio

from llamad_trio.core.completion import Completion, Done, ReplyEvent, StreamEvent, TextDelta

T = TypeVar("T")


class ReplySource(Protocol):
    """Where the parts of one reply come from: an engine of this program, or another's."""

    @property
    def completion(self) -> Completion | None:
        """The outcome, once the request is complete."""

    async def next_event(self) -> ReplyEvent:
        """The next part.  A checkpoint; cancelled, it leaves the source as it was.

        Raises:
            trio.EndOfChannel: the request is complete and every part was given.
            LlamadError: the request failed.
        """
        ...

    async def outcome(self) -> Completion:
        """Wait for the end, without the parts.  A checkpoint.  Raises as `next_event`."""
        ...

    def close(self) -> None:
        """Nobody reads any more: a request that is still running is cancelled."""


class _ReplyStream(trio.abc.ReceiveChannel[T]):
    """What streams have in common.  A reader that falls behind pauses its own slot and no
    other."""

    def __init__(self, source: ReplySource) -> None:
        self._source = source
        self._is_read = False

    @property
    def completion(self) -> Completion | None:
        """The `Completion`, once the request is complete."""
        return self._source.completion

    async def result(self) -> Completion:
        """Receive the rest and return the `Completion`.

        A checkpoint.  Cancelled, it leaves the stream where it is.

        Raises:
            LlamadError: the request failed.
        """
        if not self._is_read:
            async for _ in self:
                pass
        return await self._source.outcome()

    async def aclose(self) -> None:
        """Stop reading; a request that is still running is cancelled.  A checkpoint."""
        self._source.close()
        await trio.lowlevel.checkpoint()

    @abstractmethod
    async def receive(self) -> T: ...

    async def _next_event(self) -> ReplyEvent:
        try:
            return await self._source.next_event()
        except trio.EndOfChannel:
            self._is_read = True
            raise


class TokenStream(_ReplyStream[str]):
    """The text of one request, piece by piece.  Made by `Engine.stream`.

    A piece is the text of one or more tokens: whole characters, never empty, nothing of
    a stop sequence, of reasoning or of a tool call.  A reader that falls behind pauses its
    own slot and no other.
    """

    def __init__(self, source: ReplySource) -> None:
        super().__init__(source)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything received so far."""
        return "".join(self._pieces)

    async def receive(self) -> str:
        """Wait for the next piece.

        A checkpoint.  Cancelled, it leaves the stream as it was: no piece is lost.

        Raises:
            trio.EndOfChannel: the request is complete and everything was received.
            trio.ClosedResourceError: the stream was closed.
            LlamadError: the request failed.
        """
        while True:
            event = await self._next_event()
            if isinstance(event, TextDelta):
                self._pieces.append(event.text)
                return event.text


class EventStream(_ReplyStream[StreamEvent]):
    """All that one request's reply is made of, as it comes.  Made by `Engine.stream_events`.

    The last event is `Done`.
    """

    def __init__(self, source: ReplySource) -> None:
        super().__init__(source)
        self._is_done = False

    async def receive(self) -> StreamEvent:
        """Wait for the next event.

        A checkpoint.  Cancelled, it leaves the stream as it was: no event is lost.

        Raises:
            trio.EndOfChannel: `Done` was received.
            trio.ClosedResourceError: the stream was closed.
            LlamadError: the request failed.
        """
        try:
            return await self._next_event()
        except trio.EndOfChannel:
            if self._is_done:
                raise
        completion = await self._source.outcome()
        self._is_done = True
        return Done(completion)
