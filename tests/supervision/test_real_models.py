"""Several real models in one program: lanes, turns, memory."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from llamad_trio import (
    EngineFailed,
    EngineSpec,
    InferenceError,
    InsufficientMemory,
    Lane,
    ProtocolError,
    StepDone,
    estimate_memory,
    open_engine,
    open_models,
)
from llamad_trio.system.nursery import open_plain_nursery
from tests.support import ENDLESS, ONE_THREAD, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from llamad_trio import Engine, Models
    from llamad_trio.watch.broadcast import Broadcast
    from tests.models import Kind, TinyModels


async def steps_side_by_side(models: Models, n_steps: int) -> dict[str, int]:
    """Steps of each model while all of them generate."""
    counts = dict.fromkeys(models, 0)

    async def generate(name: str, started: trio.Event) -> None:
        async with models[name].stream("x", max_tokens=ENDLESS) as pieces:
            await pieces.receive()
            started.set()
            async for _ in pieces:
                pass

    async with trio.open_nursery() as nursery:
        for name in models:
            started = trio.Event()
            nursery.start_soon(generate, name, started)
            await started.wait()
        async with models.events(max_events=100_000) as events:
            async for event in events:
                if isinstance(event, StepDone):
                    counts[event.engine] += 1
                    if sum(counts.values()) == n_steps:
                        break
        nursery.cancel_scope.cancel()
    return counts


@pytest.mark.parametrize("n", [2, 3])
async def test_models_of_one_lane_take_turns_by_step(tiny_model: TinyModels, n: int) -> None:
    every: tuple[Kind, ...] = ("attention", "hybrid", "sliding-window")
    kinds = every[:n]
    lane = Lane(threads=1)
    specs: dict[str, EngineSpec] = {
        kind: EngineSpec(tiny_model(kind, n_ctx_train=100_000), n_ctx=8192, lane=lane)
        for kind in kinds
    }
    async with open_models(specs) as models:
        counts = await steps_side_by_side(models, 300 * n)
    # A reader that lags, on a busy machine, pauses its model for a while.
    assert max(counts.values()) <= 1.5 * min(counts.values())


# -- memory ----------------------------------------------------------------------------------


async def test_what_does_not_fit_is_refused_and_who_holds_the_memory_is_told(
    tiny_path: Path,
) -> None:
    need = (await estimate_memory(tiny_path, ONE_THREAD)).total_bytes
    specs = {name: EngineSpec(tiny_path, ONE_THREAD, load="lazy") for name in ("a", "b")}
    async with open_models(specs, memory_budget_bytes=need * 3 // 2) as models:
        assert (await models["a"].complete("x", max_tokens=2)).generated_tokens == 2
        with pytest.raises(InsufficientMemory) as caught:
            await models["b"].complete("x")
        assert caught.value.required == need
        assert caught.value.held_by == {"a": need}
        assert models.state("b") == "failed"
        await models.unload("a")
        assert (await models["b"].complete("x", max_tokens=2)).generated_tokens == 2


async def test_a_model_that_is_about_to_restart_keeps_its_share(tiny_path: Path) -> None:
    breaks = trio.Event()

    @asynccontextmanager
    async def opener(name: str, spec: EngineSpec, broadcast: Broadcast) -> AsyncIterator[Engine]:
        async with open_engine(spec.model, spec.config) as engine, open_plain_nursery() as nursery:
            nursery.start_soon(break_down)
            yield engine

    async def break_down() -> None:
        nonlocal breaks
        await breaks.wait()
        breaks = trio.Event()
        raise InferenceError("broken")

    need = (await estimate_memory(tiny_path, ONE_THREAD)).total_bytes
    specs = {
        "a": EngineSpec(tiny_path, ONE_THREAD),
        "b": EngineSpec(tiny_path, ONE_THREAD, load="lazy"),
    }
    async with open_models(specs, memory_budget_bytes=need * 3 // 2, opener=opener) as models:
        await models.wait_ready("a")
        breaks.set()
        await until(lambda: models.state("a") == "backing off")
        with pytest.raises(InsufficientMemory):
            await models["b"].complete("x")
        await models.wait_ready("a")
        await models.unload("a")
        assert (await models["b"].complete("x", max_tokens=2)).generated_tokens == 2


async def test_a_refused_load_is_an_event(tiny_path: Path) -> None:
    specs = {"a": EngineSpec(tiny_path, ONE_THREAD, load="lazy")}
    async with open_models(specs, memory_budget_bytes=1) as models, models.events() as events:
        with pytest.raises(InsufficientMemory):
            await models.complete("x")
        event = await events.receive()
        assert isinstance(event, EngineFailed)
        assert isinstance(event.error, InsufficientMemory)


async def test_the_machine_can_be_the_budget(tiny_path: Path) -> None:
    specs = {"a": EngineSpec(tiny_path, ONE_THREAD)}
    async with open_models(specs, memory_budget_bytes="auto") as models:
        await models.wait_ready("a")
    with pytest.raises(ProtocolError):
        async with open_models(specs, memory_budget_bytes="much"):  # type: ignore[arg-type]
            pass
