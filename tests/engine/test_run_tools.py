"""A model calls tools until it answers, and is told what came of each call."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import functools
import json
import threading
from typing import TYPE_CHECKING, Any

import attrs
import pydantic
import pytest
import trio

from llamad_trio import (
    InferenceError,
    Message,
    ProtocolError,
    Request,
    Tool,
    ToolCall,
    ToolRun,
    UnsupportedFeature,
    run_tools,
)
from llamad_trio.chat.tools.formats import TOOL_FORMATS
from llamad_trio.testing import ScriptedModel, open_scripted_engine
from tests.support import must_not_run, threads_of_ours, until, until_idle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from llamad_trio import Engine

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{# <tool_call>{"name": #}
{%- for message in messages %}[{{ message.role }}] {{ message.content }}
{%- for call in message.tool_calls or [] %} calls {{ call.function | tojson }}{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}[assistant] {% endif %}"""

ANSWER = "That is all."


def calling(*calls: tuple[str, Mapping[str, Any]]) -> str:
    """A reply that calls."""
    made = [ToolCall(f"call{n}", name, arguments) for n, (name, arguments) in enumerate(calls)]
    return TOOL_FORMATS["hermes"].write_calls(made)


class Script:
    """A model that makes calls round by round, and then answers."""

    def __init__(self, *rounds: str, answer: str = ANSWER) -> None:
        self.prompts: list[str] = []
        self._replies = [*rounds, answer]
        self.model = ScriptedModel(self._reply, chat_template=TEMPLATE)

    def _reply(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self._replies[min(len(self.prompts), len(self._replies)) - 1]

    def engine(self) -> AbstractAsyncContextManager[Engine]:
        """An engine with this model."""
        return open_scripted_engine(self.model)


async def result_of(
    tool: Tool | Callable[..., object], arguments: Mapping[str, Any] | None = None
) -> str:
    """What the model is told of one call."""
    name = tool.name if isinstance(tool, Tool) else getattr(tool, "__name__", None) or "add"
    script = Script(calling((name, arguments or {})))
    async with script.engine() as engine:
        run = await run_tools(engine, "Go.", tools=[tool])
    assert run.completion.text == ANSWER
    (told,) = [message for message in run.history if message.role == "tool"]
    # The model has seen it.
    assert f"[tool] {told.content}" in script.prompts[-1]
    return told.content


def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


# -- functions ------------------------------------------------------------------------------


class Desk:
    """Something with methods."""

    def __init__(self) -> None:
        self.rung = 0

    def ring(self, times: int) -> str:
        """Ring."""
        self.rung += times
        return f"rung {self.rung}"

    async def wait(self, times: int) -> str:
        """Wait."""
        await trio.lowlevel.checkpoint()
        return f"waited {times}"


async def add_soon(a: int, b: int = 1) -> int:
    """Add, after a while."""
    await trio.lowlevel.checkpoint()
    return a + b


class Adder:
    """An object that is called."""

    async def __call__(self, a: int) -> int:
        """Add one."""
        await trio.lowlevel.checkpoint()
        return a + 1


async def test_functions_of_every_kind_are_called() -> None:
    desk = Desk()
    assert await result_of(add, {"a": 1, "b": 2}) == "3"
    assert await result_of(add, {"a": 1}) == "2"
    assert await result_of(add_soon, {"a": 1, "b": 2}) == "3"
    assert await result_of(desk.ring, {"times": 3}) == "rung 3"
    assert await result_of(desk.wait, {"times": 3}) == "waited 3"
    assert await result_of(Tool("sum", "Add.", {"properties": {"a": {}}}, add), {"a": 4}) == "5"
    assert (
        await result_of(Tool("sum", "Add.", {"properties": {"a": {}}}, add_soon), {"a": 4}) == "5"
    )


async def test_partials_and_objects_are_called() -> None:
    for tool in (functools.partial(add, b=10), functools.partial(add_soon, b=10)):
        name = tool.func.__name__
        async with Script(calling((name, {"a": 1}))).engine() as engine:
            run = await run_tools(engine, "Go.", tools=[tool])
        assert run.history[-2].content == "11"
    async with Script(calling(("Adder", {"a": 1}))).engine() as engine:
        run = await run_tools(engine, "Go.", tools=[Adder()])
    assert run.history[-2].content == "2"


def run_in_asyncio(function: Callable[..., Any]) -> Callable[..., object]:
    """Make an ordinary function of one that is asyncio's."""

    @functools.wraps(function)
    def wrapper(**arguments: object) -> object:
        return asyncio.run(function(**arguments))

    return wrapper


@run_in_asyncio
async def fetch(a: int) -> int:
    """Fetch, in asyncio."""
    await asyncio.sleep(0)
    return a


async def test_an_ordinary_function_around_an_async_one_runs_in_a_thread() -> None:
    assert await result_of(fetch, {"a": 7}) == "7"


async def test_an_async_function_behind_a_decorator_is_awaited() -> None:
    @functools.wraps(add_soon)
    def logged(**arguments: Any) -> object:
        return add_soon(**arguments)

    assert await result_of(logged, {"a": 1}) == "2"


async def test_async_tools_run_in_trio_and_others_beside_it() -> None:
    here = threading.get_ident()
    seen: dict[str, int] = {}

    async def inside() -> str:
        """Here."""
        await trio.lowlevel.checkpoint()
        seen["inside"] = threading.get_ident()
        return "ok"

    def outside() -> str:
        """Elsewhere."""
        seen["outside"] = threading.get_ident()
        return "ok"

    async with Script(calling(("inside", {}), ("outside", {}))).engine() as engine:
        await run_tools(engine, "Go.", tools=[inside, outside])
    assert seen["inside"] == here
    assert seen["outside"] != here


# -- several calls --------------------------------------------------------------------------


async def test_the_calls_of_one_reply_run_side_by_side() -> None:
    arrived: dict[str, trio.Event] = {"left": trio.Event(), "right": trio.Event()}

    async def meet(name: str, other: str) -> str:
        """Wait for the other."""
        arrived[name].set()
        await arrived[other].wait()
        return f"{name} met {other}"

    barrier = threading.Barrier(2, timeout=60)

    def meet_in_thread() -> str:
        """Wait for another thread."""
        barrier.wait()
        return "met"

    script = Script(
        calling(
            ("meet", {"name": "left", "other": "right"}),
            ("meet_in_thread", {}),
            ("meet", {"name": "right", "other": "left"}),
            ("meet_in_thread", {}),
        )
    )
    async with script.engine() as engine:
        run = await run_tools(engine, "Go.", tools=[meet, meet_in_thread], max_tokens=1000)
    assert run.rounds == 1
    told = [message.content for message in run.history if message.role == "tool"]
    # In the order of the calls, whoever was first.
    assert told == ["left met right", "met", "right met left", "met"]


async def test_results_name_their_calls() -> None:
    async with Script(calling(("add", {"a": 1}), ("add", {"a": 2}))).engine() as engine:
        run = await run_tools(engine, "Go.", tools=[add])
    user, called, first, second, answer = run.history
    assert (user.role, user.content) == ("user", "Go.")
    assert [call.id for call in called.tool_calls] == [first.tool_call_id, second.tool_call_id]
    assert (first.name, first.content, second.content) == ("add", "2", "3")
    assert (answer.role, answer.content) == ("assistant", ANSWER)
    assert run.completion.text == ANSWER


# -- what goes wrong ------------------------------------------------------------------------


async def test_what_a_tool_raises_is_told_to_the_model() -> None:
    def fail(a: int) -> int:
        """Fail."""
        raise LookupError(f"no {a} here")

    async def fail_soon(a: int) -> int:
        """Fail, after a while."""
        await trio.lowlevel.checkpoint()
        raise LookupError(f"no {a} here")

    for tool in (fail, fail_soon):
        told = await result_of(tool, {"a": 5})
        assert "LookupError" in told
        assert "no 5 here" in told


async def test_what_the_tasks_of_a_tool_raise_is_told_to_the_model() -> None:
    async def save() -> None:
        async def fail(error: Exception) -> None:
            raise error

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, ValueError("the disk is full"))
            nursery.start_soon(fail, KeyError("name"))

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def mumble() -> None:
        raise Unspeakable

    script = Script(calling(("save", {})), calling(("mumble", {})))
    async with script.engine() as engine:
        run = await run_tools(engine, "x", tools=[save, mumble])
    told = [message.content for message in run.history if message.role == "tool"]
    assert "ValueError: the disk is full" in told[0]
    assert told[1] == "error: Unspeakable"


async def test_one_tool_that_fails_leaves_the_others_to_end() -> None:
    failed = trio.Event()

    async def fail() -> None:
        """Fail."""
        failed.set()
        raise ValueError("no luck")

    async def last() -> str:
        """Wait until the other has failed."""
        await failed.wait()
        await trio.lowlevel.checkpoint()
        return "done"

    async with Script(calling(("fail", {}), ("last", {}))).engine() as engine:
        run = await run_tools(engine, "Go.", tools=[fail, last])
    told = [message.content for message in run.history if message.role == "tool"]
    assert "no luck" in told[0]
    assert told[1] == "done"


async def test_arguments_that_do_not_fit_are_told_to_the_model() -> None:
    called: list[object] = []

    def odd(n: int) -> int:
        """Take something."""
        called.append(n)
        return n

    # A schema that says less than the function wants.
    loose: dict[str, Any] = {"properties": {"n": {}, "m": {}}}
    tool = Tool("odd", "Take something.", loose, odd)
    assert "missing argument 'n'" in await result_of(tool, {})
    assert "n: expected int, got str" in await result_of(tool, {"n": "five"})
    assert "unknown argument 'm'" in await result_of(tool, {"n": 1, "m": 2})
    assert called == []
    assert await result_of(tool, {"n": 5}) == "5"


async def test_a_model_that_was_told_can_do_better() -> None:
    def half(n: int) -> int:
        """Halve an even number."""
        if n % 2:
            raise ValueError("not even")
        return n // 2

    script = Script(calling(("half", {"n": 5})), calling(("half", {"n": 6})))
    async with script.engine() as engine:
        run = await run_tools(engine, "Go.", tools=[half])
    assert run.rounds == 2
    assert "not even" in script.prompts[1]
    assert "[tool] 3[assistant]" in script.prompts[2]


async def test_a_tool_without_a_function_is_refused_before_anything_runs() -> None:
    script = Script(calling(("get", {})))
    async with script.engine() as engine:
        with pytest.raises(ProtocolError, match="'get' has no function"):
            await run_tools(engine, "Go.", tools=[add, Tool("get", "Get.", {})])
    assert script.prompts == []


@pytest.mark.parametrize(
    "fields",
    [
        {"temprature": 1.0},
        {"tools": [lambda: 1]},
        {"tools": "add"},
        {"request": [1, 2]},
        {"request": 5},
        {"max_tokens": "x"},
        {"json_schema": {}},
    ],
)
async def test_a_bad_request_is_a_protocol_error(fields: dict[str, Any]) -> None:
    script = Script()
    async with script.engine() as engine:
        with pytest.raises(ProtocolError):
            await run_tools(engine, **{"request": "Go.", "tools": [add], **fields})
    assert script.prompts == []


async def test_what_the_engine_raises_comes_out() -> None:
    async with Script("<tool_call>\n{nonsense").engine() as engine:
        with pytest.raises(InferenceError):
            await run_tools(engine, "Go.", tools=[add])
    async with open_scripted_engine("x") as engine:
        with pytest.raises(UnsupportedFeature, match="tool_format"):
            await run_tools(engine, "Go.", tools=[add])


# -- rounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [-1, 0, 1, 3])
async def test_a_model_that_never_answers_is_stopped(most: int) -> None:
    n_called = 0

    def again() -> str:
        """Once more."""
        nonlocal n_called
        n_called += 1
        return "again"

    call = calling(("again", {}))
    script = Script(*[call] * 10)
    async with script.engine() as engine:
        run = await run_tools(engine, "Go.", tools=[again], max_rounds=most)
    assert run.rounds == n_called == max(most, 0)
    assert len(script.prompts) == n_called + 1
    # The last calls were not made.
    assert [c.name for c in run.completion.tool_calls] == ["again"]
    assert run.history[-1].tool_calls == run.completion.tool_calls


async def test_a_model_that_answers_at_once_calls_nothing() -> None:
    async with Script().engine() as engine:
        run = await run_tools(engine, "Go.", tools=[add])
    assert (run.rounds, run.completion.text) == (0, ANSWER)
    assert [message.role for message in run.history] == ["user", "assistant"]


@pytest.mark.parametrize("choice", ["required", "add"])
async def test_having_to_call_is_about_the_first_round(choice: str) -> None:
    async with Script(calling(("add", {"a": 1}))).engine() as engine:
        run = await run_tools(engine, "Go.", tools=[add], tool_choice=choice)
        assert (run.rounds, run.completion.text) == (1, ANSWER)
    async with Script().engine() as engine:
        with pytest.raises(InferenceError, match="does not allow"):
            await run_tools(engine, "Go.", tools=[add], tool_choice=choice)


async def test_tools_that_may_not_be_called_are_not_in_any_round() -> None:
    script = Script()
    async with script.engine() as engine:
        run = await run_tools(engine, "Go.", tools=[add], tool_choice="none")
    assert run.rounds == 0
    assert "Add." not in script.prompts[0]


async def test_the_history_of_a_run_goes_on() -> None:
    script = Script(calling(("add", {"a": 1})))
    request = Request(
        "Go.",
        system="Be kind.",
        tools=[add],
        history=[Message("user", "Hi."), Message("assistant", "Hello.")],
    )
    async with script.engine() as engine:
        run = await run_tools(engine, request)
        assert isinstance(run, ToolRun)
        assert [m.role for m in run.history] == [
            *("user", "assistant", "user", "assistant", "tool", "assistant")
        ]
        assert "Be kind." in script.prompts[1]
        again = await run_tools(engine, attrs.evolve(request, prompt="More?", history=run.history))
        assert again.completion.text == ANSWER
        assert again.history[: len(run.history)] == tuple(run.history)
        last = script.prompts[-1]
        assert last.index("Hello.") < last.index(ANSWER) < last.index("More?")
        # Also without a prompt, and without tools.
        await engine.complete(Request(None, history=[*run.history, Message("user", "And?")]))


# -- results --------------------------------------------------------------------------------


@attrs.frozen
class Place:
    """An attrs class."""

    name: str
    at: tuple[float, float]


@dataclasses.dataclass
class Visit:
    """A dataclass."""

    place: Place
    day: dt.date


class Model(pydantic.BaseModel):
    """A model of pydantic."""

    day: dt.date
    tags: list[str]


HOME = Place("Zürich", (47.4, 8.5))
DAY = dt.date(2024, 2, 29)


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (HOME, {"name": "Zürich", "at": [47.4, 8.5]}),
        (Visit(HOME, DAY), {"place": {"name": "Zürich", "at": [47.4, 8.5]}, "day": "2024-02-29"}),
        (Model(day=DAY, tags=["a"]), {"day": "2024-02-29", "tags": ["a"]}),
        ([Model(day=DAY, tags=[])], [{"day": "2024-02-29", "tags": []}]),
        ({"a": [1, None, True]}, {"a": [1, None, True]}),
        (None, None),
        (2**70, 2**70),
        (1.5, 1.5),
        ((1, 2), [1, 2]),
        (DAY, "2024-02-29"),
    ],
)
async def test_a_result_that_is_data_is_written_as_json(value: object, data: object) -> None:
    def give() -> object:
        """Give something."""
        return value

    told = await result_of(Tool("give", "Give.", {}, give))
    assert json.loads(told) == data
    assert "\\u" not in told


async def test_text_is_told_as_it_is() -> None:
    def give() -> str:
        """Give something."""
        return 'Zürich "quoted"\n{"a": 1}'

    assert await result_of(give) == 'Zürich "quoted"\n{"a": 1}'


async def test_text_that_no_message_can_hold_is_told_as_far_as_it_can_be() -> None:
    def give() -> str:
        """Give something."""
        return "a\0b\ud800c\U0001f408"

    assert await result_of(give) == "a\N{REPLACEMENT CHARACTER}b?c\U0001f408"

    def fail() -> str:
        """Fail."""
        raise ValueError("a\0b\udfff")

    told = await result_of(fail)
    assert "ValueError: a\N{REPLACEMENT CHARACTER}b?" in told


async def test_data_that_cannot_be_written_is_told_as_an_error() -> None:
    def give() -> object:
        """Give something."""
        return {"a": "\ud800"}

    assert (await result_of(Tool("give", "Give.", {}, give))).startswith("error: ")


async def test_an_answer_that_no_message_can_hold_is_kept_as_far_as_it_can_be() -> None:
    async with Script(answer="a\0b").engine() as engine:
        run = await run_tools(engine, "Go.", tools=[add])
        assert run.completion.text == "a\0b"
        assert run.history[-1].content == "a\N{REPLACEMENT CHARACTER}b"


# -- cancelling -----------------------------------------------------------------------------


async def test_cancelled_while_the_model_is_at_it_nothing_is_left() -> None:
    model = ScriptedModel("x" * 100, decode_s=1e6, chat_template=TEMPLATE)
    async with open_scripted_engine(model) as engine:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(functools.partial(run_tools, engine, "Go.", tools=[add]))
                await until(lambda: len(model.plans) > 0)
                scope.cancel()
        assert scope.cancelled_caught
        await until_idle(engine)
        assert engine.stats().requests == {"completed": 0, "failed": 0, "cancelled": 1}


async def test_cancelled_while_tools_run_they_are_cancelled_too() -> None:
    ended: list[str] = []
    begun = {name: trio.Event() for name in ("a", "b")}

    async def wait(name: str) -> None:
        """Wait for ever."""
        begun[name].set()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            ended.append(name)
            raise

    script = Script(calling(("wait", {"name": "a"}), ("wait", {"name": "b"})))
    async with script.engine() as engine:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(functools.partial(run_tools, engine, "Go.", tools=[wait]))
                for event in begun.values():
                    await event.wait()
                scope.cancel()
        assert scope.cancelled_caught
        assert sorted(ended) == ["a", "b"]
        assert len(script.prompts) == 1
        await until_idle(engine)
        assert engine.stats().requests["cancelled"] == 0


async def test_cancelled_while_a_thread_runs_it_is_waited_for() -> None:
    begun, go = threading.Event(), threading.Event()
    ended: list[bool] = []

    def block() -> None:
        """Take its time."""
        begun.set()
        go.wait()
        ended.append(True)

    script = Script(calling(("block", {})))
    async with script.engine() as engine, trio.open_nursery() as nursery:
        left = trio.Event()

        async def ask(scope: trio.CancelScope) -> None:
            with scope:
                await run_tools(engine, "Go.", tools=[block])
                must_not_run("answered")
            left.set()

        scope = trio.CancelScope()
        nursery.start_soon(ask, scope)
        try:
            await until(begun.is_set)
            scope.cancel()
            for _ in range(20):
                await trio.lowlevel.checkpoint()
            assert not left.is_set()
        finally:
            go.set()
        await left.wait()
        assert ended == [True]
        assert len(script.prompts) == 1
    assert threads_of_ours() == []


async def test_a_cancel_inside_a_tool_is_the_tools_own() -> None:
    async def give_up() -> str:
        """Wait, but not for long."""
        with trio.move_on_after(0):
            await trio.lowlevel.checkpoint()
            must_not_run("waited")
        return "gave up"

    assert await result_of(give_up) == "gave up"


# -- a real model ---------------------------------------------------------------------------


async def test_a_real_model_calls_and_is_told(engine: Engine) -> None:
    heard: list[int] = []

    def ring(times: int) -> str:
        """Ring the bell."""
        heard.append(times)
        return "The bell has rung."

    run = await run_tools(
        engine,
        Request("Ring the bell.", tools=[ring], tool_format="hermes", max_tokens=32),
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_rounds=1,
    )
    assert run.rounds == len(heard) == 1
    assert [message.role for message in run.history] == ["user", "assistant", "tool", "assistant"]
    assert run.history[2].content == "The bell has rung."
