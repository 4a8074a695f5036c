"""What happens in an engine is told once, in order, and as it was, whatever comes and goes."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import attrs
import pytest
import trio
import trio.testing
from hypothesis import example, given, settings, strategies as st

from llamad_trio import Busy, EngineClosed, InferenceError, PromptTooLong, Request, SessionFatal
from llamad_trio.core.engine_events import (
    EngineEvent,
    EngineLoaded,
    EngineStopped,
    FirstToken,
    PrefixReused,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RequestStarted,
    StepDone,
)
from llamad_trio.engine import reporter
from llamad_trio.engine.assembly import open_named_engine
from llamad_trio.testing import ScriptedModel, open_scripted_engine
from llamad_trio.watch.broadcast import Broadcast
from tests.support import ONE_THREAD, read_all, until_queued
from tests.watch.support import Watcher, watched

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trio.testing import MockClock

    from llamad_trio import Engine, EngineStats


ENDS = (RequestFinished, RequestFailed, RequestCancelled)


async def test_a_request_is_told_from_beginning_to_end(autojump_clock: MockClock) -> None:
    model = ScriptedModel("yes", decode_s=1, prefill_s=0.5)
    async with watched(model) as (engine, watcher):
        began = trio.current_time()
        done = await engine.complete("ab", raw=True)
    first, last = began + 2, began + 5
    queued, started, first_token, finished = watcher.of(1)
    assert queued == RequestQueued(time=began, engine="", request_id=1, kind="completion")
    assert started == RequestStarted(
        time=began, engine="", request_id=1, queued_s=0, prompt_tokens=2
    )
    assert first_token == FirstToken(time=first, engine="", request_id=1, ttft_s=done.ttft_s)
    assert finished == RequestFinished(
        time=last,
        engine="",
        request_id=1,
        kind="completion",
        duration_s=done.duration_s,
        prompt_tokens=done.prompt_tokens,
        generated_tokens=done.generated_tokens,
        cached_tokens=done.cached_tokens,
        finish_reason=done.finish_reason,
        ttft_s=done.ttft_s,
    )
    assert (done.ttft_s, done.duration_s, done.generated_tokens) == (2, 5, 4)


async def test_what_waits_for_a_slot_says_how_long(autojump_clock: MockClock) -> None:
    model = ScriptedModel("yes", decode_s=1)
    async with watched(model, n_slots=1) as (engine, watcher), trio.open_nursery() as users:
        users.start_soon(engine.complete, "a")
        await trio.testing.wait_all_tasks_blocked()
        users.start_soon(engine.complete, "b")
    assert [event.queued_s for event in watcher.all(RequestStarted)] == [0, 4]


async def test_a_reused_prefix_is_told_before_the_first_token(autojump_clock: MockClock) -> None:
    async with watched("yes") as (engine, watcher):
        await engine.complete("a prompt that is long enough to be kept")
        again = await engine.complete("a prompt that is long enough to be kept")
    assert watcher.names(1) == ["RequestQueued", "RequestStarted", "FirstToken", "RequestFinished"]
    assert watcher.names(2)[1:4] == ["RequestStarted", "PrefixReused", "FirstToken"]
    (reused,) = watcher.all(PrefixReused)
    assert reused.cached_tokens == again.cached_tokens > 0


async def test_each_way_to_fail_is_told(autojump_clock: MockClock) -> None:
    model = ScriptedModel({"good": "yes"})
    async with watched(model, n_ctx=64) as (engine, watcher):
        for prompt in ("x" * 100, "not scripted"):
            with pytest.raises((PromptTooLong, InferenceError)):
                await engine.complete(prompt)
        model.fail_next_step("of a test")
        with pytest.raises(InferenceError, match="of a test"):
            await engine.complete("good")
    assert watcher.names(1) == ["RequestQueued", "RequestFailed"]
    assert watcher.names(2) == ["RequestQueued", "RequestStarted", "RequestFailed"]
    errors = [event.error for event in watcher.all(RequestFailed)]
    assert [type(error) for error in errors] == [PromptTooLong, InferenceError, InferenceError]
    assert str(errors[2]) == "inference: of a test"
    assert all(error.__traceback__ is None for error in errors), "it would keep frames alive"


@pytest.mark.parametrize(
    ("error", "raised", "reason"),
    [
        (SessionFatal("of a test"), SessionFatal, "engine stopped: of a test"),
        # A bug: this is what the body gets first.
        (ZeroDivisionError("of a test"), EngineClosed, "ZeroDivisionError: of a test"),
    ],
)
async def test_a_crash_fails_everybody_and_says_why_the_engine_stopped(
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    raised: type[Exception],
    reason: str,
) -> None:
    def step(_: object) -> None:
        raise error

    watcher = Watcher()
    model = ScriptedModel("yes", decode_s=1)
    monkeypatch.setattr(model, "step", step)
    async with trio.open_nursery() as nursery:
        with pytest.raises(raised):
            async with open_scripted_engine(model) as engine:
                await nursery.start(watcher.run, engine)
                await engine.complete("a")
    assert watcher.names(1) == ["RequestQueued", "RequestStarted", "RequestFailed"]
    (failed,) = watcher.all(RequestFailed)
    assert isinstance(failed.error, raised)
    assert watcher.events[-1] == EngineStopped(time=trio.current_time(), engine="", reason=reason)


async def test_the_end_of_the_block_fails_what_runs_and_ends_the_events(
    autojump_clock: MockClock,
) -> None:
    model = ScriptedModel("yes", decode_s=1)
    async with trio.open_nursery() as nursery, watched(model) as (engine, watcher):

        async def ask() -> None:
            with pytest.raises(EngineClosed):
                await engine.complete("a")

        nursery.start_soon(ask)
        await trio.sleep(1.5)
    failed, stopped = watcher.events[-2:]
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, EngineClosed)
    assert stopped == EngineStopped(time=1.5, engine="", reason=None)


async def test_a_cancel_is_told_wherever_the_request_is(autojump_clock: MockClock) -> None:
    model = ScriptedModel("yes", decode_s=1)
    async with watched(model, n_slots=1) as (engine, watcher), engine.stream("a") as stream:
        await stream.receive()
        with trio.move_on_after(0.25):
            await engine.complete("b")
    assert watcher.names(1)[-2:] == ["FirstToken", "RequestCancelled"]
    assert watcher.names(2) == ["RequestQueued", "RequestCancelled"]
    cancelled = watcher.of(2)[-1]
    assert isinstance(cancelled, RequestCancelled)
    assert cancelled.duration_s == 0.25


async def test_a_refused_request_has_no_events(autojump_clock: MockClock) -> None:
    model = ScriptedModel("yes", decode_s=1)
    async with (
        watched(model, n_slots=1, max_queue=1) as (engine, watcher),
        trio.open_nursery() as users,
    ):
        users.start_soon(engine.complete, "a")
        users.start_soon(engine.complete, "b")
        await until_queued(engine, 1)
        with pytest.raises(Busy):
            await engine.complete("c")
    assert len(watcher.all(RequestQueued)) == len(watcher.all(RequestFinished)) == 2
    assert not watcher.all(RequestFailed)


async def test_who_gives_way_before_it_began_is_told_as_waiting_on(
    autojump_clock: MockClock,
) -> None:
    model = ScriptedModel("x" * 200, decode_s=1)
    small = {"n_ctx": 180, "n_slots": 3, "n_batch": 4}
    async with watched(model, **small) as (engine, watcher), trio.open_nursery() as users:

        def ask(prompt: str, max_tokens: int) -> None:
            users.start_soon(partial(engine.complete, prompt, raw=True, max_tokens=max_tokens))

        ask("b", 150)
        await trio.sleep(2.5)
        ask("a" * 150, 1)
        await trio.sleep(1)
        ask("a" * 149 + "cdefg", 1)
        await trio.sleep(400)
        assert engine.stats().preemptions == 2
    assert watcher.names(2).count("RequestPreempted") == 1
    assert watcher.names(3)[:2] == ["RequestQueued", "RequestStarted"]
    assert "RequestPreempted" not in watcher.names(3)


async def test_events_tell_what_was_asked_for(autojump_clock: MockClock) -> None:
    async with watched("yes") as (engine, watcher):
        await engine.complete("a")
        await engine.complete("a", raw=True)
        await engine.complete(Request([97, 98]))
        await engine.score("a", ["yes"])
        async with engine.session() as session:
            await session.ensure_prefix("a prefix of some length")
    kinds = [event.kind for event in watcher.all(RequestQueued)]
    assert kinds == ["chat", "completion", "completion", "score", "prefill"]
    assert [event.kind for event in watcher.all(RequestFinished)] == kinds
    with_token = [event.request_id for event in watcher.all(FirstToken)]
    assert with_token == [1, 2, 3], "what generates nothing has no first token"


async def test_the_end_of_a_request_knows_the_context_it_was_asked_in(
    autojump_clock: MockClock,
) -> None:
    trace: ContextVar[str] = ContextVar("trace")
    async with watched(ScriptedModel({"good": "yes"}, decode_s=1)) as (engine, watcher):
        trace.set("finished")
        await engine.complete("good")
        trace.set("failed")
        with pytest.raises(InferenceError):
            await engine.complete("bad")
        trace.set("cancelled")
        with trio.move_on_after(0.5):
            await engine.complete("good")
        trace.set("later")
    ends = [event for event in watcher.events if isinstance(event, ENDS)]
    seen = [end.context[trace] for end in ends if end.context is not None]
    assert seen == ["finished", "failed", "cancelled"]


async def test_nothing_is_made_while_nobody_listens(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def noting(kind: type) -> Callable[..., object]:
        def make(**fields: Any) -> object:
            made.append(kind.__name__)
            return kind(**fields)

        return make

    for kind in get_args(EngineEvent):
        if hasattr(reporter, kind.__name__):
            monkeypatch.setattr(reporter, kind.__name__, noting(kind))
    async with open_scripted_engine({"good": "yes"}) as engine:

        async def ask() -> None:
            await engine.complete("good")
            with pytest.raises(InferenceError):
                await engine.complete("bad")
            async with engine.stream("good") as stream:
                await stream.receive()

        await ask()
        assert made == []
        async with engine.events():
            await ask()
            assert {"StepDone", "RequestQueued", "RequestFailed"} < set(made)
        made.clear()
        await ask()
        assert made == []


async def test_a_reader_that_comes_later_is_told_no_beginning_it_has_missed(
    autojump_clock: MockClock,
) -> None:
    watcher = Watcher()
    model = ScriptedModel("yes", decode_s=1)
    async with (
        trio.open_nursery() as nursery,
        open_scripted_engine(model) as engine,
        engine.stream("a") as stream,
    ):
        await stream.receive()
        await nursery.start(watcher.run, engine)
        await read_all(stream)
    assert watcher.names(1) == ["RequestFinished"]


async def test_engines_can_share_a_broadcast_and_each_has_its_own(tiny_path: Path) -> None:
    shared = Broadcast()
    own = Watcher()
    async with trio.open_nursery() as nursery, shared.subscribe() as of_all:
        async with (
            open_named_engine(tiny_path, ONE_THREAD, name="a", broadcast=shared) as a,
            open_named_engine(tiny_path, ONE_THREAD, name="b", broadcast=shared) as b,
        ):
            await nursery.start(own.run, b)
            await a.complete("x", raw=True, max_tokens=2)
            await b.complete("x", raw=True, max_tokens=2)
        shared.close()
        events = [event async for event in of_all]
    assert [event for event in events if event.engine == "b"][1:] == own.events
    for name in "ab":
        loaded, *_, stopped = [event for event in events if event.engine == name]
        assert isinstance(loaded, EngineLoaded)
        assert loaded.load_s > 0
        assert stopped == EngineStopped(time=stopped.time, engine=name, reason=None)
    assert [e.engine for e in events if isinstance(e, RequestFinished)] == ["a", "b"]


# -- laws, whatever comes and goes and breaks ------------------------------------------------

ORDER: list[tuple[type[EngineEvent], ...]] = [
    (RequestQueued,),
    (RequestStarted,),
    (PrefixReused,),
    (FirstToken,),
    ENDS,
]


@attrs.frozen
class Asked:
    """A request of the test below: when it comes, what for, and when its caller leaves."""

    at_s: float
    prompt: str
    reply: int
    stays_s: float


TIMES = st.sampled_from([0.0, 0.5, 1.0, 1.5, 3.0, 7.5, 20.0])

ASKED = st.builds(
    Asked,
    at_s=TIMES,
    prompt=st.sampled_from(["a", "b", "a shared prefix of some length", "!", "x" * 60, "x" * 500]),
    reply=st.sampled_from([1, 5, 90]),
    stays_s=st.just(10_000.0) | TIMES,
)


BOTH_LONG = [Asked(0, "a", 90, 10_000), Asked(0, "b", 90, 10_000), Asked(3, "c", 90, 50)]
"""More than the pool has room for."""


@settings(max_examples=60, deadline=None)
@example(asked=BOTH_LONG, n_slots=3, ends_s=None, crashes_s=None)
@example(asked=BOTH_LONG, n_slots=3, ends_s=20, crashes_s=None)
@example(asked=BOTH_LONG, n_slots=3, ends_s=None, crashes_s=20)
@given(
    asked=st.lists(ASKED, min_size=1, max_size=8),
    n_slots=st.integers(1, 3),
    ends_s=st.none() | TIMES,
    crashes_s=st.none() | TIMES,
)
def test_every_request_has_one_end_and_its_events_in_order(
    asked: list[Asked], n_slots: int, ends_s: float | None, crashes_s: float | None
) -> None:
    watcher, stats = trio.run(
        _run_and_watch,
        asked,
        n_slots,
        ends_s,
        crashes_s,
        clock=trio.testing.MockClock(autojump_threshold=0),
    )
    times = [event.time for event in watcher.events]
    assert times == sorted(times)
    assert isinstance(watcher.events[-1], EngineStopped)
    assert len(watcher.all(EngineStopped)) == 1

    by_request: dict[int, list[EngineEvent]] = defaultdict(list)
    for event in watcher.events:
        if not isinstance(event, StepDone | EngineStopped):
            assert hasattr(event, "request_id")
            by_request[event.request_id].append(event)
    for events in by_request.values():
        in_order = [e for e in events if not isinstance(e, RequestPreempted)]
        places = [n for e in in_order for n, kind in enumerate(ORDER) if isinstance(e, kind)]
        assert places == sorted(set(places)), "each at most once, and in order"
        assert places[0] == 0, "it is queued first"
        assert isinstance(events[-1], ENDS), "the end is the last"
        if isinstance(events[-1], RequestFinished):
            assert {0, 1, 3} <= set(places), "what is complete was started and has a token"
        if any(isinstance(e, RequestPreempted) for e in events):
            kinds_in_order = [type(e) for e in events]
            started, preempted = map(kinds_in_order.index, (RequestStarted, RequestPreempted))
            assert started < preempted

    counts = Counter(type(event) for event in watcher.events)
    assert stats.requests == {
        "completed": counts[RequestFinished],
        "failed": counts[RequestFailed],
        "cancelled": counts[RequestCancelled],
    }
    assert counts[RequestPreempted] == stats.preemptions
    steps = watcher.all(StepDone)
    assert len(steps) == stats.steps
    assert sum(step.aborted for step in steps) == stats.aborted_steps
    assert sum(step.decode_tokens for step in steps) == stats.decode_tokens
    assert sum(step.prefill_tokens for step in steps) == stats.prefill_tokens
    assert sum(step.duration_s for step in steps) == pytest.approx(stats.decode_s + stats.prefill_s)
    assert all(1 <= step.slots_in_use <= n_slots for step in steps)


async def _run_and_watch(
    asked: list[Asked], n_slots: int, ends_s: float | None, crashes_s: float | None
) -> tuple[Watcher, EngineStats]:
    """Serve all that is asked, or until the block ends or the engine crashes."""
    watcher = Watcher()

    def reply(prompt: str) -> str:
        if "!" in prompt:
            raise ValueError("scripted")
        return "y" * 90

    async def ask(engine: Engine, what: Asked) -> None:
        await trio.sleep(what.at_s)
        with trio.move_on_after(what.stays_s):
            try:
                async with engine.stream(what.prompt, max_tokens=what.reply) as stream:
                    await stream.result()
            except (PromptTooLong, InferenceError, EngineClosed, SessionFatal):
                pass

    model = ScriptedModel(reply, decode_s=0.5, prefill_s=0.01)
    async with trio.open_nursery() as outer:
        try:
            async with open_scripted_engine(model, n_ctx=120, n_slots=n_slots) as engine:
                await outer.start(watcher.run, engine)
                if crashes_s is not None:

                    async def crash() -> None:
                        await trio.sleep(crashes_s)
                        model.crash_next_step()

                    outer.start_soon(crash)
                async with trio.open_nursery() as users:
                    for what in asked:
                        (users if ends_s is None else outer).start_soon(ask, engine, what)
                    if ends_s is not None:
                        await trio.sleep(ends_s)
        except SessionFatal:
            assert crashes_s is not None
    return watcher, engine.stats()
