"""The lane: one OS thread on which every step of its engines is computed.

libgomp keeps a team of threads per *calling* thread.  As soon as two threads of the
process have computed, there are more threads than cores, libgomp stops spinning at
its barriers, and decoding loses 40 %.  So all compute goes through one thread.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import attrs
import outcome
import trio
from trio.lowlevel import RunVar

from llamad_trio.core.config import MAX_THREADS, EngineConfig, LaneLike
from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.fields import optional, whole_number
from llamad_trio.system.host import physical_cores
from llamad_trio.system.nursery import ends_in_order, open_plain_nursery, run_uninterrupted

logger = logging.getLogger("llamad_trio")

HANDOVER_S = 0.002
"""How long the thread waits for the next step of an engine whose turn is not over.  The
engine has to apply the last one first: 0.3 ms, several when the machine is busy."""

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

    def wake(self) -> None:
        """Wake the task.  From any thread."""
        self._clapper.send(b"!")

    @ends_in_order  # or it would be waited for once more
    async def wait_woken(self) -> None:
        """Wait for `wake`.  A checkpoint; cancelled, it can be waited for again."""
        await trio.lowlevel.wait_readable(self._listener.fileno())
        self._listener.recv(1)

    def close(self) -> None:
        self._listener.close()
        self._clapper.close()


@attrs.define(eq=False)
class _Job(Generic[T]):
    function: Callable[[], T]
    bell: _Bell
    engine: object
    weight: int
    withdrawn: bool = False
    result: outcome.Outcome[T] | None = None

    def execute(self) -> None:
        """On the lane's thread."""
        if not self.withdrawn:
            self.result = outcome.capture(self.function)
        self.bell.wake()


class Lane:
    """One OS thread that computes, one job at a time.

    Engines on the same lane take turns: a step each, or as many as their `weight` says, and
    each step may use all the lane's threads.  A lane belongs to one Trio run at a time: an
    engine that another run opens on it meanwhile is refused with `ProtocolError`.

    Args:
        threads: with how many threads llama.cpp computes for the engines on it, unless
            their config says otherwise; `None` is the physical cores.

    Raises:
        ProtocolError: `threads` is no integer.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads: int | None = optional(whole_number(1, MAX_THREADS))(threads, "threads")
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        # Taken from the queue, but not yet begun.  Only the thread looks at it.
        self._waiting: deque[_Job[Any]] = deque()
        self._idle_bells: list[_Bell] = []
        # Not a place in Trio's default limiter: a lane would hold it for good.
        self._limiter = trio.CapacityLimiter(1)
        self._hosting = trio.Lock()
        self._host: object = None
        self._owner: trio.lowlevel.TrioToken | None = None
        self._n_hosts = 0
        # Two runs may come for it at once, each on a thread of its own.
        self._owning = threading.Lock()

    @asynccontextmanager
    @ends_in_order  # or the thread would go on, and be waited for
    async def hosted(self) -> AsyncIterator[None]:
        """Keep the lane alive inside the block.

        Every block has a task that is ready to host the thread; one does.  When that
        block ends, the thread ends after the job it is in, and the task of another
        block starts the next: no job is lost.  Leaving the block waits for that.

        Raises:
            ProtocolError: another Trio run is in such a block.
        """
        me = object()
        with self._owned_by_this_run():
            async with open_plain_nursery() as nursery:
                nursery.start_soon(self._be_host, me)
                try:
                    yield
                finally:
                    if self._host is me:
                        self._jobs.put(None)

    @contextmanager
    @ends_in_order  # or it would belong to a run that Ctrl-C has ended
    def _owned_by_this_run(self) -> Iterator[None]:
        """Have the lane belong to this Trio run inside the block."""
        run = trio.lowlevel.current_trio_token()
        with self._owning:
            if self._owner not in (None, run):
                raise ProtocolError("the lane is in use: it belongs to one Trio run at a time")
            self._owner = run
            self._n_hosts += 1
        try:
            yield
        finally:
            with self._owning:
                self._n_hosts -= 1
                if not self._n_hosts:
                    while self._idle_bells:
                        self._idle_bells.pop().close()
                    self._owner = None

    @ends_in_order
    async def run(
        self,
        job: Callable[[], T],
        *,
        abort: Callable[[], None],
        engine: object = None,
        weight: int = 1,
    ) -> T:
        """Run `job` on the lane's thread and return what it returns or raise what it raises.

        Args:
            job: what to run.
            abort: makes it end soon.
            engine: whose job it is.
            weight: how many jobs of this engine may be run before it is another's turn.

        A checkpoint.  When cancelled, calls `abort`, which should make the job end soon;
        waits for that, drops its result and raises `Cancelled`.  A job that has not
        begun is dropped, but its turn is waited for all the same.  Ctrl-C is such a cancel
        that raises `KeyboardInterrupt`, and a second one does not cut the wait short.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        bell = self._idle_bells.pop() if self._idle_bells else _Bell()
        item = _Job(job, bell, engine, weight)
        self._jobs.put(item)
        try:
            await self._wait_bell(bell)
        except BaseException:
            item.withdrawn = True
            try:
                abort()
            finally:
                await run_uninterrupted(partial(self._wait_bell, bell))
            raise
        assert item.result is not None
        return item.result.unwrap()

    @ends_in_order
    async def _wait_bell(self, bell: _Bell) -> None:
        """Wait for the bell.  One that has yet to ring is not for the next job."""
        await bell.wait_woken()
        self._idle_bells.append(bell)

    @ends_in_order
    async def _be_host(self, me: object) -> None:
        async with self._hosting:
            self._host = me
            try:
                await trio.to_thread.run_sync(self._work, limiter=self._limiter)
            finally:
                self._host = None

    def _work(self) -> None:
        """The lane's thread."""
        favoured: object = None
        n_in_turn = 0
        while (job := self._next(favoured)) is not None:
            n_in_turn = n_in_turn + 1 if job.engine is favoured else 1
            favoured = job.engine if n_in_turn < job.weight else None
            job.execute()

    def _next(self, favoured: object) -> _Job[Any] | None:
        """The oldest job, or that of an engine whose turn is not over; `None` to end."""
        deadline = time.monotonic() + HANDOVER_S
        while True:
            for job in self._waiting:
                if favoured is not None and job.engine is favoured:
                    self._waiting.remove(job)
                    return job
            left_s = 0.0 if favoured is None else max(deadline - time.monotonic(), 0.0)
            try:
                arrived = self._jobs.get(timeout=left_s if self._waiting else None)
            except Empty:
                return self._waiting.popleft()
            if arrived is None:
                return None
            self._waiting.append(arrived)


_in_use: RunVar[Counter[tuple[LaneLike, int]]] = RunVar("llamad_trio lanes in use")


@contextmanager
def counting_threads(lane: LaneLike, n_threads: int, n_cores: int) -> Iterator[None]:
    """Count an engine's threads inside the block, and warn when there are too many."""
    try:
        in_use = _in_use.get()
    except LookupError:
        in_use = Counter()
        _in_use.set(in_use)
    before = _n_threads(in_use)
    in_use[lane, n_threads] += 1
    after = _n_threads(in_use)
    if after > max(n_cores, before):
        n_lanes = len({lane for lane, _ in +in_use})
        logger.warning(
            "%s with %d threads on %d cores: when they compute at once, llama.cpp's "
            "threads wait for each other at every node of the graph, and a step takes up to twice "
            "as long; let the n_threads of all lanes add up to the cores",
            "1 lane computes" if n_lanes == 1 else f"{n_lanes} lanes compute",
            after,
            n_cores,
        )
    try:
        yield
    finally:
        in_use[lane, n_threads] -= 1


def _n_threads(in_use: Counter[tuple[LaneLike, int]]) -> int:
    """Threads that may compute at once: the most of any engine on each lane."""
    most: dict[LaneLike, int] = {}
    for lane, n_threads in +in_use:
        most[lane] = max(most.get(lane, 0), n_threads)
    return sum(most.values())


_shared: RunVar[Lane] = RunVar("llamad_trio shared lane")


def shared_lane() -> Lane:
    """The lane engines use by default: one for all of this Trio run."""
    try:
        return _shared.get()
    except LookupError:
        lane = Lane()
        _shared.set(lane)
        return lane


def with_lane_threads(config: EngineConfig) -> EngineConfig:
    """With the threads of the lane that the application made for it, unless it says otherwise."""
    if not isinstance(config.lane, Lane):
        return config
    threads = config.lane.threads
    return attrs.evolve(
        config,
        n_threads=config.n_threads or threads,
        n_threads_batch=config.n_threads_batch or threads,
    )


def count_lane_threads(lane: LaneLike, config: EngineConfig) -> AbstractContextManager[None]:
    """Count the engine's threads among those that may compute at once, inside the block."""
    assert config.n_threads is not None
    assert config.n_threads_batch is not None
    return counting_threads(lane, max(config.n_threads, config.n_threads_batch), physical_cores())
