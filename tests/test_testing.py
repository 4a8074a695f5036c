"""The scripted model: real actors and scheduler, no GGUF, no waiting."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from llamad_trio import Engine, EngineClosed, InferenceError
from llamad_trio.testing import ScriptedModel, open_scripted_engine


async def test_replies_by_text_part_and_function(autojump_clock: trio.testing.MockClock) -> None:
    async with open_scripted_engine("hello") as eng:
        assert await eng.complete_text("anything") == "hello"
    async with open_scripted_engine({"2+2": "4", "2+2+2": "6"}) as eng:
        assert await eng.complete_text("What is 2+2?") == "4"
        assert await eng.complete_text("What is 2+2+2?") == "6"
        with pytest.raises(InferenceError, match="no reply is scripted"):
            await eng.complete("What is 3+3?")
    async with open_scripted_engine(lambda prompt: prompt.upper()) as eng:
        assert await eng.complete_text("abc", raw=True) == "ABC"


async def test_time_passes_on_trios_clock_only(autojump_clock: trio.testing.MockClock) -> None:
    model = ScriptedModel("x" * 59, decode_s=1.0)
    async with open_scripted_engine(model) as eng:
        start = trio.current_time()
        completion = await eng.complete("p", raw=True)
        assert trio.current_time() - start == pytest.approx(60.0)
        assert completion.duration_s == pytest.approx(60.0)
        assert completion.ttft_s == pytest.approx(1.0)


async def test_preempted_and_slow_requests_keep_their_text(
    autojump_clock: trio.testing.MockClock,
) -> None:
    model = ScriptedModel(lambda prompt: prompt * 3, decode_s=0.1)
    texts: dict[str, str] = {}
    async with open_scripted_engine(model, n_slots=3, n_ctx=120) as eng:

        async def one(prompt: str) -> None:
            async with eng.stream(prompt, raw=True) as stream:
                async for _ in stream:
                    await trio.sleep(0.3)
                texts[prompt] = stream.text

        prompts = [letter * 20 for letter in "abcdef"]
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(one, prompt)
        assert eng.stats().preemptions > 0
    assert texts == {prompt: prompt * 3 for prompt in prompts}


async def test_a_block_that_ends_with_a_result_on_its_way_closes_cleanly(
    autojump_clock: trio.testing.MockClock,
) -> None:
    model = ScriptedModel("x" * 100, decode_s=1.0)
    for delay in (0.0, 1.0, 2.0):  # steps end at the very moments the block does
        async with trio.open_nursery() as nursery:
            failures: list[Exception] = []

            async def ask(eng: Engine, failures: list[Exception] = failures) -> None:
                try:
                    await eng.complete("p", raw=True)
                except EngineClosed as error:
                    failures.append(error)

            async with open_scripted_engine(model) as eng:
                for _ in range(3):
                    nursery.start_soon(ask, eng)
                await trio.sleep(delay)
        assert len(failures) == 3
