"""A stream of events is the reply, in its order, and nothing else."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings, strategies as st

from llamad_trio import (
    Completion,
    Done,
    EngineClosed,
    InferenceError,
    ProtocolError,
    ReasoningDelta,
    Request,
    StreamEvent,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
)
from llamad_trio.chat.tools.formats import TOOL_FORMATS, Mistral
from llamad_trio.testing import ScriptedModel, open_scripted_engine
from tests.support import read_all, until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from llamad_trio import Engine, EventStream

# The model opens its reasoning itself, unless it is told not to think; then the template
# writes an empty block for it, as Qwen 3's does.
THINKS_ITSELF = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{# <tool_call>{"name": #}
{%- for message in messages %}[{{ message.role }}]
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]
{%- if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

# The template opens it, as DeepSeek's does.
IS_MADE_TO_THINK = THINKS_ITSELF.split("{%- if enable_thinking")[0] + "<think>\n{% endif %}"

TAGLESS = THINKS_ITSELF.replace("<think>", "").replace("</think>", "")


def look(city: str) -> str:
    """Look at the weather."""
    return f"sunny in {city}"


CALLS = [
    ToolCall("aaaaaaaa1", "look", {"city": "Paris"}),
    ToolCall("aaaaaaaa2", "look", {"city": 'Ro"me 🐈'}),
]
CALLED = TOOL_FORMATS["hermes"].write_calls(CALLS)


async def all_of(events: EventStream) -> list[StreamEvent]:
    """Every event up to the end."""
    received: list[StreamEvent] = []
    async for event in events:
        assert not (received and isinstance(received[-1], Done)), "that was the end"
        received.append(event)
    return received


def check(events: list[StreamEvent]) -> Completion:
    """The laws of a stream of events; returns the completion it ends with."""
    assert [event for event in events if isinstance(event, Done)] == events[-1:]
    last = events[-1]
    assert isinstance(last, Done)
    done = last.completion
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == done.text
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == (
        done.reasoning or ""
    )
    # Reasoning comes before all else.
    kinds = [type(event) for event in events if not isinstance(event, Done)]
    n_reasoning = kinds.count(ReasoningDelta)
    assert kinds[:n_reasoning] == [ReasoningDelta] * n_reasoning
    arguments: dict[int, str] = {}
    for event in events:
        match event:
            case TextDelta(text) | ReasoningDelta(text):
                assert text
            case ToolCallStart(index, call_id, name):
                # One after the other, each before its arguments.
                assert index == len(arguments)
                arguments[index] = ""
                if index < len(done.tool_calls):
                    call = done.tool_calls[index]
                    assert (call.id, call.name) == (call_id, name)
            case ToolCallDelta(index, text):
                assert text
                assert index == len(arguments) - 1
                arguments[index] += text
            case Done():
                pass
    for index, call in enumerate(done.tool_calls):
        assert json.loads(arguments[index]) == call.arguments
    return done


async def events_of(
    reply: str, *, template: str = THINKS_ITSELF, **fields: Any
) -> tuple[list[StreamEvent], Completion]:
    """What a scripted reply comes as, checked; and the same reply, completed at once."""
    model = ScriptedModel(reply, chat_template=template)
    async with open_scripted_engine(model) as engine:
        request = Request("x", **{"max_tokens": 2000, **fields})
        async with engine.stream_events(request) as stream:
            events = await all_of(stream)
            for _ in range(2):
                with pytest.raises(trio.EndOfChannel):
                    await stream.receive()
            assert await stream.result() == stream.completion
        done = check(events)
        async with engine.stream(request) as pieces:
            received = [piece async for piece in pieces]
        assert all(received)
        assert "".join(received) == pieces.text == done.text
        at_once = await engine.complete(request)
    assert (at_once.text, at_once.reasoning) == (done.text, done.reasoning)
    assert at_once.unfinished == done.unfinished
    assert [c.arguments for c in at_once.tool_calls] == [c.arguments for c in done.tool_calls]
    return events, done


# -- order and laws -------------------------------------------------------------------------


async def test_reasoning_text_and_calls_come_in_the_order_of_the_reply() -> None:
    reply = f"<think>\nLet me see.\n</think>\n\nI look.\n{CALLED}\nSo it is."
    events, done = await events_of(reply, tools=[look])
    runs = [kind.__name__ for kind, _ in itertools.groupby(map(type, events))]
    assert runs == [
        *("ReasoningDelta", "TextDelta"),
        *("ToolCallStart", "ToolCallDelta", "ToolCallStart", "ToolCallDelta"),
        *("TextDelta", "Done"),
    ]
    assert done.reasoning == "Let me see."
    assert done.text.split() == ["I", "look.", "So", "it", "is."]
    assert [call.arguments for call in done.tool_calls] == [call.arguments for call in CALLS]


SCRAPS = st.lists(
    st.sampled_from(["Hi ", "\n", " ", "a", "<", "<think", "</think>", "🐈", ">", "{}", "."]),
    max_size=6,
).map("".join)


@settings(max_examples=25, deadline=None)
@given(text=SCRAPS, thought=st.none() | SCRAPS, n=st.integers(0, 2), most=st.integers(1, 120))
async def test_the_laws_hold_for_any_reply_cut_anywhere(
    text: str, thought: str | None, n: int, most: int
) -> None:
    lead = "" if thought is None else f"<think>{thought}</think>"
    reply = lead + text + TOOL_FORMATS["hermes"].write_calls(CALLS[:n])
    model = ScriptedModel(reply, chat_template=THINKS_ITSELF)
    async with open_scripted_engine(model) as engine:
        fields: dict[str, Any] = {"tools": [look]} if n else {}
        try:
            async with engine.stream_events("x", max_tokens=most, **fields) as stream:
                check(await all_of(stream))
        except InferenceError as error:
            assert "does not allow" in str(error) or "wants more" in str(error)  # noqa: PT017


# -- reasoning ------------------------------------------------------------------------------


REPLIES: list[tuple[str, str, str, str | None]] = [
    # The template, a reply, and its text and reasoning.
    (THINKS_ITSELF, "Hello there.", "Hello there.", None),
    (THINKS_ITSELF, "", "", None),
    (THINKS_ITSELF, "<think>hm</think>yes", "yes", "hm"),
    (THINKS_ITSELF, "yes, <think> is a tag", "yes, <think> is a tag", None),
    (IS_MADE_TO_THINK, "hm\n</think>\n\nyes", "yes", "hm"),
    (IS_MADE_TO_THINK, "hm, well", "", "hm, well"),
    (TAGLESS, "<think>hm</think>yes", "<think>hm</think>yes", None),
]


@pytest.mark.parametrize(("template", "reply", "text", "reasoning"), REPLIES)
async def test_reasoning_is_told_apart_where_the_template_has_any(
    template: str, reply: str, text: str, reasoning: str | None
) -> None:
    events, done = await events_of(reply, template=template)
    assert (done.text, done.reasoning, done.tool_calls) == (text, reasoning, ())
    kinds = [TextDelta] * bool(text) + [ReasoningDelta] * bool(reasoning) + [Done]
    assert {type(event) for event in events} == set(kinds)


async def test_reasoning_that_is_cut_off_leaves_no_text() -> None:
    _, done = await events_of("<think>hm, well", max_tokens=10)
    assert (done.reasoning, done.text, done.finish_reason) == ("hm,", "", "length")


async def test_a_variable_of_the_template_switches_thinking_off() -> None:
    model = ScriptedModel(
        lambda prompt: "plain" if "</think>" in prompt else "<think>hm</think>thought",
        chat_template=THINKS_ITSELF,
    )
    async with open_scripted_engine(model) as engine:
        for value, text, reasoning in ((True, "thought", "hm"), (False, "plain", None)):
            done = await engine.complete("x", template_vars={"enable_thinking": value})
            assert (done.text, done.reasoning) == (text, reasoning)
        assert (await engine.complete("x")).reasoning == "hm"


CONSTRAINTS: list[dict[str, Any]] = [
    {"json_schema": {"type": "integer"}},
    {"regex": "[0-9]+"},
    {"lark": "start: /[0-9]+/"},
    {"grammar": "root ::= [0-9]+"},
]


@pytest.mark.parametrize("fields", CONSTRAINTS, ids=lambda f: next(iter(f)))
async def test_a_constraint_is_about_what_follows_the_reasoning(fields: dict[str, Any]) -> None:
    for reply in ("one, { two\n</think>\n\n42", "</think>42"):
        _, done = await events_of(reply, template=IS_MADE_TO_THINK, **fields)
        assert done.text == "42"
        assert done.value == (42 if "json_schema" in fields else None)
    for reply in ("42", "hm</think>yes", "hm</think>"):
        with pytest.raises(InferenceError, match="constraint"):
            await events_of(reply, template=IS_MADE_TO_THINK, **fields)
    # Where no reasoning is open, it is about the whole.
    _, done = await events_of("42", **fields)
    assert done.text == "42"
    with pytest.raises(InferenceError, match="constraint"):
        await events_of("<think>hm</think>42", **fields)


# -- the reader -----------------------------------------------------------------------------


async def test_several_events_of_one_piece_are_each_received_or_still_there() -> None:
    # In a list of Mistral's the id comes last: a call is told whole, with its last brace.
    reply = f"Look: {Mistral('list').write_calls(CALLS)}"
    model = ScriptedModel(reply, chat_template="{{ tools }}{# [TOOL_CALLS] #}")
    async with open_scripted_engine(model) as engine:
        events: list[StreamEvent] = []
        async with engine.stream_events("x", tools=[look], max_tokens=2000) as stream:
            while not (events and isinstance(events[-1], Done)):
                with trio.CancelScope() as scope:
                    scope.cancel()
                    events.append(await stream.receive())
                assert scope.cancelled_caught
                with trio.testing.assert_checkpoints():
                    events.append(await stream.receive())
        assert len(check(events).tool_calls) == 2


async def test_what_is_under_way_when_the_engine_closes_gets_engine_closed() -> None:
    async def read(engine: Engine) -> None:
        async with engine.stream("x") as pieces:
            await read_all(pieces)

    async def read_events(engine: Engine) -> None:
        async with engine.stream_events("x") as events:
            await all_of(events)

    uses: list[Callable[[Engine], Awaitable[object]]] = [
        *(lambda engine: engine.complete("x"), lambda engine: engine.score("x", ["y", "z"])),
        *(read, read_events),
    ]
    n_refused = 0

    async def use(call: Callable[[Engine], Awaitable[object]], engine: Engine) -> None:
        nonlocal n_refused
        with pytest.raises(EngineClosed):
            await call(engine)
        n_refused += 1

    model = ScriptedModel("x", decode_s=1e6)
    async with trio.open_nursery() as nursery, open_scripted_engine(model) as engine:
        for call in uses:
            nursery.start_soon(use, call, engine)
        n_slots = engine.config.n_slots
        # All have come in, in whatever order; the first step takes a while.
        await until(
            lambda: n_slots - (now := engine.stats()).slots["free"] + now.queued == len(uses)
        )
    assert n_refused == len(uses)


# -- the scripted model ---------------------------------------------------------------------


async def test_a_scripted_choice_is_the_option_that_the_reply_begins_with() -> None:
    replies = {"sky": "blue, I think", "grass": "green", "snow": "white"}
    async with open_scripted_engine(replies) as engine:
        for part, text in (("sky", "blue"), ("grass", "green"), ("snow", "white")):
            choice = await engine.choose(f"What colour is {part}?", ["green", "blue", "white"])
            assert choice.text == text
            assert choice.probabilities[choice.index] > 0.9
        scores = await engine.score("What colour is sky?", ["blue", "green"])
        assert scores[0] > scores[1]
        with pytest.raises(InferenceError, match="no reply is scripted"):
            await engine.choose("What colour is coal?", ["black"])


async def test_a_scripted_reply_that_its_constraint_does_not_allow_is_an_error() -> None:
    async with open_scripted_engine("abc") as engine:
        assert await engine.complete_text("x", regex="[a-c]+") == "abc"
        for pattern, complaint in (
            ("[0-9]+", "does not allow"),
            ("ab", "does not allow"),
            ("abcd", "wants more"),
        ):
            with pytest.raises(InferenceError, match=complaint):
                await engine.complete("x", regex=pattern)
            with pytest.raises(InferenceError, match=complaint):
                async with engine.stream("x", regex=pattern) as tokens:
                    await tokens.result()
        # It costs that request only.
        assert await engine.complete_text("x") == "abc"
        with pytest.raises(ProtocolError, match="regex"):
            await engine.complete("x", regex="(")
