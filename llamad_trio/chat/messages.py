"""Messages as chat templates read them: dictionaries, in transformers' spelling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from llamad_trio.chat.tools.base import ToolFormat
from llamad_trio.core.request import Message
from llamad_trio.core.tools import Tool


def reads_tool_calls(template_source: str) -> bool:
    """Whether a template writes the calls of earlier assistant turns.

    Some are given `tools` but expect the calls in the turn's text (LFM2):
    `message_dict` must then be told the format.
    """
    return "tool_calls" in template_source


def message_dict(message: Message, *, calls_as: ToolFormat | None = None) -> dict[str, object]:
    """Return what a template gets for `message`; what the message has not is left out.

    With `calls_as` the calls become part of `content`, in that format.
    """
    fields: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls and calls_as is not None:
        calls = calls_as.write_calls(message.tool_calls)
        fields["content"] = f"{message.content}\n{calls}" if message.content else calls
    elif message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        fields["name"] = message.name
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    return fields


def plain_messages(
    messages: Iterable[Message], tools: Sequence[Tool], tool_format: ToolFormat
) -> list[dict[str, object]]:
    """Rewrite a conversation for a template that knows nothing of tools.

    The system turn, made if there is none, ends with the format's instructions when there are
    tools; calls and results become text.  The results of one turn become one user turn, joined
    with a user turn that follows, because many templates insist that the two take turns.
    """
    turns: list[dict[str, object]] = []
    results: list[str] = []
    instructions = tool_format.instructions(tools) if tools else ""
    if instructions:
        turns.append({"role": "system", "content": instructions})
    for index, message in enumerate(messages):
        if message.role == "tool":
            results.append(tool_format.write_result(message))
            continue
        if results and message.role == "user":
            message = attrs.evolve(message, content="\n".join([*results, message.content]))
        elif results:
            turns.append(_user(results))
        results = []
        if index == 0 and message.role == "system" and instructions:
            turns[0]["content"] = f"{message.content}\n\n{instructions}".lstrip()
        else:
            turns.append(message_dict(message, calls_as=tool_format))
    if results:
        turns.append(_user(results))
    return turns


def _user(results: Iterable[str]) -> dict[str, object]:
    return {"role": "user", "content": "\n".join(results)}
