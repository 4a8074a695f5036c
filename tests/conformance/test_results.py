"""What every `EngineLike` makes of a model's text: data, calls, numbers, and nothing that was
not asked for."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Literal, assert_type

import attrs
import pytest

from llamad_trio import (
    Choice,
    Completion,
    Done,
    IncompleteOutput,
    Message,
    ProtocolError,
    Request,
    Tool,
    ToolCallDelta,
    ToolCallStart,
    run_tools,
)
from tests.engine.test_events import all_of, check
from tests.support import until_idle

if TYPE_CHECKING:
    from tests.conformance.engines import Opener, Pair

CLOSE = 1e-3
"""What the cut of a prompt into steps may change of a logarithm."""

SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


# -- constraints ----------------------------------------------------------------------------


async def test_a_json_schema_gives_the_data(pair: Pair) -> None:
    asked = Request("an object", json_schema=SCHEMA, max_tokens=100, temperature=0)
    done = await pair.engine.complete(asked)
    assert done.value == json.loads(done.text)
    assert set(done.value) == {"n", "ok"}
    async with pair.engine.stream_events(asked) as events:
        last = (await all_of(events))[-1]
    assert isinstance(last, Done)
    assert last.completion.value == done.value
    async with pair.engine.stream(asked) as tokens:
        assert (await tokens.result()).value == done.value


async def test_json_that_is_cut_off_is_no_data(pair: Pair) -> None:
    for fields in ({"max_tokens": 5}, {"stop": ['"ok"']}):
        asked = Request("an object", json_schema=SCHEMA, temperature=0)
        done = await pair.engine.complete(attrs.evolve(asked, **fields))
        assert done.value is None
        assert done.text.startswith("{")


TWO_DIGITS: list[dict[str, Any]] = [
    {"regex": "[0-9]{2}"},
    {"lark": 'start: "4" /[0-9]/'},
    {"grammar": 'root ::= [0-9] "2"'},
    {"grammar": 'root ::= "x"\nnumber ::= [0-9] [0-9]', "grammar_root": "number"},
]


async def test_a_constraint_holds(pair: Pair) -> None:
    for seed, fields in enumerate(TWO_DIGITS):
        asked = Request("a number", temperature=1.5, seed=seed, **fields)
        done = await pair.engine.complete(asked)
        assert re.fullmatch("[0-9]{2}", done.text)
        assert done.finish_reason == "stop"
        assert done.value is None
        assert done.text == await pair.behind.complete_text(asked)
        async with pair.engine.stream(asked) as tokens:
            assert (await tokens.result()).text == tokens.text == done.text


# -- types ----------------------------------------------------------------------------------


@attrs.frozen
class Found:
    """What was found.

    Attributes:
        n: how many there are.
        ok: whether that is enough.
    """

    n: Literal[1, 2, 3]
    ok: bool


async def test_a_type_asked_for_is_a_value_got(pair: Pair) -> None:
    done = await pair.engine.complete("an object", into=Found, max_tokens=100)
    assert_type(done, Completion[Found])
    assert_type(done.value, Found)
    assert isinstance(done.value, Found)
    assert attrs.asdict(done.value) == json.loads(done.text)
    number = await pair.engine.complete("a number", into=Literal[42, 43])
    assert number.value in (42, 43)
    assert_type(await pair.engine.complete("a number", max_tokens=1), Completion[Any])


async def test_describe_tells_the_model_what_the_fields_mean(pair: Pair) -> None:
    asked = Request("an object", max_tokens=100)
    plain = await pair.engine.complete(asked, into=Found)
    described = await pair.engine.complete(asked, into=Found, describe=True)
    told = await pair.behind.complete(asked, into=Found, describe=True)
    assert isinstance(described.value, Found)
    assert described.prompt_tokens == told.prompt_tokens > plain.prompt_tokens + 10
    with pytest.raises(ProtocolError, match="into"):
        await pair.engine.complete(asked, describe=True)


async def test_what_is_cut_off_is_told_with_its_text(pair: Pair) -> None:
    asked = Request("an object", max_tokens=100, temperature=0)
    whole = (await pair.engine.complete(asked, into=Found)).text
    for fields in ({"max_tokens": 4}, {"stop": ['"ok"']}):
        with pytest.raises(IncompleteOutput) as caught:
            await pair.engine.complete(asked, into=Found, **fields)
        assert caught.value.text
        assert whole.startswith(caught.value.text)
        assert '"ok"' not in caught.value.text
    await until_idle(pair.behind)
    # The requests themselves were completed.
    assert pair.behind.stats().requests == {"completed": 3, "failed": 0, "cancelled": 0}


# -- numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 3])
async def test_logprobs_are_told_of_each_token(pair: Pair, n: int) -> None:
    asked = Request("the cat", max_tokens=12, temperature=0, logprobs=n)
    done = await pair.engine.complete(asked)
    there = await pair.behind.complete(asked)
    assert done.logprobs is not None
    assert there.logprobs is not None
    assert len(done.logprobs) == done.generated_tokens == 12
    assert b"".join(told.piece for told in done.logprobs).decode(errors="replace") == done.text
    for told, expected in zip(done.logprobs, there.logprobs, strict=True):
        assert (told.token, told.piece, told.text) == (
            expected.token,
            expected.piece,
            expected.text,
        )
        assert told.logprob == pytest.approx(expected.logprob, abs=CLOSE)
        assert [other.token for other in told.top] == [other.token for other in expected.top]
        assert len(told.top) <= n
    async with pair.engine.stream(asked) as tokens:
        streamed = (await tokens.result()).logprobs
    assert streamed is not None
    assert [told.token for told in streamed] == [told.token for told in done.logprobs]


async def test_scores_are_those_of_the_engine_behind(pair: Pair) -> None:
    texts = ['"O', "a", "42", "é 🐈"]
    scores = await pair.engine.score("the cat", texts)
    assert all(type(score) is float for score in scores)
    assert scores == pytest.approx(await pair.behind.score("the cat", texts), abs=CLOSE)
    assert await pair.engine.score("the cat", []) == []
    assert await pair.engine.score("the cat", tuple(texts), raw=True) == pytest.approx(
        await pair.behind.score("the cat", texts, raw=True), abs=CLOSE
    )
    await until_idle(pair.behind)


async def test_the_likeliest_option_is_chosen(pair: Pair) -> None:
    options = ["hats", "42", "a number"]
    choice = await pair.engine.choose("a number", options)
    assert isinstance(choice, Choice)
    assert choice.text == options[choice.index]
    assert sum(choice.probabilities) == pytest.approx(1)
    assert max(choice.probabilities) == choice.probabilities[choice.index]
    scores = await pair.engine.score("a number", options)
    assert choice.index == scores.index(max(scores))
    ratio = choice.probabilities[0] / choice.probabilities[1]
    assert ratio == pytest.approx(math.exp(scores[0] - scores[1]), rel=0.01)
    there = await pair.behind.choose("a number", tuple(options))
    assert (choice.text, choice.index) == (there.text, there.index)
    assert list(choice.probabilities) == pytest.approx(list(there.probabilities), rel=0.01)


# -- tools ----------------------------------------------------------------------------------


def pick(n: Literal[1, 2, 3]) -> str:
    """Pick one.

    Args:
        n: which one.
    """
    return f"picked {n}"


PICK = Tool(
    "pick",
    "Pick one.",
    {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]},
)

CALL: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}


@pytest.mark.parametrize("tool", [pick, PICK], ids=["function", "Tool"])
async def test_a_model_calls_the_tools_it_was_given(pair: Pair, tool: Any) -> None:
    asked = Request("a call", tools=[tool], **CALL)
    assert await pair.engine.render(asked) == await pair.behind.render(asked)
    assert "Pick one." in await pair.engine.render(asked)
    done = await pair.engine.complete(asked)
    (call,) = done.tool_calls
    assert call.name == "pick"
    assert call.id
    assert call.arguments["n"] in (1, 2, 3)
    assert (done.text, done.unfinished, done.finish_reason) == ("", "", "stop")
    there = await pair.behind.complete(asked)
    assert [c.arguments for c in there.tool_calls] == [call.arguments]


async def test_calls_are_streamed_as_they_are_made(pair: Pair) -> None:
    async with pair.engine.stream_events("a call", tools=[pick], **CALL) as stream:
        events = await all_of(stream)
    done = check(events)
    (start,) = (event for event in events if isinstance(event, ToolCallStart))
    (call,) = done.tool_calls
    assert (start.index, start.id, start.name) == (0, call.id, "pick")
    arguments = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
    assert json.loads(arguments) == call.arguments


async def test_a_call_that_is_cut_off_is_told_as_unfinished(pair: Pair) -> None:
    done = await pair.engine.complete("a call", tools=[pick], **CALL, max_tokens=15)
    assert done.tool_calls == ()
    assert done.unfinished.startswith("<tool")
    assert done.finish_reason == "length"


async def test_calls_and_results_are_part_of_a_history(pair: Pair) -> None:
    done = await pair.engine.complete("a call", tools=[pick], **CALL)
    (call,) = done.tool_calls
    history = [
        Message("user", "a call"),
        Message("assistant", done.text, tool_calls=done.tool_calls, reasoning="Hm."),
        Message("tool", "picked", tool_call_id=call.id, name="pick"),
    ]
    asked = Request(None, history=history, tools=[pick], tool_choice="none", max_tokens=8)
    rendered = await pair.engine.render(asked)
    assert "[tool] picked" in rendered
    assert '"name": "pick"' in rendered
    assert rendered == await pair.behind.render(asked)
    assert (await pair.engine.complete(asked)).text


async def test_tools_run_until_the_model_answers(pair: Pair) -> None:
    picked: list[int] = []

    async def pick(n: Literal[1, 2, 3]) -> str:
        """Pick one."""
        picked.append(n)
        return "picked"

    run = await run_tools(pair.engine, "a call", tools=[pick], max_rounds=1, **CALL, max_tokens=60)
    assert run.rounds == len(picked) == 1
    _, called, told, answer = run.history
    (call,) = called.tool_calls
    assert call.arguments == {"n": picked[0]}
    assert (told.role, told.content, told.tool_call_id) == ("tool", "picked", call.id)
    assert answer.content == run.completion.text
    await until_idle(pair.behind)


async def test_a_model_of_reasoning_tells_it_apart_from_its_answer(opener: Opener) -> None:
    thinks = "{% for message in messages %}{{ message.content }}\n{% endfor %}<think>\n"
    async with opener(chat_template=thinks) as pair:
        asked = Request("a number", max_tokens=40, temperature=0)
        async with pair.engine.stream_events(asked) as stream:
            done = check(await all_of(stream))
        at_once = await pair.engine.complete(asked)
        there = await pair.behind.complete(asked)
    assert done.reasoning
    assert (at_once.text, at_once.reasoning) == (done.text, done.reasoning)
    assert (there.text, there.reasoning) == (done.text, done.reasoning)
