"""One pool for all slots: what is reused, who gives way, and that nobody notices."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio

from llamad_trio import Busy, Request, open_engine
from tests.support import (
    ENDLESS,
    EXACT,
    ONE_THREAD,
    SURE_PROMPTS,
    held_steps,
    must_not_run,
    until,
    until_idle,
    until_queued,
)

if TYPE_CHECKING:
    from pathlib import Path

    from llamad_trio import Engine


async def complete_all(engine: Engine, requests: list[Request]) -> list[str]:
    """The texts of requests that run at once, in the order of the requests."""
    texts: dict[int, str] = {}

    async def complete(i: int) -> None:
        texts[i] = await engine.complete_text(requests[i])

    async with trio.open_nursery() as nursery:
        for i in range(len(requests)):
            nursery.start_soon(complete, i)
    return [texts[i] for i in range(len(requests))]


# -- preemption -----------------------------------------------------------------------------


@pytest.mark.usefixtures("smollm2_is_kept")
async def test_preempted_requests_say_what_they_would_have_said_alone(
    smollm2_path: Path,
) -> None:
    requests = [Request(p, raw=True, max_tokens=12, temperature=0) for p in SURE_PROMPTS[:2]]
    async with open_engine(smollm2_path, ONE_THREAD, n_ctx=256) as engine:
        alone = [await engine.complete_text(request) for request in requests]
        assert engine.stats().preemptions == 0
    async with open_engine(smollm2_path, ONE_THREAD, n_ctx=70) as engine:
        assert await complete_all(engine, requests) == alone
        assert engine.stats().preemptions > 0
        await until_idle(engine)
        assert engine.stats().requests == {"completed": 2, "failed": 0, "cancelled": 0}


async def test_preempted_requests_go_on_with_their_seed_their_penalties_and_their_stream(
    tiny_path: Path,
) -> None:
    requests = [
        Request(f"the cat {n}", raw=True, max_tokens=80, temperature=0.5, seed=n, top_p=0.5)
        for n in range(4)
    ]
    pieces: dict[int, list[str]] = {}

    async def stream(engine: Engine, n: int) -> None:
        async with engine.stream(requests[n]) as tokens:
            pieces[n] = [piece async for piece in tokens]

    async with open_engine(tiny_path, EXACT, n_ctx=512) as engine:
        alone = [await engine.complete_text(request) for request in requests]
    async with open_engine(tiny_path, EXACT, n_ctx=160) as engine:
        async with trio.open_nursery() as nursery:
            for n in range(len(requests)):
                nursery.start_soon(stream, engine, n)
        assert engine.stats().preemptions > 0
    assert ["".join(pieces[n]) for n in range(len(requests))] == alone


async def test_the_oldest_request_is_never_preempted(tiny_path: Path) -> None:
    async with open_engine(tiny_path, ONE_THREAD, n_ctx=128) as engine:
        async with (
            trio.open_nursery() as nursery,
            engine.stream("the cat", max_tokens=ENDLESS) as oldest,
        ):
            await oldest.receive()
            for _ in range(3):
                nursery.start_soon(lambda: engine.complete("a hat", max_tokens=ENDLESS))
            done = await oldest.result()
            # It had the whole pool at its end.
            assert done.prompt_tokens + done.generated_tokens == 128
        assert engine.stats().preemptions > 0
        assert engine.stats().requests["completed"] == 4


async def test_a_high_max_tokens_costs_no_room_until_it_is_used(tiny_path: Path) -> None:
    async with (
        open_engine(tiny_path, ONE_THREAD, n_ctx=512) as engine,
        trio.open_nursery() as nursery,
    ):
        for _ in range(4):
            nursery.start_soon(lambda: engine.complete("the cat", max_tokens=ENDLESS))
        await until(lambda: engine.stats().slots["decode"] == 4)
        assert engine.stats().queued == 0
        nursery.cancel_scope.cancel()


# -- the queue ------------------------------------------------------------------------------


async def test_requests_beyond_the_queue_are_refused_as_busy(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_engine(tiny_path, ONE_THREAD, n_slots=1, max_queue=2, n_ctx=512) as engine:
        with held_steps(monkeypatch) as steps:
            async with trio.open_nursery() as nursery:
                for waiting in range(3):
                    nursery.start_soon(lambda: engine.complete("the cat", max_tokens=2))
                    await until(steps.begun.is_set)
                    await until_queued(engine, waiting)
                with pytest.raises(Busy) as error:
                    await engine.complete("the cat")
                assert (error.value.queued, error.value.max_queue) == (2, 2)
                with pytest.raises(Busy):
                    async with engine.stream("the cat"):
                        must_not_run("the block was entered")
                steps.let_go()
        assert engine.stats().requests == {"completed": 3, "failed": 0, "cancelled": 0}
        assert (await engine.complete("the cat", max_tokens=2)).generated_tokens == 2


async def test_without_a_queue_only_the_slots_serve(tiny_path: Path) -> None:
    async with open_engine(tiny_path, ONE_THREAD, n_slots=2, max_queue=0, n_ctx=512) as engine:
        async with engine.stream("the cat", max_tokens=ENDLESS) as first:
            await first.receive()
            async with engine.stream("the cat", max_tokens=ENDLESS) as second:
                await second.receive()
                with pytest.raises(Busy):
                    await engine.complete("the cat")
        await until_idle(engine)
        assert (await engine.complete("the cat", max_tokens=2)).generated_tokens == 2


# -- reuse ----------------------------------------------------------------------------------


async def test_a_prompt_that_was_just_read_is_reused(engine: Engine) -> None:
    asked = Request("Write the numbers from 1 to 10.", max_tokens=6, temperature=0)
    first, second = [await engine.complete(asked) for _ in range(2)]
    assert first.cached_tokens == 0
    # The last token is computed in any case: its logits are wanted.
    assert second.cached_tokens == second.prompt_tokens - 1
    assert second.text == first.text
    assert engine.stats().cached_tokens == second.cached_tokens


async def test_a_conversation_goes_on_where_it_was(tiny: Engine) -> None:
    first = await tiny.complete("the cat ", raw=True, max_tokens=20, temperature=0)
    longer = "the cat " + first.text + " and a hat"
    second = await tiny.complete(longer, raw=True, max_tokens=4, temperature=0)
    # Text need not come back as the tokens that it was said in, but it begins alike.
    assert first.prompt_tokens <= second.cached_tokens < second.prompt_tokens


@pytest.mark.usefixtures("smollm2_is_kept")
async def test_only_what_two_prompts_share_is_reused(smollm2_path: Path) -> None:
    one, other = "The capital of France is", "The capital of Spain is"
    asked = Request(other, raw=True, max_tokens=4, temperature=0)
    async with open_engine(smollm2_path, ONE_THREAD, n_ctx=512, kv_cache=False) as engine:
        cold = await engine.complete(asked)
    async with open_engine(smollm2_path, ONE_THREAD, n_ctx=512) as engine:
        await engine.complete(one, raw=True, max_tokens=2)
        warm = await engine.complete(asked)
        assert cold.cached_tokens == 0
        assert warm.cached_tokens == len(await engine.tokenize("The capital of"))
        assert warm.text == cold.text


async def test_without_the_kv_cache_nothing_is_kept(tiny_path: Path) -> None:
    async with open_engine(tiny_path, ONE_THREAD, n_ctx=512, kv_cache=False) as engine:
        texts = set()
        for _ in range(3):
            done = await engine.complete("the cat", max_tokens=8, temperature=0)
            assert done.cached_tokens == 0
            texts.add(done.text)
        assert len(texts) == 1
        stats = engine.stats()
        assert (stats.kv_retained_tokens, stats.kv_free_tokens, stats.cached_tokens) == (0, 512, 0)


async def test_what_is_kept_gives_way_to_any_need(tiny_path: Path) -> None:
    async with open_engine(tiny_path, ONE_THREAD, n_ctx=256) as engine:
        for n in range(4):
            await engine.complete(Request([20 + n] * 60), max_tokens=2)
        assert engine.stats().kv_retained_tokens == 4 * 61
        done = await engine.complete(Request([7] * 250), max_tokens=6)
        assert done.generated_tokens == 6
        stats = engine.stats()
        assert stats.preemptions == 0
        assert stats.kv_used_tokens == 0
        assert stats.kv_retained_tokens + stats.kv_free_tokens == 256


async def test_the_books_add_up_at_every_moment(tiny_path: Path) -> None:
    class Auditor(trio.abc.Instrument):
        n_looks = 0

        def after_task_step(self, task: trio.lowlevel.Task) -> None:
            stats = engine.stats()
            pool = stats.kv_used_tokens, stats.kv_retained_tokens, stats.kv_free_tokens
            assert sum(pool) == 256
            assert min(pool) >= 0
            assert sum(stats.slots.values()) == 4
            assert min(*stats.slots.values(), stats.queued) >= 0
            self.n_looks += 1

    auditor = Auditor()
    async with open_engine(tiny_path, ONE_THREAD, n_ctx=256) as engine:
        trio.lowlevel.add_instrument(auditor)
        await complete_all(engine, [Request([20 + n] * 40, max_tokens=60) for n in range(8)])
        # Trio removes an instrument that raises.
        trio.lowlevel.remove_instrument(auditor)
        stats = engine.stats()
        assert auditor.n_looks > stats.steps > 60
        computed = stats.prefill_tokens + stats.decode_tokens + stats.cached_tokens
        # The last token of a text is said, and never computed.
        assert computed >= 8 * (40 + 59)


async def test_the_queue_counts_those_who_wait_for_room(tiny_path: Path) -> None:
    async with (
        open_engine(tiny_path, ONE_THREAD, n_ctx=256, max_queue=1) as engine,
        trio.open_nursery() as nursery,
    ):

        async def ask_again() -> None:
            while True:
                with suppress(Busy):
                    await engine.complete(Request([270] * 200, max_tokens=50))
                await trio.lowlevel.checkpoint()

        for _ in range(2):
            nursery.start_soon(ask_again)
        await until(lambda: engine._desk.decode.scheduler.has_waiting)  # four slots, room for one
        with pytest.raises(Busy):
            await engine.complete(Request([270] * 200))
        nursery.cancel_scope.cancel()
