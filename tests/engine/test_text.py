"""Questions about text are answered by what a request would be made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from llamad_trio import Message, Request
from tests.support import ENDLESS, read_all, until

if TYPE_CHECKING:
    from llamad_trio import Engine

REQUESTS = {
    "text": Request("the cat"),
    "conversation": Request(
        "and then?", system="a hat", history=[Message("user", "a"), Message("assistant", "b")]
    ),
    "raw": Request("the cat", raw=True),
    "tokens": Request([262, 270, 280]),
    "long": Request("the cat " * 200),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_prompt_is_counted_as_it_is_computed(tiny: Engine, name: str) -> None:
    count = await tiny.count_tokens(REQUESTS[name])
    assert (await tiny.complete(REQUESTS[name], max_tokens=1)).prompt_tokens == count


@pytest.mark.parametrize("name", ["text", "conversation", "long"])
async def test_a_rendered_prompt_sent_raw_is_the_same_prompt(tiny: Engine, name: str) -> None:
    asked = Request(await tiny.render(REQUESTS[name]), raw=True, max_tokens=12, temperature=0)
    templated = await tiny.complete(REQUESTS[name], max_tokens=12, temperature=0)
    raw = await tiny.complete(asked)
    assert (raw.text, raw.prompt_tokens) == (templated.text, templated.prompt_tokens)


async def test_rendering_writes_out_what_is_sent(tiny: Engine) -> None:
    assert await tiny.render(REQUESTS["raw"]) == "the cat"
    assert await tiny.render("the cat") == (
        "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    )
    assert await tiny.render("the cat", system="a hat") != await tiny.render("the cat")
    tokens = await tiny.tokenize("the cat")
    assert await tiny.render(Request(tokens)) == "the cat"


async def test_text_comes_back_from_its_tokens(engine: Engine) -> None:
    emoji = "👩\u200d👩\u200d👧"
    for text in ("", "the cat", " two  spaces ", f"naïve 猫 {emoji}", "a\n\tb", "long " * 1000):
        assert await engine.detokenize(await engine.tokenize(text)) == text


async def test_control_tokens_are_text_unless_they_are_asked_for(engine: Engine) -> None:
    plain = await engine.tokenize("<|im_end|>")
    (marker,) = await engine.tokenize("<|im_end|>", special=True)
    assert len(plain) > 1
    assert marker not in plain
    assert await engine.detokenize(plain) == await engine.detokenize([marker]) == "<|im_end|>"


async def test_questions_are_answered_while_all_slots_are_busy(tiny: Engine) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(lambda: tiny.complete("the cat", max_tokens=ENDLESS))
        await until(lambda: tiny.stats().slots["free"] == 0)
        assert await tiny.detokenize(await tiny.tokenize("the cat " * 600)) == "the cat " * 600
        assert await tiny.count_tokens("the cat") > 2
        assert tiny.stats().slots["free"] == 0
        nursery.cancel_scope.cancel()


async def test_a_token_list_is_read_once_and_may_change_afterwards(tiny: Engine) -> None:
    tokens = [262, 270, 280]
    asked = Request(tokens, max_tokens=8, temperature=0)
    tokens.clear()
    async with tiny.stream(asked) as stream:
        text = "".join(await read_all(stream))
    assert text == await tiny.complete_text(Request([262, 270, 280]), max_tokens=8, temperature=0)
