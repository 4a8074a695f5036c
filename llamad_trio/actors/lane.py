"""The lane: one OS thread on which every step of its engines is computed.

libgomp keeps a team of threads per *calling* thread.  As soon as two threads of the
process have computed, there are more threads than cores, libgomp stops spinning at
its barriers, and decoding loses 40 %.  So all compute goes through one thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

import attrs
import outcome
import trio
from trio.lowlevel import RunVar

from llamad_trio.actors.nursery import open_plain_nursery

__all__ = ["Lane", "shared_lane"]

T = TypeVar("T")


@attrs.define(eq=False)
class _Job:
    function: Callable[[], Any]
    task: trio.lowlevel.Task
    token: trio.lowlevel.TrioToken
    withdrawn: bool = False

    def execute(self) -> None:
        """On the lane's thread."""
        result: outcome.Outcome[Any] = outcome.Value(None)
        if not self.withdrawn:
            result = outcome.capture(self.function)
        self.token.run_sync_soon(trio.lowlevel.reschedule, self.task, outcome.Value(result))


class Lane:
    """One OS thread that computes, one job at a time, in the order they come.

    Engines on the same lane take turns, a step each, and each step may use all its
    threads.  A lane belongs to one Trio run.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        # Not a place in Trio's default limiter: a lane would hold it for good.
        self._limiter = trio.CapacityLimiter(1)
        self._hosting = trio.Lock()
        self._host: object = None

    @asynccontextmanager
    async def hosted(self) -> AsyncIterator[None]:
        """Keep the lane alive inside the block.

        Every block has a task that is ready to host the thread; one does.  When that
        block ends, the thread ends after the job it is in, and the task of another
        block starts the next: no job is lost.  Leaving the block waits for that.
        """
        me = object()
        async with open_plain_nursery() as nursery:
            nursery.start_soon(self._be_host, me)
            try:
                yield
            finally:
                if self._host is me:
                    self._jobs.put(None)

    async def run(self, job: Callable[[], T], *, abort: Callable[[], None]) -> T:
        """Run `job` on the lane's thread and return what it returns or raise what it raises.

        A checkpoint.  When cancelled, calls `abort`, which should make the job end soon;
        waits for that, drops its result and raises `Cancelled`.  A job that has not
        begun is dropped, but its turn is waited for all the same.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        item = _Job(job, trio.lowlevel.current_task(), trio.lowlevel.current_trio_token())
        raise_cancel: Callable[[], NoReturn] | None = None

        def on_cancel(raise_it: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
            nonlocal raise_cancel
            raise_cancel = raise_it
            item.withdrawn = True
            abort()
            return trio.lowlevel.Abort.FAILED

        self._jobs.put(item)
        result: outcome.Outcome[T] = await trio.lowlevel.wait_task_rescheduled(on_cancel)
        if raise_cancel is not None:
            raise_cancel()
        return result.unwrap()

    async def _be_host(self, me: object) -> None:
        async with self._hosting:
            self._host = me
            try:
                await trio.to_thread.run_sync(self._work, limiter=self._limiter)
            finally:
                self._host = None

    def _work(self) -> None:
        """The lane's thread."""
        while (job := self._jobs.get()) is not None:
            job.execute()


_shared: RunVar[Lane] = RunVar("llamad_trio shared lane")


def shared_lane() -> Lane:
    """The lane engines use by default: one for all of this Trio run."""
    try:
        return _shared.get()
    except LookupError:
        lane = Lane()
        _shared.set(lane)
        return lane
