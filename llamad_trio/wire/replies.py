"""What comes back, as JSON and as data: parts of a reply and its end, errors, what happens in
an engine.  Knows no clock: how far the times of the two sides are apart is told."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any, get_args

import attrs
from cattrs.gen import override

from llamad_trio.core import errors
from llamad_trio.core.completion import (
    Completion,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    is_cut_off,
    json_value,
)
from llamad_trio.core.engine_events import EngineEvent
from llamad_trio.core.errors import (
    Busy,
    EngineClosed,
    InferenceError,
    LlamadError,
    PromptTooLong,
    ProtocolError,
    UnsupportedFeature,
)
from llamad_trio.core.request import Request
from llamad_trio.wire.calls import CallId
from llamad_trio.wire.converter import register, structure, structure_known, unstructure

logger = logging.getLogger("llamad_trio")


# -- completions --------------------------------------------------------------------------------


def completion_reply(completion: Completion, *, is_original: bool) -> dict[str, object]:
    """The end of a completion; an original one has three keys."""
    reply: dict[str, object] = {
        "text": completion.text,
        "prompt_tokens": completion.prompt_tokens,
        "generated_tokens": completion.generated_tokens,
    }
    return reply if is_original else reply | unstructure(completion)


def completion_from(reply: dict[str, object], request: Request) -> Completion:
    """A completion as its engine gave it: with its value, where the request asked for JSON.

    Raises:
        InferenceError: text of a JSON schema that is no JSON to Python.
        ProtocolError: the reply is none.
    """
    completion = structure_known({"finish_reason": "stop", **reply}, Completion)
    if request.json_schema is None or is_cut_off(completion):
        return completion
    return attrs.evolve(completion, value=json_value(completion.text))


def event_reply(event: ReplyEvent) -> dict[str, object]:
    """A part of a reply as it comes."""
    match event:
        case TextDelta(text):
            return {"token": text}
        case ReasoningDelta(text):
            return {"reasoning": text}
        case ToolCallStart():
            return {"tool_call": {"index": event.index, "id": event.id, "name": event.name}}
        case ToolCallDelta():
            return {"tool_call": {"index": event.index, "arguments": event.arguments}}


def event_from(reply: dict[str, object]) -> ReplyEvent | None:
    """The part of a reply that a line tells of; `None` if it is none.

    Raises:
        ProtocolError: of a wrong type.
    """
    match reply:
        case {"token": str(text)}:
            return TextDelta(text)
        case {"reasoning": str(text)} if "done" not in reply:
            return ReasoningDelta(text)
        case {"tool_call": {"arguments": _} as call}:
            return structure(call, ToolCallDelta)
        case {"tool_call": call}:
            return structure(call, ToolCallStart)
    return None


# -- errors -------------------------------------------------------------------------------------

CLOSING = "inference: the daemon is stopping"
"""What those are told whose request was under way."""

_AS_THEY_ARE = (Busy, InferenceError, PromptTooLong, ProtocolError)
"""These begin with the protocol's own words."""

_ERRORS = {name: getattr(errors, name) for name in errors.__all__ if name != "LlamadError"}


def error_text(error: LlamadError) -> str:
    """What a client of the original protocol is told."""
    if isinstance(error, _AS_THEY_ARE):
        return str(error)
    kind = "invalid request" if isinstance(error, UnsupportedFeature) else "inference"
    return f"{kind}: {error}"


def error_reply(error: LlamadError, *, is_original: bool) -> dict[str, object]:
    """The whole reply: with the error's type and fields, unless it is the original's."""
    reply: dict[str, object] = {"error": error_text(error)}
    if not is_original:
        reply |= {"type": type(error).__name__, "details": unstructure(error)}
    return reply


def error_from(reply: dict[str, object]) -> LlamadError:
    """The error that a reply tells of, as it was raised on the other side."""
    text = str(reply.get("error"))
    kind, details = _ERRORS.get(str(reply.get("type"))), reply.get("details")
    if kind is not None and isinstance(details, dict):
        try:
            error: LlamadError = structure_known(details, kind)
            str(error)  # nobody else is to find out that its fields make no text
        except (ProtocolError, ArithmeticError, TypeError, ValueError) as failure:
            logger.debug("an error of another version: %r", failure)
        else:
            return error
    numbers = [int(number) for number in re.findall(r"\d{1,18}", text)]
    if len(numbers) == 2 and text.startswith("busy: "):
        return Busy(*numbers)
    if len(numbers) == 2 and text.startswith("prompt too long: "):
        return PromptTooLong(*numbers)
    if text.startswith("invalid request: "):
        return ProtocolError(text.removeprefix("invalid request: "))
    if text in {"empty request", "request too large", "read timeout"}:
        return ProtocolError(text)
    if text == CLOSING:
        return EngineClosed()
    return InferenceError(text.removeprefix("inference: "))


# -- what happens in an engine ------------------------------------------------------------------

call_id: ContextVar[CallId | None] = ContextVar("llamad_trio call id", default=None)
"""The `id` of the call that a task answers: events tell it of the requests it makes."""

_EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(EngineEvent)}


def _read_error(value: object, _: object) -> LlamadError:
    if not isinstance(value, dict):
        raise ProtocolError(f"an error must be an object, not {type(value).__name__}")
    return error_from(value)


_OVERRIDES = {
    "context": override(
        rename="call",
        struct_hook=lambda context, _: context,
        unstruct_hook=lambda context: None if context is None else context.get(call_id),
    ),
    "error": override(
        struct_hook=_read_error, unstruct_hook=lambda error: error_reply(error, is_original=False)
    ),
}

for _kind in _EVENTS.values():
    _fields = attrs.fields_dict(_kind)
    register(_kind, **{name: how for name, how in _OVERRIDES.items() if name in _fields})


def engine_event_reply(event: EngineEvent, shift_s: float) -> dict[str, object]:
    """An event as it is sent, `shift_s` later."""
    told = {"type": type(event).__name__, **unstructure(event), "time": event.time + shift_s}
    return {"event": told}


def engine_event_from(
    reply: dict[str, object], shift_s: float, context_of: Callable[[object], Context | None]
) -> EngineEvent | None:
    """The event that a line tells of, `shift_s` later; `None` for a kind that is not known here.

    `context_of` gives the context of the task that made a call, by what is told of its id.

    Raises:
        ProtocolError: it tells of none.
    """
    data = reply.get("event")
    if not isinstance(data, dict):
        raise ProtocolError("not an event")
    kind = _EVENTS.get(str(data.get("type")))
    if kind is None:
        return None
    event: EngineEvent = structure_known({**data, "call": context_of(data.get("call"))}, kind)
    return attrs.evolve(event, time=event.time + shift_s)
