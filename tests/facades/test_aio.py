"""What only asyncio has: tasks that are cancelled, and loops that come, go and are several."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import asynccontextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llamad_trio import EngineLike, aio
from tests.facades import ENDLESS, HANG_S, THREAD_STARTS, engine_threads, is_idle, scripted, telling
from tests.serving.support import wait_for
from tests.support import must_not_run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from llamad_trio import EngineStats
    from llamad_trio.aio import AsyncEngine
    from tests.facades import RunScript


def in_asyncio(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an asyncio loop of its own."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


async def until_stats(eng: AsyncEngine, condition: Callable[[EngineStats], object]) -> EngineStats:
    """Wait for what the background thread will bring about."""
    async with asyncio.timeout(HANG_S / 2):
        while not condition(stats := await eng.stats()):  # noqa: ASYNC110  (it is another thread)
            await asyncio.sleep(0.001)
        return stats


async def first_piece(eng: AsyncEngine, begun: asyncio.Event) -> None:
    """Read a stream for ever."""
    async with eng.stream(ENDLESS) as pieces:
        async for _ in pieces:
            begun.set()


# -- many tasks, many loops -----------------------------------------------------------------


@in_asyncio
async def test_loops_in_two_threads_can_share_an_engine() -> None:
    async with aio.open_with(scripted()) as eng:

        async def ask() -> str:
            texts = [await eng.complete_text("the cat") for _ in range(20)]
            return "".join(texts) + "".join([piece async for piece in eng.stream("the cat")])

        others = [asyncio.to_thread(asyncio.run, ask()) for _ in range(2)]
        assert await asyncio.gather(ask(), *others) == ["42" * 21] * 3


@in_asyncio
async def test_each_of_two_loops_can_have_its_own_engine() -> None:
    async def ask() -> str:
        async with aio.open_with(scripted()) as eng:
            return await eng.complete_text("the cat")

    loops = [asyncio.to_thread(asyncio.run, ask()) for _ in range(4)]
    assert await asyncio.gather(*loops) == ["42"] * 4


# -- cancelling -----------------------------------------------------------------------------


async def complete(eng: AsyncEngine) -> None:
    await eng.complete(ENDLESS)


async def read(eng: AsyncEngine) -> None:
    async with eng.stream(ENDLESS) as pieces:
        await pieces.result()


async def read_without_block(eng: AsyncEngine) -> None:
    await eng.stream_events(ENDLESS).result()


async def sleep_in_block(eng: AsyncEngine) -> None:
    async with eng.stream(ENDLESS) as pieces:
        await anext(pieces)
        await asyncio.sleep(60)


@pytest.mark.parametrize("use", [complete, read, read_without_block, sleep_in_block])
@in_asyncio
async def test_cancelling_a_task_cancels_its_request_and_no_other(
    use: Callable[[AsyncEngine], Coroutine[Any, Any, None]],
) -> None:
    async with aio.open_with(scripted(decode_s=0.001)) as eng, eng.stream(ENDLESS) as other:
        await anext(other)
        task = asyncio.create_task(use(eng))
        await until_stats(eng, lambda stats: stats.slots["free"] == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # It was waited for, or this were 0.
        assert (await eng.stats()).requests["cancelled"] == 1
        assert await anext(other)
        assert await eng.complete_text("the cat") == "42"


@in_asyncio
async def test_a_timeout_is_asyncios_own() -> None:
    async with aio.open_with(scripted(decode_s=0.001)) as eng:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await eng.complete(ENDLESS)
        pieces = eng.stream(ENDLESS)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), pieces:
                await pieces.result()
        assert pieces.text
        assert (await eng.stats()).requests == {"completed": 0, "failed": 0, "cancelled": 2}
        await until_stats(eng, is_idle)


@in_asyncio
async def test_cancelling_a_load_stops_it() -> None:
    stopped = threading.Event()

    @asynccontextmanager
    async def never() -> AsyncIterator[EngineLike]:
        try:
            await trio.sleep(HANG_S)
        finally:
            stopped.set()
        async with scripted()() as engine:
            yield engine

    opening = asyncio.create_task(aio.open_with(never).__aenter__())
    await asyncio.sleep(0.05)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert stopped.is_set()
    assert engine_threads() == []


@pytest.mark.parametrize("start", THREAD_STARTS.values(), ids=THREAD_STARTS)
def test_a_thread_that_does_not_start_properly_leaves_no_engine_behind(start: Any) -> None:
    async def main() -> None:
        with start():
            async with aio.open_with(scripted()):
                must_not_run("it is opened")

    with pytest.raises((KeyboardInterrupt, RuntimeError), match=r"^$|no more threads"):
        asyncio.run(main())
    wait_for(lambda: engine_threads() == [])


@in_asyncio
async def test_the_loop_runs_on_while_an_engine_opens_and_closes() -> None:
    n = 0

    @asynccontextmanager
    async def slow() -> AsyncIterator[EngineLike]:
        await trio.sleep(0.2)
        async with scripted()() as engine:
            yield engine
        await trio.sleep(0.2)

    async def count() -> None:
        nonlocal n
        while True:
            n += 1
            await asyncio.sleep(0.01)

    task = asyncio.create_task(count())
    async with aio.open_with(slow):
        pass
    task.cancel()
    assert n > 10


# -- errors, and the end --------------------------------------------------------------------


def test_a_trio_program_is_told_that_this_is_for_asyncio() -> None:
    async def main() -> None:
        async with aio.open_with(scripted()):
            must_not_run("it is opened")

    with pytest.raises(RuntimeError, match=r"aio is for asyncio.*llamad_trio\.open_engine"):
        trio.run(main)
    assert engine_threads() == []


@in_asyncio
async def test_the_background_thread_cannot_wait_for_itself() -> None:
    tokens: list[trio.lowlevel.TrioToken] = []

    def from_inside(call: Callable[[], Coroutine[Any, Any, object]]) -> None:
        with pytest.raises(RuntimeError, match="its own background thread"):
            trio.from_thread.run_sync(lambda: asyncio.run(call()), trio_token=tokens[0])

    async with aio.open_with(telling(tokens)) as eng, eng.stream(ENDLESS) as pieces:
        for call in (eng.stats, partial(eng.complete, "x"), pieces.result, pieces.aclose):
            await asyncio.to_thread(from_inside, call)
        assert await anext(pieces)


@pytest.mark.parametrize("is_woken", [False, True])
@in_asyncio
async def test_a_loop_closed_in_the_middle_leaves_no_request_behind(is_woken: bool) -> None:
    left: list[object] = []

    def in_a_loop() -> None:
        loop = asyncio.new_event_loop()
        begun = asyncio.Event()
        tasks = [
            loop.create_task(first_piece(eng, begun)),
            loop.create_task(eng.complete_text(ENDLESS, max_tokens=500)),
        ]
        loop.run_until_complete(begun.wait())
        if is_woken:
            wait_for(lambda: len(loop._ready) > 0)  # type: ignore[attr-defined]
        loop.close()
        left.extend(tasks)
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    async with aio.open_with(scripted(decode_s=0.001)) as eng:
        await asyncio.to_thread(in_a_loop)
        # The next piece of the one finds nobody; the other ends, which nobody hears.
        await until_stats(eng, is_idle)
        assert (await eng.stats()).requests == {"completed": 1, "failed": 0, "cancelled": 1}
        assert await eng.complete_text("the cat") == "42"


@pytest.mark.filterwarnings("error")  # such as of an exception that nobody can catch
def test_a_task_that_is_thrown_away_leaves_nothing_behind() -> None:
    async def use(begun: asyncio.Event) -> None:
        async with aio.open_with(scripted(decode_s=0.001)) as eng:
            await first_piece(eng, begun)

    loop = asyncio.new_event_loop()
    begun = asyncio.Event()
    coroutine = use(begun)
    task = loop.create_task(coroutine)
    loop.run_until_complete(begun.wait())
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine.close()
    wait_for(lambda: engine_threads() == [])


def test_an_engine_whose_loop_is_gone_closes_itself() -> None:
    loop = asyncio.new_event_loop()
    block = aio.open_with(scripted())
    eng = loop.run_until_complete(block.__aenter__())
    assert loop.run_until_complete(eng.complete_text("the cat")) == "42"
    loop.close()
    with pytest.warns(ResourceWarning, match="unclosed"):  # noqa: PT031
        del eng, block
        gc.collect()
    wait_for(lambda: engine_threads() == [])


def test_a_forked_child_hangs_on_nothing_and_leaves_its_parents_loop_alone(
    run_script: RunScript,
) -> None:
    script = """
    import asyncio, trio
    from contextlib import asynccontextmanager
    from llamad_trio import aio

    loop = asyncio.new_event_loop()
    parent, wake = os.getpid(), loop.call_soon_threadsafe

    def told(*args):
        if os.getpid() != parent:
            print("the child writes to the loop of its parent")
        return wake(*args)

    loop.call_soon_threadsafe = told

    @asynccontextmanager
    async def slow_to_close():
        async with scripted()() as engine:
            yield engine
        await trio.sleep(1)

    async def leave():
        async with stream: pass

    block = aio.open_with(scripted(decode_s=0.2))
    eng = loop.run_until_complete(block.__aenter__())
    stream = eng.stream("endless", max_tokens=1_000_000)
    loop.run_until_complete(anext(stream))
    other = aio.open_with(slow_to_close)
    loop.run_until_complete(other.__aenter__())
    reading = loop.create_task(stream.result())
    closing = loop.create_task(other.__aexit__(None, None, None))
    loop.run_until_complete(asyncio.sleep(0.05))
    for use in (stream.result, stream.aclose, leave, eng.stats, partial(eng.complete, "the cat")):
        in_child(lambda: asyncio.run(use()))
    in_child(lambda: asyncio.run(block.__aexit__(None, None, None)))
    print(len(stream.text) > 0)
    reading.cancel()
    loop.run_until_complete(asyncio.wait([reading, closing]))
    print(loop.run_until_complete(eng.complete_text("the cat")))
    loop.run_until_complete(block.__aexit__(None, None, None))
    loop.close()
    """
    status, lines, errors = run_script(script)
    assert (status, errors) == (0, "")
    assert lines == ["closed", *["returns"] * 3, "closed", "returns", "True", "42"]


def test_the_interpreter_exits_with_an_engine_left_open(run_script: RunScript) -> None:
    script = """
    import asyncio
    from llamad_trio import aio
    loop = asyncio.new_event_loop()
    block = aio.open_with(scripted())
    eng = loop.run_until_complete(block.__aenter__())
    stream = eng.stream("endless")
    loop.run_until_complete(anext(stream))
    task = loop.create_task(eng.complete("endless", max_tokens=1_000_000))
    loop.run_until_complete(asyncio.sleep(0.1))
    task._log_destroy_pending = False
    loop.close()
    print("exits")
    """
    status, lines, errors = run_script(script)
    assert (status, lines, errors) == (0, ["exits"], "")


def test_ctrl_c_ends_an_asyncio_program(run_script: RunScript) -> None:
    script = """
    import asyncio
    from llamad_trio import aio
    async def interrupt(eng):
        while (await eng.stats()).slots["free"] == 4:
            await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
    async def main():
        async with aio.open_with(scripted()) as eng:
            interrupting = asyncio.create_task(interrupt(eng))
            try:
                await eng.complete("endless", max_tokens=1_000_000)
            finally:
                print((await eng.stats()).requests["cancelled"])
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print([t.name for t in threading.enumerate() if "llamad" in t.name])
    """
    assert run_script(script) == (0, ["1", "[]"], "")
