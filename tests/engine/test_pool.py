"""One pool for all slots, in every kind of memory: what is reused, who gives way, and that nobody
notices.  Who it is that gives way is in `tests.scheduling`."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from llamad_trio import Busy, Request, open_engine
from tests.models import DECODER_KINDS
from tests.support import (
    ENDLESS,
    EXACT,
    ONE_THREAD,
    count_pieces,
    side_by_side,
    threads_of_ours,
    until,
    until_idle,
)

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from llamad_trio import Engine
    from tests.models import Kind

# Longer than the sliding window.
PROMPT = "the cat and the rat ran in the rain, then they rested"

kinds = pytest.mark.parametrize("kind", DECODER_KINDS)


def open_tiny(path: Path, n_ctx: int = 2048) -> AbstractAsyncContextManager[Engine]:
    return open_engine(path, EXACT, n_ctx=n_ctx)


def requests(n: int, max_tokens: int) -> list[Request]:
    """As many as are asked for, each another."""
    return [
        Request(f"{c} {PROMPT} {c}", max_tokens=max_tokens, seed=i, temperature=0.5, top_p=0.5)
        for i, c in enumerate("abcdefgh"[:n])
    ]


async def texts_of(engine: Engine, asked: list[Request]) -> list[str]:
    """The texts of requests that run at once, in the order of the requests."""
    return await side_by_side(partial(engine.complete_text, request) for request in asked)


# -- every kind of memory --------------------------------------------------------------------


@kinds
async def test_what_is_reused_is_what_can_be(path: Path, kind: Kind) -> None:
    asked = Request(PROMPT, max_tokens=12, temperature=0)
    async with open_tiny(path) as engine:
        can_rewind = kind in ("attention", "sliding-window")
        assert engine.info.can_rewind == can_rewind
        cold, warm = [await engine.complete(asked) for _ in range(2)]
        assert cold.cached_tokens == 0
        assert warm.cached_tokens == (warm.prompt_tokens - 1 if can_rewind else 0)
        assert warm.text == cold.text
        assert engine.stats().kv_retained_tokens > 0
        assert engine.stats().cached_tokens == warm.cached_tokens


@kinds
async def test_requests_side_by_side_say_what_they_say_alone(path: Path) -> None:
    asked = requests(8, max_tokens=20)
    async with open_tiny(path) as engine:
        alone = [await engine.complete_text(request) for request in asked]
        assert await texts_of(engine, asked) == alone
        assert len(set(alone)) == 8
    assert threads_of_ours() == []


@kinds
async def test_preempted_requests_say_what_they_say_alone(path: Path) -> None:
    asked = requests(4, max_tokens=60)
    async with open_tiny(path) as engine:
        alone = [await engine.complete_text(request) for request in asked]
        n_prompt = await engine.count_tokens(asked[0])
    async with open_tiny(path, n_ctx=2 * (n_prompt + 40)) as engine:
        assert await texts_of(engine, asked) == alone
        assert engine.stats().preemptions > 0
        await until_idle(engine)


@kinds
async def test_cancels_at_any_moment_leave_the_others_and_the_next_as_they_were(path: Path) -> None:
    asked = requests(3, max_tokens=30)
    async with open_tiny(path) as engine:
        alone = [await engine.complete_text(request) for request in asked]
        for n_pieces in (0, 1, 5):
            # In the middle of a prompt, unless that was read at once, and of a text.
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.complete, Request([270] * 1500, max_tokens=ENDLESS))
                await until(lambda: engine.stats().slots["free"] < engine.config.n_slots)
                nursery.cancel_scope.cancel()
            async with engine.stream(PROMPT, max_tokens=ENDLESS) as tokens:
                await count_pieces(tokens, n_pieces)
            assert await texts_of(engine, asked) == alone
        await until_idle(engine)
        stats = engine.stats()
        assert stats.requests["cancelled"] == 6
        assert stats.kv_retained_tokens + stats.kv_free_tokens == 2048


@kinds
async def test_a_full_pool_is_used_to_its_last_token(path: Path) -> None:
    async with open_tiny(path, n_ctx=128) as engine:
        for _ in range(2):
            done = await engine.complete(PROMPT, max_tokens=ENDLESS)
            assert done.prompt_tokens + done.generated_tokens == 128


@kinds
async def test_a_batch_of_one_token_serves(path: Path) -> None:
    asked = Request(PROMPT, max_tokens=5, temperature=0)
    async with open_tiny(path) as engine:
        expected = await engine.complete_text(asked)
    async with open_engine(path, EXACT, n_slots=1, n_batch=1) as engine:
        assert await engine.complete_text(asked) == expected


# -- the books ------------------------------------------------------------------------------


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
        await texts_of(engine, [Request([20 + n] * 40, max_tokens=60) for n in range(8)])
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
