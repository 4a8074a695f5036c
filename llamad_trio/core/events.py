"""What a reply is made of, as it comes."""

from __future__ import annotations

import attrs

from llamad_trio.core.completion import Completion


@attrs.frozen
class TextDelta:
    """More of the answer; never empty."""

    text: str


@attrs.frozen
class ReasoningDelta:
    """More of what the model thinks before it answers; never empty."""

    text: str


@attrs.frozen
class ToolCallStart:
    """The model calls a tool: call number `index` of this reply, from 0."""

    index: int
    id: str
    name: str


@attrs.frozen
class ToolCallDelta:
    """More of the arguments of call `index`, as JSON text; never empty.

    All of a call's deltas together are one JSON object, unless the reply was cut off.
    """

    index: int
    arguments: str


@attrs.frozen
class Done:
    """The reply is complete; always the last event, exactly once."""

    completion: Completion


ReplyEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta
StreamEvent = ReplyEvent | Done
