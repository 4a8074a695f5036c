"""Whatever comes and goes and breaks: the laws of the events of an engine."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import attrs
import trio
import trio.testing
from hypothesis import example, given, settings, strategies as st

from llamad_trio import EngineClosed, InferenceError, PromptTooLong, SessionFatal
from llamad_trio.core.engine_events import (
    EngineEvent,
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
from llamad_trio.testing import ScriptedModel, open_scripted_engine
from tests.watch.support import Watcher

if TYPE_CHECKING:
    from llamad_trio import Engine

ENDS = (RequestFinished, RequestFailed, RequestCancelled)

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
    watcher, outcomes = trio.run(
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
    assert outcomes == {
        "completed": counts[RequestFinished],
        "failed": counts[RequestFailed],
        "cancelled": counts[RequestCancelled],
    }


async def _run_and_watch(
    asked: list[Asked], n_slots: int, ends_s: float | None, crashes_s: float | None
) -> tuple[Watcher, dict[str, int]]:
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
    return watcher, dict(engine.stats().requests)
