"""The relay actor: publishes the events of an engine in another process, while there are readers.

Decides when they are asked for, and that every request it tells of gets an end.  How they come
here it does not know.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import trio
import trio.abc

from llamad_trio.core.engine_events import (
    EngineEvent,
    EngineStopped,
    Lagged,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestQueued,
)
from llamad_trio.core.errors import InferenceError, LlamadError
from llamad_trio.system.nursery import ends_in_order, new_shield
from llamad_trio.watch.broadcast import Broadcast

OpenEvents = Callable[[], AbstractAsyncContextManager[trio.abc.ReceiveChannel[EngineEvent]]]


class EventRelay:
    """A `Source` of one engine's events, which `open_events` reads from when it is entered.

    The broadcast is to be `fed_by` it before anybody can read there.
    """

    def __init__(self, open_events: OpenEvents, broadcast: Broadcast) -> None:
        self._open_events = open_events
        self._broadcast = broadcast
        self._wanted = trio.Event()
        self._attached = trio.Event()  # set while events are read
        self._error: LlamadError | None = None  # why it could not be attached
        self._ended = trio.Event()
        self._scope = new_shield()
        self._under_way: dict[int, RequestQueued] = {}

    async def attach(self) -> None:
        """See `Source`.

        Raises:
            InferenceError: the events cannot be asked for; the next reader may try again.
        """
        self._wanted.set()
        await self._attached.wait()
        if self._error is not None:
            raise copy.copy(self._error)

    @ends_in_order
    async def run(self) -> None:
        """Relay until `end`, or until the engine is gone: why is not told here.

        No cancel from outside ends it: an engine that ends has things to tell.
        """
        try:
            with self._scope:
                while not self._ended.is_set():
                    await self._wanted.wait()
                    await self._relay_while_wanted()
        finally:
            self._ended.set()
            self._attached.set()

    async def drain(self) -> None:
        """Wait until all is told that is on its way from an engine that ends.  A checkpoint."""
        await trio.lowlevel.checkpoint()
        if self._attached.is_set():
            await self._ended.wait()

    def end(self, error: LlamadError) -> None:
        """Relay no more; tell how the requests ended that the engine told no end of."""
        self._scope.cancel()
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

    async def _relay_while_wanted(self) -> None:
        try:
            async with self._open_events() as events:
                self._error = None
                self._attached.set()
                await self._relay(events)
        except LlamadError as error:
            if self._attached.is_set() or not isinstance(error, InferenceError):
                self._ended.set()
            else:
                self._error = error
                self._attached.set()
                self._wait_again()

    async def _relay(self, events: trio.abc.ReceiveChannel[EngineEvent]) -> None:
        async for event in events:
            if isinstance(event, EngineStopped):
                break  # whoever closes it tells that
            self._follow(event)
            self._broadcast.publish(event)
            if not self._broadcast.has_readers:
                self._wait_again()
                return
        self._ended.set()

    def _wait_again(self) -> None:
        """For the next reader: before any checkpoint, or that one would be taken for attached."""
        self._wanted, self._attached = trio.Event(), trio.Event()
        self._under_way.clear()

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
