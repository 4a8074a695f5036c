"""What the two ways from outside of Trio have in common: nearly all, for any number of threads or
of tasks, each with its own request and nobody else's."""

from __future__ import annotations

import copy
import pickle
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from llamad_trio import (
    Busy,
    Choice,
    Completion,
    Done,
    EngineClosed,
    EngineLike,
    IncompleteOutput,
    InferenceError,
    Lane,
    ModelLoadError,
    PromptTooLong,
    ProtocolError,
    Request,
    SessionFatal,
    TextDelta,
    aio,
    blocking,
    open_engine,
)
from llamad_trio.background_run import MOST_PARTS
from llamad_trio.testing import ScriptedModel
from llamad_trio.watch.logs import log_events
from tests.facades import ENDLESS, engine_threads, is_idle, lazy, scripted, served
from tests.serving.support import wait_for
from tests.support import EXACT, ONE_THREAD, must_not_run, threads_of_ours

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

CAT = Request("the cat", max_tokens=12, temperature=0)


def until_idle(eng: Any) -> None:
    wait_for(lambda: is_idle(eng.stats()))


def in_threads(n: int, function: Callable[[int], object]) -> list[object]:
    """What `function` returns, or raises, for each of the first `n` numbers, all at once."""
    barrier = threading.Barrier(n)

    def run(number: int) -> object:
        barrier.wait()
        try:
            return function(number)
        except Exception as error:
            return error

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, range(n)))


# -- the same engine ------------------------------------------------------------------------

ASKED: dict[str, Callable[[Any], Any]] = {
    "complete": lambda eng: eng.complete(CAT),
    "fields": lambda eng: eng.complete("the cat", max_tokens=5, seed=3, temperature=1.5),
    "into": lambda eng: eng.complete("a number", into=bool, describe=True, temperature=0),
    "complete_text": lambda eng: eng.complete_text(CAT),
    "score": lambda eng: eng.score("the cat", ["a", "the"], raw=True),
    "choose": lambda eng: eng.choose("the cat", ["in", "er"], raw=True),
    "render": lambda eng: eng.render("the cat", system="a hat"),
    "count_tokens": lambda eng: eng.count_tokens("the cat", system="a hat"),
    "tokenize": lambda eng: eng.tokenize("<s>the cat", special=True),
    "detokenize": lambda eng: eng.detokenize([280, 281, 282]),
}


def comparable(value: Any) -> object:
    if isinstance(value, Completion):
        return attrs.evolve(value, ttft_s=0.0, duration_s=0.0)
    # Who shares a step moves a logit a little.
    if isinstance(value, Choice):
        return value.text, [round(probability, 2) for probability in value.probabilities]
    if isinstance(value, list) and isinstance(value[0], float):
        return [round(score, 2) for score in value]
    return value


def test_every_method_gives_what_the_engines_does(facade: Any, tiny_path: Path) -> None:
    async def inside() -> tuple[dict[str, object], object, object]:
        async with open_engine(tiny_path, EXACT, kv_cache=False) as eng:
            given = {name: comparable(await ask(eng)) for name, ask in ASKED.items()}
            return given, eng.info, eng.config

    given, info, config = trio.run(inside)
    with facade.open_engine(tiny_path, EXACT, kv_cache=False) as eng:
        assert {name: comparable(ask(eng)) for name, ask in ASKED.items()} == given
        assert (eng.info, eng.config) == (info, config)
        assert eng.stats().requests["completed"] == 8  # a score is a request for each text


@pytest.mark.parametrize("kind", [blocking.BlockingEngine, aio.AsyncEngine])
def test_it_has_every_member_of_an_engine(kind: type) -> None:
    # But for events: who follows them does so in the Trio run, which the opener can start.
    for name in vars(EngineLike).keys() - {"events"}:
        assert hasattr(kind, name) or name.startswith("_")


def test_a_stream_gives_the_text_piece_by_piece(facade: Any, tiny_path: Path) -> None:
    with facade.open_engine(tiny_path, EXACT) as eng:
        text = eng.complete_text(CAT)
        with eng.stream(CAT) as pieces:
            assert pieces.completion is None
            first = next(pieces)
            assert pieces.text == first != ""
            rest = list(pieces)
            assert "".join([first, *rest]) == pieces.text == text
            assert pieces.result() == pieces.completion
            assert list(pieces) == []
        assert pieces.result().text == text
        assert "".join(eng.stream(CAT)) == text
        assert eng.stream(CAT).result().text == text


def test_a_stream_of_events_ends_with_done(facade: Any) -> None:
    with facade.open_with(scripted()) as eng, eng.stream_events("the cat") as events:
        *deltas, done = events
        assert isinstance(done, Done)
        assert events.result() == done.completion
        assert [event.text for event in deltas if isinstance(event, TextDelta)] == ["4", "2"]


def test_nothing_is_submitted_before_a_stream_is_entered_or_read(facade: Any) -> None:
    with facade.open_with(scripted()) as eng:
        entered, read, unused = (eng.stream("the cat") for _ in range(3))
        assert eng.stats().steps == 0
        with entered:
            wait_for(lambda: eng.stats().requests["completed"] == 1)
        next(read)
        read.close()
        del unused
        until_idle(eng)
        assert sum(eng.stats().requests.values()) == 2


def test_the_engine_of_a_daemon_can_be_used(facade: Any, sock: Path) -> None:
    with facade.open_with(served(scripted(decode_s=0.001), sock)) as behind:
        with facade.connect(sock) as eng:
            assert eng.complete_text("the cat") == "42"
            with eng.stream(ENDLESS) as pieces:
                next(pieces)
        until_idle(behind)
        with pytest.raises(ProtocolError), facade.connect(sock, model="another"):
            must_not_run("it is connected")


def test_requests_can_be_made_while_a_stream_is_read(facade: Any) -> None:
    with facade.open_with(scripted({"long": "la " * 100, "": "42"}, n_slots=1)) as eng:
        texts = [eng.complete_text("the cat") for _ in eng.stream("long", max_tokens=300)]
        assert texts == ["42"] * 300
        with eng.stream("long") as outer, eng.stream("the cat") as inner:
            assert next(outer) == "l"
            assert inner.result().text == "42"


def test_events_are_followed_by_a_task_that_the_opener_starts(
    facade: Any, caplog: pytest.LogCaptureFixture
) -> None:
    @asynccontextmanager
    async def watched() -> AsyncIterator[EngineLike]:
        async with scripted()() as eng, trio.open_nursery() as nursery:
            await nursery.start(log_events, eng)
            yield eng
            nursery.cancel_scope.cancel()

    with caplog.at_level("INFO"), facade.open_with(watched) as eng:
        eng.complete("the cat")
        wait_for(lambda: "request_finished" in caplog.text)


# -- many at once ---------------------------------------------------------------------------


def test_fifty_threads_have_each_their_own_text(facade: Any, tiny_path: Path) -> None:
    asked = [attrs.evolve(CAT, prompt=f"cat {n}", seed=n, temperature=1.5) for n in range(50)]
    with facade.open_engine(tiny_path, EXACT, n_slots=4, n_ctx=8192) as eng:
        alone = [eng.complete_text(each) for each in asked]

        def ask(n: int) -> str:
            return eng.complete_text(asked[n]) if n % 2 else "".join(eng.stream(asked[n]))

        assert in_threads(50, ask) == alone
        until_idle(eng)
        assert eng.stats().requests == {"completed": 100, "failed": 0, "cancelled": 0}


def test_two_engines_at_once_are_two_threads(facade: Any) -> None:
    with facade.open_with(scripted("one")) as one, facade.open_with(scripted("two")) as two:
        assert len(engine_threads()) == 2
        assert [one.complete_text("x"), two.complete_text("x")] == ["one", "two"]


def test_a_slow_reader_pauses_its_slot_and_loses_nothing(facade: Any) -> None:
    with facade.open_with(scripted({"long": "la " * 500, "": "42"}, n_slots=2)) as eng:
        with eng.stream("long", max_tokens=10_000) as pieces:
            next(pieces)
            wait_for(lambda: eng.stats().slots["paused"] == 1)
            # The engine's own buffer and ours; what is under way; what was read.
            assert eng.stats().decode_tokens <= 64 + MOST_PARTS + 8
            assert eng.complete_text("the cat") == "42"
            assert pieces.result().text == pieces.text == "la " * 500
        until_idle(eng)


# -- cancelling -----------------------------------------------------------------------------


def leave_block(eng: Any) -> None:
    with eng.stream(ENDLESS) as pieces:
        next(pieces)


def leave_block_unread(eng: Any) -> None:
    with eng.stream(ENDLESS):
        wait_for(lambda: eng.stats().slots["free"] == 0)


def leave_loop(eng: Any) -> None:
    for _ in eng.stream(ENDLESS):
        break


def close_stream(eng: Any) -> None:
    pieces = closed_stream(eng)
    pieces.close()
    with pytest.raises(ValueError, match="cancelled"):
        next(pieces)
    with pytest.raises(ValueError, match="cancelled"):
        pieces.result()
    assert pieces.completion is None


def drop_events(eng: Any) -> None:
    events = eng.stream_events(ENDLESS)
    next(events)
    del events


def raise_in_block(eng: Any) -> None:
    with pytest.raises(KeyError), eng.stream(ENDLESS) as pieces:
        next(pieces)
        raise KeyError


@pytest.mark.parametrize(
    "leave",
    [leave_block, leave_block_unread, leave_loop, close_stream, drop_events, raise_in_block],
)
def test_a_stream_left_early_frees_its_slot(facade: Any, leave: Callable[[Any], None]) -> None:
    with facade.open_with(scripted(decode_s=0.001, n_slots=1)) as eng:
        leave(eng)
        until_idle(eng)
        assert eng.stats().requests == {"completed": 0, "failed": 0, "cancelled": 1}


def test_a_closed_stream_holds_no_place_that_the_next_request_needs(facade: Any) -> None:
    with facade.open_with(scripted(decode_s=0.001, n_slots=1, max_queue=0)) as eng:
        for _ in range(50):
            leave_block(eng)
            assert eng.complete_text("the cat") == "42"  # else it were `Busy`


def test_closing_a_stream_elsewhere_ends_its_reader(facade: Any) -> None:
    with facade.open_with(scripted(decode_s=0.2)) as eng:
        pieces = eng.stream(ENDLESS)
        next(pieces)
        closer = threading.Timer(0.05, pieces.close)
        closer.start()
        with pytest.raises(ValueError, match="cancelled"):
            pieces.result()
        closer.join()
        until_idle(eng)


# -- errors ---------------------------------------------------------------------------------


def test_errors_come_out_as_themselves(facade: Any) -> None:
    model = ScriptedModel({"the cat": "42", "a hat": ValueError("no hat")}, n_ctx_train=1000)
    with facade.open_with(scripted(model=model, n_ctx=100, n_slots=1)) as eng:
        for ask in (eng.complete, eng.complete_text, eng.stream, eng.count_tokens):
            with pytest.raises(ProtocolError, match="unknown field colour"):
                ask("the cat", colour="red")
        with pytest.raises(PromptTooLong):
            eng.complete("the cat " * 20)
        with pytest.raises(InferenceError, match="no hat"):
            eng.complete("a hat")
        with pytest.raises(InferenceError, match="no hat"), eng.stream("a hat") as pieces:
            next(pieces)
        with pytest.raises(InferenceError, match="no hat"):
            pieces.result()
        with pytest.raises(IncompleteOutput):
            eng.complete("the cat", into=int, max_tokens=1)
        assert eng.complete("the cat", into=int).value == 42


def test_a_full_queue_is_busy(facade: Any) -> None:
    opener = scripted(decode_s=0.001, n_slots=1, max_queue=0)
    with facade.open_with(opener) as eng, eng.stream(ENDLESS) as pieces:
        next(pieces)
        with pytest.raises(Busy):
            eng.complete("the cat")


def failing_stream(eng: Any) -> Any:
    return eng.stream("a hat")


def closed_stream(eng: Any) -> Any:
    pieces = eng.stream(ENDLESS)
    next(pieces)
    pieces.close()
    return pieces


@pytest.mark.parametrize(
    ("fail", "kind"), [(failing_stream, InferenceError), (closed_stream, ValueError)]
)
def test_a_failed_stream_can_be_read_again_and_again(
    facade: Any, fail: Callable[[Any], Any], kind: type[Exception]
) -> None:
    model = ScriptedModel({"endless": "la " * 30_000, "": ValueError("no hat")}, decode_s=0.001)
    with facade.open_with(scripted(model=model)) as eng:
        check_fails_alike(fail(eng), kind)


def check_fails_alike(pieces: Any, kind: type[Exception]) -> None:
    lengths, messages = set(), set()
    for _ in range(5):
        with pytest.raises(kind) as caught:
            pieces.result()
        lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert len(lengths) <= 2  # the first one was raised by a part that did not come


def test_an_error_raised_twice_is_two_with_the_same_cause(facade: Any) -> None:
    has_begun: list[Callable[[], None]] = []

    @asynccontextmanager
    async def opener() -> AsyncIterator[EngineLike]:
        begun = trio.Event()
        has_begun.append(partial(trio.lowlevel.current_trio_token().run_sync_soon, begun.set))

        async def die() -> None:
            await begun.wait()
            raise ZeroDivisionError("a watcher died")

        async with scripted(decode_s=0.001)() as engine, trio.open_nursery() as nursery:
            nursery.start_soon(die)
            yield engine

    errors: list[BaseException] = []
    with pytest.raises(ExceptionGroup) as group:  # noqa: SIM117
        with facade.open_with(opener) as eng, eng.stream(ENDLESS) as pieces:
            next(pieces)
            has_begun[0]()
            for _ in range(2):
                with pytest.raises(EngineClosed) as caught:
                    pieces.result()
                errors.append(caught.value)
    first, second = errors
    assert first is not second
    assert first.__cause__ is second.__cause__ is group.value


class OfTwoError(Exception):
    """An exception of which `copy` makes no other."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def test_what_keeps_an_engine_from_opening_comes_out(
    facade: Any, tiny_path: Path, tmp_path: Path
) -> None:
    mine = OfTwoError("a hat", "a cat")

    def refuse(fraction: float) -> None:
        raise ZeroDivisionError(fraction)

    def fail() -> Any:
        raise mine

    with pytest.raises(ModelLoadError, match="no such file"), facade.open_engine(tmp_path / "none"):
        must_not_run("it is opened")
    with pytest.raises(ProtocolError, match="colour"), facade.open_engine(tiny_path, colour="red"):
        must_not_run("it is opened")
    with (
        pytest.raises(ZeroDivisionError),
        facade.open_engine(tiny_path, ONE_THREAD, on_load=refuse),
    ):
        must_not_run("it is opened")
    with pytest.raises(OfTwoError) as caught, facade.open_with(fail):
        must_not_run("it is opened")
    assert caught.value is mine
    told: list[float] = []
    with facade.open_engine(tiny_path, ONE_THREAD, on_load=told.append):
        assert told[-1] == 1.0


def test_a_crash_reaches_everybody_and_comes_out_of_the_block(facade: Any) -> None:
    model = ScriptedModel("la " * 30_000, decode_s=0.001, n_ctx_train=100_000)

    def have_all_come() -> bool:
        stats = eng.stats()
        return bool(stats.slots["free"] == 0 and stats.queued == 8)

    def crash() -> None:
        wait_for(have_all_come)  # who comes later is told as well, but not counted as failed
        model.crash_next_step("the books are wrong")

    block = facade.open_with(scripted(model=model, n_slots=2))
    eng = block.__enter__()
    with eng.stream(ENDLESS) as pieces:
        next(pieces)
        threading.Thread(target=crash).start()
        errors = in_threads(9, lambda _: eng.complete(ENDLESS))
        with pytest.raises(SessionFatal):
            pieces.result()
    assert [str(error) for error in errors] == ["engine stopped: the books are wrong"] * 9
    assert len({id(error) for error in errors}) == 9
    late = in_threads(2, lambda _: eng.complete("x"))
    assert [type(error) for error in late] == [SessionFatal] * 2
    assert late[0] is not late[1]
    assert not eng.is_open
    assert eng.stats().requests["failed"] == 10
    with pytest.raises(SessionFatal, match="the books are wrong"):
        block.__exit__(None, None, None)
    with pytest.raises(SessionFatal):
        eng.complete("x")


@pytest.mark.parametrize("mine", [KeyError("mine"), StopAsyncIteration("mine"), EngineClosed()])
def test_an_exception_of_the_block_comes_out_as_itself(facade: Any, mine: Exception) -> None:
    with (
        pytest.raises(type(mine)) as caught,
        facade.open_with(scripted(decode_s=0.001)) as eng,
        eng.stream(ENDLESS) as pieces,
    ):
        next(pieces)
        raise mine
    assert caught.value is mine
    assert eng.stats().requests["cancelled"] == 1


# -- statistics -----------------------------------------------------------------------------


def test_a_model_that_is_not_loaded_has_no_statistics_and_hangs_nobody(facade: Any) -> None:
    with facade.open_with(lazy) as eng:
        with pytest.raises(EngineClosed):
            eng.stats()
        assert eng.complete_text("the cat") == "42"
        assert eng.stats().requests["completed"] == 1


def test_the_statistics_of_a_daemon_are_those_of_this_moment(facade: Any, sock: Path) -> None:
    def has_completed(n: int) -> bool:
        try:
            return bool(eng.stats().requests["completed"] == n)
        except EngineClosed:  # it did not answer in time, and has told nothing before
            return False

    block = facade.open_with(served(lazy, sock))
    there = block.__enter__()
    with facade.connect(sock) as eng:
        with pytest.raises(EngineClosed):
            eng.stats()
        for n in (1, 2):
            there.complete("the cat")
            wait_for(partial(has_completed, n))
        block.__exit__(None, None, None)
        assert has_completed(2)  # nobody tells of others
    assert has_completed(2)


# -- the end --------------------------------------------------------------------------------


def test_nothing_is_left_of_a_closed_engine(facade: Any, tiny_path: Path) -> None:
    with facade.open_engine(tiny_path, ONE_THREAD, lane=Lane()) as eng:
        assert len(engine_threads()) == 1
        assert eng.complete("the cat", max_tokens=2).generated_tokens == 2
    assert engine_threads() == []
    assert threads_of_ours() == []


def test_a_closed_engine_refuses_and_still_tells_what_it_was(facade: Any) -> None:
    with facade.open_with(scripted()) as eng:
        before = eng.stream("the cat")
        eng.complete("the cat")
        was_open, info, config = eng.is_open, eng.info, eng.config
    for ask in ASKED.values():
        with pytest.raises(EngineClosed):
            ask(eng)
    for stream in (before, eng.stream("the cat"), eng.stream_events("the cat")):
        with pytest.raises(EngineClosed):
            next(stream)
    with pytest.raises(EngineClosed), eng.stream("the cat") as pieces:
        pieces.result()
    assert (was_open, eng.is_open) == (True, False)
    assert (eng.info, eng.config) == (info, config)
    assert eng.stats().requests["completed"] == 1


def test_leaving_the_block_ends_the_calls_of_all_others(facade: Any, tiny_path: Path) -> None:
    asked = Request("the cat", max_tokens=1_000_000)
    with ThreadPoolExecutor(12) as pool:
        with facade.open_engine(tiny_path, ONE_THREAD, n_slots=2, n_ctx=65536) as eng:
            calls = [pool.submit(eng.complete, asked) for _ in range(10)]
            calls += [pool.submit(lambda: eng.stream(asked).result()) for _ in range(2)]
            wait_for(lambda: not eng.stats().slots["free"])
        assert [type(call.exception()) for call in calls] == [EngineClosed] * 12
    assert eng.stats().kv_used_tokens == 0


def test_nobody_waits_for_what_an_engine_still_has_to_tidy_up(facade: Any) -> None:
    can_end = threading.Event()

    @asynccontextmanager
    async def opener() -> AsyncIterator[EngineLike]:
        async with scripted(decode_s=0.001)() as engine:
            yield engine
        await trio.to_thread.run_sync(can_end.wait)

    block = facade.open_with(opener)
    eng = block.__enter__()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(eng.complete, ENDLESS)
        wait_for(lambda: not is_idle(eng.stats()))
        closing = pool.submit(block.__exit__, None, None, None)
        assert isinstance(running.exception(), EngineClosed)
        with pytest.raises(EngineClosed):
            eng.complete("the cat")
        assert not closing.done()
        can_end.set()
        closing.result()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_engines_and_streams_cannot_be_copied_or_pickled(
    facade: Any, duplicate: Callable[[object], object]
) -> None:
    with facade.open_with(scripted()) as eng:
        pieces = eng.stream("the cat")
        for each in (eng, pieces, eng.stream_events("the cat")):
            with pytest.raises(TypeError, match=r"(Blocking|Async).* cannot be copied or pickled"):
                duplicate(getattr(each, "inner", each))
        assert eng.complete_text("the cat") == "".join(pieces) == "42"
