"""What comes back: the end of a completion, and what comes before it in a stream."""

from __future__ import annotations

import attrs

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
from llamad_trio.core.request import Request
from llamad_trio.wire.converter import structure, structure_known, unstructure


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
