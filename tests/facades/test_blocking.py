"""The engine for code without an event loop: any number of threads, each with its own request
and nobody else's."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import time
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from math import inf, nan
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from llamad_trio import (
    Busy,
    Choice,
    Completion,
    Done,
    Engine,
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
    UnsupportedFeature,
    blocking,
    open_engine,
    serve_unix,
)
from llamad_trio.background_run import MOST_PARTS
from llamad_trio.testing import ScriptedModel, open_scripted_engine
from llamad_trio.watch.logs import log_events
from tests.facades import (
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
from tests.support import EXACT, ONE_THREAD, threads_of_ours

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from llamad_trio.blocking import BlockingEngine
    from tests.facades import RunScript
    from tests.models import TinyModels

ENDLESS = Request("endless", max_tokens=1_000_000)
CAT = Request("the cat", max_tokens=12, temperature=0)


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    with dying_of_a_hang():
        yield
    assert engine_threads() == []


@pytest.fixture
def tiny_path(tiny_model: TinyModels) -> Path:
    return tiny_model("attention", n_ctx_train=100_000)


def until_idle(eng: BlockingEngine) -> None:
    until(lambda: is_idle(eng.stats()))


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


def test_every_method_gives_what_the_engines_does(tiny_path: Path) -> None:
    async def inside() -> tuple[dict[str, object], object, object]:
        async with open_engine(tiny_path, EXACT, kv_cache=False) as eng:
            given = {name: comparable(await ask(eng)) for name, ask in ASKED.items()}
            return given, eng.info, eng.config

    given, info, config = trio.run(inside)
    with blocking.open_engine(tiny_path, EXACT, kv_cache=False) as eng:
        assert {name: comparable(ask(eng)) for name, ask in ASKED.items()} == given
        assert (eng.info, eng.config) == (info, config)
        assert eng.stats().requests["completed"] == 8  # a score is a request for each text


def test_it_has_every_member_of_an_engine() -> None:
    # But for events: who follows them does so in the Trio run, which the opener can start.
    for name in vars(EngineLike).keys() - {"events"}:
        assert hasattr(blocking.BlockingEngine, name) or name.startswith("_")


def test_a_stream_gives_the_text_piece_by_piece(tiny_path: Path) -> None:
    with blocking.open_engine(tiny_path, EXACT) as eng:
        text = eng.complete_text(CAT)
        with eng.stream(CAT) as pieces:
            early = pieces.completion
            assert early is None
            first = next(pieces)
            assert pieces.text == first != ""
            rest = list(pieces)
            assert "".join([first, *rest]) == pieces.text == text
            assert pieces.result() == pieces.completion
            assert list(pieces) == []
        assert pieces.result().text == text
        assert "".join(eng.stream(CAT)) == text
        assert eng.stream(CAT).result().text == text


def test_a_stream_of_events_ends_with_done() -> None:
    with (
        blocking.open_with(scripted()) as eng,
        eng.stream_events("the cat") as events,
    ):
        *deltas, done = events
        assert isinstance(done, Done)
        assert events.result() == done.completion
        assert [event.text for event in deltas if isinstance(event, TextDelta)] == ["4", "2"]


def test_nothing_is_submitted_before_a_stream_is_entered_or_read() -> None:
    with blocking.open_with(scripted()) as eng:
        entered, read, unused = (eng.stream("the cat") for _ in range(3))
        assert eng.stats().steps == 0
        with entered:
            until(lambda: eng.stats().requests["completed"] == 1)
        next(read)
        read.close()
        del unused
        until_idle(eng)
        assert sum(eng.stats().requests.values()) == 2


def test_the_engine_of_a_daemon_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"

    @asynccontextmanager
    async def daemon() -> AsyncIterator[Engine]:
        async with scripted(decode_s=0.001)() as behind, trio.open_nursery() as nursery:
            assert isinstance(behind, Engine)
            await nursery.start(serve_unix, behind, path)
            yield behind
            nursery.cancel_scope.cancel()

    with blocking.open_with(daemon) as behind:
        with blocking.connect(path) as eng:
            assert eng.complete_text("the cat") == "42"
            with eng.stream(ENDLESS) as pieces:
                next(pieces)
        until_idle(behind)
        with pytest.raises(ProtocolError):
            blocking.connect(path, model="another")


# -- many threads ---------------------------------------------------------------------------


def test_fifty_threads_have_each_their_own_text(tiny_path: Path) -> None:
    asked = [attrs.evolve(CAT, prompt=f"cat {n}", seed=n, temperature=1.5) for n in range(50)]
    with blocking.open_engine(tiny_path, EXACT, n_slots=4, n_ctx=8192) as eng:
        alone = [eng.complete_text(each) for each in asked]

        def ask(n: int) -> str:
            return eng.complete_text(asked[n]) if n % 2 else "".join(eng.stream(asked[n]))

        assert in_threads(50, ask) == alone
        until_idle(eng)
        assert eng.stats().requests == {"completed": 100, "failed": 0, "cancelled": 0}


def test_two_engines_at_once_are_two_threads() -> None:
    with (
        blocking.open_with(scripted("one")) as one,
        blocking.open_with(scripted("two")) as two,
    ):
        assert len(engine_threads()) == 2
        assert [one.complete_text("x"), two.complete_text("x")] == ["one", "two"]


def test_a_slow_reader_pauses_its_slot_and_loses_nothing() -> None:
    with blocking.open_with(scripted({"long": "la " * 500, "": "42"}, n_slots=2)) as eng:
        with eng.stream("long", max_tokens=10_000) as pieces:
            next(pieces)
            until(lambda: eng.stats().slots["paused"] == 1)
            # The engine's own buffer and ours; what is under way; what was read.
            assert eng.stats().decode_tokens <= 64 + MOST_PARTS + 8
            assert eng.complete_text("the cat") == "42"
            assert pieces.result().text == pieces.text == "la " * 500
        until_idle(eng)


# -- cancelling -----------------------------------------------------------------------------


def leave_block(eng: BlockingEngine) -> None:
    with eng.stream(ENDLESS) as pieces:
        next(pieces)


def leave_block_unread(eng: BlockingEngine) -> None:
    with eng.stream(ENDLESS):
        until(lambda: eng.stats().slots["free"] == 0)


def leave_loop(eng: BlockingEngine) -> None:
    for _ in eng.stream(ENDLESS):
        break


def close_stream(eng: BlockingEngine) -> None:
    pieces = eng.stream(ENDLESS)
    next(pieces)
    pieces.close()
    pieces.close()
    with pytest.raises(ValueError, match="cancelled"):
        next(pieces)
    with pytest.raises(ValueError, match="cancelled"):
        pieces.result()
    assert pieces.completion is None


def drop_events(eng: BlockingEngine) -> None:
    events = eng.stream_events(ENDLESS)
    next(events)
    del events


def raise_in_block(eng: BlockingEngine) -> None:
    with pytest.raises(KeyError), eng.stream(ENDLESS) as pieces:
        next(pieces)
        raise KeyError


@pytest.mark.parametrize(
    "leave",
    [leave_block, leave_block_unread, leave_loop, close_stream, drop_events, raise_in_block],
)
def test_a_stream_left_early_frees_its_slot(leave: Callable[[BlockingEngine], None]) -> None:
    with blocking.open_with(scripted(decode_s=0.001, n_slots=1)) as eng:
        leave(eng)
        until_idle(eng)
        assert eng.stats().requests == {"completed": 0, "failed": 0, "cancelled": 1}


def test_a_closed_stream_holds_no_place_that_the_next_request_needs() -> None:
    with blocking.open_with(scripted(decode_s=0.001, n_slots=1, max_queue=0)) as eng:
        for _ in range(50):
            with eng.stream(ENDLESS) as pieces:
                next(pieces)
            assert eng.complete_text("the cat") == "42"  # else it were `Busy`


def test_closing_a_stream_in_another_thread_ends_its_reader() -> None:
    with blocking.open_with(scripted(decode_s=0.2)) as eng:
        pieces = eng.stream(ENDLESS)
        next(pieces)
        closer = threading.Timer(0.05, pieces.close)
        closer.start()
        with pytest.raises(ValueError, match="cancelled"):
            pieces.result()
        closer.join()
        until_idle(eng)


def test_a_timeout_cancels_its_own_request_only() -> None:
    with blocking.open_with(scripted(decode_s=0.001)) as eng, eng.stream(ENDLESS) as other:
        next(other)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"0\.1 s"):
            eng.complete(ENDLESS, timeout=0.1)
        pieces = eng.stream(ENDLESS, timeout=0.5)
        with pytest.raises(TimeoutError):
            pieces.result()
        assert time.monotonic() - began >= 0.6
        assert pieces.text
        assert eng.stats().requests == {"completed": 0, "failed": 0, "cancelled": 2}
        assert next(other)
        assert eng.complete_text("the cat", timeout=60) == "42"


TIMED: dict[str, Callable[[BlockingEngine, Any], object]] = {
    "complete": lambda eng, timeout: eng.complete("the cat", timeout=timeout),
    "complete_text": lambda eng, timeout: eng.complete_text("the cat", timeout=timeout),
    "stream": lambda eng, timeout: eng.stream("the cat", timeout=timeout).result(),
    "stream_events": lambda eng, timeout: eng.stream_events("the cat", timeout=timeout).result(),
    "score": lambda eng, timeout: eng.score("the cat", ["a"], timeout=timeout),
    "choose": lambda eng, timeout: eng.choose("the cat", ["a", "b"], timeout=timeout),
    "render": lambda eng, timeout: eng.render("the cat", timeout=timeout),
    "count_tokens": lambda eng, timeout: eng.count_tokens("the cat", timeout=timeout),
    "tokenize": lambda eng, timeout: eng.tokenize("the cat", timeout=timeout),
    "detokenize": lambda eng, timeout: eng.detokenize([1, 2], timeout=timeout),
}


def test_a_timeout_that_has_passed_already_is_a_timeout() -> None:
    with blocking.open_with(scripted()) as eng:
        for ask in TIMED.values():
            for timeout in (0, -0.001, -inf):
                with pytest.raises(TimeoutError, match="not complete after 0 s"):
                    ask(eng, timeout)


def test_a_timeout_that_is_no_number_is_refused_before_anything_is_submitted() -> None:
    with blocking.open_with(scripted()) as eng:
        for ask in TIMED.values():
            for timeout in (nan, "3", True, [1]):
                with pytest.raises(ProtocolError, match="timeout must be a number"):
                    ask(eng, timeout)
        with pytest.raises(ProtocolError, match="timeout must be a number"):
            eng.stream("the cat", timeout=nan)  # not only when it is read
        assert sum(eng.stats().requests.values()) == 0
        for unlimited in (None, inf, 10**400):
            assert eng.complete_text("the cat", timeout=unlimited) == "42"


def test_ctrl_c_cancels_the_callers_request_and_no_other(run_script: RunScript) -> None:
    script = """
    most = dict(max_tokens=1_000_000)
    def complete():
        eng.complete("endless", **most)
    def read():
        eng.stream("endless", **most).result()
    def loop():
        for piece in eng.stream("endless", **most): pass
    other = []
    def read_beside():
        for piece in eng.stream("endless", **most):
            other.append(piece)
            if len(other) >= 200 and is_done.is_set():
                return
    def interrupt():
        until(lambda: eng.stats().slots["free"] == 2)
        os.kill(os.getpid(), signal.SIGINT)
    with blocking.open_with(scripted()) as eng:
        is_done = threading.Event()
        beside = threading.Thread(target=read_beside)
        beside.start()
        for use in complete, read, loop:
            until(lambda: eng.stats().slots["free"] == 3)
            interrupter = threading.Thread(target=interrupt)
            interrupter.start()
            try:
                use()
            except KeyboardInterrupt:
                interrupter.join()
                print("interrupted", eng.stats().requests["cancelled"])
        is_done.set()
        beside.join()
        print(eng.complete_text("the cat"))
        until(lambda: eng.stats().slots["free"] == 4)
    print(threading.active_count())
    """
    status, lines, errors = run_script(script)
    assert (status, errors) == (0, "")
    assert lines == ["interrupted 1", "interrupted 2", "interrupted 3", "42", "1"]


def test_ctrl_c_ends_a_program_that_computes(run_script: RunScript, tiny_path: Path) -> None:
    script = """
    with blocking.open_engine(sys.argv[1], n_threads=1, n_threads_batch=1, n_ctx=65536) as eng:
        threading.Timer(0.3, lambda: (print("exits"), os.kill(os.getpid(), signal.SIGINT))).start()
        eng.complete("the cat", max_tokens=1_000_000)
    """
    status, _, errors = run_script(script, str(tiny_path))
    assert status in (-2, 130)  # as a program ends that does not catch it
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_stops_a_load(run_script: RunScript) -> None:
    script = """
    from contextlib import asynccontextmanager
    import trio
    @asynccontextmanager
    async def never():
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await trio.sleep_forever()
        finally:
            print("stopped")
        yield
    try:
        blocking.open_with(never)
    except KeyboardInterrupt:
        print("interrupted", [t.name for t in threading.enumerate() if "llamad" in t.name])
    """
    assert run_script(script) == (0, ["stopped", "interrupted []"], "")


@pytest.mark.parametrize("start", THREAD_STARTS.values(), ids=THREAD_STARTS)
def test_a_thread_that_does_not_start_properly_leaves_no_engine_behind(start: Any) -> None:
    with pytest.raises((KeyboardInterrupt, RuntimeError), match=r"^$|no more threads"), start():
        blocking.open_with(scripted())
    until(lambda: engine_threads() == [])
    with blocking.open_with(scripted()) as eng:
        assert eng.complete_text("the cat") == "42"


# -- errors ---------------------------------------------------------------------------------


def tool(n: int) -> int:
    """Count."""
    return n


def test_errors_come_out_as_themselves() -> None:
    model = ScriptedModel({"the cat": "42", "a hat": ValueError("no hat")}, n_ctx_train=1000)
    with blocking.open_with(partial(open_scripted_engine, model, n_ctx=100, n_slots=1)) as eng:
        for ask in (eng.complete, eng.complete_text, eng.stream, eng.count_tokens):
            with pytest.raises(ProtocolError, match="unknown field colour"):
                ask("the cat", colour="red")  # type: ignore[call-overload,call-arg]
        with pytest.raises(ProtocolError):
            eng.complete(5)  # type: ignore[call-overload]
        with pytest.raises(PromptTooLong) as too_long:
            eng.complete("the cat " * 20)
        assert too_long.value.tokens > too_long.value.budget
        with pytest.raises(InferenceError, match="no hat"):
            eng.complete("a hat")
        with pytest.raises(InferenceError, match="no hat"), eng.stream("a hat") as pieces:
            next(pieces)
        with pytest.raises(InferenceError, match="no hat"):
            pieces.result()
        with pytest.raises(IncompleteOutput):
            eng.complete("the cat", into=int, max_tokens=1)
        with pytest.raises(UnsupportedFeature):
            eng.complete("the cat", tools=[tool])
        with pytest.raises(ProtocolError):
            eng.detokenize([-1])
        model.fail_next_step("a bad step")
        with pytest.raises(InferenceError, match="a bad step"):
            eng.complete("the cat")
        assert eng.complete("the cat", into=int).value == 42


def test_a_full_queue_is_busy() -> None:
    opener = scripted(decode_s=0.001, n_slots=1, max_queue=0)
    with blocking.open_with(opener) as eng, eng.stream(ENDLESS) as pieces:
        next(pieces)
        with pytest.raises(Busy):
            eng.complete("the cat")


def time_out(eng: BlockingEngine) -> Any:
    return eng.stream(ENDLESS, timeout=0.05)


def break_down(eng: BlockingEngine) -> Any:
    return eng.stream("a hat")


def be_closed(eng: BlockingEngine) -> Any:
    pieces = eng.stream(ENDLESS)
    next(pieces)
    pieces.close()
    return pieces


@pytest.mark.parametrize(
    ("fail", "kind"),
    [(time_out, TimeoutError), (break_down, InferenceError), (be_closed, ValueError)],
)
def test_a_failed_stream_can_be_read_again_and_again(
    fail: Callable[[BlockingEngine], Any], kind: type[Exception]
) -> None:
    model = ScriptedModel({"endless": "la " * 30_000, "": ValueError("no hat")}, decode_s=0.001)
    with blocking.open_with(scripted(model=model)) as eng:
        pieces = fail(eng)
        lengths, messages = set(), set()
        for _ in range(5):
            with pytest.raises(kind) as caught:
                pieces.result()
            lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
            messages.add(str(caught.value))
        assert len(messages) == 1
        assert len(lengths) <= 2  # the first one was raised by a part that did not come


def test_an_error_raised_twice_is_two_with_the_same_cause() -> None:
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

    with pytest.raises(ExceptionGroup) as group:  # noqa: SIM117
        with blocking.open_with(opener) as eng, eng.stream(ENDLESS) as pieces:
            next(pieces)
            has_begun[0]()
            with pytest.raises(EngineClosed) as first:
                pieces.result()
            with pytest.raises(EngineClosed) as second:
                pieces.result()
    assert first.value is not second.value
    assert first.value.__cause__ is second.value.__cause__ is group.value


def test_what_keeps_an_engine_from_opening_comes_out(tiny_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file"):
        blocking.open_engine(tmp_path / "none.gguf")
    with pytest.raises(ProtocolError, match="unknown config field colour"):
        blocking.open_engine(tiny_path, colour="red")  # type: ignore[call-arg]

    def refuse(fraction: float) -> None:
        raise ZeroDivisionError(fraction)

    with pytest.raises(ZeroDivisionError):
        blocking.open_engine(tiny_path, ONE_THREAD, on_load=refuse)

    class OfTwoError(Exception):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(f"{one} and {two}")

    mine = OfTwoError("a hat", "a cat")  # which a copy of would not be

    def fail() -> Any:
        raise mine

    with pytest.raises(OfTwoError) as caught:
        blocking.open_with(fail)
    assert caught.value is mine
    told: list[float] = []
    with blocking.open_engine(tiny_path, ONE_THREAD, on_load=told.append):
        assert told[-1] == 1.0


def test_a_crash_reaches_everybody_and_comes_out_of_the_block() -> None:
    model = ScriptedModel("la " * 5000, decode_s=0.001)

    def crash() -> None:
        until(lambda: eng.stats().queued == 8)
        model.crash_next_step("the books are wrong")

    with pytest.raises(SessionFatal, match="the books are wrong"):  # noqa: SIM117
        with blocking.open_with(partial(open_scripted_engine, model, n_slots=2)) as eng:
            with eng.stream("x", max_tokens=3000) as pieces:
                next(pieces)
                threading.Thread(target=crash).start()
                errors = in_threads(9, lambda _: eng.complete("x", max_tokens=3000))
                with pytest.raises(SessionFatal):
                    pieces.result()
            assert [str(error) for error in errors] == ["engine stopped: the books are wrong"] * 9
            assert len({id(error) for error in errors}) == 9
            late = in_threads(2, lambda _: eng.complete("x"))
            assert [type(error) for error in late] == [SessionFatal] * 2
            assert late[0] is not late[1]
            assert not eng.is_open
            assert eng.stats().requests["failed"] == 10
    with pytest.raises(SessionFatal):
        eng.complete("x")


def test_an_exception_of_the_block_comes_out_as_itself() -> None:
    mine = ZeroDivisionError("mine")
    with (
        pytest.raises(ZeroDivisionError) as caught,
        blocking.open_with(scripted()) as eng,
        eng.stream(ENDLESS) as pieces,
    ):
        next(pieces)
        raise mine
    assert caught.value is mine
    assert eng.stats().requests["cancelled"] == 1


# -- events ---------------------------------------------------------------------------------


def test_events_are_followed_by_a_task_that_the_opener_starts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @asynccontextmanager
    async def watched() -> AsyncIterator[EngineLike]:
        async with scripted()() as eng, trio.open_nursery() as nursery:
            await nursery.start(log_events, eng)
            yield eng
            nursery.cancel_scope.cancel()

    with caplog.at_level("INFO"), blocking.open_with(watched) as eng:
        eng.complete("the cat")
        until(lambda: "request_finished" in caplog.text)


# -- statistics -----------------------------------------------------------------------------


def test_a_model_that_is_not_loaded_has_no_statistics_and_hangs_nobody() -> None:
    with blocking.open_with(lazy) as eng:
        with pytest.raises(EngineClosed):
            eng.stats()
        assert eng.complete_text("the cat") == "42"
        assert eng.stats().requests["completed"] == 1


def test_the_statistics_of_a_daemon_are_those_of_this_moment(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with blocking.open_with(served(lazy, path)) as there:
        with blocking.connect(path) as eng:
            with pytest.raises(EngineClosed):
                eng.stats()
            there.complete("the cat")
            until(lambda: has_completed(eng, 1))
            there.complete("the cat")
            until(lambda: has_completed(eng, 2))
            there.close()
            assert has_completed(eng, 2)  # nobody tells of others
        assert has_completed(eng, 2)


def has_completed(eng: BlockingEngine, n: int) -> bool:
    try:
        return eng.stats().requests["completed"] == n
    except EngineClosed:  # it did not answer in time, and has told nothing before
        return False


# -- nested use -----------------------------------------------------------------------------


def test_requests_can_be_made_while_a_stream_is_read() -> None:
    with blocking.open_with(scripted({"long": "la " * 100, "": "42"}, n_slots=1)) as eng:
        texts = [eng.complete_text("the cat") for _ in eng.stream("long", max_tokens=300)]
        assert texts == ["42"] * 300
        with eng.stream("long") as outer, eng.stream("the cat") as inner:
            assert next(outer) == "l"
            assert inner.result().text == "42"


def test_it_can_be_called_inside_other_event_loops() -> None:
    def use() -> str:
        with blocking.open_with(scripted()) as eng:
            return eng.complete_text("the cat") + "".join(eng.stream("the cat"))

    async def in_task() -> str:
        return use()

    assert trio.run(in_task) == asyncio.run(in_task()) == "4242"


def test_the_background_thread_cannot_wait_for_itself() -> None:
    tokens: list[trio.lowlevel.TrioToken] = []
    with blocking.open_with(telling(tokens)) as eng:
        with eng.stream("the cat") as pieces:
            for call in (eng.stats, partial(eng.complete, "the cat"), eng.close, pieces.close):
                with pytest.raises(RuntimeError, match="its own background thread"):
                    trio.from_thread.run_sync(call, trio_token=tokens[0])
            assert pieces.result().text == "42"
        with eng.stream(ENDLESS) as pieces:
            # More than can wait for a reader: at some time it has to wait itself.
            with pytest.raises(RuntimeError, match="its own background thread"):
                trio.from_thread.run_sync(list, pieces, trio_token=tokens[0])
            assert next(pieces)
        assert eng.complete_text("the cat") == "42"


def test_a_validator_cannot_close_the_engine_that_waits_for_it() -> None:
    def close(_self: object, _field: object, _value: bool) -> None:
        with pytest.raises(RuntimeError, match="its own background thread"):
            eng.close()

    @attrs.frozen
    class Closing:
        answer: bool = attrs.field(validator=close)

    with blocking.open_with(scripted('{"answer": true}')) as eng:
        assert isinstance(eng.complete("the cat", into=Closing).value, Closing)
        assert eng.is_open


# -- the end --------------------------------------------------------------------------------


def test_nothing_is_left_of_a_closed_engine(tiny_path: Path) -> None:
    eng = blocking.open_engine(tiny_path, ONE_THREAD, lane=Lane())
    assert len(engine_threads()) == 1
    assert eng.complete("the cat", max_tokens=2).generated_tokens == 2
    eng.close()
    eng.close()
    assert engine_threads() == []
    assert threads_of_ours() == []


def test_a_closed_engine_refuses_and_still_tells_what_it_was() -> None:
    with blocking.open_with(scripted()) as eng:
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


def test_closing_ends_the_calls_of_all_other_threads(tiny_path: Path) -> None:
    eng = blocking.open_engine(tiny_path, ONE_THREAD, n_slots=2, n_ctx=65536)

    def use(n: int) -> object:
        if n < 10:
            return eng.complete("the cat", max_tokens=1_000_000)
        if n < 12:
            return eng.stream("the cat", max_tokens=1_000_000).result()
        until(lambda: not eng.is_open or not eng.stats().slots["free"])
        eng.close()
        return None

    results = in_threads(15, use)
    assert [type(result) for result in results[:12]] == [EngineClosed] * 12
    assert results[12:] == [None] * 3


def test_nobody_waits_for_what_an_engine_still_has_to_tidy_up() -> None:
    can_end = threading.Event()

    @asynccontextmanager
    async def opener() -> AsyncIterator[EngineLike]:
        async with scripted(decode_s=0.001)() as engine:
            yield engine
        await trio.to_thread.run_sync(can_end.wait)

    eng = blocking.open_with(opener)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(eng.complete, ENDLESS)
        until(lambda: not is_idle(eng.stats()))
        closing = pool.submit(eng.close)
        assert isinstance(running.exception(), EngineClosed)
        with pytest.raises(EngineClosed):
            eng.complete("the cat")
        assert not closing.done()
        can_end.set()
        closing.result()


def test_an_engine_that_nobody_has_any_more_closes_itself() -> None:
    eng = blocking.open_with(scripted())
    pieces = eng.stream("the cat")
    gone = weakref.ref(eng)
    del eng
    assert "".join(pieces) == "42"  # whoever reads has it
    with pytest.warns(ResourceWarning, match="unclosed"):  # noqa: PT031
        del pieces
        gc.collect()
    assert gone() is None
    until(lambda: engine_threads() == [])


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_engines_and_streams_cannot_be_copied_or_pickled(
    duplicate: Callable[[object], object],
) -> None:
    with blocking.open_with(scripted()) as eng:
        pieces = eng.stream("the cat")
        for each in (eng, pieces, eng.stream_events("the cat")):
            with pytest.raises(TypeError, match=r"Blocking.* cannot be copied or pickled"):
                duplicate(each)
        assert eng.complete_text("the cat") == "".join(pieces) == "42"


STREAM = """
pieces = eng.stream("endless", max_tokens=1_000_000)
next(pieces)
"""
LOOP = """
for piece in eng.stream("endless", max_tokens=1_000_000):
    print("exits")
    sys.exit()
"""
DAEMON_THREAD = """
threading.Thread(
    target=eng.complete, args=("endless",), kwargs={"max_tokens": 1_000_000}, daemon=True
).start()
until(lambda: eng.stats().slots["free"] < 4)
"""
THREAD = """
def ask():
    try:
        eng.complete("endless", max_tokens=1_000_000)
    except EngineClosed as error:
        print(error)
    try:
        blocking.open_with(scripted())
    except RuntimeError as error:
        print(error)
threading.Thread(target=ask).start()
until(lambda: eng.stats().slots["free"] < 4)
"""
POOL = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor()
pool.submit(eng.complete, "endless", max_tokens=1_000_000)
until(lambda: eng.stats().slots["free"] < 4)
"""


@pytest.mark.parametrize(
    ("left", "says"),
    [
        ("", []),
        (STREAM, []),
        (LOOP, []),
        (DAEMON_THREAD, []),
        (
            THREAD,
            ["the engine is closed", "an engine cannot be opened while the interpreter exits"],
        ),
        (POOL, []),
    ],
    ids=["idle", "stream", "loop", "daemon thread", "thread", "pool"],
)
def test_the_interpreter_exits_with_an_engine_left_open(
    run_script: RunScript, left: str, says: list[str]
) -> None:
    script = f"eng = blocking.open_with(scripted())\n{left}\nprint('exits')"
    status, lines, errors = run_script(script)
    assert (status, errors) == (0, "")
    assert lines == ["exits", *says]


def test_the_interpreter_exits_with_a_model_that_computes(
    run_script: RunScript, tiny_path: Path
) -> None:
    opened = (
        "eng = blocking.open_engine(sys.argv[1], n_threads=1, n_threads_batch=1, n_ctx=65536)\n"
    )
    script = opened + STREAM + DAEMON_THREAD + "print('exits')"
    status, lines, errors = run_script(script, str(tiny_path))
    assert (status, lines, errors) == (0, ["exits"], "")


def test_a_forked_child_is_refused_instead_of_hanging(run_script: RunScript) -> None:
    script = """
    warnings.simplefilter("ignore", DeprecationWarning)
    with blocking.open_with(scripted()) as eng:
        pid = os.fork()
        try:
            print(eng.complete_text("the cat"))
        except EngineClosed:
            eng.close()
            print("closed")
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    status, lines, errors = run_script(script)
    assert (status, sorted(lines), errors) == (0, ["42", "7", "closed"], "")


def test_a_stream_begun_before_a_fork_hangs_nobody_in_the_child(run_script: RunScript) -> None:
    script = """
    def begun():
        pieces = eng.stream("endless", max_tokens=1_000_000)
        next(pieces)
        return pieces

    def left():
        with entered: pass

    with blocking.open_with(scripted()) as eng, eng.stream("endless", max_tokens=99) as entered:
        read, lost = begun(), [begun()]
        for use in (lambda: list(read), read.result, read.close, left, lost.clear, eng.stats):
            in_child(use)
        print(len(entered.result().text), next(read) != "", eng.complete_text("the cat"))
    """
    status, lines, errors = run_script(script)
    assert (status, errors) == (0, "")
    *children, parent = lines
    assert children == ["closed", "closed", "returns", "returns", "returns", "returns"]
    assert parent.endswith("True 42")


def test_a_child_can_have_an_engine_of_its_own(run_script: RunScript) -> None:
    script = """
    def open_another():
        with blocking.open_with(scripted()) as another:
            print(another.complete_text("the cat"))

    with blocking.open_with(scripted()) as eng:
        in_child(open_another)
    """
    assert run_script(script) == (0, ["42", "returns"], "")
