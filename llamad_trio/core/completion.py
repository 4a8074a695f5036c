"""What a caller gets back: the reply as it comes, and its end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Generic, Literal

import attrs
from typing_extensions import TypeVar

from llamad_trio.core.errors import InferenceError
from llamad_trio.core.tools import ToolCall

FinishReason = Literal["stop", "length"]

ValueT_co = TypeVar("ValueT_co", covariant=True, default=Any)


@attrs.frozen
class TokenLogprob:
    """How likely a token was to the model, before constraint, penalties and temperature.

    Attributes:
        token: its id.
        piece: the bytes it stands for, which need not be whole characters.
        logprob: natural logarithm of its probability.
        top: the likeliest tokens in its place, likeliest first; empty in these themselves.
    """

    token: int
    piece: bytes
    logprob: float
    top: Sequence[TokenLogprob] = ()

    @property
    def text(self) -> str:
        """The piece as text; what is no whole character becomes U+FFFD."""
        return self.piece.decode(errors="replace")


@attrs.frozen(kw_only=True)
class Choice:
    """The likeliest of several texts.

    Attributes:
        text: the option.
        index: its place among the options.
        probabilities: of each option, in their order; they add up to 1.
    """

    text: str
    index: int
    probabilities: Sequence[float]


@attrs.frozen(kw_only=True)
class Completion(Generic[ValueT_co]):
    """The end of one request.

    Attributes:
        text: the answer: everything generated, up to and without the stop sequence, and
            without what is reasoning or a tool call.
        prompt_tokens: length of the templated prompt.
        generated_tokens: tokens sampled, the one that ended the generation included.
        finish_reason: `"stop"` (end of generation, a stop sequence, or a constraint that
            is complete) or `"length"`.
        stop_sequence: the stop sequence that matched, if one did.
        cached_tokens: prompt tokens whose KV was reused instead of computed.
        ttft_s: seconds from submission to the first token.
        duration_s: seconds from submission to the end.
        value: the text as data: an instance of the type that was asked for; of a request
            with a JSON schema, what `json.loads` gives, or `None` if it was cut off.
        reasoning: what the model thought before it answered, where its template has that.
        tool_calls: what the model called.
        unfinished: the text of a tool call that was cut off.
        logprobs: of each generated token, where the request asked for them.
    """

    text: str
    prompt_tokens: int
    generated_tokens: int
    finish_reason: FinishReason
    stop_sequence: str | None = None
    cached_tokens: int = 0
    ttft_s: float = 0.0
    duration_s: float = 0.0
    value: ValueT_co = attrs.field(default=None)
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    unfinished: str = ""
    logprobs: Sequence[TokenLogprob] | None = None


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


def is_cut_off(completion: Completion) -> bool:
    """Whether the text stopped before its own end: its value, if it has one, is incomplete."""
    return completion.finish_reason == "length" or completion.stop_sequence is not None


def json_value(text: str) -> object:
    """The data that a text under a JSON schema is.

    Raises:
        InferenceError: Python cannot read it, such as a number of too many digits.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise InferenceError(f"the text cannot be read as JSON: {error}") from None
