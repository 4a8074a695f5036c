"""What a lane is to those that run steps on it, and to `EngineConfig`, which may be given one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class LaneLike(Protocol):
    """Where steps run, one at a time."""

    def hosted(self) -> AbstractAsyncContextManager[None]:
        """Keep the lane alive inside the block."""
        ...

    async def run(
        self,
        job: Callable[[], T],
        *,
        abort: Callable[[], None],
        engine: object = None,
        weight: int = 1,
    ) -> T:
        """Run `job` on the lane: one of `engine`, which may have `weight` of them in a row.

        When cancelled, calls `abort` once if the job has begun, waits for it to end, and
        raises `Cancelled`; a job that has not begun never will.
        """
        ...
