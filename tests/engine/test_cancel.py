"""Cancel means stop: the work ends, its slot and its room are free, nobody else is touched."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from llamad_trio import Request, open_engine
from llamad_trio.llama.llama_runtime import LlamaRuntime
from tests.support import (
    ENDLESS,
    EXACT,
    before_steps,
    count_pieces,
    held_steps,
    side_by_side,
    until,
    until_idle,
)

if TYPE_CHECKING:
    from pathlib import Path

    from llamad_trio import Engine
    from llamad_trio.scheduling.plan import StepPlan

ASKED = Request("The quick brown fox jumps over the lazy", raw=True, max_tokens=1, temperature=0)


async def test_a_request_is_cancelled_while_its_prompt_is_read(engine: Engine) -> None:
    async with trio.open_nursery() as nursery:
        # Seconds of work in a few steps: its end is not waited for.
        nursery.start_soon(engine.complete, Request([7] * 1000))
        await until(lambda: engine.stats().slots["prefill"] == 1)
        nursery.cancel_scope.cancel()
    await until_idle(engine)
    stats = engine.stats()
    assert stats.aborted_steps == 1
    assert stats.prefill_tokens < 1000
    assert await engine.complete_text(ASKED) == " dog"


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


async def test_a_hundred_requests_with_random_cancels_leave_nothing_behind(tiny_path: Path) -> None:
    chance = random.Random(5)
    prompts = [f"{'the cat and ' * chance.randrange(1, 6)} {n}" for n in range(5)]

    async with open_engine(tiny_path, EXACT, n_ctx=600) as engine:
        alone = [await engine.complete_text(p, max_tokens=24, temperature=0) for p in prompts]

        async def one_request(n: int, n_pieces: int | None) -> int:
            text = alone[n % len(prompts)]
            async with engine.stream(
                prompts[n % len(prompts)], max_tokens=24, temperature=0
            ) as tokens:
                if n_pieces is None:
                    assert (await tokens.result()).text == text
                    return 1
                await count_pieces(tokens, n_pieces)
                assert text.startswith(tokens.text)
                return 0

        kept = await side_by_side(
            partial(one_request, n, chance.choice([None, 0, 0, 1, 5, 10])) for n in range(100)
        )
        await until_idle(engine)
        stats = engine.stats()
        assert stats.requests["completed"] - len(prompts) >= sum(kept) > 0
        assert stats.requests["cancelled"] > 0
        assert sum(stats.requests.values()) == 100 + len(prompts)
        assert stats.requests["failed"] == 0
        assert stats.kv_free_tokens + stats.kv_retained_tokens == 600
