"""What the tests of events share."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from llamad_trio.testing import open_scripted_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llamad_trio import Engine
    from llamad_trio.core.engine_events import EngineEvent
    from llamad_trio.system.nursery import TaskStatus
    from llamad_trio.testing import ScriptedModel
    from llamad_trio.watch import EventSource

__all__ = ["Watcher", "watched"]

T = TypeVar("T")


class Watcher:
    """Reads events until they end."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []

    async def run(
        self, source: EventSource, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Read."""
        async with source.events(100_000) as events:
            task_status.started(None)
            async for event in events:
                self.events.append(event)

    def of(self, request_id: int) -> list[EngineEvent]:
        """The events of one request."""
        return [e for e in self.events if getattr(e, "request_id", None) == request_id]

    def names(self, request_id: int) -> list[str]:
        """The names of those."""
        return [type(event).__name__ for event in self.of(request_id)]

    def all(self, kind: type[T]) -> list[T]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


@asynccontextmanager
async def watched(
    model: ScriptedModel | str | dict[str, str], **config: Any
) -> AsyncIterator[tuple[Engine, Watcher]]:
    """A scripted engine, and who reads all its events, also those of its end."""
    watcher = Watcher()
    async with trio.open_nursery() as nursery, open_scripted_engine(model, **config) as engine:
        await nursery.start(watcher.run, engine)
        yield engine, watcher
