"""The engine for asyncio: any number of tasks of any number of loops."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from llamad_trio import (
    Done,
    Engine,
    EngineClosed,
    EngineLike,
    InferenceError,
    ModelLoadError,
    ProtocolError,
    Request,
    SessionFatal,
    TextDelta,
    aio,
    open_engine,
    serve_unix,
)
from llamad_trio.background_run import MOST_PARTS
from llamad_trio.testing import ScriptedModel, open_scripted_engine
from tests.facades import (
    HANG_S,
    THREAD_STARTS,
    dying_of_a_hang,
    engine_threads,
    is_idle,
    lazy,
    scripted,
    served,
    telling,
    until,
)
from tests.facades.test_blocking import ASKED, CAT, ENDLESS, comparable
from tests.support import EXACT, ONE_THREAD, must_not_run, threads_of_ours

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from llamad_trio import EngineStats
    from llamad_trio.aio import AsyncEngine
    from tests.facades import RunScript
    from tests.models import TinyModels


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    with dying_of_a_hang():
        yield
    until(lambda: engine_threads() == [])


@pytest.fixture
def tiny_path(tiny_model: TinyModels) -> Path:
    return tiny_model("attention", n_ctx_train=100_000)


def with_engine(
    opened: AbstractAsyncContextManager[AsyncEngine],
    use: Callable[[AsyncEngine], Coroutine[Any, Any, object]],
) -> None:
    """Run `use` in a loop of its own, with an engine."""

    async def main() -> None:
        async with opened as eng:
            await use(eng)

    asyncio.run(main())


async def until_stats(eng: AsyncEngine, condition: Callable[[EngineStats], object]) -> EngineStats:
    """Wait for what the background thread will bring about."""
    async with asyncio.timeout(HANG_S / 2):
        while not condition(stats := await eng.stats()):  # noqa: ASYNC110  (it is another thread)
            await asyncio.sleep(0.001)
        return stats


async def until_idle(eng: AsyncEngine) -> None:
    await until_stats(eng, is_idle)


async def first_piece(eng: AsyncEngine, begun: asyncio.Event) -> None:
    """Read a stream for ever."""
    async with eng.stream(ENDLESS) as pieces:
        async for _ in pieces:
            begun.set()


# -- the same engine ------------------------------------------------------------------------


def test_every_method_gives_what_the_engines_does(tiny_path: Path) -> None:
    async def inside() -> tuple[dict[str, object], object, object]:
        async with open_engine(tiny_path, EXACT, kv_cache=False) as eng:
            given = {name: comparable(await ask(eng)) for name, ask in ASKED.items()}
            return given, eng.info, eng.config

    given, info, config = trio.run(inside)

    async def use(eng: AsyncEngine) -> None:
        assert {name: comparable(await ask(eng)) for name, ask in ASKED.items()} == given
        assert (eng.info, eng.config) == (info, config)
        assert (await eng.stats()).requests["completed"] == 8

    with_engine(aio.open_engine(tiny_path, EXACT, kv_cache=False), use)


def test_it_has_every_member_of_an_engine() -> None:
    for name in vars(EngineLike).keys() - {"events"}:
        assert hasattr(aio.AsyncEngine, name) or name.startswith("_")


def test_a_stream_gives_the_text_piece_by_piece() -> None:
    async def use(eng: AsyncEngine) -> None:
        async with eng.stream("the cat") as pieces:
            assert await anext(pieces) == pieces.text == "4"
            assert [piece async for piece in pieces] == ["2"]
            assert pieces.text == "42"
            assert await pieces.result() == pieces.completion
        assert (await pieces.result()).text == "42"
        assert [piece async for piece in eng.stream("the cat")] == ["4", "2"]
        async with eng.stream_events("the cat") as events:
            *deltas, done = [event async for event in events]
        assert isinstance(done, Done)
        assert [event.text for event in deltas if isinstance(event, TextDelta)] == ["4", "2"]

    with_engine(aio.open_with(scripted()), use)


def test_the_engine_of_a_daemon_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"

    @asynccontextmanager
    async def daemon() -> AsyncIterator[Engine]:
        async with scripted()() as behind, trio.open_nursery() as nursery:
            assert isinstance(behind, Engine)
            await nursery.start(serve_unix, behind, path)
            yield behind
            nursery.cancel_scope.cancel()

    async def use(_: AsyncEngine) -> None:
        async with aio.connect(path) as eng:
            assert await eng.complete_text("the cat") == "42"

    with_engine(aio.open_with(daemon), use)


# -- many tasks, many loops -----------------------------------------------------------------


def test_fifty_tasks_have_each_their_own_text(tiny_path: Path) -> None:
    asked = [attrs.evolve(CAT, prompt=f"cat {n}", seed=n, temperature=1.5) for n in range(50)]

    async def use(eng: AsyncEngine) -> None:
        alone = [await eng.complete_text(each) for each in asked]

        async def ask(n: int) -> str:
            if n % 2:
                return await eng.complete_text(asked[n])
            return "".join([piece async for piece in eng.stream(asked[n])])

        assert await asyncio.gather(*map(ask, range(50))) == alone
        await until_idle(eng)
        stats = await eng.stats()
        assert stats.requests == {"completed": 100, "failed": 0, "cancelled": 0}

    with_engine(aio.open_engine(tiny_path, EXACT, n_ctx=8192), use)


def test_loops_in_two_threads_can_share_an_engine() -> None:
    async def use(eng: AsyncEngine) -> None:
        async def ask() -> str:
            texts = [await eng.complete_text("the cat") for _ in range(20)]
            return "".join(texts) + "".join([piece async for piece in eng.stream("the cat")])

        def in_a_loop(_: int) -> str:
            return asyncio.run(ask())

        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(2) as pool:
            others = [loop.run_in_executor(pool, in_a_loop, n) for n in range(2)]
            assert await asyncio.gather(ask(), *others) == ["42" * 21] * 3

    with_engine(aio.open_with(scripted()), use)


def test_each_of_two_loops_can_have_its_own_engine() -> None:
    def in_a_loop(_: int) -> None:
        async def use(eng: AsyncEngine) -> None:
            assert await eng.complete_text("the cat") == "42"

        with_engine(aio.open_with(scripted()), use)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(in_a_loop, range(4)))


def test_a_slow_reader_pauses_its_slot_and_loses_nothing() -> None:
    async def use(eng: AsyncEngine) -> None:
        async with eng.stream("long", max_tokens=10_000) as pieces:
            await anext(pieces)
            stats = await until_stats(eng, lambda stats: stats.slots["paused"])
            # The engine's own buffer and ours; what is under way; what was read.
            assert stats.decode_tokens <= 64 + MOST_PARTS + 8
            assert await eng.complete_text("the cat") == "42"
            assert (await pieces.result()).text == pieces.text == "la " * 500

    with_engine(aio.open_with(scripted({"long": "la " * 500, "": "42"}, n_slots=2)), use)


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
def test_cancelling_a_task_cancels_its_request_and_no_other(
    use: Callable[[AsyncEngine], Coroutine[Any, Any, None]],
) -> None:
    async def main(eng: AsyncEngine) -> None:
        async with eng.stream(ENDLESS) as other:
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

    with_engine(aio.open_with(scripted(decode_s=0.001)), main)


def test_a_timeout_is_asyncios_own() -> None:
    async def use(eng: AsyncEngine) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await eng.complete(ENDLESS)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), eng.stream(ENDLESS) as pieces:
                await pieces.result()
        assert pieces.text
        assert (await eng.stats()).requests == {"completed": 0, "failed": 0, "cancelled": 2}
        await until_idle(eng)

    with_engine(aio.open_with(scripted(decode_s=0.001)), use)


async def leave_block(eng: AsyncEngine) -> None:
    async with eng.stream(ENDLESS) as pieces:
        await anext(pieces)


async def leave_loop(eng: AsyncEngine) -> None:
    async for _ in eng.stream(ENDLESS):
        break


async def close_stream(eng: AsyncEngine) -> None:
    pieces = eng.stream(ENDLESS)
    await anext(pieces)
    await pieces.aclose()
    await pieces.aclose()
    with pytest.raises(ValueError, match="cancelled"):
        await anext(pieces)
    with pytest.raises(ValueError, match="cancelled"):
        await pieces.result()


@pytest.mark.parametrize("leave", [leave_block, leave_loop, close_stream])
def test_a_stream_left_early_frees_its_slot(
    leave: Callable[[AsyncEngine], Coroutine[Any, Any, None]],
) -> None:
    async def use(eng: AsyncEngine) -> None:
        await leave(eng)
        await until_idle(eng)
        assert (await eng.stats()).requests == {"completed": 0, "failed": 0, "cancelled": 1}

    with_engine(aio.open_with(scripted(decode_s=0.001, n_slots=1)), use)


def test_a_closed_stream_holds_no_place_that_the_next_request_needs() -> None:
    async def use(eng: AsyncEngine) -> None:
        for _ in range(30):
            async with eng.stream(ENDLESS) as pieces:
                await anext(pieces)
            assert await eng.complete_text("the cat") == "42"  # else it were `Busy`

    with_engine(aio.open_with(scripted(decode_s=0.001, n_slots=1, max_queue=0)), use)


def test_cancelling_a_load_stops_it() -> None:
    stopped = threading.Event()

    @asynccontextmanager
    async def never() -> AsyncIterator[EngineLike]:
        try:
            await trio.sleep(HANG_S)
        finally:
            stopped.set()
        async with scripted()() as engine:
            yield engine

    async def main() -> None:
        opening = asyncio.create_task(aio.open_with(never).__aenter__())
        await asyncio.sleep(0.05)
        opening.cancel()
        await opening

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
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
    until(lambda: engine_threads() == [])


def test_the_loop_runs_on_while_an_engine_opens_and_closes(tiny_path: Path) -> None:
    @asynccontextmanager
    async def slow() -> AsyncIterator[EngineLike]:
        await trio.sleep(0.2)
        async with scripted()() as engine:
            yield engine
        await trio.sleep(0.2)

    async def main() -> int:
        n = 0

        async def count() -> None:
            nonlocal n
            while True:
                n += 1
                await asyncio.sleep(0.01)

        task = asyncio.create_task(count())
        async with aio.open_with(slow):
            pass
        task.cancel()
        return n

    assert asyncio.run(main()) > 10


# -- errors, and the end --------------------------------------------------------------------


def test_errors_come_out_as_themselves(tmp_path: Path) -> None:
    model = ScriptedModel({"the cat": "42", "a hat": ValueError("no hat")}, n_ctx_train=1000)

    async def use(eng: AsyncEngine) -> None:
        with pytest.raises(ProtocolError, match="unknown field colour"):
            await eng.complete("the cat", colour="red")  # type: ignore[call-overload]
        with pytest.raises(ProtocolError, match="unknown field colour"):
            eng.stream("the cat", colour="red")  # type: ignore[call-arg]
        with pytest.raises(InferenceError, match="no hat"):
            await eng.complete("a hat")
        with pytest.raises(InferenceError, match="no hat"):
            async with eng.stream("a hat") as pieces:
                await pieces.result()
        assert (await eng.complete("the cat", into=int)).value == 42

    with_engine(aio.open_with(partial(open_scripted_engine, model)), use)

    async def open_nothing() -> None:
        async with aio.open_engine(tmp_path / "none.gguf"):
            must_not_run("it is opened")

    with pytest.raises(ModelLoadError, match="no such file"):
        asyncio.run(open_nothing())


def test_a_failed_stream_fails_again_with_another_error() -> None:
    model = ScriptedModel({"": ValueError("no hat")})

    async def use(eng: AsyncEngine) -> None:
        pieces = eng.stream("a hat")
        with pytest.raises(InferenceError, match="no hat") as first:
            await pieces.result()
        with pytest.raises(InferenceError, match="no hat") as second:
            await pieces.result()
        assert first.value is not second.value

    with_engine(aio.open_with(scripted(model=model)), use)


def test_a_trio_program_is_told_that_this_is_for_asyncio() -> None:
    async def main() -> None:
        async with aio.open_with(scripted()):
            must_not_run("it is opened")

    with pytest.raises(RuntimeError, match=r"aio is for asyncio.*llamad_trio\.open_engine"):
        trio.run(main)
    assert engine_threads() == []


@pytest.mark.parametrize("error", [KeyError("mine"), StopAsyncIteration("mine"), EngineClosed()])
def test_an_exception_of_the_block_comes_out_as_itself(error: Exception) -> None:
    async def use(eng: AsyncEngine) -> None:
        async with eng.stream(ENDLESS) as pieces:
            await anext(pieces)
            raise error

    async def main() -> BaseException | None:
        try:
            async with aio.open_with(scripted(decode_s=0.001)) as eng:
                await use(eng)
        except BaseException as raised:
            return raised
        return None

    assert asyncio.run(main()) is error


def test_a_crash_reaches_everybody_and_comes_out_of_the_block() -> None:
    model = ScriptedModel("la " * 5000, decode_s=0.001)

    async def use(eng: AsyncEngine) -> None:
        asks = [asyncio.create_task(eng.complete_text("x", max_tokens=3000)) for _ in range(5)]
        await until_stats(eng, lambda stats: stats.steps)
        model.crash_next_step("the books are wrong")
        errors = await asyncio.gather(*asks, return_exceptions=True)
        assert [type(error) for error in errors] == [SessionFatal] * 5
        with pytest.raises(SessionFatal):
            await eng.complete("x")

    with pytest.raises(SessionFatal, match="the books are wrong"):
        with_engine(aio.open_with(partial(open_scripted_engine, model)), use)


def test_leaving_the_block_ends_the_calls_of_all_other_tasks(tiny_path: Path) -> None:
    async def main() -> list[object]:
        async with aio.open_engine(tiny_path, ONE_THREAD, n_slots=2, n_ctx=65536) as eng:
            most = Request("the cat", max_tokens=1_000_000)
            asks = [asyncio.create_task(eng.complete_text(most)) for _ in range(10)]
            await until_stats(eng, lambda stats: not stats.slots["free"])
        assert engine_threads() == []
        assert threads_of_ours() == []
        for ask in ASKED.values():
            with pytest.raises(EngineClosed):
                await ask(eng)
        with pytest.raises(EngineClosed):
            await anext(eng.stream("the cat"))
        assert not eng.is_open
        assert (await eng.stats()).kv_used_tokens == 0
        return await asyncio.gather(*asks, return_exceptions=True)

    assert [type(error) for error in asyncio.run(main())] == [EngineClosed] * 10


def test_the_background_thread_cannot_wait_for_itself() -> None:
    tokens: list[trio.lowlevel.TrioToken] = []

    async def use(eng: AsyncEngine) -> None:
        def from_inside(call: Callable[[], Coroutine[Any, Any, object]]) -> None:
            with pytest.raises(RuntimeError, match="its own background thread"):
                trio.from_thread.run_sync(lambda: asyncio.run(call()), trio_token=tokens[0])

        async with eng.stream(ENDLESS) as pieces:
            for call in (eng.stats, partial(eng.complete, "x"), pieces.result, pieces.aclose):
                await asyncio.to_thread(from_inside, call)
            assert await anext(pieces)

    with_engine(aio.open_with(telling(tokens)), use)


def test_a_model_that_is_not_loaded_has_no_statistics_and_hangs_nobody() -> None:
    async def use(eng: AsyncEngine) -> None:
        with pytest.raises(EngineClosed):
            await eng.stats()
        assert await eng.complete_text("the cat") == "42"
        assert (await eng.stats()).requests["completed"] == 1

    with_engine(aio.open_with(lazy), use)


def test_the_statistics_of_a_daemon_are_those_of_this_moment(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"

    async def use(there: AsyncEngine) -> None:
        async with aio.connect(path) as eng:
            await there.complete("the cat")
            await until_stats(eng, lambda stats: stats.requests["completed"] == 1)

    with_engine(aio.open_with(served(scripted(), path)), use)


@pytest.mark.parametrize("is_woken", [False, True])
def test_a_loop_closed_in_the_middle_leaves_no_request_behind(is_woken: bool) -> None:
    async def use(eng: AsyncEngine) -> None:
        def in_a_loop() -> None:
            loop = asyncio.new_event_loop()
            begun = asyncio.Event()
            tasks = [
                loop.create_task(first_piece(eng, begun)),
                loop.create_task(eng.complete_text(ENDLESS, max_tokens=500)),
            ]
            loop.run_until_complete(begun.wait())
            if is_woken:
                until(lambda: len(loop._ready) > 0)  # type: ignore[attr-defined]
            loop.close()
            left.extend(tasks)
            for task in tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]

        left: list[object] = []
        await asyncio.to_thread(in_a_loop)
        # The next piece of the one finds nobody; the other ends, which nobody hears.
        await until_idle(eng)
        assert (await eng.stats()).requests == {"completed": 1, "failed": 0, "cancelled": 1}
        assert await eng.complete_text("the cat") == "42"

    with_engine(aio.open_with(scripted(decode_s=0.001)), use)


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
    until(lambda: engine_threads() == [])


def test_an_engine_whose_loop_is_gone_closes_itself() -> None:
    loop = asyncio.new_event_loop()
    block = aio.open_with(scripted())
    eng = loop.run_until_complete(block.__aenter__())
    assert loop.run_until_complete(eng.complete_text("the cat")) == "42"
    loop.close()
    with pytest.warns(ResourceWarning, match="unclosed"):  # noqa: PT031
        del eng, block
        gc.collect()
    until(lambda: engine_threads() == [])


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_engines_and_streams_cannot_be_copied_or_pickled(
    duplicate: Callable[[object], object],
) -> None:
    async def use(eng: AsyncEngine) -> None:
        for each in (eng, eng.stream("the cat"), eng.stream_events("the cat")):
            with pytest.raises(TypeError, match=r"Async.* cannot be copied or pickled"):
                duplicate(each)
        assert await eng.complete_text("the cat") == "42"

    with_engine(aio.open_with(scripted()), use)


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
