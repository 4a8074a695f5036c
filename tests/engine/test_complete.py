"""A request has one outcome, and it is the one that was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import llama_cpp
import pytest
import trio

from llamad_trio import Message, PromptTooLong, Request, open_engine
from llamad_trio.llama.llama_runtime import LlamaRuntime
from tests.support import (
    ENDLESS,
    ONE_THREAD,
    SURE_PROMPTS,
    held_steps,
    until,
    until_idle,
    until_queued,
)

if TYPE_CHECKING:
    from pathlib import Path

    from llamad_trio import Completion, Engine
    from tests.models import TinyModels

COUNTING = Request(
    "Write the numbers from 1 to 10, separated by commas.", max_tokens=16, temperature=0
)


async def test_a_completion_reports_what_was_done(engine: Engine) -> None:
    done = await engine.complete(COUNTING)
    assert done.text.startswith("1, 2, 3, 4, 5")
    assert done.prompt_tokens == await engine.count_tokens(COUNTING)
    assert done.generated_tokens == len(await engine.tokenize(done.text)) == 16
    assert done.finish_reason == "length"
    assert done.stop_sequence is None
    assert done.cached_tokens == 0
    assert 0 < done.ttft_s <= done.duration_s


async def test_the_text_is_what_llama_cpp_says_by_itself(
    engine: Engine, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = engine.config.use_extra_bufts is not False
    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_model_default_params", lambda: params)
    asked = Request(SURE_PROMPTS[0], raw=True, max_tokens=12, temperature=0)
    prompt = await engine.tokenize(SURE_PROMPTS[0])
    alone = llama_cpp.Llama(
        str(smollm2_path), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False
    )
    try:
        reference = alone.create_completion(
            prompt, max_tokens=12, temperature=0, repeat_penalty=1.0
        )
    finally:
        alone.close()
    assert await engine.complete_text(asked) == reference["choices"][0]["text"]


async def test_complete_text_is_the_text_of_the_completion(tiny: Engine) -> None:
    assert (
        await tiny.complete_text(COUNTING)
        == (await tiny.complete(COUNTING)).text
        == await tiny.complete_text(str(COUNTING.prompt), max_tokens=16, temperature=0)
    )


async def test_fields_override_those_of_the_request(tiny: Engine) -> None:
    done = await tiny.complete(COUNTING, max_tokens=3)
    assert done.generated_tokens == 3
    assert COUNTING.max_tokens == 16


async def test_a_text_that_ends_by_itself_has_stopped(engine: Engine) -> None:
    done = await engine.complete("Hi", temperature=0, max_tokens=64)
    assert done.finish_reason == "stop"
    assert done.stop_sequence is None
    assert done.generated_tokens < 64
    assert "<|im_end|>" not in done.text


async def test_a_model_with_a_huge_vocabulary_and_a_sliding_window_answers(
    gemma3_path: Path,
) -> None:
    async with open_engine(gemma3_path, ONE_THREAD, n_ctx=512, n_slots=1) as engine:
        assert engine.info.architecture == "gemma3"
        first = await engine.complete("The capital of France is", raw=True, max_tokens=4)
        again = await engine.complete("The capital of France is", raw=True, max_tokens=4)
        assert first.text.startswith(" the capital")
        assert again.text == first.text
        assert again.cached_tokens > 0
        # Its template writes BOS: it gets no second one.
        asked = Request("Hi" if engine.info.has_template else "<bos>Hi", max_tokens=1)
        asked = attrs.evolve(asked, raw=not engine.info.has_template)
        rendered = await engine.render(asked)
        assert rendered.startswith("<bos>")
        tokens = await engine.tokenize(rendered, special=True)
        assert tokens.count(tokens[0]) == 1
        assert (await engine.complete(asked)).prompt_tokens == len(tokens)


# -- prompts --------------------------------------------------------------------------------


async def test_system_and_history_are_part_of_the_prompt(engine: Engine) -> None:
    asked = Request("And then?", history=[Message("user", "One"), Message("assistant", "Two")])
    plain = await engine.render(attrs.evolve(asked, history=()))
    with_history = await engine.render(asked)
    with_system = await engine.render(asked, system="You are a pirate.")
    turns = ["<|im_start|>user\nOne", "<|im_start|>assistant\nTwo", "<|im_start|>user\nAnd then?"]
    places = [with_history.find(turn) for turn in turns]
    assert -1 < places[0] < places[1] < places[2]
    assert "One" not in plain
    assert "<|im_start|>system\nYou are a pirate." in with_system
    assert (await engine.complete(asked, max_tokens=1)).prompt_tokens > (
        await engine.complete("And then?", max_tokens=1)
    ).prompt_tokens


async def test_a_raw_prompt_and_one_of_tokens_are_used_as_they_are(engine: Engine) -> None:
    text = "The quick brown fox jumps over the lazy"
    tokens = await engine.tokenize(text)
    for asked in (Request(text, raw=True), Request(tokens)):
        done = await engine.complete(asked, max_tokens=1, temperature=0)
        assert done.prompt_tokens == len(tokens)
        assert done.text == " dog"


async def test_any_script_goes_in_whole(engine: Engine) -> None:
    for text in ("naïve café", "猫と犬", "👩\u200d👩\u200d👧 🎉", "\u0645\u0631\u062d\u0628\u0627"):
        tokens = await engine.tokenize(text)
        assert await engine.detokenize(tokens) == text
        assert text in await engine.render(text)
        done = await engine.complete(text, raw=True, max_tokens=1)
        assert (done.prompt_tokens, done.generated_tokens) == (len(tokens), 1)


# -- limits ---------------------------------------------------------------------------------


async def test_a_reply_is_capped_by_what_fits_beside_its_prompt(tiny_path: Path) -> None:
    async with open_engine(tiny_path, ONE_THREAD, n_ctx=96) as engine:
        done = await engine.complete("the cat", max_tokens=ENDLESS)
        assert done.finish_reason == "length"
        assert done.prompt_tokens + done.generated_tokens == 96


async def test_the_longest_prompt_that_fits_gets_one_token(tiny_path: Path) -> None:
    async with open_engine(tiny_path, ONE_THREAD, n_ctx=64) as engine:
        done = await engine.complete(Request([7] * 63))
        assert (done.prompt_tokens, done.generated_tokens) == (63, 1)
        with pytest.raises(PromptTooLong) as error:
            await engine.complete(Request([7] * 64))
        assert (error.value.tokens, error.value.budget) == (64, 63)


async def test_a_prompt_beyond_what_the_model_was_trained_for_is_too_long(
    tiny_model: TinyModels,
) -> None:
    path = tiny_model("attention", n_ctx_train=512)
    async with open_engine(path, ONE_THREAD, n_ctx=1024) as engine:
        with pytest.raises(PromptTooLong) as error:
            await engine.complete(Request([7] * 512))
        assert error.value.budget == 511
    async with open_engine(path, ONE_THREAD, n_ctx=1024, rope_freq_scale=0.5) as engine:
        done = await engine.complete(Request([7] * 512), max_tokens=1)
        assert done.prompt_tokens == 512


async def test_a_prompt_that_is_too_long_costs_nobody_else_anything(tiny: Engine) -> None:
    async def ask_too_much() -> None:
        with pytest.raises(PromptTooLong) as error:
            await tiny.complete("word " * 10_000)
        assert error.value.tokens > error.value.budget == 8191

    asked = Request("the cat", max_tokens=16, temperature=0)
    alone = await tiny.complete_text(asked)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_too_much)
        assert await tiny.complete_text(asked) == alone
    assert tiny.stats().requests == {"completed": 2, "failed": 1, "cancelled": 0}


async def test_a_megabyte_is_refused_without_being_tokenised(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> list[int]:
        raise AssertionError("tokenised")

    with monkeypatch.context() as patch:
        patch.setattr(LlamaRuntime, "tokenize", refuse)
        for raw in (True, False):
            with pytest.raises(PromptTooLong) as error:
                await tiny.complete("a" * 1_000_000, raw=raw)
            assert error.value.tokens > error.value.budget == 8191
    assert (await tiny.complete(COUNTING)).finish_reason == "length"


# -- seeds ----------------------------------------------------------------------------------


async def test_a_seed_fixes_the_text_and_other_seeds_give_others(tiny: Engine) -> None:
    asked = Request("the cat", max_tokens=16, temperature=1.0)
    texts = [await tiny.complete_text(asked, seed=seed) for seed in (0, 1, 2, 0)]
    assert texts[0] == texts[3]
    assert len(set(texts)) > 1


async def test_without_a_seed_every_request_draws_its_own(tiny: Engine) -> None:
    asked = Request("the cat", max_tokens=16, temperature=1.0)
    assert len({await tiny.complete_text(asked) for _ in range(4)}) > 1


async def test_every_seed_repeats_even_the_one_that_llama_cpp_takes_for_random(
    tiny: Engine,
) -> None:
    asked = Request("the cat", max_tokens=32, temperature=1.0, seed=2**32 - 1)
    assert len({await tiny.complete_text(asked) for _ in range(3)}) == 1


async def test_greedy_ignores_the_seed_and_all_other_sampling_fields(tiny: Engine) -> None:
    greedy = await tiny.complete_text("the cat", temperature=0, max_tokens=24)
    assert greedy == await tiny.complete_text(
        "the cat", temperature=-3, max_tokens=24, seed=5, top_k=1, repeat_penalty=2.0, min_p=1.0
    )
    assert greedy == await tiny.complete_text(
        "the cat", temperature=2, top_k=1, max_tokens=24, repeat_penalty=1.0
    )


async def test_penalties_keep_a_text_from_repeating_itself(tiny: Engine) -> None:
    asked = Request("the cat", max_tokens=40, temperature=0.01, repeat_penalty=1.0, raw=True)
    free = await tiny.complete_text(asked)
    penalised = await tiny.complete_text(asked, repeat_penalty=2.0, frequency_penalty=2.0)
    assert len(set(penalised)) > len(set(free))


# -- stop sequences -------------------------------------------------------------------------


async def test_a_stop_sequence_ends_the_text_and_is_no_part_of_it(engine: Engine) -> None:
    asked = attrs.evolve(COUNTING, max_tokens=8)
    done = await engine.complete(asked, stop=["3", "9"])
    assert done.text == "1, 2, "
    assert (done.finish_reason, done.stop_sequence) == ("stop", "3")
    assert done.generated_tokens < 8
    # It may span tokens.
    done = await engine.complete(asked, stop=[", 2, 3"])
    assert done.text == "1"
    assert done.stop_sequence == ", 2, 3"
    # One that never comes changes nothing.
    without = await engine.complete(asked)
    done = await engine.complete(asked, stop=["", "never said", without.text + "!"])
    assert (done.text, done.finish_reason) == (without.text, "length")
    assert done.stop_sequence is None


# -- many at once ---------------------------------------------------------------------------


async def complete_all(engine: Engine, requests: list[Request]) -> list[Completion]:
    """All at once, in the order of the requests."""
    done: dict[int, Completion] = {}

    async def complete(i: int) -> None:
        done[i] = await engine.complete(requests[i])

    async with trio.open_nursery() as nursery:
        for i in range(len(requests)):
            nursery.start_soon(complete, i)
    return [done[i] for i in range(len(requests))]


async def test_twenty_requests_on_four_slots_all_complete(tiny: Engine) -> None:
    requests = [
        Request(f"Number {n} is followed by", raw=True, max_tokens=1 + n % 4, temperature=0)
        for n in range(20)
    ]
    done = await complete_all(tiny, requests)
    assert [d.prompt_tokens for d in done] == [await tiny.count_tokens(r) for r in requests]
    assert [d.generated_tokens for d in done] == [1 + n % 4 for n in range(20)]
    await until_idle(tiny)
    assert tiny.stats().requests == {"completed": 20, "failed": 0, "cancelled": 0}


async def test_texts_do_not_mix(engine: Engine) -> None:
    requests = [Request(p, raw=True, max_tokens=6, temperature=0) for p in SURE_PROMPTS]
    alone = [await engine.complete_text(request) for request in requests]
    together = [done.text for done in await complete_all(engine, requests)]
    assert together == alone
    assert together[0].startswith(" 9, 10")
    assert together[1].startswith(" 19, 2")


async def test_one_slot_serves_in_the_order_of_arrival(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[int] = []
    async with open_engine(tiny_path, ONE_THREAD, n_ctx=512, n_slots=1) as engine:

        async def complete(i: int) -> None:
            await engine.complete("the cat", max_tokens=8)
            finished.append(i)

        with held_steps(monkeypatch) as steps:
            async with trio.open_nursery() as nursery:
                for i in range(5):
                    nursery.start_soon(complete, i)
                    await until(steps.begun.is_set)
                    await until_queued(engine, i)
                steps.let_go()
    assert finished == [0, 1, 2, 3, 4]
