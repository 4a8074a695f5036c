"""A request has one outcome, and it is the one that was asked for; a stream of it comes in whole
characters, at its reader's pace; who leaves costs nobody anything.  What holds for every engine is
in `tests.conformance`."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import attrs
import llama_cpp
import pytest
import trio

from llamad_trio import PromptTooLong, Request, open_engine
from llamad_trio.constraints.gbnf_lark import gbnf_to_lark
from llamad_trio.engine.preprocess import MAX_THREADS
from llamad_trio.llama.llama_runtime import LlamaRuntime
from llamad_trio.testing import ScriptedModel, open_scripted_engine
from tests.support import (
    ENDLESS,
    ONE_THREAD,
    SURE_PROMPTS,
    before_steps,
    held_steps,
    read_all,
    side_by_side,
    until,
    until_idle,
    until_queued,
)

if TYPE_CHECKING:
    from pathlib import Path

    from llamad_trio import Engine
    from llamad_trio.constraints.compiler import Matcher
    from llamad_trio.constraints.constraint import Constraint
    from llamad_trio.scheduling.plan import StepPlan
    from tests.models import TinyModels


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


# -- limits ---------------------------------------------------------------------------------


async def test_a_reply_is_capped_by_what_fits_beside_its_prompt(tiny_path: Path) -> None:
    async with open_engine(tiny_path, ONE_THREAD, n_ctx=64) as engine:
        for n_prompt in (1, 40, 63):
            done = await engine.complete(Request([7] * n_prompt), max_tokens=ENDLESS)
            assert (done.prompt_tokens, done.generated_tokens) == (n_prompt, 64 - n_prompt)
            assert done.finish_reason == "length"
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


# -- seeds ----------------------------------------------------------------------------------


async def test_a_seed_fixes_the_text_and_other_seeds_give_others(tiny: Engine) -> None:
    asked = Request("the cat", max_tokens=32, temperature=1.0)
    seeds = [0, 1, 2, 2**32 - 1]  # the last is random to llama.cpp
    texts = [await tiny.complete_text(asked, seed=seed) for seed in seeds]
    assert texts == [await tiny.complete_text(asked, seed=seed) for seed in seeds]
    assert len(set(texts)) > 1
    # Without one, every request draws its own.
    assert len({await tiny.complete_text(asked) for _ in range(4)}) > 1


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


# -- many at once ---------------------------------------------------------------------------


async def test_texts_of_a_real_model_do_not_mix(engine: Engine) -> None:
    asked = [Request(prompt, raw=True, max_tokens=6, temperature=0) for prompt in SURE_PROMPTS]
    alone = [await engine.complete_text(request) for request in asked]
    together = await side_by_side(partial(engine.complete_text, request) for request in asked)
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


# -- streams -------------------------------------------------------------------------------

EMOJI = Request("🎉🐈👍🎉🐈👍🎉🐈👍🎉🐈👍", raw=True, max_tokens=18, temperature=0)


async def test_pieces_are_whole_characters(engine: Engine) -> None:
    # A token of this vocabulary is a part of an emoji: bytes that are no text by themselves.
    done = await engine.complete(EMOJI)
    async with engine.stream(EMOJI) as tokens:
        pieces = await read_all(tokens)
    assert "🐈" in pieces
    assert len(pieces) < done.generated_tokens
    # Only a text that is cut off can end in half a character, which is then told as such.
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces[:-1])
    assert "".join(pieces) == done.text


async def test_all_slots_paused_wait_without_computing_until_one_is_read(tiny: Engine) -> None:
    asked = Request("the cat", max_tokens=100, temperature=0)
    go = trio.Event()

    async def read_late() -> str:
        async with tiny.stream(asked) as tokens:
            await go.wait()
            return (await tokens.result()).text

    async def look_and_let_go() -> str:
        await until(lambda: tiny.stats().slots["paused"] == 4)
        steps = tiny.stats().steps
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        assert tiny.stats().steps == steps
        go.set()
        return await tiny.complete_text(asked)

    assert len(set(await side_by_side([*[read_late] * 4, look_and_let_go]))) == 1


# -- cancelled ------------------------------------------------------------------------------


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


# -- prepared in threads --------------------------------------------------------------------

HANG_S = 30


class SlowToCompile(ScriptedModel):
    """Compiles what is hard only when it may."""

    def __init__(self) -> None:
        super().__init__("easy")
        self.may_go_on = threading.Event()
        self.compiled: list[object] = []

    def compile(self, constraint: Constraint) -> Matcher:
        self.compiled.append(constraint.source)
        if constraint.source == "hard":
            assert self.may_go_on.wait(HANG_S)
        return super().compile(constraint)


async def test_what_waits_to_be_compiled_and_is_cancelled_is_not_compiled() -> None:
    model = SlowToCompile()
    async with open_scripted_engine(model) as engine:
        async with trio.open_nursery() as nursery:
            for _ in range(3 * MAX_THREADS):
                nursery.start_soon(engine.complete, Request("x", raw=True, regex="hard"))
            await until(lambda: len(model.compiled) == MAX_THREADS)
            nursery.cancel_scope.cancel()
        model.may_go_on.set()
        assert (await engine.complete("x", raw=True, regex="easy")).text == "easy"
    assert model.compiled == ["hard"] * MAX_THREADS + ["easy"]


async def test_no_grammar_is_read_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def noting(source: str, root: str) -> str:
        threads.append(threading.current_thread())
        return gbnf_to_lark(source, root)

    monkeypatch.setattr("llamad_trio.chat.conversation.gbnf_to_lark", noting)
    request = Request("x", raw=True, grammar='root ::= "easy"')
    async with open_scripted_engine("easy") as engine:
        await engine.complete(request)
        await engine.count_tokens(request)
        await engine.render(request)
        await engine.score(request, ["easy"])
    assert len(threads) == 4
    assert threading.current_thread() not in threads
