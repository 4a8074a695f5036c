"""A model that makes sense says the same through every `EngineLike`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

import attrs

from llamad_trio import Request
from tests.engine.test_events import all_of, check
from tests.support import ENDLESS, SURE_PROMPTS, count_pieces, side_by_side, until_idle

if TYPE_CHECKING:
    from tests.conformance.engines import Pair

FOX = Request("The quick brown fox jumps over the lazy", raw=True, max_tokens=1, temperature=0)

COUNTING = Request(SURE_PROMPTS[0], raw=True, max_tokens=10, temperature=0)


@attrs.frozen
class Person:
    """Somebody."""

    name: str
    age: int


async def test_text_comes_at_once_or_as_it_is_made(real: Pair) -> None:
    assert await real.engine.complete_text(FOX) == " dog"
    done = await real.engine.complete(COUNTING)
    assert done.text.startswith(" 9, 10, 11")
    async with real.engine.stream(COUNTING) as tokens:
        assert (await tokens.result()).text == tokens.text == done.text
    async with real.engine.stream_events(COUNTING) as events:
        assert check(await all_of(events)).text == done.text
    assert await real.behind.complete_text(COUNTING) == done.text


async def test_values_and_choices_make_sense(real: Pair) -> None:
    asked = Request("Ada is 36 years old. Describe her as JSON.", max_tokens=40, temperature=0)
    done = await real.engine.complete(asked, into=Person)
    assert isinstance(done.value, Person)
    options = ["London", "Paris", "Berlin"]
    question = "Answer with one word. What is the capital of France?"
    assert (await real.engine.choose(question, options)).text == "Paris"
    answer = await real.engine.complete("Is water wet?", into=Literal["yes", "no"], max_tokens=8)
    assert answer.value in ("yes", "no")


async def test_a_stream_that_is_left_frees_its_slot(real: Pair) -> None:
    async with real.engine.stream("Count to a million.", max_tokens=ENDLESS) as tokens:
        await count_pieces(tokens, 2)
    await until_idle(real.behind)
    assert real.behind.stats().requests["cancelled"] == 1
    assert await real.engine.complete_text(FOX) == " dog"


async def test_texts_do_not_mix(real: Pair) -> None:
    asked = [attrs.evolve(COUNTING, prompt=prompt, max_tokens=6) for prompt in SURE_PROMPTS]
    alone = [await real.engine.complete_text(request) for request in asked]
    together = await side_by_side(partial(real.engine.complete_text, request) for request in asked)
    assert together == alone
    assert together[1].startswith(" 19, 2")
