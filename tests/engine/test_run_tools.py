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
    run_tools,
)
from llamad_trio.chat.tools.formats import TOOL_FORMATS
from llamad_trio.testing import ScriptedModel, open_scripted_engine
from tests.conformance.engines import TEMPLATE
from tests.support import must_not_run, threads_of_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from llamad_trio import Engine

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

    async def run(self, *tools: Tool | Callable[..., object], **fields: Any) -> ToolRun:
        """Have it call these."""
        async with self.engine() as engine:
            return await run_tools(engine, "Go.", tools=tools, **fields)


def results_in(run: ToolRun) -> list[str]:
    """What the model was told of its calls."""
    return [message.content for message in run.history if message.role == "tool"]


async def result_of(
    tool: Tool | Callable[..., object], arguments: Mapping[str, Any] | None = None, name: str = ""
) -> str:
    """What the model is told of one call."""
    name = name or (tool.name if isinstance(tool, Tool) else getattr(tool, "__name__", ""))
    script = Script(calling((name, arguments or {})))
    run = await script.run(tool)
    assert run.completion.text == ANSWER
    (told,) = results_in(run)
    # The model has seen it.
    assert f"[tool] {told}" in script.prompts[-1]
    return told


# -- functions ------------------------------------------------------------------------------


def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


async def add_soon(a: int, b: int = 1) -> int:
    """Add, after a while."""
    await trio.lowlevel.checkpoint()
    return a + b


class Adder:
    """Something with methods, and an object that is called."""

    def add(self, a: int) -> int:
        """Add one."""
        return a + 1

    async def add_soon(self, a: int) -> int:
        """Add one, after a while."""
        return await add_soon(a)

    async def __call__(self, a: int) -> int:
        """Add one."""
        return await add_soon(a)


@functools.wraps(add_soon)
def logged(**arguments: Any) -> object:
    """An async function behind a decorator."""
    return add_soon(**arguments)


def in_asyncio(a: int) -> int:
    """Add one in asyncio, around which this is an ordinary function."""

    async def fetch() -> int:
        await asyncio.sleep(0)
        return a + 1

    return asyncio.run(fetch())


LOOSE: dict[str, Any] = {"properties": {"a": {}}}
"""A schema that says less than the function wants."""

FUNCTIONS: list[tuple[str, Tool | Callable[..., object], dict[str, Any]]] = [
    ("add", add, {"a": 1, "b": 2}),
    ("add", add, {"a": 2}),
    ("add_soon", add_soon, {"a": 1, "b": 2}),
    ("add", Adder().add, {"a": 2}),
    ("add_soon", Adder().add_soon, {"a": 2}),
    ("Adder", Adder(), {"a": 2}),
    ("add", functools.partial(add, b=2), {"a": 1}),
    ("add_soon", functools.partial(add_soon, b=2), {"a": 1}),
    ("add_soon", logged, {"a": 2}),
    ("in_asyncio", in_asyncio, {"a": 2}),
    ("sum", Tool("sum", "Add.", LOOSE, add), {"a": 2}),
    ("sum", Tool("sum", "Add.", LOOSE, add_soon), {"a": 2}),
]


@pytest.mark.parametrize(("name", "tool", "arguments"), FUNCTIONS)
async def test_functions_of_every_kind_are_called(
    name: str, tool: Tool | Callable[..., object], arguments: dict[str, Any]
) -> None:
    assert await result_of(tool, arguments, name) == "3"


# -- several calls --------------------------------------------------------------------------


async def test_the_calls_of_one_reply_run_side_by_side() -> None:
    arrived: dict[str, trio.Event] = {"left": trio.Event(), "right": trio.Event()}

    async def meet(name: str, other: str) -> str:
        arrived[name].set()
        await arrived[other].wait()
        return f"{name} met {other}"

    barrier = threading.Barrier(2, timeout=60)

    def meet_in_thread() -> str:
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
    run = await script.run(meet, meet_in_thread, max_tokens=1000)
    assert run.rounds == 1
    # In the order of the calls, whoever was first.
    assert results_in(run) == ["left met right", "met", "right met left", "met"]
    user, called, *results, answer = run.history
    assert [message.role for message in (user, called, answer)] == ["user", *["assistant"] * 2]
    assert [call.id for call in called.tool_calls] == [told.tool_call_id for told in results]
    assert [call.name for call in called.tool_calls] == [told.name for told in results]


# -- what goes wrong ------------------------------------------------------------------------


async def test_what_a_tool_raises_is_told_to_the_model() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def fail() -> None:
        raise LookupError("nothing here")

    async def fail_soon() -> None:
        await trio.lowlevel.checkpoint()
        raise LookupError("nothing here")

    async def save() -> None:
        async def fail(error: Exception) -> None:
            raise error

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, ValueError("the disk is full"))
            nursery.start_soon(fail, KeyError("name"))

    def mumble() -> None:
        raise Unspeakable

    assert await result_of(fail) == await result_of(fail_soon) == "error: LookupError: nothing here"
    assert "ValueError: the disk is full" in await result_of(save)
    assert await result_of(mumble) == "error: Unspeakable"


async def test_one_tool_that_fails_leaves_the_others_to_end() -> None:
    failed = trio.Event()

    async def fail() -> None:
        failed.set()
        raise ValueError("no luck")

    async def last() -> str:
        await failed.wait()
        await trio.lowlevel.checkpoint()
        return "done"

    told = results_in(await Script(calling(("fail", {}), ("last", {}))).run(fail, last))
    assert "no luck" in told[0]
    assert told[1] == "done"


async def test_arguments_that_do_not_fit_are_told_to_the_model() -> None:
    called: list[object] = []

    def odd(n: int) -> int:
        called.append(n)
        return n

    tool = Tool("odd", "Take something.", {"properties": {"n": {}, "m": {}}}, odd)
    assert "missing argument 'n'" in await result_of(tool, {})
    assert "n: expected int, got str" in await result_of(tool, {"n": "five"})
    assert "unknown argument 'm'" in await result_of(tool, {"n": 1, "m": 2})
    assert called == []
    assert await result_of(tool, {"n": 5}) == "5"


@pytest.mark.parametrize(
    "fields",
    [{"tools": [add, Tool("get", "Get.", {})]}, {"tools": "add"}, {"request": [1]}, {"temp": 1.0}],
    ids=["no function", "no list", "tokens", "unknown field"],
)
async def test_a_bad_request_is_refused_before_anything_runs(fields: dict[str, Any]) -> None:
    script = Script()
    async with script.engine() as engine:
        with pytest.raises(ProtocolError):
            await run_tools(engine, **{"request": "Go.", "tools": [add], **fields})
    assert script.prompts == []


# -- rounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [-1, 0, 1, 3])
async def test_a_model_that_never_answers_is_stopped(most: int) -> None:
    n_called = 0

    def again() -> str:
        nonlocal n_called
        n_called += 1
        return "again"

    script = Script(*[calling(("again", {}))] * 10)
    run = await script.run(again, max_rounds=most)
    assert run.rounds == n_called == max(most, 0)
    assert len(script.prompts) == n_called + 1
    # The last calls were not made.
    assert [c.name for c in run.completion.tool_calls] == ["again"]
    assert run.history[-1].tool_calls == run.completion.tool_calls


@pytest.mark.parametrize("choice", ["required", "add"])
async def test_having_to_call_is_about_the_first_round(choice: str) -> None:
    run = await Script(calling(("add", {"a": 1}))).run(add, tool_choice=choice)
    assert (run.rounds, run.completion.text) == (1, ANSWER)
    with pytest.raises(InferenceError, match="does not allow"):
        await Script().run(add, tool_choice=choice)


async def test_tools_that_may_not_be_called_are_not_in_any_round() -> None:
    script = Script()
    assert (await script.run(add, tool_choice="none")).rounds == 0
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
        assert (again.completion.text, again.rounds) == (ANSWER, 0)
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
    told = await result_of(Tool("give", "Give.", {}, lambda: value))
    assert json.loads(told) == data
    assert "\\u" not in told


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ('Zürich "quoted"\n{"a": 1}', 'Zürich "quoted"\n{"a": 1}'),
        # What no message can hold is told as far as it can be.
        ("a\0b\ud800c\U0001f408", "a\N{REPLACEMENT CHARACTER}b?c\U0001f408"),
    ],
)
async def test_text_is_told_as_it_is(value: str, told: str) -> None:
    def fail() -> str:
        raise ValueError(value)

    assert await result_of(Tool("give", "Give.", {}, lambda: value)) == told
    assert await result_of(fail) == f"error: ValueError: {told}"


async def test_an_answer_that_no_message_can_hold_is_kept_as_far_as_it_can_be() -> None:
    run = await Script(answer="a\0b").run(add)
    assert run.completion.text == "a\0b"
    assert run.history[-1].content == "a\N{REPLACEMENT CHARACTER}b"


async def test_data_that_cannot_be_written_is_told_as_an_error() -> None:
    give = Tool("give", "Give.", {}, lambda: {"a": "\ud800"})
    assert (await result_of(give)).startswith("error: ")


# -- cancelling -----------------------------------------------------------------------------


async def test_cancelled_while_tools_run_they_are_cancelled_too() -> None:
    begun: list[str] = []
    ended: list[str] = []

    async def wait(name: str) -> None:
        begun.append(name)
        if len(begun) == 2:
            scope.cancel()
        try:
            await trio.sleep_forever()
        finally:
            ended.append(name)

    script = Script(calling(("wait", {"name": "a"}), ("wait", {"name": "b"})))
    with trio.CancelScope() as scope:
        await script.run(wait)
    assert scope.cancelled_caught
    assert sorted(ended) == ["a", "b"]
    assert len(script.prompts) == 1


async def test_cancelled_while_a_thread_runs_it_is_waited_for() -> None:
    had_left: list[bool] = []

    def block() -> None:
        """Take its time."""
        trio.from_thread.run_sync(scope.cancel)
        for _ in range(20):
            trio.from_thread.run_sync(int)  # after whatever else there is to do
        had_left.append(scope.cancelled_caught)

    script = Script(calling(("block", {})))
    with trio.CancelScope() as scope:
        await script.run(block)
    assert scope.cancelled_caught
    assert had_left == [False]
    assert len(script.prompts) == 1
    assert threads_of_ours() == []


async def test_a_cancel_inside_a_tool_is_the_tools_own() -> None:
    async def give_up() -> str:
        with trio.move_on_after(0):
            await trio.lowlevel.checkpoint()
            must_not_run("waited")
        return "gave up"

    assert await result_of(give_up) == "gave up"
