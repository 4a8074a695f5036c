"""Any history of requests, crashes, failing loads, unloads, additions and removals."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio
from hypothesis import given, settings, strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from llamad_trio import (
    EngineClosed,
    EngineSpec,
    LlamadError,
    ModelLoadError,
    Models,
    ProtocolError,
    RestartPolicy,
    SessionFatal,
)
from llamad_trio.testing import ScriptedModel, open_scripted_models

NAMES = ["a", "b"]
POLICY = RestartPolicy(max_restarts=1000, first_delay_s=1.0, max_delay_s=8.0)
"""It never gives up: that is tested elsewhere."""

actions = st.one_of(
    st.tuples(
        st.sampled_from(
            ["ask", "ask", "give up", "crash", "unload", "load", "remove", "add", "break", "mend"]
        ),
        st.sampled_from(NAMES),
    ),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0, 10.0, 100.0])),
)
histories = st.tuples(
    st.lists(actions, max_size=40),
    st.sampled_from(["eager", "lazy"]),
    st.sampled_from([None, 0.0, 2.0]),
    st.sampled_from([0.0, 0.7]),
)


class World:
    """Some models, and what became of everybody who asked them."""

    def __init__(self) -> None:
        self.scripted = {n: ScriptedModel(f"from {n}", decode_s=0.25) for n in NAMES}
        self.loaded: dict[str, ScriptedModel | ModelLoadError] = dict(self.scripted)
        self.asked = 0
        self.outcomes: Counter[str] = Counter()

    async def ask(self, models: Models, name: str, *, patience_s: float = 1e6) -> None:
        self.asked += 1
        outcome = "gave up"
        try:
            with trio.move_on_after(patience_s):
                text = await models.complete_text("x", model=name, raw=True)
                assert text == f"from {name}"
                outcome = "completed"
        except (SessionFatal, EngineClosed, ModelLoadError, ProtocolError) as error:
            outcome = type(error).__name__
        self.outcomes[outcome] += 1

    async def act(
        self, models: Models, nursery: trio.Nursery, action: str, name: str, spec: EngineSpec
    ) -> None:
        match action:
            case "ask":
                nursery.start_soon(self.ask, models, name)
            case "give up":
                nursery.start_soon(partial(self.ask, models, name, patience_s=0.6))
            case "crash":
                self.scripted[name].crash_next_step()
            case "break":
                self.loaded[name] = ModelLoadError(name, "scripted")
            case "mend":
                self.loaded[name] = self.scripted[name]
            case "unload" | "load" | "remove":
                nursery.start_soon(_tolerant, partial(getattr(models, action), name))
            case "add":
                nursery.start_soon(_tolerant, partial(models.add, name, spec))


async def _tolerant(call: Callable[[], Awaitable[object]]) -> None:
    """What is refused is refused with a typed error."""
    with contextlib.suppress(LlamadError):
        await call()


async def live_through(
    history: list[tuple[str, object]], load: str, unload_after_s: float | None, load_s: float
) -> None:
    world = World()
    specs = {
        name: EngineSpec(name, load=load, unload_after_s=unload_after_s)  # type: ignore[arg-type]
        for name in NAMES
    }
    async with open_scripted_models(world.loaded, specs, load_s=load_s, restart=POLICY) as models:
        async with trio.open_nursery() as nursery:
            for action, what in history:
                if action == "wait":
                    await trio.sleep(what)  # type: ignore[arg-type]
                else:
                    name = str(what)
                    await world.act(models, nursery, action, name, specs[name])
                assert all(models.state(name) for name in models)
            for name in NAMES:
                await world.act(models, nursery, "mend", name, specs[name])
            # Whoever waits for a lazy model's restart has to get it, too.
            await trio.sleep(1000)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.deadline = trio.current_time() + 10_000
        assert not nursery.cancel_scope.cancelled_caught, "somebody waits for ever"
        assert world.outcomes.total() == world.asked
        for name in NAMES:
            if name not in models:
                await models.add(name, specs[name])
            if models.state(name) == "failed":
                await models.load(name)
            try:
                text = await models.complete_text("x", model=name, raw=True)
            except SessionFatal:  # a crash was still to come
                text = await models.complete_text("x", model=name, raw=True)
            assert text == f"from {name}"
            assert models.state(name) in {"ready", "unloaded"}


@settings(max_examples=25, deadline=None)
@given(histories)
def test_everybody_gets_one_outcome_and_the_models_go_on(
    case: tuple[list[tuple[str, object]], str, float | None, float],
) -> None:
    trio.run(partial(live_through, *case), clock=MockClock(autojump_threshold=0))


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(histories)
def test_everybody_gets_one_outcome_and_the_models_go_on_at_length(
    case: tuple[list[tuple[str, object]], str, float | None, float],
) -> None:
    trio.run(partial(live_through, *case), clock=MockClock(autojump_threshold=0))
