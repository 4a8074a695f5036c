"""What is built on an engine's events: metrics, traces and logs, each in its own module.

They follow events like any other reader, in a task that the application starts and ends.
The engine knows nothing of them.  Statistics of an engine in another process are what it told
last: `refresh_all` has them told again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol, runtime_checkable

import trio
import trio.abc

from llamad_trio.core.engine_events import EngineEvent
from llamad_trio.core.errors import LlamadError
from llamad_trio.core.info import EngineStats
from llamad_trio.system.nursery import TaskStatus

__all__ = ["EventSource", "follow"]

MAX_EVENTS = 4096
"""Events a follower may lag behind: a second of the steps of 20 small models."""

REFRESH_S = 1.0
"""How long an engine has to answer, in seconds."""


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


@runtime_checkable
class _Refreshable(Protocol):
    async def refresh(self) -> EngineStats: ...


async def refresh_if_possible(engine: object) -> None:
    """Call `refresh`, if an engine has it, for its `stats()` to be of this moment.

    A checkpoint.  If nobody answers within `REFRESH_S`, they stay what they were.
    """
    await trio.lowlevel.checkpoint()
    if isinstance(engine, _Refreshable):
        with trio.move_on_after(REFRESH_S), suppress(LlamadError):
            await engine.refresh()


async def refresh_all(engines: Iterable[object]) -> None:
    """`refresh_if_possible` for several engines, all at once.  A checkpoint."""
    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(refresh_if_possible, engine)
