"""What a client asks for, as data, and as the JSON object it comes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs

from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.fields import apply_converters, boolean, checked, optional, text, whole_number
from llamad_trio.core.request import Request
from llamad_trio.wire.converter import given_fields, structure, unknown_field, unstructure
from llamad_trio.wire.lines import decode_object

CallId = str | int

MAX_ID_CHARS = 128
"""It comes back in every line of the reply."""

ORIGINAL_FIELDS = frozenset(
    {
        *("prompt", "system", "history", "max_tokens", "temperature", "top_k", "top_p", "min_p"),
        *("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty", "seed"),
        *("stop", "grammar", "grammar_root", "raw", "stream"),
    }
)
"""A request of these alone is answered as the original llamad answers it, byte for byte."""


def _id(value: object, _name: str) -> CallId | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if not isinstance(value, str):
        raise ProtocolError(f"id must be text or an integer, not {type(value).__name__}")
    if len(value) > MAX_ID_CHARS or not value.isprintable():
        raise ProtocolError(f"id must be at most {MAX_ID_CHARS} printable characters")
    return value


def _list(value: object, name: str) -> tuple[object, ...]:
    """A converter that looks at the list only; what is in it the engine checks."""
    if not isinstance(value, list | tuple):
        raise ProtocolError(f"{name} must be a list, not {type(value).__name__}")
    return tuple(value)


def _flag() -> Any:
    return attrs.field(default=False, metadata=checked(boolean))


@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class Call:
    """What every call can have.

    Its `id` comes back in every line of its reply; no two calls of one connection that are under
    way may have the same.  With `keep` the connection stays open for another call.  Without a
    `model` the default one is asked.
    """

    op: ClassVar[str | None] = None
    id: CallId | None = attrs.field(default=None, metadata=checked(_id))
    keep: bool = _flag()
    model: str | None = attrs.field(default=None, metadata=checked(optional(text)))


@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class Generate(Call):
    """A completion.

    `stream` replies with the text as it comes, `events` with all there is: text, reasoning, tool
    calls.  An `is_original` one is answered as the original llamad does.
    """

    request: Request
    stream: bool = _flag()
    events: bool = _flag()
    with_stats: bool = _flag()
    is_original: bool = False


@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class Ping(Call):
    """Whether anybody is there."""

    op = "ping"


@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class ListModels(Call):
    """What models there are."""

    op = "models"


@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class GetStats(Call):
    """What the daemon is doing."""

    op = "stats"


@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class GetMetrics(Call):
    """What has been counted, in Prometheus' text format."""

    op = "metrics"


@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class WatchEvents(Call):
    """What happens in a model from now on; `max_events` as for `Engine.events`."""

    op = "events"
    max_events: int = attrs.field(default=1024, metadata=checked(whole_number(1, 1_000_000)))


@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class Cancel(Call):
    """Stop the call of this connection that has this `id`."""

    op = "cancel"


@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class Tokenize(Call):
    """Text to tokens; see `Engine.tokenize`."""

    op = "tokenize"
    text: str = attrs.field(metadata=checked(text))
    special: bool = _flag()


@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class Detokenize(Call):
    """Tokens to text; see `Engine.detokenize`."""

    op = "detokenize"
    tokens: Sequence[int] = attrs.field(metadata=checked(_list))


@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class Render(Call):
    """The prompt text of a request."""

    op = "render"
    request: Request


@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class CountTokens(Call):
    """The length of a request's prompt."""

    op = "count_tokens"
    request: Request


@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class Score(Call):
    """How likely each of several texts is; see `Engine.score`."""

    op = "score"
    request: Request
    continuations: Sequence[str] = attrs.field(metadata=checked(_list))


@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class Choose(Call):
    """Which of several texts is likeliest; see `Engine.choose`."""

    op = "choose"
    request: Request
    options: Sequence[str] = attrs.field(metadata=checked(_list))


_OPS: dict[str | None, type[Call]] = {
    kind.op: kind
    for kind in (
        *(Generate, Ping, ListModels, GetStats, GetMetrics, WatchEvents, Cancel),
        *(Tokenize, Detokenize, Render, CountTokens, Score, Choose),
    )
}

_OURS = {"request", "is_original"}
"""Fields that no client has."""

_OWN = {kind: given_fields(kind) - _OURS for kind in _OPS.values()}
_OF_REQUEST = {"tokens", *given_fields(Request)}
_KNOWN = {"op"}.union(_OF_REQUEST, *_OWN.values())


def decode_call(line: bytes) -> Call:
    """What a line asks for.

    Raises:
        ProtocolError: it is no call.
    """
    data = {
        name: value
        for name, value in decode_object(line).items()
        if value is not None or name not in _KNOWN  # what is not known is refused even so
    }
    op = data.pop("op", None)
    kind = _OPS.get(op) if isinstance(op, str | None) else None
    if kind is None:
        known = ", ".join(name for name in _OPS if name)
        raise ProtocolError(f"unknown op {str(op)[:64]!r}; known are {known}")
    own = _OWN[kind]
    has_request = "request" in attrs.fields_dict(kind)
    fields = own | _OF_REQUEST if has_request else own
    if unknown := data.keys() - fields:
        misspelt = unknown - _KNOWN  # the others are fields of another call
        raise unknown_field(misspelt or unknown, fields | {"op"} if misspelt else ())
    if not has_request:
        return structure(data, kind)
    if kind is Generate and data.keys() <= ORIGINAL_FIELDS:
        data["is_original"] = True
    of_call = {name: data.pop(name) for name in (own | _OURS) & data.keys()}
    return structure({**of_call, "request": _request(data)}, kind)


def _request(data: dict[str, object]) -> Request:
    prompt = data.get("prompt")
    tokens = data.pop("tokens", None)
    if tokens is not None:
        if prompt is not None:
            raise ProtocolError("only one of prompt and tokens can be given")
        if not isinstance(tokens, list):
            raise ProtocolError(f"tokens must be a list, not {type(tokens).__name__}")
        data["prompt"] = tokens
    elif prompt is None:
        if not data.get("history"):
            raise ProtocolError("missing field 'prompt'")
        return attrs.evolve(structure({**data, "prompt": ""}, Request), prompt=None)
    elif not isinstance(prompt, str):
        raise ProtocolError(f"prompt must be text, not {type(prompt).__name__}")
    return structure(data, Request)


def encode_call(call: Call) -> dict[str, object]:
    """A call as the JSON object that `decode_call` reads."""
    data = unstructure(call)
    data.pop("is_original", None)
    request = data.pop("request", None)
    if request is not None:
        prompt = request.pop("prompt", None)
        if prompt is not None:
            data["prompt" if isinstance(prompt, str) else "tokens"] = prompt
        data |= request
    return data if call.op is None else {"op": call.op, **data}
