"""Events of an engine come out on the other side as they went in."""

from __future__ import annotations

import json
from contextvars import copy_context
from typing import Any, get_args

import attrs
import pytest

from llamad_trio.core.engine_events import (
    EngineEvent,
    EngineFailed,
    EngineStopped,
    FirstToken,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestQueued,
)
from llamad_trio.core.errors import Busy, EngineCrashed, InferenceError, ProtocolError
from llamad_trio.wire.lines import encode_line
from llamad_trio.wire.replies import call_id, engine_event_from, engine_event_reply

VALUES: dict[str, Any] = {
    "aborted": True,
    "after_s": 0.25,
    "attempt": 2,
    "cached_tokens": 12,
    "decode_tokens": 3,
    "duration_s": 1.5,
    "engine": "small \N{SNOWMAN}",
    "error": EngineCrashed(-9, ("last words",)),
    "finish_reason": "length",
    "generated_tokens": 64,
    "kind": "chat",
    "load_s": 2.5,
    "n_lost": 5,
    "n_threads": 3,
    "n_threads_batch": 6,
    "prefill_tokens": 4,
    "prompt_tokens": 31,
    "queued_s": 0.125,
    "reason": "it broke",
    "request_id": 7,
    "slots_in_use": 2,
    "time": 512.25,
    "ttft_s": 0.5,
}

KINDS = get_args(EngineEvent)
ERRORS = (Busy(1, 2), InferenceError("why"))


def an_event(kind: type[Any]) -> Any:
    return kind(**{name: VALUES[name] for name in attrs.fields_dict(kind) if name != "context"})


def shown(event: EngineEvent | None) -> str:
    """With all fields, also of its error, which equals only itself."""
    return f"{event!r} {getattr(event, 'error', None)!r}"


def crossed(event: EngineEvent, shift_s: float = 0.0) -> EngineEvent | None:
    line = encode_line(engine_event_reply(event, shift_s))
    return engine_event_from(json.loads(line), -shift_s, nobody)


def with_more(kind: type[Any], **more: object) -> dict[str, object]:
    told = engine_event_reply(an_event(kind), 0.0)["event"]
    assert isinstance(told, dict)
    return {"event": {**told, **more}}


def nobody(call: object) -> None:
    return None


@pytest.mark.parametrize(
    "event",
    [
        *map(an_event, KINDS),
        attrs.evolve(an_event(EngineStopped), reason=None),
        *(attrs.evolve(an_event(EngineFailed), error=error) for error in ERRORS),
        *(attrs.evolve(an_event(RequestFailed), error=error) for error in ERRORS),
    ],
    ids=lambda event: type(event).__name__,
)
def test_every_event_crosses_with_all_its_fields(event: EngineEvent) -> None:
    assert shown(crossed(event)) == shown(event)


def test_times_are_shifted_and_nothing_else_is() -> None:
    event = an_event(FirstToken)
    sent = engine_event_reply(event, 100.0)["event"]
    assert isinstance(sent, dict)
    assert (sent["time"], sent["ttft_s"]) == (612.25, 0.5)
    assert crossed(event, 100.0) == event


@pytest.mark.parametrize("kind", [RequestQueued, RequestFinished, RequestFailed, RequestCancelled])
def test_of_the_context_only_the_id_of_the_call_crosses(kind: type[Any]) -> None:
    over_there = copy_context()
    over_there.run(call_id.set, "seven")
    event = attrs.evolve(an_event(kind), context=over_there)
    line = encode_line(engine_event_reply(event, 0.0))
    here = copy_context()
    read = engine_event_from(json.loads(line), 0.0, lambda call: here if call == "seven" else None)
    assert isinstance(read, kind)
    assert read.context is here
    assert shown(read) == shown(event)


def test_no_other_side_can_say_what_the_context_is() -> None:
    others: tuple[object, ...] = ("x", {}, ["x"])
    for false in others:
        read = engine_event_from(with_more(RequestFinished, context=false, call=false), 0.0, nobody)
        assert isinstance(read, RequestFinished)
        assert read.context is None


def test_kinds_and_fields_that_are_newer_are_passed_by() -> None:
    read = engine_event_from(with_more(FirstToken, new=1), 0.0, nobody)
    assert read == an_event(FirstToken)
    assert engine_event_from({"event": {"type": "Unheard", "time": 1.0}}, 0.0, nobody) is None


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"event": None},
        {"event": []},
        {"event": {"type": "FirstToken"}},
        {"event": {"type": "FirstToken", "time": "1", "engine": "", "request_id": 1, "ttft_s": 1}},
        {"event": {"type": "FirstToken", "time": 1, "engine": "", "request_id": 1.5, "ttft_s": 1}},
        {"event": {"type": "RequestQueued", "time": 1, "engine": "", "request_id": 1, "kind": "x"}},
        {"event": {"type": "EngineFailed", "time": 1, "engine": "", "error": "x"}},
    ],
)
def test_what_is_no_event_is_refused(reply: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        engine_event_from(reply, 0.0, nobody)
