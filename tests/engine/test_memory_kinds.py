"""Every kind of memory serves: attention, sliding window, recurrent, hybrid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from llamad_trio import Request, open_engine
from tests.models import DECODER_KINDS
from tests.support import (
    ENDLESS,
    EXACT,
    ONE_THREAD,
    count_pieces,
    threads_of_ours,
    until,
    until_idle,
)

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from llamad_trio import Engine
    from tests.models import Kind, TinyModels

CAN_REWIND: dict[Kind, bool] = {
    "attention": True,
    "sliding-window": True,
    "recurrent": False,
    "hybrid": False,
}

# Longer than the sliding window.
PROMPT = "the cat and the rat ran in the rain, then they rested"

kinds = pytest.mark.parametrize("kind", DECODER_KINDS)


def open_tiny(
    tiny_model: TinyModels, kind: Kind, n_ctx: int = 2048
) -> AbstractAsyncContextManager[Engine]:
    return open_engine(tiny_model(kind), EXACT, n_ctx=n_ctx)


def requests(n: int, max_tokens: int) -> list[Request]:
    """As many as are asked for, each another."""
    return [
        Request(f"{c} {PROMPT} {c}", max_tokens=max_tokens, seed=i, temperature=0.5, top_p=0.5)
        for i, c in enumerate("abcdefgh"[:n])
    ]


async def stream_all(engine: Engine, asked: list[Request]) -> list[str]:
    """The texts of requests that run at once, in the order of the requests."""
    texts: dict[int, str] = {}

    async def stream(i: int) -> None:
        async with engine.stream(asked[i]) as tokens:
            texts[i] = "".join([piece async for piece in tokens])

    async with trio.open_nursery() as nursery:
        for i in range(len(asked)):
            nursery.start_soon(stream, i)
    return [texts[i] for i in range(len(asked))]


@kinds
async def test_it_generates_and_streams_the_same(tiny_model: TinyModels, kind: Kind) -> None:
    async with open_tiny(tiny_model, kind) as engine:
        assert engine.info.can_rewind == CAN_REWIND[kind]
        for asked in requests(2, max_tokens=40):
            done = await engine.complete(asked)
            assert done.generated_tokens == 40
            async with engine.stream(asked) as tokens:
                pieces = [piece async for piece in tokens]
            assert "".join(pieces) == done.text
            assert len(done.text) > 3
    assert threads_of_ours() == []


@kinds
async def test_what_is_reused_is_what_can_be(tiny_model: TinyModels, kind: Kind) -> None:
    asked = Request(PROMPT, max_tokens=12, temperature=0)
    async with open_tiny(tiny_model, kind) as engine:
        cold, warm = [await engine.complete(asked) for _ in range(2)]
        assert cold.cached_tokens == 0
        assert warm.cached_tokens == (warm.prompt_tokens - 1 if CAN_REWIND[kind] else 0)
        assert warm.text == cold.text
        assert engine.stats().kv_retained_tokens > 0


@kinds
async def test_requests_side_by_side_say_what_they_say_alone(
    tiny_model: TinyModels, kind: Kind
) -> None:
    asked = requests(8, max_tokens=20)
    async with open_tiny(tiny_model, kind) as engine:
        alone = [await engine.complete_text(request) for request in asked]
        assert await stream_all(engine, asked) == alone
        assert len(set(alone)) == 8


@kinds
async def test_preempted_requests_say_what_they_say_alone(
    tiny_model: TinyModels, kind: Kind
) -> None:
    asked = requests(4, max_tokens=60)
    async with open_tiny(tiny_model, kind) as engine:
        alone = [await engine.complete_text(request) for request in asked]
        n_prompt = await engine.count_tokens(asked[0])
    async with open_tiny(tiny_model, kind, n_ctx=2 * (n_prompt + 40)) as engine:
        assert await stream_all(engine, asked) == alone
        assert engine.stats().preemptions > 0
        await until_idle(engine)


@kinds
async def test_cancels_at_any_moment_leave_the_others_and_the_next_as_they_were(
    tiny_model: TinyModels, kind: Kind
) -> None:
    asked = requests(3, max_tokens=30)
    async with open_tiny(tiny_model, kind) as engine:
        alone = [await engine.complete_text(request) for request in asked]
        for n_pieces in (0, 1, 5):
            # In the middle of a prompt, unless that was read at once, and of a text.
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.complete, Request([270] * 1500, max_tokens=ENDLESS))
                await until(lambda: engine.stats().slots["free"] < engine.config.n_slots)
                nursery.cancel_scope.cancel()
            async with engine.stream(PROMPT, max_tokens=ENDLESS) as tokens:
                await count_pieces(tokens, n_pieces)
            assert await stream_all(engine, asked) == alone
        await until_idle(engine)
        stats = engine.stats()
        assert stats.requests["cancelled"] == 6
        assert stats.kv_retained_tokens + stats.kv_free_tokens == 2048


@kinds
async def test_a_full_pool_is_used_to_its_last_token(tiny_model: TinyModels, kind: Kind) -> None:
    async with open_tiny(tiny_model, kind, n_ctx=128) as engine:
        for _ in range(2):
            done = await engine.complete(PROMPT, max_tokens=ENDLESS)
            assert done.prompt_tokens + done.generated_tokens == 128


@kinds
async def test_a_batch_of_one_token_serves(tiny_model: TinyModels, kind: Kind) -> None:
    asked = Request(PROMPT, max_tokens=5, temperature=0)
    async with open_tiny(tiny_model, kind) as engine:
        expected = await engine.complete_text(asked)
    async with open_engine(tiny_model(kind), EXACT, n_slots=1, n_batch=1) as engine:
        assert await engine.complete_text(asked) == expected


async def test_a_model_that_can_end_ends(tiny_model: TinyModels) -> None:
    path = tiny_model("attention", can_end=True)
    async with open_engine(path, ONE_THREAD) as engine:
        done = [
            await engine.complete(PROMPT, seed=seed, temperature=1.0, max_tokens=500)
            for seed in range(5)
        ]
    assert "stop" in {d.finish_reason for d in done}
    assert all("im_end" not in d.text for d in done)
