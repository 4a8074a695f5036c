"""How likely texts are to follow a prompt: the model's own numbers, from one pass over it."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from llamad_trio import PromptTooLong, Request, open_engine
from tests.models import DECODER_KINDS
from tests.support import (
    EXACT,
    ONE_THREAD,
    SURE_PROMPTS,
    held_steps,
    side_by_side,
    until,
    until_idle,
)

if TYPE_CHECKING:
    from pathlib import Path

    from llamad_trio import Engine
    from tests.models import Kind, TinyModels

PROMPT = "the cat and the rat ran in the rain, then they rested"
OPTIONS = ["the end", "a", "and then", "rain", "they ran", "x.", "the", "üçé", "猫"]

CLOSE = 5e-3
"""What the cut of a prompt into steps changes, where the KV cache is tiny."""

ROUGH = 0.15
"""The same for SmolLM2 with its usual settings, over a few tokens."""

QUESTION = "Answer with one word. What is the capital of France?"


# -- what comes out -------------------------------------------------------------------------


async def test_the_sensible_option_wins(engine: Engine) -> None:
    for prompt, raw, options, best in (
        (QUESTION, False, ["London", "Paris", "Berlin"], "Paris"),
        ("The capital of France is", True, [" London", " Paris", " a banana"], " Paris"),
        (SURE_PROMPTS[0], True, [" 7", " 8", " 9"], " 9"),
        ("The quick brown fox jumps over the lazy", True, [" dog", " cat", " sea"], " dog"),
    ):
        choice = await engine.choose(prompt, options, raw=raw)
        assert choice.text == options[choice.index] == best
        assert max(choice.probabilities) == choice.probabilities[choice.index] > 0.5


async def test_one_option_is_certain_and_of_two_that_no_float_can_hold_one_wins(
    tiny: Engine,
) -> None:
    assert list((await tiny.choose(PROMPT, ["rain"])).probabilities) == [1.0]
    choice = await tiny.choose(PROMPT, ["猫" * 150, "猫" * 149])
    assert choice.index == 1
    assert sum(choice.probabilities) == pytest.approx(1)


async def test_a_score_is_the_sum_of_the_logprobs_of_the_text_when_it_is_forced(
    engine: Engine,
) -> None:
    asked = Request("The capital of France is", raw=True, temperature=0)
    for text in (" Paris", " the city of Paris, in the north", " 42"):
        forced = await engine.complete(asked, regex=re.escape(text), logprobs=0)
        assert forced.text == text
        assert forced.logprobs is not None
        assert [told.token for told in forced.logprobs] == await engine.tokenize(text)
        (score,) = await engine.score(asked, [text])
        assert score == pytest.approx(sum(told.logprob for told in forced.logprobs), abs=ROUGH)


async def test_scores_of_one_token_are_the_logprobs_in_its_place(tiny: Engine) -> None:
    asked = Request(await tiny.tokenize(PROMPT), max_tokens=1, temperature=0)
    done = await tiny.complete(asked, logprobs=20)
    assert done.logprobs is not None
    # A letter may also be there as a byte, which no text is cut into.
    by_text = {
        told.text: told.logprob
        for told in done.logprobs[0].top
        if await tiny.tokenize(told.text) == [told.token]
    }
    letters = [text for text in by_text if re.fullmatch("[a-z.,]", text)]
    assert len(letters) > 5
    scores = await tiny.score(asked, letters)
    assert scores == pytest.approx([by_text[letter] for letter in letters], abs=CLOSE)


async def test_what_cannot_both_follow_is_no_likelier_together_than_certain(tiny: Engine) -> None:
    sums: list[float] = []
    for prompt in ("the", "rain", "and he", "in a", "they", PROMPT):
        tokens = Request(await tiny.tokenize(prompt))
        scores = await tiny.score(tokens, list("abcdefghijklmnopqrstuvwxyz.,"))
        assert all(score < 0 for score in scores)
        sums.append(sum(map(math.exp, scores)))
    assert 0.5 < max(sums) <= 1.0001


async def test_a_score_is_that_of_a_part_and_of_what_follows_that(engine: Engine) -> None:
    prompt, first, then = "The capital of France", " is", " Paris, the city"
    (whole,) = await engine.score(prompt, [first + then], raw=True)
    (of_first,) = await engine.score(prompt, [first], raw=True)
    (of_then,) = await engine.score(prompt + first, [then], raw=True)
    assert whole == pytest.approx(of_first + of_then, abs=ROUGH)


async def test_nothing_is_sure_to_follow(engine: Engine) -> None:
    before, paris, after = await engine.score(QUESTION, ["", "Paris", ""])
    assert before == after == 0 > paris
    assert (await engine.score("The cap", ["", "ital"], raw=True))[0] == 0
    assert await engine.score("The cap", [""], raw=True) == [0]
    assert await engine.score(QUESTION, []) == []


# -- where text and continuation meet within a token ----------------------------------------


async def test_a_probability_is_at_most_1_where_a_token_goes_over_the_seam(engine: Engine) -> None:
    for prompt, continuation in (
        ("The cap", "ital"),
        ("The capital of Fr", "ance"),
        ("She said hel", "lo"),
        ("1 + 1 = 1", "1"),
    ):
        cut, odd, longer = await engine.score(
            prompt, [continuation, "qzx", continuation + " and the"], raw=True
        )
        assert longer <= cut <= 0
        assert odd < cut
        alone = (await engine.score(prompt, [continuation], raw=True))[0]
        assert alone == pytest.approx(cut, abs=ROUGH)


async def test_a_word_that_is_begun_is_completed_sensibly(engine: Engine) -> None:
    choice = await engine.choose("The capital of Fr", ["uit", "ance", "og"], raw=True)
    assert choice.text == "ance"
    assert choice.probabilities[1] > 0.9


async def test_ids_are_joined_to_nothing(engine: Engine) -> None:
    ids = await engine.tokenize("The cap")
    forced = await engine.complete(Request(ids), regex="ital", logprobs=0, temperature=0)
    assert forced.logprobs is not None
    assert [told.token for told in forced.logprobs] == await engine.tokenize("ital")
    (apart,) = await engine.score(Request(ids), ["ital"])
    (joined,) = await engine.score("The cap", ["ital"], raw=True)
    assert apart == pytest.approx(sum(told.logprob for told in forced.logprobs), abs=ROUGH)
    assert apart < joined - 1


# -- what it costs --------------------------------------------------------------------------


@pytest.mark.parametrize("n_options", [1, 2, 20])
async def test_the_prompt_is_computed_once(tiny: Engine, n_options: int) -> None:
    options = [f"{chr(ord('a') + i)} rat ran" for i in range(n_options)]
    n_prompt = await tiny.count_tokens(PROMPT)
    n_options_tokens = sum([len(await tiny.tokenize(option)) for option in options])
    await tiny.score(PROMPT, options)
    stats = tiny.stats()
    assert stats.prefill_tokens <= n_prompt + n_options_tokens
    assert stats.decode_tokens == 0
    # And a second time not at all.
    await tiny.choose(PROMPT, options)
    again = tiny.stats().prefill_tokens - stats.prefill_tokens
    assert again <= n_options_tokens


async def test_the_prompt_is_held_no_longer_than_the_scoring_takes_also_if_that_is_cancelled(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_engine(tiny_path, EXACT, n_ctx=512) as engine:

        async def check_nothing_is_held() -> None:
            await until_idle(engine)
            await engine.complete(Request([21] * 200), max_tokens=1)
            await engine.complete(Request([22] * 200), max_tokens=1)  # one of three has to go
            assert (await engine.complete(Request([21] * 200), max_tokens=1)).cached_tokens == 199

        await engine.score(Request([20] * 200), ["a", "b"])
        await check_nothing_is_held()
        await engine.score(Request([20] * 200), ["a"])
        with held_steps(monkeypatch) as steps:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.score, Request([20] * 200), ["a", "b"])
                await until(steps.begun.is_set)
                nursery.cancel_scope.cancel()
        await check_nothing_is_held()


@pytest.mark.parametrize("kind", DECODER_KINDS)
async def test_every_memory_gives_the_numbers_of_a_plain_pass(
    tiny_model: TinyModels, kind: Kind
) -> None:
    path = tiny_model(kind)
    plain: list[float] = []
    for kv_cache in (False, True):
        async with open_engine(path, EXACT, n_ctx=2048, kv_cache=kv_cache) as engine:
            scores = await engine.score(PROMPT, OPTIONS)
            one_by_one = [(await engine.score(PROMPT, [option]))[0] for option in OPTIONS]
            await until_idle(engine)
        plain = plain or one_by_one
        assert scores == pytest.approx(plain, abs=CLOSE)
        assert one_by_one == pytest.approx(plain, abs=CLOSE)


async def test_a_pool_with_room_for_little_more_than_the_prompt_will_do(tiny_path: Path) -> None:
    async with open_engine(tiny_path, EXACT, n_ctx=2048) as engine:
        expected = await engine.score(PROMPT, OPTIONS)
        n_prompt = await engine.count_tokens(PROMPT)
    async with open_engine(tiny_path, EXACT, n_ctx=n_prompt + 16) as engine:
        assert await engine.score(PROMPT, OPTIONS) == pytest.approx(expected, abs=CLOSE)
        await until_idle(engine)


async def test_a_long_continuation_is_scored_whole(tiny_path: Path) -> None:
    text = "and the rat ran then. " * 30
    async with open_engine(tiny_path, EXACT, n_ctx=2048, n_batch=16) as engine:
        (in_small_steps,) = await engine.score(PROMPT, [text])
    async with open_engine(tiny_path, EXACT, n_ctx=2048) as engine:
        (score,) = await engine.score(PROMPT, [text])
        forced = await engine.complete(
            PROMPT, regex=re.escape(text), logprobs=0, temperature=0, max_tokens=1000
        )
    assert forced.text == text
    assert forced.logprobs is not None
    assert score == pytest.approx(in_small_steps, abs=0.1)
    assert score == pytest.approx(sum(told.logprob for told in forced.logprobs), abs=0.1)


# -- beside others --------------------------------------------------------------------------


async def test_streams_beside_it_say_what_they_say_alone(tiny: Engine) -> None:
    asked = [Request(f"{c} {PROMPT}", max_tokens=30, temperature=0) for c in "abc"]
    alone = [await tiny.complete_text(request) for request in asked]
    expected = await tiny.score(PROMPT, OPTIONS)

    async def score() -> None:
        assert await tiny.score(PROMPT, OPTIONS) == pytest.approx(expected, abs=CLOSE)

    async with trio.open_nursery() as nursery:
        for _ in asked:
            nursery.start_soon(score)
        texts = await side_by_side(partial(tiny.complete_text, request) for request in asked)
    assert texts == alone
    await until_idle(tiny)


async def test_one_scoring_of_many_options_does_not_overflow_the_queue(tiny_path: Path) -> None:
    for max_queue in (0, 1):
        async with open_engine(
            tiny_path, EXACT, n_ctx=512, n_slots=2, max_queue=max_queue
        ) as engine:
            assert len(await engine.score(PROMPT, OPTIONS)) == len(OPTIONS)


# -- what is refused ------------------------------------------------------------------------


async def test_what_does_not_fit_is_refused_before_anything_is_computed(tiny_path: Path) -> None:
    async with open_engine(tiny_path, ONE_THREAD, n_ctx=128) as engine:
        for prompt, continuation in [
            (Request([20] * 128), "a"),
            (Request([20] * 100), "a" * 100),
            (Request("a" * 100, raw=True), "a" * 100),
            (Request([20]), "a" * 100_000),
        ]:
            with pytest.raises(PromptTooLong):
                await engine.score(prompt, ["b", continuation])
            with pytest.raises(PromptTooLong):
                await engine.choose(prompt, ["b", continuation])
        assert engine.stats().steps == 0
        (score,) = await engine.score(Request([20] * 100), ["a" * 27])
        assert score < 0
        await until_idle(engine)
