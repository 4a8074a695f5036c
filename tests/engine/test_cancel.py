"""Cancel means stop: the work ends, its slot and its room are free, nobody else is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from llamad_trio import Request
from llamad_trio.llama.llama_runtime import LlamaRuntime
from tests.support import (
    ENDLESS,
    before_steps,
    held_steps,
    until,
    until_idle,
)

if TYPE_CHECKING:
    from llamad_trio import Engine
    from llamad_trio.scheduling.plan import StepPlan


async def test_a_step_that_nobody_wants_any_more_is_aborted(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_steps(monkeypatch) as steps:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(tiny.complete, "the cat")
            await until(steps.begun.is_set)
            nursery.cancel_scope.cancel()
    await until_idle(tiny)
    assert tiny.stats().aborted_steps == 1
    assert tiny.stats().requests == {"completed": 0, "failed": 0, "cancelled": 2}


async def test_a_step_shared_with_others_is_left_to_finish(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Request("the cat", max_tokens=8, temperature=0)
    text = await tiny.complete_text(asked)
    scope = trio.CancelScope()
    plans: list[StepPlan] = []

    def cancel_in_a_shared_step(plan: StepPlan) -> None:
        plans.append(plan)
        if [len(plan.work) for plan in plans].count(2) == 1:
            trio.from_thread.run_sync(scope.cancel)
            trio.from_thread.run(until, lambda: tiny.stats().requests["cancelled"] == 1)

    async def complete_until_cancelled() -> None:
        with scope:
            await tiny.complete("a hat", max_tokens=ENDLESS)

    before_steps(monkeypatch, cancel_in_a_shared_step)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete_until_cancelled)
        assert await tiny.complete_text(asked) == text
    assert scope.cancelled_caught
    assert len(plans[-1].work) == 1
    assert tiny.stats().aborted_steps == 0


async def test_a_long_prompt_is_cancelled_while_it_is_tokenised(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = trio.Event(), trio.Event()
    tokenize = LlamaRuntime.tokenize

    def wait_and_tokenize(
        runtime: LlamaRuntime, text: str, *, add_special: bool, parse_special: bool
    ) -> list[int]:
        trio.from_thread.run_sync(begun.set)
        trio.from_thread.run(go.wait)
        return tokenize(runtime, text, add_special=add_special, parse_special=parse_special)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaRuntime, "tokenize", wait_and_tokenize)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tiny.complete, "the cat " * 500)
            await begun.wait()
            nursery.cancel_scope.cancel()
        # The caller has left already; the thread ends in its own time.
        assert tiny.stats().requests["cancelled"] == 1
        go.set()
    assert (await tiny.complete("the cat", max_tokens=2)).generated_tokens == 2
    assert tiny.stats().requests == {"completed": 1, "failed": 0, "cancelled": 1}
