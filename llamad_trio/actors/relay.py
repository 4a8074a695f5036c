"""The relay actor: publishes the events of an engine in another process, while there are readers.

Decides when they are asked for, and that every request it tells of gets an end.  How they come
here it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import trio
import trio.abc

from llamad_trio.actors.broadcast import Broadcast
from llamad_trio.actors.nursery import ends_in_order
from llamad_trio.core.engine_events import (
    EngineEvent,
    EngineStopped,
    Lagged,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestQueued,
)
from llamad_trio.core.errors import LlamadError

__all__ = ["EventRelay"]

OpenEvents = Callable[[], AbstractAsyncContextManager[trio.abc.ReceiveChannel[EngineEvent]]]


class EventRelay:
    """A `Source` of one engine's events.

    Args:
        open_events: reads what happens in the engine, from when it is entered.
        broadcast: where that is published.
    """

    def __init__(self, open_events: OpenEvents, broadcast: Broadcast) -> None:
        self._open_events = open_events
        self._broadcast = broadcast
        self._wanted = trio.Event()
        self._attached = trio.Event()
        self._has_ended = False
        self._under_way: dict[int, RequestQueued] = {}

    async def attach(self) -> None:
        """See `Source`."""
        self._wanted.set()
        await self._attached.wait()

    @ends_in_order
    async def run(self) -> None:
        """Relay until cancelled, or until the engine is gone: why is not told here."""
        try:
            with self._broadcast.fed_by(self):
                while not self._has_ended:
                    await self._wanted.wait()
                    async with self._open_events() as events:
                        self._attached.set()
                        await self._relay(events)
        except LlamadError:
            return
        finally:
            self._attached.set()

    def end(self, error: LlamadError) -> None:
        """Tell how the requests ended that the engine told no end of."""
        now = trio.current_time()
        for queued in self._under_way.values():
            self._broadcast.publish(
                RequestFailed(
                    time=now,
                    engine=queued.engine,
                    request_id=queued.request_id,
                    kind=queued.kind,
                    context=queued.context,
                    duration_s=now - queued.time,
                    error=error,
                )
            )
        self._under_way.clear()

    async def _relay(self, events: trio.abc.ReceiveChannel[EngineEvent]) -> None:
        async for event in events:
            if isinstance(event, EngineStopped):
                break  # whoever closes it tells that
            self._follow(event)
            self._broadcast.publish(event)
            if not self._broadcast.has_readers:
                self._wanted, self._attached = trio.Event(), trio.Event()
                self._under_way.clear()
                return
        self._has_ended = True

    def _follow(self, event: EngineEvent) -> None:
        match event:
            case RequestQueued():
                self._under_way[event.request_id] = event
            case RequestFinished() | RequestFailed() | RequestCancelled():
                self._under_way.pop(event.request_id, None)
            case Lagged():
                self._under_way.clear()  # their ends may be among what is lost
            case _:
                pass
