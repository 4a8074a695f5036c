"""The stream of one request's text."""

from __future__ import annotations

from collections.abc import Callable

import trio

from llamad_trio.actors.ticket import Ticket
from llamad_trio.core.completion import Completion

__all__ = ["TokenStream"]


class TokenStream(trio.abc.ReceiveChannel[str]):
    """The text of one request, piece by piece.  Made by `Engine.stream`.

    A piece is the text of one or more tokens: whole characters, never empty, nothing of
    a stop sequence.  A reader that falls behind pauses its own slot and no other.
    """

    def __init__(self, ticket: Ticket, *, withdraw: Callable[[], None]) -> None:
        self._ticket = ticket
        self._withdraw = withdraw
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything received so far."""
        return "".join(self._pieces)

    @property
    def completion(self) -> Completion | None:
        """The `Completion`, once the request is complete."""
        return self._ticket.completion

    async def receive(self) -> str:
        """Wait for the next piece.

        A checkpoint.  Cancelled, it leaves the stream as it was: no piece is lost.

        Raises:
            trio.EndOfChannel: the request is complete and everything was received.
            trio.ClosedResourceError: the stream was closed.
            LlamadError: the request failed.
        """
        piece = await self._ticket.receive()
        self._pieces.append(piece)
        return piece

    async def result(self) -> Completion:
        """Receive the rest and return the `Completion`.

        A checkpoint.  Cancelled, it leaves the stream where it is.

        Raises:
            LlamadError: the request failed.
        """
        if self._ticket.completion is None or self._ticket.has_pieces:
            async for _ in self:
                pass
        else:
            await trio.lowlevel.checkpoint()
        return await self._ticket.outcome()

    async def aclose(self) -> None:
        """Stop reading; a request that is still running is cancelled.  A checkpoint."""
        self._withdraw()
        self._ticket.close()
        await trio.lowlevel.checkpoint()
