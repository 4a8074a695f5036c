"""Errors say what happened, carry their fields, and survive a trip to another process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from llamad_trio.core import errors
from llamad_trio.core.errors import LlamadError

CRASHED = {"status": -9, "last_log_lines": ("first", "last")}
EXHAUSTED = {"model": "a", "failures": (errors.Failure(1.0, "one"), errors.Failure(3.5, "two"))}
NO_MEMORY = {"required": 3 << 30, "available": 1 << 30, "held_by": {"a": 512 << 20}}
OVERFLOW = {"stage": "decode", "resident_tokens": 60, "additional_tokens": 5, "n_ctx": 64}

# Fields in the order in which an error takes them.
KINDS: list[tuple[type[LlamadError], dict[str, Any], str]] = [
    (errors.ModelLoadError, {"path": "a.gguf", "reason": "no"}, "cannot load model 'a.gguf': no"),
    (errors.Busy, {"queued": 3, "max_queue": 2}, "busy: 3 requests are waiting, the limit is 2"),
    (errors.PromptTooLong, {"tokens": 9, "budget": 8}, "prompt too long: 9 tokens, at most 8 fit"),
    (errors.IncompleteOutput, {"text": '{"a": '}, "the output is incomplete after 6 characters"),
    (
        errors.ContextOverflow,
        OVERFLOW,
        "context overflow in decode: 60 tokens resident, 5 more do not fit in 64",
    ),
    (errors.ProtocolError, {"reason": "bad role"}, "invalid request: bad role"),
    (errors.UnsupportedFeature, {"feature": "x", "reason": "y"}, "x is not supported: y"),
    (errors.InferenceError, {"reason": "NaN"}, "inference: NaN"),
    (errors.SessionFatal, {"reason": "lost count"}, "engine stopped: lost count"),
    (errors.EngineClosed, {}, "the engine is closed"),
    (errors.Disconnected, {}, "the other side disconnected"),
    (errors.SocketUnavailable, {"path": "/x", "reason": "nobody"}, "socket '/x': nobody"),
    (
        errors.ConfigError,
        {"path": "d.toml", "where": "a.b", "reason": "wrong"},
        "d.toml: a.b: wrong",
    ),
    (
        errors.EngineCrashed,
        CRASHED,
        "the engine's process ended with signal 9; its last words: last",
    ),
    (
        errors.RestartsExhausted,
        EXHAUSTED,
        "model 'a' failed 2 times: 2.5 s before: one; 0.0 s before: two",
    ),
    (
        errors.InsufficientMemory,
        NO_MEMORY,
        str(errors.InsufficientMemory(3 << 30, 1 << 30, {"a": 512 << 20})),
    ),
]

EXAMPLES = [(kind(*fields.values()), fields, message) for kind, fields, message in KINDS]

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
