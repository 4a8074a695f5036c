"""A model calls the tools it was given, as it was told to, and in no other way."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import pytest

from llamad_trio import (
    Done,
    InferenceError,
    Message,
    ProtocolError,
    Request,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    UnsupportedFeature,
)
from llamad_trio.chat.tools.base import ToolFormat
from llamad_trio.chat.tools.formats import TOOL_FORMATS
from llamad_trio.chat.tools.mistral import Mistral
from llamad_trio.testing import ScriptedModel, open_scripted_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamad_trio import Completion, Engine

# How the templates of four families are made, in a few lines each.
HERMES = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools> Write <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call>
{% endif %}
{%- for message in messages %}[{{ message.role }}] {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{% endfor %}
{%- if add_generation_prompt %}[assistant] {% endif %}"""

LLAMA3 = """\
{%- if tools is not none %}Respond with {"name": function name, "parameters": values}.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}[{{ message.role }}]
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}
{%- else %} {{ message.content }}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""

MISTRAL = """\
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls is defined %}{{ message.content }}[TOOL_CALLS][
{%- for call in message.tool_calls %}{% set out = call.function | tojson %}
{{- out[:-1] }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.tool_call_id }}: {{ message.content }}
{%- else %}{{ message.content }}{% endif %}
{%- endfor %}"""

LFM2 = """\
{%- if tools %}List of tools: <|tool_list_start|>[
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}]<|tool_list_end|>
{% endif %}
{%- for message in messages %}[{{ message.role }}] {{ message.content }}
{% endfor %}
{%- if add_generation_prompt %}[assistant] {% endif %}"""

PLAIN = """\
{%- for message in messages %}[{{ message.role }}] {{ message.content }}
{% endfor %}
{%- if add_generation_prompt %}[assistant] {% endif %}"""

TEMPLATES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "lfm2": LFM2}
SYNTAX: dict[str, ToolFormat] = {**TOOL_FORMATS, "mistral": Mistral("list")}
every_family = pytest.mark.parametrize("family", TEMPLATES)


def get_weather(city: str, days: int = 1) -> str:
    """Tell the weather.

    Args:
        city: where.
        days: how far ahead.
    """
    return f"sunny in {city} for {days}"


def get_time() -> str:
    """Tell the time."""
    return "noon"


TOOLS: list[Tool | Callable[..., object]] = [get_weather, get_time]
PARIS = ToolCall("aaaaaaaaa", "get_weather", {"city": "Paris", "days": 2})
ROME = ToolCall("bbbbbbbbb", "get_weather", {"city": "Rome \U0001f408"})
NOON = ToolCall("ccccccccc", "get_time", {})


def written(family: str, *calls: ToolCall) -> str:
    """Calls, as a model of the family writes them."""
    return SYNTAX[family].write_calls(calls)


def meant(calls: Any) -> list[tuple[str, dict[str, object]]]:
    """What is called, without ids."""
    return [(call.name, dict(call.arguments)) for call in calls]


async def replied(family: str, reply: str, **fields: Any) -> Completion:
    """What comes of a scripted reply."""
    model = ScriptedModel(reply, chat_template=TEMPLATES.get(family, PLAIN))
    async with open_scripted_engine(model) as engine:
        return await engine.complete("How is it?", **{"tools": TOOLS, **fields})


# -- replies --------------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize("calls", [[PARIS], [NOON], [PARIS, ROME, NOON]], ids=len)
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_calls_are_taken_out_of_the_reply(
    family: str, calls: list[ToolCall], choice: str
) -> None:
    done = await replied(family, written(family, *calls), tool_choice=choice)
    assert meant(done.tool_calls) == meant(calls)
    assert done.text == done.unfinished == ""
    assert done.finish_reason == "stop"
    ids = [call.id for call in done.tool_calls]
    assert len(set(ids)) == len(ids)


@every_family
async def test_a_tool_is_named_and_the_others_are_out(family: str) -> None:
    done = await replied(family, written(family, NOON), tool_choice="get_time")
    assert meant(done.tool_calls) == meant([NOON])
    with pytest.raises(InferenceError, match="does not allow"):
        await replied(family, written(family, PARIS), tool_choice="get_time")


@every_family
async def test_text_alone_is_an_answer_unless_a_call_is_required(family: str) -> None:
    assert (await replied(family, "It is fine.")).text == "It is fine."
    assert (await replied(family, "It is fine.", tool_choice="none")).text == "It is fine."
    for choice in ("required", "get_time"):
        with pytest.raises(InferenceError, match="does not allow"):
            await replied(family, "It is fine.", tool_choice=choice)


@pytest.mark.parametrize("family", ["hermes", "mistral", "lfm2"])
async def test_text_may_come_before_calls(family: str) -> None:
    done = await replied(family, f"Let me look.\n{written(family, PARIS)}")
    assert done.text == "Let me look."
    assert meant(done.tool_calls) == meant([PARIS])


@pytest.mark.parametrize("family", ["hermes", "mistral", "lfm2"])
async def test_text_may_come_after_calls(family: str) -> None:
    done = await replied(family, f"Look: {written(family, PARIS)} That is all.")
    assert done.text.split() == ["Look:", "That", "is", "all."]
    assert meant(done.tool_calls) == meant([PARIS])


@every_family
async def test_with_tool_choice_none_the_model_is_told_of_no_tools(family: str) -> None:
    async with open_scripted_engine(ScriptedModel("", chat_template=TEMPLATES[family])) as engine:
        told = await engine.render("x", tools=TOOLS)
        assert "Tell the weather" in told
        assert "how far ahead" in told
        assert await engine.render("x", tools=TOOLS, tool_choice="none") == await engine.render("x")
    # What looks like a call is text, then.
    done = await replied(family, written(family, PARIS), tool_choice="none")
    assert done.text == written(family, PARIS)
    assert done.tool_calls == ()


@every_family
async def test_without_parallel_calls_a_reply_has_one(family: str) -> None:
    for choice in ("auto", "required"):
        fields = {"parallel_tool_calls": False, "tool_choice": choice}
        done = await replied(family, written(family, PARIS), **fields)
        assert meant(done.tool_calls) == meant([PARIS])
        with pytest.raises(InferenceError, match="does not allow"):
            await replied(family, written(family, PARIS, NOON), **fields)


BAD_CALLS = {
    "unknown tool": ToolCall("ddddddddd", "get_money", {}),
    "unknown argument": ToolCall("ddddddddd", "get_time", {"zone": 1}),
    "missing argument": ToolCall("ddddddddd", "get_weather", {"days": 1}),
    "wrong type": ToolCall("ddddddddd", "get_weather", {"city": 5}),
}


@every_family
@pytest.mark.parametrize("bad", BAD_CALLS)
async def test_a_call_that_no_tool_takes_is_not_a_reply(family: str, bad: str) -> None:
    for choice in ("auto", "required"):
        with pytest.raises(InferenceError, match="does not allow"):
            await replied(family, written(family, BAD_CALLS[bad]), tool_choice=choice)


# -- what is cut off ------------------------------------------------------------------------


@every_family
async def test_a_call_that_is_cut_off_is_none(family: str) -> None:
    reply = written(family, PARIS)
    n = reply.index("Paris") + 2
    done = await replied(family, reply, max_tokens=n)
    assert done.tool_calls == ()
    assert done.unfinished == reply[:n]
    assert (done.text, done.finish_reason) == ("", "length")


@pytest.mark.parametrize("family", ["hermes", "llama3", "lfm2"])
async def test_the_calls_before_one_that_is_cut_off_are_whole(family: str) -> None:
    reply = written(family, PARIS, ROME)
    done = await replied(family, reply, max_tokens=reply.index("Rome") + 2)
    assert meant(done.tool_calls) == meant([PARIS])
    assert done.unfinished
    assert reply[: reply.index("Rome") + 2].endswith(done.unfinished)


@every_family
async def test_a_stop_sequence_may_cut_a_call_off(family: str) -> None:
    done = await replied(family, written(family, PARIS), stop=["Paris"])
    assert (done.tool_calls, done.stop_sequence) == ((), "Paris")
    assert done.unfinished


# -- events ---------------------------------------------------------------------------------


@every_family
async def test_calls_have_the_same_ids_in_events_and_completion(family: str) -> None:
    reply = written(family, PARIS, NOON)
    model = ScriptedModel(reply, chat_template=TEMPLATES[family])
    async with (
        open_scripted_engine(model) as engine,
        engine.stream_events("x", tools=TOOLS) as events,
    ):
        starts: list[ToolCallStart] = []
        arguments = {0: "", 1: ""}
        async for event in events:
            match event:
                case ToolCallStart():
                    starts.append(event)
                case ToolCallDelta(index, text):
                    arguments[index] += text
                case Done(completion):
                    last = completion
                case _:
                    pytest.fail(f"no event of a call: {event}")
        assert [start.index for start in starts] == [0, 1]
        assert [(s.id, s.name) for s in starts] == [(c.id, c.name) for c in last.tool_calls]
        assert [json.loads(text) for text in arguments.values()] == [
            call.arguments for call in last.tool_calls
        ]
        assert await events.result() == last


# -- history --------------------------------------------------------------------------------


def conversation(*calls: ToolCall) -> list[Message]:
    """A history in which calls were made and answered."""
    return [
        Message("user", "How is it?"),
        Message("assistant", "", tool_calls=calls),
        *(Message("tool", f"result of {c.id}", tool_call_id=c.id, name=c.name) for c in calls),
    ]


@every_family
async def test_calls_and_results_are_shown_to_the_model(family: str) -> None:
    model = ScriptedModel("It is fine.", chat_template=TEMPLATES[family])
    async with open_scripted_engine(model) as engine:
        request = Request(None, history=conversation(PARIS), tools=TOOLS)
        shown = await engine.render(request)
        assert "Paris" in shown
        assert "get_weather" in shown.split("How is it?")[1]
        assert "result of aaaaaaaaa" in shown
        done = await engine.complete(request)
        assert done.text == "It is fine."
        # It goes on with the reply, and without tools.
        history = [*request.history, Message("assistant", done.text)]
        again = await engine.render("And now?", history=history)
        assert again.index("Paris") < again.index("It is fine.") < again.index("And now?")


async def test_a_named_format_tells_a_plain_template_of_tools_in_text() -> None:
    async with open_scripted_engine(ScriptedModel("ok", chat_template=PLAIN)) as engine:
        for name, syntax in TOOL_FORMATS.items():
            request = Request(
                "Well?",
                history=conversation(PARIS),
                tools=TOOLS,
                tool_format=name,
                system="Be kind.",
            )
            shown = await engine.render(request)
            assert shown.startswith("[system] Be kind.")
            assert "Tell the weather" in shown
            assert syntax.write_calls([PARIS]) in shown
            assert "result of aaaaaaaaa" in shown
            assert "[tool]" not in shown


@pytest.mark.parametrize("name", TOOL_FORMATS)
async def test_a_named_format_is_the_one_that_is_read(name: str) -> None:
    for template in (PLAIN, HERMES):
        model = ScriptedModel(TOOL_FORMATS[name].write_calls([PARIS]), chat_template=template)
        async with open_scripted_engine(model) as engine:
            done = await engine.complete("x", tools=TOOLS, tool_format=name)
        assert meant(done.tool_calls) == meant([PARIS])


# -- refusals -------------------------------------------------------------------------------


async def test_a_template_without_tools_needs_a_format() -> None:
    model = ScriptedModel("ok", chat_template=PLAIN)
    async with open_scripted_engine(model) as engine:
        for fields in ({"tools": TOOLS}, {"history": conversation(PARIS)}):
            with pytest.raises(UnsupportedFeature, match="tool_format"):
                await engine.complete("x", **fields)
        assert model.plans == []
        assert await engine.complete_text("x", tools=TOOLS, tool_choice="none") == "ok"


async def test_tools_that_cannot_be_used_are_refused() -> None:
    def untyped(a):  # type: ignore[no-untyped-def]
        return a

    bad: list[dict[str, Any]] = [
        {"tool_choice": "get_money"},
        {"tool_choice": ""},
        {"tool_format": "morse"},
        {"tools": [untyped]},
        {"tools": [lambda: 1]},
        {"tools": [Tool("f", "", {"type": "array"})]},
        {"tools": [Tool("f", "", {"properties": {"a": {"type": "no such type"}}})]},
        {"json_schema": {"type": "integer"}},
        {"regex": "a"},
        {"raw": True},
    ]
    model = ScriptedModel("ok", chat_template=HERMES)
    async with open_scripted_engine(model) as engine:
        for fields in bad:
            with pytest.raises((ProtocolError, UnsupportedFeature)):
                await engine.complete("x", **{"tools": TOOLS, **fields})
        assert model.plans == []
        assert await engine.complete_text("x", tools=TOOLS) == "ok"


async def test_a_model_without_a_template_has_no_tools() -> None:
    async with open_scripted_engine(ScriptedModel("ok", chat_template=None)) as engine:
        with pytest.raises((ProtocolError, UnsupportedFeature)):
            await engine.complete("x", tools=TOOLS)


# -- a model of random weights -----------------------------------------------------------------


def set_light(room: Literal["kitchen", "hall"], on: bool) -> None:
    """Switch a light."""


def ring(times: Literal[1, 2, 3]) -> None:
    """Ring the bell."""


async def test_a_model_that_must_call_always_does(tiny: Engine) -> None:
    asked = Request(
        "Turn on the light in the kitchen.",
        tools=[set_light, ring],
        tool_format="hermes",
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1.0,
        max_tokens=200,
    )
    for seed in range(5):
        done = await tiny.complete(asked, seed=seed)
        (call,) = done.tool_calls
        assert done.finish_reason == "stop"
        assert (done.text, done.unfinished) == ("", "")
        if call.name == "set_light":
            assert set(call.arguments) == {"room", "on"}
            assert call.arguments["room"] in ("kitchen", "hall")
        else:
            assert call.name == "ring"
            assert call.arguments["times"] in (1, 2, 3)
    named = await tiny.complete(asked, seed=0, tool_choice="ring")
    assert [call.name for call in named.tool_calls] == ["ring"]


async def test_a_model_may_answer_and_reads_results(tiny: Engine) -> None:
    history = conversation(NOON)
    asked = Request(None, history=history, tools=[get_time], tool_format="hermes", max_tokens=12)
    shown = await tiny.render(asked)
    assert "result of ccccccccc" in shown
    done = await tiny.complete(asked, temperature=0)
    assert done.generated_tokens >= 1
    assert done.text or done.tool_calls or done.unfinished
    none = await tiny.complete(asked, tool_choice="none", temperature=0)
    assert none.tool_calls == ()


async def test_two_tools_of_one_name_are_refused(tiny: Engine) -> None:
    tool = Tool("same", "", {"type": "object"})
    with pytest.raises(ProtocolError, match="same name"):
        await tiny.complete("x", tools=[tool, tool])
