"""What is built on an engine's events: metrics, traces and logs, each in its own module.

They follow events like any other reader, in a task that the application starts and ends.
The engine knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import trio
import trio.abc

from llamad_trio.core.engine_events import EngineEvent
from llamad_trio.system.nursery import TaskStatus

__all__ = ["EventSource", "follow"]

MAX_EVENTS = 4096
"""Events a follower may lag behind: a second of the steps of 20 small models."""


class EventSource(Protocol):
    """Whose events can be followed, such as an `Engine`."""

    def events(
        self, max_events: int = ...
    ) -> AbstractAsyncContextManager[trio.abc.ReceiveChannel[EngineEvent]]:
        """What happens from now on."""
        ...


async def follow(
    source: EventSource,
    take: Callable[[EngineEvent], None],
    *,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Hand every event to `take`, until the source ends.

    A checkpoint.  Cancelled, it follows no further.  What `take` raises comes out.
    `nursery.start` returns when no event is missed any more.
    """
    async with source.events(MAX_EVENTS) as events:
        task_status.started(None)
        async for event in events:
            take(event)
