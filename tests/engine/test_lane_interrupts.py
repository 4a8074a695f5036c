"""Ctrl-C, and once more: a lane and a model are left only when they are done with."""

from __future__ import annotations

import signal
import threading
from functools import partial, wraps
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.lowlevel
import trio.testing

from llamad_trio import EngineConfig, ProtocolError
from llamad_trio.engine import loading as loading_module
from llamad_trio.engine.lane import Lane
from llamad_trio.engine.loading import Loaded, loaded_model
from llamad_trio.system.nursery import ends_in_order, run_uninterrupted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from llamad_trio.llama.llama_runtime import LlamaRuntime


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """Whoever runs the tests in the background may have them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def in_a_run_of_its_own(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Be a program's own task, which Ctrl-C strikes."""

    @wraps(test)
    def run(**fixtures: object) -> None:
        trio.run(partial(test, **fixtures))

    return run


@ends_in_order
def press_ctrl_c() -> None:
    """Press it: it strikes the program's own task where that waits, now or next."""
    signal.raise_signal(signal.SIGINT)


async def press_ctrl_c_and_wait() -> None:
    """Press it, and wait until the program's own task waits again, or still does."""
    press_ctrl_c()
    struck = trio.Event()
    trio.lowlevel.current_trio_token().run_sync_soon(struck.set)  # these are in order
    await struck.wait()
    await trio.testing.wait_all_tasks_blocked()


class HeldJob:
    """A job that runs until it may end."""

    def __init__(self) -> None:
        self.begun = trio.Event()
        self.may_end = threading.Event()
        self.has_ended = False

    def __call__(self) -> str:
        trio.from_thread.run_sync(self.begun.set)
        self.may_end.wait()
        self.has_ended = True
        return "held"

    async def end_after_ctrl_c(self, presses: int) -> None:
        try:
            await self.begun.wait()
            for _ in range(presses):
                await press_ctrl_c_and_wait()
        finally:
            self.may_end.set()


def nothing() -> None:
    pass


# -- the lane -------------------------------------------------------------------------------


@pytest.mark.parametrize("presses", [1, 2])
@in_a_run_of_its_own
async def test_a_job_has_ended_when_ctrl_c_comes_out_of_it(presses: int) -> None:
    lane, job = Lane(), HeldJob()
    async with lane.hosted(), trio.open_nursery() as nursery:
        nursery.start_soon(job.end_after_ctrl_c, presses)
        with pytest.raises(KeyboardInterrupt):
            await lane.run(job, abort=nothing)
        assert job.has_ended
        assert await lane.run(lambda: "next", abort=nothing) == "next"


@in_a_run_of_its_own
async def test_a_job_is_waited_for_even_if_it_cannot_be_aborted() -> None:
    def broken_abort() -> None:
        raise ValueError("no abort")

    lane, job = Lane(), HeldJob()
    async with lane.hosted(), trio.open_nursery() as nursery:
        nursery.start_soon(job.end_after_ctrl_c, 1)
        with pytest.raises(ValueError, match="no abort"):
            await lane.run(job, abort=broken_abort)
        assert job.has_ended


@in_a_run_of_its_own
async def test_nobody_is_woken_by_the_end_of_a_job_that_was_interrupted_twice() -> None:
    results: list[str] = []

    def last_job() -> str:
        # Whoever was woken too early goes on now.
        trio.from_thread.run(trio.testing.wait_all_tasks_blocked)
        return "last"

    lane, first = Lane(), HeldJob()

    async def run(job: Any) -> None:
        results.append(await lane.run(job, abort=nothing))

    async def interrupt_twice(nursery: trio.Nursery) -> None:
        try:
            await press_ctrl_c_and_wait()
            await press_ctrl_c_and_wait()
            nursery.start_soon(run, last_job)
            await trio.testing.wait_all_tasks_blocked()
        finally:
            first.may_end.set()

    async with lane.hosted(), trio.open_nursery() as nursery:
        nursery.start_soon(run, first)
        await first.begun.wait()
        nursery.start_soon(interrupt_twice, nursery)
        with pytest.raises(KeyboardInterrupt):
            await lane.run(lambda: results.append("withdrawn"), abort=nothing)
    assert results == ["held", "last"]


@in_a_run_of_its_own
async def test_ctrl_c_does_not_strike_between_a_job_and_its_books() -> None:
    protected: list[bool] = []

    class Jobs(SimpleQueue[Any]):
        def put(self, item: Any, *args: Any, **kwargs: Any) -> None:
            protected.append(trio.lowlevel.currently_ki_protected())
            super().put(item)

    lane = Lane()
    lane._jobs = Jobs()
    async with lane.hosted():
        assert not trio.lowlevel.currently_ki_protected()  # the program's own code
        await lane.run(nothing, abort=nothing)
        assert not trio.lowlevel.currently_ki_protected()
    assert protected == [True, True]  # the job, and the end of the thread


# -- the model ------------------------------------------------------------------------------


class FakeRuntime:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.warming_up = HeldJob()
        self.warming_up.may_end.set()

    def warm_up(self) -> None:
        self.warming_up()
        self.log.append("warmed up")

    def request_abort(self) -> None:
        pass

    def close(self) -> None:
        self.log.append("closed")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """Of every model that is loaded."""
    runtime = FakeRuntime()
    loaded = Loaded(cast("LlamaRuntime", runtime), ProtocolError("no template"))
    monkeypatch.setattr(loading_module, "_load", lambda *_: loaded)
    return runtime


@pytest.mark.parametrize("presses", [1, 2])
@in_a_run_of_its_own
async def test_a_model_is_freed_after_the_warm_up_that_was_interrupted(
    runtime: FakeRuntime, presses: int
) -> None:
    runtime.warming_up.may_end.clear()

    lane = Lane()
    async with lane.hosted(), trio.open_nursery() as nursery:
        nursery.start_soon(runtime.warming_up.end_after_ctrl_c, presses)
        with pytest.raises(KeyboardInterrupt):
            async with loaded_model("x", EngineConfig(), lane, None):
                raise AssertionError("opened")
    assert runtime.log == ["warmed up", "closed"]


@in_a_run_of_its_own
async def test_a_model_is_freed_when_ctrl_c_comes_as_it_is_closed(runtime: FakeRuntime) -> None:
    lane = Lane()
    async with lane.hosted():
        with pytest.raises(KeyboardInterrupt):
            async with loaded_model("x", EngineConfig(), lane, None):
                press_ctrl_c()
        assert runtime.log == ["warmed up", "closed"]


# -- what nothing interrupts ----------------------------------------------------------------


@in_a_run_of_its_own
async def test_what_is_uninterrupted_ends_before_ctrl_c_comes_out() -> None:
    done: list[str] = []

    async def work() -> str:
        await press_ctrl_c_and_wait()
        done.append("work")
        return "result"

    with pytest.raises(KeyboardInterrupt):
        await run_uninterrupted(work)
    assert done == ["work"]


async def test_what_is_uninterrupted_returns_and_raises_as_itself_under_a_cancel() -> None:
    async def returns() -> str:
        await trio.lowlevel.checkpoint()
        return "result"

    error = ValueError("mine")

    async def raises() -> None:
        await trio.lowlevel.checkpoint()
        raise error

    with trio.CancelScope() as scope:
        scope.cancel()
        assert await run_uninterrupted(returns) == "result"
        with pytest.raises(ValueError, match="mine") as caught:
            await run_uninterrupted(raises)
        assert caught.value is error
    assert not scope.cancelled_caught
