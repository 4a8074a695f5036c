"""llama.cpp computes each step with the threads that were chosen for it, and changes are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import llama_cpp.llama_cpp as lib
import pytest
import trio

from llamad_trio import EngineConfig, Request, ThreadsChanged, open_engine
from llamad_trio.llama.llama_runtime import LlamaRuntime
from llamad_trio.scheduling.pacing import ComputeThreads
from tests.watch.support import Watcher

if TYPE_CHECKING:
    from pathlib import Path

    from llamad_trio.scheduling.plan import StepPlan, StepResult


class Steps:
    """Which steps were run: with a prompt in them, and with how many threads."""

    def __init__(self) -> None:
        self.threads: dict[bool, list[int]] = {False: [], True: []}
        self.results: list[StepResult] = []


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    seen = Steps()
    run_step = LlamaRuntime.step

    def step(runtime: LlamaRuntime, plan: StepPlan) -> StepResult:
        result = run_step(runtime, plan)
        with_prompt = any(work.pos == 0 or len(work.tokens) > 1 for work in plan.work)
        if plan.work:
            seen.threads[with_prompt].append(lib.llama_n_threads(runtime._context.pointer))
            assert plan.n_threads == lib.llama_n_threads_batch(runtime._context.pointer)
            seen.results.append(result)
        return result

    monkeypatch.setattr(LlamaRuntime, "step", step)
    return seen


@pytest.mark.parametrize(("n_threads", "n_threads_batch"), [(1, 2), (2, 1)])
async def test_steps_with_and_without_prompts_have_threads_of_their_own(
    tiny_path: Path, steps: Steps, n_threads: int, n_threads_batch: int
) -> None:
    config = EngineConfig(
        n_threads=n_threads, n_threads_batch=n_threads_batch, adaptive_threads=False
    )
    async with open_engine(tiny_path, config) as engine:
        async with trio.open_nursery() as nursery:
            for i in range(3):  # together: a batch of several rows is no prompt
                nursery.start_soon(engine.complete, Request([3 + i, 4, 5], max_tokens=8))
        stats = engine.stats()
    assert set(steps.threads[True]) == {n_threads_batch}
    assert set(steps.threads[False]) == {n_threads}
    assert (stats.n_threads, stats.n_threads_batch) == (n_threads, n_threads_batch)


async def test_a_step_tells_how_long_it_computed_and_waited(tiny_path: Path, steps: Steps) -> None:
    async with open_engine(tiny_path, EngineConfig(n_threads=1, n_threads_batch=1)) as engine:
        await engine.complete(Request([3, 4, 5], max_tokens=8))
    for result in steps.results:
        assert 0 < result.compute_s <= result.elapsed_s
        assert 0 <= result.waited_s <= result.compute_s


async def test_another_number_is_used_told_and_counted(
    tiny_path: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_observed = 0
    observe = ComputeThreads.observe

    def observe_and_change(threads: ComputeThreads, **measured: float) -> None:
        nonlocal n_observed
        observe(threads, **measured)  # type: ignore[arg-type]
        assert measured["elapsed_s"] > 0
        n_observed += 1
        if n_observed == 4:
            threads._decode.in_force = 1

    monkeypatch.setattr(ComputeThreads, "observe", observe_and_change)
    config = EngineConfig(n_threads=2, n_threads_batch=2, adaptive_threads=False)
    watcher = Watcher()
    async with trio.open_nursery() as nursery, open_engine(tiny_path, config) as engine:
        await nursery.start(watcher.run, engine)
        await engine.complete(Request([3, 4, 5], max_tokens=8))
        stats = engine.stats()
    told = watcher.all(ThreadsChanged)
    assert [(event.n_threads, event.n_threads_batch) for event in told] == [(1, 2)]
    assert steps.threads[False] == [2, 2, 2, 1, 1, 1, 1]
    assert (stats.n_threads, stats.n_threads_batch) == (1, 2)
