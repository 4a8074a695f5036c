"""The lane: one OS thread on which every step of its engines is computed.

libgomp keeps a team of threads per *calling* thread.  As soon as two threads of the
process have computed, there are more threads than cores, libgomp stops spinning at
its barriers, and decoding loses 40 %.  So all compute goes through one thread.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import attrs
import outcome
import trio
from trio.lowlevel import RunVar

from llamad_trio.actors.nursery import open_plain_nursery, shielded

__all__ = ["Lane", "shared_lane"]

T = TypeVar("T")


class _Bell:
    """Wakes one Trio task from another thread.

    A byte through a socket pair, which the task waits for itself: half the delay of
    `TrioToken.run_sync_soon`, which goes through a task of Trio's own (220 against 430 us
    after 10 ms of work, on 2 cores), and that delay is part of every step.
    """

    def __init__(self) -> None:
        self._listener, self._clapper = socket.socketpair()
        self._listener.setblocking(False)

    def ring(self) -> None:
        """Wake the task.  From any thread."""
        self._clapper.send(b"!")

    async def rung(self) -> None:
        """Wait for `ring`.  A checkpoint; cancelled, it can be waited for again."""
        await trio.lowlevel.wait_readable(self._listener.fileno())
        self._listener.recv(1)

    def close(self) -> None:
        self._listener.close()
        self._clapper.close()


@attrs.define(eq=False)
class _Job(Generic[T]):
    function: Callable[[], T]
    bell: _Bell
    withdrawn: bool = False
    result: outcome.Outcome[T] | None = None

    def execute(self) -> None:
        """On the lane's thread."""
        if not self.withdrawn:
            self.result = outcome.capture(self.function)
        self.bell.ring()


class Lane:
    """One OS thread that computes, one job at a time, in the order they come.

    Engines on the same lane take turns, a step each, and each step may use all its
    threads.  A lane belongs to one Trio run.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._idle_bells: list[_Bell] = []
        self._n_hosts = 0
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
        self._n_hosts += 1
        async with open_plain_nursery() as nursery:
            nursery.start_soon(self._be_host, me)
            try:
                yield
            finally:
                if self._host is me:
                    self._jobs.put(None)
                self._n_hosts -= 1
                while not self._n_hosts and self._idle_bells:
                    self._idle_bells.pop().close()

    async def run(self, job: Callable[[], T], *, abort: Callable[[], None]) -> T:
        """Run `job` on the lane's thread and return what it returns or raise what it raises.

        A checkpoint.  When cancelled, calls `abort`, which should make the job end soon;
        waits for that, drops its result and raises `Cancelled`.  A job that has not
        begun is dropped, but its turn is waited for all the same.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        bell = self._idle_bells.pop() if self._idle_bells else _Bell()
        item = _Job(job, bell)
        self._jobs.put(item)
        try:
            await bell.rung()
        except BaseException:
            item.withdrawn = True
            abort()
            with shielded():
                await bell.rung()
            raise
        finally:
            self._idle_bells.append(bell)
        assert item.result is not None
        return item.result.unwrap()

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
