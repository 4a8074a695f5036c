"""A broadcast of events: one side publishes and never waits, any number of readers follow.

Knows nothing of what the events mean.  It has no task of its own, and a reader that is
slow costs only itself: it loses its oldest events, and is told how many.

Events that come from elsewhere are fetched by a `Source` as long as there is a reader.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

import trio
import trio.abc

from llamad_trio.core.engine_events import EngineEvent, Lagged
from llamad_trio.system.nursery import run_all

ATTACH_S = 5.0
"""How long a reader waits for its sources: one that does not answer is not to hold up the rest."""


def check_max_events(max_events: object) -> None:
    """Raise `ValueError` for what cannot be the most events that wait for a reader."""
    if not isinstance(max_events, int) or max_events < 1:
        raise ValueError(f"max_events must be a whole number of at least 1, not {max_events!r}")


class EventReader(trio.abc.ReceiveChannel[EngineEvent]):
    """One reader's events, oldest first.  Made by `Broadcast.subscribe`.

    A `trio.abc.ReceiveChannel`: `receive`, `async for`, `aclose`.
    """

    def __init__(self, max_events: int, on_close: Callable[[EventReader], None]) -> None:
        self._send, self._receive = trio.open_memory_channel[EngineEvent](max_events)
        self._on_close = on_close
        self._n_lost = 0
        self._lost_until = 0.0

    async def receive(self) -> EngineEvent:
        """The next event, or a `Lagged` in place of those that were lost.

        A checkpoint; cancelled, it leaves the events as they are.

        Raises:
            trio.EndOfChannel: the broadcast has ended and all is read.
            trio.ClosedResourceError: this reader is closed.
        """
        if self._n_lost:
            await trio.lowlevel.checkpoint()
            if self._n_lost:  # nobody else has read it meanwhile
                lagged = Lagged(time=self._lost_until, engine="", n_lost=self._n_lost)
                self._n_lost = 0
                return lagged
        return await self._receive.receive()

    async def aclose(self) -> None:
        """Read no more.  A checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """As `aclose`, at once."""
        self._n_lost = 0
        self._on_close(self)
        self._receive.close()

    def put(self, event: EngineEvent) -> None:
        """The broadcast's side: take an event, losing the oldest if there is no room."""
        try:
            self._send.send_nowait(event)
        except trio.WouldBlock:
            self._lost_until = self._receive.receive_nowait().time
            self._n_lost += 1
            self._send.send_nowait(event)

    def end(self) -> None:
        """The broadcast's side: nothing will follow."""
        self._send.close()


class Source(Protocol):
    """Publishes events that come from elsewhere."""

    async def attach(self) -> None:
        """There is a reader: returns when no event is missed any more.

        Cancelled, it is attached all the same, as soon as that can be done.
        """
        ...


class Broadcast:
    """Where events are published.  Belongs to one Trio run, and to its thread.

    Args:
        onward: another broadcast that also gets what is published here.
    """

    def __init__(self, onward: Broadcast | None = None) -> None:
        self._onward = onward
        self._readers: list[EventReader] = []
        self._sources: list[Source] = []
        self._has_ended = False

    @property
    def has_readers(self) -> bool:
        """Whether anybody listens.  If not, an event need not even be made."""
        return bool(self._readers) or (self._onward is not None and self._onward.has_readers)

    def publish(self, event: EngineEvent) -> None:
        """Give an event to every reader.  Never blocks; after `close` it does nothing here."""
        for reader in self._readers:
            reader.put(event)
        if self._onward is not None:
            self._onward.publish(event)

    @asynccontextmanager
    async def subscribe(self, max_events: int = 1024) -> AsyncIterator[EventReader]:
        """Read what is published from now on.

        Args:
            max_events: most events that wait to be read, at least 1.  Beyond that the oldest
                are lost.

        An async context manager.  Entering it waits for its sources, if it has any, side by
        side and for 5 s at most: the events of one that takes longer come from when it
        answers.  Leaving it waits for nothing.  Once the broadcast is closed, a reader ends
        after what it has.

        Raises:
            ValueError: `max_events` is no whole number of at least 1.
            InferenceError: a source cannot be attached; the next reader may try again.
        """
        check_max_events(max_events)
        reader = EventReader(max_events, self._forget)
        if self._has_ended:
            reader.end()
        else:
            self._readers.append(reader)
        try:
            if self._sources:
                with trio.move_on_after(ATTACH_S):
                    await run_all([source.attach for source in self._sources])
            yield reader
        finally:
            reader.close()

    @contextmanager
    def fed_by(self, source: Source) -> Iterator[None]:
        """Have a source that is attached when there are readers, here or onward."""
        self._sources.append(source)
        try:
            if self._onward is None:
                yield
            else:
                with self._onward.fed_by(source):
                    yield
        finally:
            self._sources.remove(source)

    def close(self) -> None:
        """Nothing will follow: readers end after what they have.  `onward` stays open."""
        self._has_ended = True
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.end()

    def _forget(self, reader: EventReader) -> None:
        if reader in self._readers:
            self._readers.remove(reader)
