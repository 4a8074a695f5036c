"""The loop of call, execute, answer."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Unpack, cast

import attrs
import msgspec
import trio

from llamad_trio.core.completion import Completion
from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.request import Message, Request, RequestFields
from llamad_trio.core.tools import Tool, ToolCall
from llamad_trio.engine.engine_like import EngineLike
from llamad_trio.system.nursery import run_all
from llamad_trio.typed.asking import as_request
from llamad_trio.typed.function_tool import call_arguments, tool_from

logger = logging.getLogger("llamad_trio")


@attrs.frozen(kw_only=True)
class ToolRun:
    """What came of a request with tools.

    Attributes:
        completion: the last one.  It has `tool_calls` only if the rounds were used up;
            those calls were not made.
        history: the whole conversation after the system message, this reply included: the
            history of a request that goes on from here.
        rounds: how often tools were called.
    """

    completion: Completion
    history: Sequence[Message]
    rounds: int


async def run_tools(
    engine: EngineLike,
    request: Request | str,
    *,
    max_rounds: int = 8,
    **fields: Unpack[RequestFields],
) -> ToolRun:
    """Let a model call tools until it answers.

    The calls of one reply run side by side.  An async function runs in this task's
    nursery, any other in a worker thread.  What a tool raises is told to the model as the
    result of the call.

    Args:
        engine: what to ask.
        request: its `tools` must have functions.
        max_rounds: how often the model may call tools, >= 0.
        fields: `Request` fields that override the request's.

    A checkpoint.  Cancelled, it stops the model and the tools; a function in a thread is
    waited for.  Raises as `Engine.complete`; `ProtocolError` for a tool without a function.
    """
    request = as_request(request, fields)
    tools = {tool.name: tool for tool in map(tool_from, request.tools)}
    for tool in tools.values():
        if tool.function is None:
            raise ProtocolError(f"tool {tool.name!r} has no function to call")
    if not isinstance(request.prompt, str | None):
        raise ProtocolError("tools need the chat template, which a token prompt skips")
    last = () if request.prompt is None else (Message("user", request.prompt),)
    history = [*request.history, *last]
    rounds = 0
    while True:
        completion = await engine.complete(request)
        history.append(
            Message(
                "assistant",
                _storable(completion.text),
                tool_calls=completion.tool_calls,
                reasoning=completion.reasoning and _storable(completion.reasoning),
            )
        )
        if not completion.tool_calls or rounds >= max_rounds:
            return ToolRun(completion=completion, history=tuple(history), rounds=rounds)
        rounds += 1
        history += await _results(tools, completion.tool_calls)
        # Having to call a tool was about the first reply: else there would never be an answer.
        choice = "none" if request.tool_choice == "none" else "auto"
        request = attrs.evolve(request, prompt=None, history=history, tool_choice=choice)


async def _results(tools: dict[str, Tool], calls: Sequence[ToolCall]) -> list[Message]:
    """The results of calls, in their order."""
    contents = [""] * len(calls)

    async def run(index: int) -> None:
        contents[index] = await _result(tools, calls[index])

    await run_all(partial(run, index) for index in range(len(calls)))
    return [
        Message("tool", content, tool_call_id=call.id, name=call.name)
        for call, content in zip(calls, contents, strict=True)
    ]


async def _result(tools: dict[str, Tool], call: ToolCall) -> str:
    tool = tools.get(call.name)
    if tool is None:
        return f"error: there is no tool {call.name!r}"
    try:
        value = await _call_function(tool, call)
        # For the model to read: text as it is, all else as JSON.
        content = (
            value
            if isinstance(value, str)
            else msgspec.json.encode(value, enc_hook=_plain).decode()
        )
    except Exception as error:  # told to the model, which may do better
        logger.info("tool %s failed", call.name, exc_info=True)
        content = f"error: {_error_text(error)}"
    return _storable(content)


def _error_text(error: BaseException) -> str:
    """What happened; of a nursery, to each of its tasks that failed."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(_error_text, error.exceptions))
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the tool's, which need not be able to show itself
        return type(error).__name__


def _storable(text: str) -> str:
    """The text without what no message can hold."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def _plain(value: object) -> object:
    dump = getattr(value, "model_dump", None)  # pydantic's models
    return str(value) if dump is None else dump(mode="json")


async def _call_function(tool: Tool, call: ToolCall) -> object:
    arguments = call_arguments(tool, call.arguments)
    function = tool.function
    assert function is not None
    if inspect.iscoroutinefunction(function):
        function = cast("Callable[..., Awaitable[object]]", function)
        return await function(**arguments)
    # Packed, because Trio takes a coroutine that comes out of a thread for a mistake.
    (value,) = await trio.to_thread.run_sync(lambda: (function(**arguments),))
    if isinstance(value, Awaitable):  # an async function behind an object or a decorator
        return await value
    return value
