"""A constraint is always kept, ends the text when it is complete, and disturbs nobody."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import jsonschema
import pytest

from llamad_trio import Request, open_engine
from tests.support import EXACT, ONE_THREAD, side_by_side, until_idle

if TYPE_CHECKING:
    from pathlib import Path

    from llamad_trio import Engine
    from tests.models import TinyModels

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SUM = 'root ::= num ("+" num)* "=" num\nnum ::= [0-9] [0-9]? | "(" root ")"'
LIST = 'start: "[" item ("," item)* "]"\nitem: /[a-c]{1,2}/'


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": ({"json_schema": PERSON}, is_person),
    "regex": ({"regex": "[a-f]{3}-[0-9]{2}/x"}, re.compile("[a-f]{3}-[0-9]{2}/x").fullmatch),
    "lark": ({"lark": LIST}, re.compile(r"\[[a-c]{1,2}(,[a-c]{1,2})*\]").fullmatch),
    "grammar": ({"grammar": 'root ::= "<" [xy]+ ">"'}, re.compile("<[xy]+>").fullmatch),
}


@pytest.fixture
def can_end_path(tiny_model: TinyModels) -> Path:
    return tiny_model("attention", n_ctx_train=4096, can_end=True)


@pytest.mark.parametrize("kind", KINDS)
async def test_random_text_is_of_the_constraint(can_end_path: Path, kind: str) -> None:
    fields, matches = KINDS[kind]
    async with open_engine(can_end_path, ONE_THREAD, n_slots=8) as engine:

        async def finishes(seed: int) -> bool:
            request = Request("x", raw=True, temperature=2.0, seed=seed, max_tokens=200)
            done = await engine.complete(request, **fields)
            if done.finish_reason != "stop":
                return False
            assert matches(done.text)
            assert done.generated_tokens < 200
            assert done.value == (json.loads(done.text) if kind == "json_schema" else None)
            return True

        finished = await side_by_side(partial(finishes, seed) for seed in range(24))
    assert sum(finished) >= 12


@pytest.mark.parametrize("temperature", [0.0, 1.5])
async def test_forced_tokens_change_nothing_but_the_steps(
    can_end_path: Path, temperature: float
) -> None:
    """`logprobs` has every token computed on its own."""
    async with open_engine(can_end_path, EXACT, n_slots=1, kv_cache=False) as engine:
        asked = Request("x", raw=True, temperature=temperature, max_tokens=120, json_schema=PERSON)
        for seed in range(8):
            before = engine.stats().steps
            together = await engine.complete(asked, seed=seed)
            between = engine.stats().steps
            one_by_one = await engine.complete(asked, seed=seed, logprobs=0)
            after = engine.stats().steps
            assert together.text == one_by_one.text
            assert together.generated_tokens == one_by_one.generated_tokens
            assert between - before < after - between
            assert one_by_one.logprobs is not None
            assert len(one_by_one.logprobs) == one_by_one.generated_tokens


async def test_max_tokens_and_stop_sequences_cut_within_forced_text(tiny: Engine) -> None:
    request = Request("x", raw=True, regex="abcdefghij[kl]mnopqrst", temperature=1.0, seed=1)
    whole = await tiny.complete(request)
    assert whole.finish_reason == "stop"
    assert (await tiny.complete(request, max_tokens=19)).finish_reason == "stop"
    for n in range(1, 19):
        cut = await tiny.complete(request, max_tokens=n)
        assert whole.text.startswith(cut.text)
        assert cut.generated_tokens == n
        assert cut.finish_reason == "length"
    stopped = await tiny.complete(request, stop=["fg", "nop"])
    assert (stopped.text, stopped.stop_sequence) == ("abcde", "fg")
    stopped = await tiny.complete(request, stop=["nop"])
    assert stopped.text == whole.text[: whole.text.index("nop")]


async def test_streamed_pieces_are_the_text(tiny: Engine) -> None:
    request = Request("x", raw=True, json_schema=PERSON, temperature=1.0, seed=5, max_tokens=200)
    async with tiny.stream(request) as tokens:
        pieces = [piece async for piece in tokens]
        done = await tokens.result()
    assert "".join(pieces) == done.text
    assert len(pieces) < done.generated_tokens  # what is forced comes in one piece


async def test_requests_side_by_side_get_what_they_get_alone(can_end_path: Path) -> None:
    requests = [
        Request(f"{i}", raw=True, temperature=0, max_tokens=60, **fields)
        for i in range(4)
        for fields in (*(fields for fields, _ in KINDS.values()), {}, {"grammar": SUM})
    ]
    async with open_engine(can_end_path, EXACT, n_slots=4) as engine:
        alone = [await engine.complete_text(request) for request in requests]
    # A pool this small makes them preempt each other, too.
    async with open_engine(can_end_path, EXACT, n_slots=4, n_ctx=96) as engine:
        beside = await side_by_side(partial(engine.complete_text, r) for r in requests)
        assert engine.stats().preemptions > 0
        await until_idle(engine)
    assert beside == alone


async def test_a_prompt_of_tokens_can_be_constrained(tiny: Engine) -> None:
    done = await tiny.complete(Request([1, 2, 3], regex="a{5}"))
    assert done.text == "aaaaa"


async def test_logprobs_are_those_of_the_model(engine: Engine) -> None:
    request = Request("1, 2, 3,", raw=True, temperature=0, max_tokens=6)
    done = await engine.complete(request, logprobs=20)
    assert done.logprobs is not None
    assert len(done.logprobs) == done.generated_tokens
    for told in done.logprobs:
        values = [top.logprob for top in told.top]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert told.logprob == values[0]
        assert told.token == told.top[0].token
    assert "".join(told.text for told in done.logprobs) == done.text
    # The same text, scored.
    (score,) = await engine.score(Request("1, 2, 3,", raw=True), [done.text])
    assert score == pytest.approx(sum(told.logprob for told in done.logprobs), abs=0.5)
    assert (await engine.complete(request)).logprobs is None
    few = await engine.complete(request, logprobs=2)
    assert few.logprobs is not None
    assert [len(told.top) for told in few.logprobs] == [2] * 6


async def test_logprobs_of_a_constrained_token_are_from_before_the_constraint(
    engine: Engine,
) -> None:
    request = Request("1, 2, 3,", raw=True, temperature=0, regex=" zebra", max_tokens=6)
    done = await engine.complete(request, logprobs=1)
    assert done.text == " zebra"
    assert done.logprobs is not None
    assert done.logprobs[0].logprob < done.logprobs[0].top[0].logprob


async def test_the_same_request_twice_is_the_same(tiny: Engine) -> None:
    request = Request("x" * 40, raw=True, json_schema=PERSON, temperature=0, max_tokens=100)
    first = await tiny.complete(request)
    again = await tiny.complete(attrs.evolve(request, session="s"))
    assert again.cached_tokens > 0
    assert again.text == first.text
