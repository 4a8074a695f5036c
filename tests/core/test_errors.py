"""Errors say what happened, carry their fields, and survive a trip to another process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from llamad_trio.core import errors
from llamad_trio.core.errors import (
    Busy,
    ConfigError,
    ContextOverflow,
    Disconnected,
    EngineClosed,
    EngineCrashed,
    Failure,
    IncompleteOutput,
    InferenceError,
    InsufficientMemory,
    LlamadError,
    ModelLoadError,
    PromptTooLong,
    ProtocolError,
    RestartsExhausted,
    SessionFatal,
    SocketUnavailable,
    UnsupportedFeature,
)

EXAMPLES: list[tuple[LlamadError, dict[str, Any], str]] = [
    (
        ModelLoadError("a.gguf", "no such file"),
        {"path": "a.gguf", "reason": "no such file"},
        "cannot load model 'a.gguf': no such file",
    ),
    (
        Busy(3, 2),
        {"queued": 3, "max_queue": 2},
        "busy: 3 requests are waiting, the limit is 2",
    ),
    (
        PromptTooLong(90, 80),
        {"tokens": 90, "budget": 80},
        "prompt too long: 90 tokens, at most 80 fit",
    ),
    (
        IncompleteOutput('{"a": '),
        {"text": '{"a": '},
        "the output is incomplete after 6 characters",
    ),
    (
        ContextOverflow("decode", 60, 5, 64),
        {"stage": "decode", "resident_tokens": 60, "additional_tokens": 5, "n_ctx": 64},
        "context overflow in decode: 60 tokens resident, 5 more do not fit in 64",
    ),
    (ProtocolError("bad role"), {"reason": "bad role"}, "invalid request: bad role"),
    (
        UnsupportedFeature("embeddings", "a decoder"),
        {"feature": "embeddings", "reason": "a decoder"},
        "embeddings is not supported: a decoder",
    ),
    (InferenceError("NaN"), {"reason": "NaN"}, "inference: NaN"),
    (SessionFatal("lost count"), {"reason": "lost count"}, "engine stopped: lost count"),
    (EngineClosed(), {}, "the engine is closed"),
    (Disconnected(), {}, "the other side disconnected"),
    (
        SocketUnavailable("/tmp/x", "nobody listens there"),
        {"path": "/tmp/x", "reason": "nobody listens there"},
        "socket '/tmp/x': nobody listens there",
    ),
    (
        ConfigError("d.toml", "models.a.n_ctx", "wrong"),
        {"path": "d.toml", "where": "models.a.n_ctx", "reason": "wrong"},
        "d.toml: models.a.n_ctx: wrong",
    ),
    (
        EngineCrashed(-9, ("first", "last")),
        {"status": -9, "last_log_lines": ("first", "last")},
        "the engine's process ended with signal 9; its last words: last",
    ),
    (
        RestartsExhausted("a", (Failure(1.0, "one"), Failure(3.5, "two"))),
        {"model": "a", "failures": (Failure(1.0, "one"), Failure(3.5, "two"))},
        "model 'a' failed 2 times: 2.5 s before: one; 0.0 s before: two",
    ),
    (
        InsufficientMemory(3 << 30, 1 << 30, {"a": 512 << 20}),
        {"required": 3 << 30, "available": 1 << 30, "held_by": {"a": 512 << 20}},
        str(InsufficientMemory(3 << 30, 1 << 30, {"a": 512 << 20})),
    ),
]

every_error = pytest.mark.parametrize(
    ("error", "fields", "message"), EXAMPLES, ids=[type(e).__name__ for e, _, _ in EXAMPLES]
)


def fields_of(error: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(error, name) for name in names}


def test_the_examples_are_all_there_are() -> None:
    assert {type(error).__name__ for error, _, _ in EXAMPLES} == {*errors.__all__} - {"LlamadError"}


@every_error
def test_it_says_what_happened_carries_its_fields_and_can_be_chained(
    error: LlamadError, fields: dict[str, Any], message: str
) -> None:
    assert (fields_of(error, fields), str(error)) == (fields, message)
    cause = ValueError("why")
    with pytest.raises(LlamadError) as caught:
        raise error from cause
    assert caught.value is error
    assert error.__cause__ is cause
    assert error.__traceback__ is not None


def pickled(protocol: int, error: LlamadError) -> Any:
    return pickle.loads(pickle.dumps(error, protocol))


PICKLED = [partial(pickled, n) for n in range(pickle.HIGHEST_PROTOCOL + 1)]


@every_error
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, *PICKLED])
def test_it_can_be_copied_and_pickled(
    error: LlamadError, fields: dict[str, Any], message: str, duplicate: Any
) -> None:
    twin = duplicate(error)
    assert twin is not error
    assert type(twin) is type(error)
    assert (fields_of(twin, fields), str(twin)) == (fields, message)


def test_the_base_catches_and_pickles_too() -> None:
    assert isinstance(pickle.loads(pickle.dumps(LlamadError())), LlamadError)
