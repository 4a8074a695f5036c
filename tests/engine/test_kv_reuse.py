"""No token is computed twice that need not be, and nothing that is said is other for it."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest

from llamad_trio import Request, open_engine
from tests.models import DECODER_KINDS, SLIDING_WINDOW_TOKENS
from tests.support import EXACT, read_all, side_by_side

if TYPE_CHECKING:
    from pathlib import Path

    from llamad_trio import Completion, Engine
    from tests.models import Kind

kinds = pytest.mark.parametrize("kind", DECODER_KINDS)
rewinding = pytest.mark.parametrize("kind", ["attention", "sliding-window"])
with_state = pytest.mark.parametrize("kind", ["recurrent", "hybrid"])

LETTERS = range(262, 296)
"""Tokens of the tiny vocabulary that are said as they are."""


def some_tokens(n: int, seed: int = 0) -> list[int]:
    """Tokens without a pattern: other seeds, other tokens."""
    return random.Random(seed).choices(LETTERS, k=n)


async def tell(
    engine: Engine, prompt: list[int], max_tokens: int = 12
) -> tuple[Completion, list[int]]:
    """What follows the prompt, and its tokens."""
    asked = Request(prompt, max_tokens=max_tokens, temperature=0, logprobs=0)
    done = await engine.complete(asked)
    assert done.logprobs is not None
    return done, [told.token for told in done.logprobs]


# -- whose prefix it may be -----------------------------------------------------------------


@rewinding
async def test_a_prompt_is_reused_while_its_first_request_still_runs(path: Path) -> None:
    prompt = some_tokens(200)
    async with open_engine(path, EXACT) as engine:
        alone = await engine.complete_text(Request(prompt, max_tokens=300, temperature=0))
    async with open_engine(path, EXACT) as engine:
        asked = Request(prompt, max_tokens=300, temperature=0)
        async with engine.stream(asked) as first:
            pieces = [await first.receive()]
            second = await engine.complete(asked, max_tokens=20)
            assert second.cached_tokens == 199
            assert alone.startswith(second.text)
            # And one that goes another way after 150 tokens.
            third = await engine.complete(Request(prompt[:150] + some_tokens(9, 1)), max_tokens=20)
            assert third.cached_tokens == 150
            pieces += await read_all(first)
        assert "".join(pieces) == alone


@rewinding
async def test_requests_that_arrive_together_compute_what_they_share_once(path: Path) -> None:
    shared = some_tokens(400)
    # Each goes on with a token of its own, so that no two share any more, in whatever order.
    asked = [
        Request([*shared, 261 + n, *some_tokens(19, n)], max_tokens=10, temperature=0)
        for n in range(1, 9)
    ]
    async with open_engine(path, EXACT, n_slots=8, kv_cache=False) as engine:
        alone = [await engine.complete_text(request) for request in asked]
        assert engine.stats().prefill_tokens == 8 * 420
    async with open_engine(path, EXACT, n_slots=8) as engine:
        done = await side_by_side(partial(engine.complete, request) for request in asked)
        stats = engine.stats()
    assert [d.text for d in done] == alone
    assert stats.prefill_tokens == 400 + 8 * 20
    assert stats.cached_tokens == 7 * 400
    assert sorted(d.cached_tokens for d in done) == [0, *[400] * 7]


# -- memories with a state ------------------------------------------------------------------


@with_state
async def test_a_conversation_that_goes_on_exactly_is_not_computed_again(path: Path) -> None:
    conversation = some_tokens(50)
    turns: list[tuple[list[int], str]] = []
    async with open_engine(path, EXACT) as engine:
        for turn in range(5):
            done, answer = await tell(engine, conversation)
            turns.append((conversation, done.text))
            # The last token that was said has never been read.
            n_new = 1 + 10 if turn else len(conversation)
            assert done.cached_tokens == len(conversation) - n_new
            conversation = conversation + answer + some_tokens(10, turn)
    async with open_engine(path, EXACT, kv_cache=False) as engine:
        for prompt, text in turns:
            cold = await engine.complete(Request(prompt, max_tokens=12, temperature=0))
            assert (cold.text, cold.cached_tokens) == (text, 0)


@kinds
@pytest.mark.parametrize("kv_cache", [True, False])
async def test_what_a_memory_cannot_do_is_said_once_and_only_if_it_is_wanted(
    path: Path, kind: Kind, kv_cache: bool, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = some_tokens(60)
    async with open_engine(path, EXACT, kv_cache=kv_cache) as engine:
        can_rewind = engine.info.can_rewind
        for _ in range(3):
            done = await engine.complete(Request(prompt, max_tokens=3))
            prompt = prompt + some_tokens(10)
            if not kv_cache:
                stats = engine.stats()
                assert done.cached_tokens == stats.kv_retained_tokens == stats.cached_tokens == 0
    warnings = [r.getMessage() for r in caplog.records if r.name == "llamad_trio"]
    if can_rewind or not kv_cache:
        assert warnings == []
    else:
        (said,) = warnings
        assert f"tiny-{kind}" in said
        assert "cannot go back" in said
        assert "reused only when" in said


# -- never other than cold ------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("n_turns", [20, pytest.param(200, marks=pytest.mark.slow)])
async def test_a_long_conversation_in_a_small_pool_says_what_it_says_cold(
    path: Path, n_turns: int
) -> None:
    draw = random.Random(5)
    asked: list[Request] = []
    texts: list[str] = []
    async with open_engine(path, EXACT, n_ctx=256) as engine:
        conversation: list[int] = []
        for turn in range(n_turns):
            if len(conversation) > 180:
                # Back to before the window, or to the beginning.
                conversation = conversation[: draw.choice([20, 90, 150])]
            conversation = conversation + some_tokens(draw.randint(1, 20), turn)
            asked.append(Request(conversation, max_tokens=10, temperature=0))
            done, answer = await tell(engine, conversation, 10)
            texts.append(done.text)
            conversation = conversation + answer
            if draw.random() < 0.3:
                # Somebody else's, which takes the cells that are free.
                await engine.complete(Request(some_tokens(60, 1000 + turn), max_tokens=2))
        assert engine.stats().cached_tokens > 5 * SLIDING_WINDOW_TOKENS
    async with open_engine(path, EXACT, n_ctx=256, kv_cache=False) as engine:
        assert [await engine.complete_text(request) for request in asked] == texts
