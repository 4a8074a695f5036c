"""A model calls the tools it was given, as it was told to, and in no other way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llamad_trio import InferenceError, Message, Request, Tool, ToolCall
from llamad_trio.chat.tools.formats import TOOL_FORMATS
from llamad_trio.testing import ScriptedModel, open_scripted_engine
from tests.chat.test_tool_formats import FORMATS, PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamad_trio import Completion

every_family = pytest.mark.parametrize("family", FORMATS)


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
    return FORMATS[family][0].write_calls(calls)


def meant(calls: Any) -> list[tuple[str, dict[str, object]]]:
    """What is called, without ids."""
    return [(call.name, dict(call.arguments)) for call in calls]


async def replied(family: str, reply: str, **fields: Any) -> Completion:
    """What comes of a scripted reply."""
    model = ScriptedModel(reply, chat_template=FORMATS[family][1])
    async with open_scripted_engine(model) as engine:
        return await engine.complete("How is it?", **{"tools": TOOLS, **fields})


# -- replies --------------------------------------------------------------------------------

UNKNOWN = ToolCall("ddddddddd", "get_money", {})
UNKNOWN_ARGUMENT = ToolCall("ddddddddd", "get_time", {"zone": 1})
MISSING_ARGUMENT = ToolCall("ddddddddd", "get_weather", {"days": 1})
WRONG_TYPE = ToolCall("ddddddddd", "get_weather", {"city": 5})

ALLOWED: list[tuple[list[ToolCall], dict[str, Any]]] = [
    *(([PARIS], {"tool_choice": choice}) for choice in ("auto", "required", "get_weather")),
    *(([NOON], {"tool_choice": choice}) for choice in ("auto", "required", "get_time")),
    *(([PARIS, ROME, NOON], {"tool_choice": choice}) for choice in ("auto", "required")),
    *(
        ([PARIS], {"tool_choice": choice, "parallel_tool_calls": False})
        for choice in ("auto", "required")
    ),
]

NOT_ALLOWED: list[tuple[list[ToolCall], dict[str, Any]]] = [
    *(([], {"tool_choice": choice}) for choice in ("required", "get_time")),
    ([PARIS], {"tool_choice": "get_time"}),
    *(
        ([PARIS, NOON], {"tool_choice": choice, "parallel_tool_calls": False})
        for choice in ("auto", "required")
    ),
    *(
        ([bad], {"tool_choice": choice})
        for bad in (UNKNOWN, UNKNOWN_ARGUMENT, MISSING_ARGUMENT, WRONG_TYPE)
        for choice in ("auto", "required")
    ),
]


@every_family
async def test_calls_are_taken_out_of_the_reply(family: str) -> None:
    for calls, fields in ALLOWED:
        done = await replied(family, written(family, *calls), **fields)
        assert meant(done.tool_calls) == meant(calls), fields
        assert done.text == done.unfinished == ""
        assert done.finish_reason == "stop"
        assert len({call.id for call in done.tool_calls}) == len(calls)


@every_family
async def test_a_reply_with_other_calls_than_it_may_have_is_none(family: str) -> None:
    for calls, fields in NOT_ALLOWED:
        reply = written(family, *calls) if calls else "It is fine."
        with pytest.raises(InferenceError, match="does not allow"):
            await replied(family, reply, **fields)


@every_family
async def test_text_is_an_answer_where_no_call_is_required(family: str) -> None:
    for choice in ("auto", "none"):
        done = await replied(family, "It is fine.", tool_choice=choice)
        assert (done.text, done.tool_calls) == ("It is fine.", ())


@every_family
async def test_with_tool_choice_none_the_model_is_told_of_no_tools(family: str) -> None:
    async with open_scripted_engine(ScriptedModel("", chat_template=FORMATS[family][1])) as engine:
        told = await engine.render("x", tools=TOOLS)
        assert "Tell the weather" in told
        assert "how far ahead" in told
        assert await engine.render("x", tools=TOOLS, tool_choice="none") == await engine.render("x")
    # What looks like a call is text, then.
    done = await replied(family, written(family, PARIS), tool_choice="none")
    assert (done.text, done.tool_calls) == (written(family, PARIS), ())


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
    model = ScriptedModel("It is fine.", chat_template=FORMATS[family][1])
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


@pytest.mark.parametrize("name", TOOL_FORMATS)
async def test_a_named_format_is_the_one_that_is_told_and_read(name: str) -> None:
    for template in (PLAIN, FORMATS["hermes"][1]):
        model = ScriptedModel(TOOL_FORMATS[name].write_calls([PARIS]), chat_template=template)
        asked = Request(None, history=conversation(PARIS), tools=TOOLS, tool_format=name)
        async with open_scripted_engine(model) as engine:
            shown = await engine.render(asked)
            done = await engine.complete(asked)
        for told in ("Tell the weather", "Paris", "result of aaaaaaaaa"):
            assert told in shown
        assert meant(done.tool_calls) == meant([PARIS])
