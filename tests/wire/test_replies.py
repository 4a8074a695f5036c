"""What comes back: the original's bytes, and everything else as it was on the other side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args, get_type_hints

import attrs
import pytest
from hypothesis import given, strategies as st

from llamad_trio.core import errors
from llamad_trio.core.completion import (
    Completion,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
)
from llamad_trio.core.errors import (
    Busy,
    ContextOverflow,
    EngineClosed,
    InferenceError,
    LlamadError,
    PromptTooLong,
    ProtocolError,
    SessionFatal,
    UnsupportedFeature,
)
from llamad_trio.core.request import Request
from llamad_trio.core.tools import ToolCall
from llamad_trio.remote.reply import reading_reply
from llamad_trio.wire.lines import encode_line
from llamad_trio.wire.replies import (
    CLOSING,
    completion_from,
    completion_reply,
    error_from,
    error_reply,
    error_text,
    event_from,
    event_reply,
)
from tests.strategies import tool_calls

Json = dict[str, Any]

SAMPLES: dict[Any, list[Any]] = {
    str: ["why: \N{SNOWMAN}\n", ""],
    int: [7, 0],
    Sequence[str]: [("a", "b"), ()],
    Mapping[str, int]: [{"a": 7}, {}],
}


def samples(kind: type[LlamadError]) -> list[LlamadError]:
    """Two errors of a kind, with different values in every field."""
    hints = get_type_hints(kind)
    names = [field.name for field in getattr(kind, "__attrs_attrs__", ())]
    choices = [SAMPLES.get(hints[name]) or get_args(hints[name]) for name in names]
    return [kind(*(choice[n] for choice in choices)) for n in (0, 1)]


OF_NO_REQUEST = {"LlamadError", "RestartsExhausted"}
"""A base, and what ends a program's own block: no request ends with one of these."""

KINDS: list[type[LlamadError]] = [
    getattr(errors, name) for name in errors.__all__ if name not in OF_NO_REQUEST
]


def crossed(reply: Json) -> Json:
    """A reply that has gone over the wire."""
    found: Json = json.loads(encode_line(reply))
    return found


def fields_of(error: LlamadError) -> Json:
    return {f.name: getattr(error, f.name) for f in getattr(type(error), "__attrs_attrs__", ())}


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_is_rebuilt_as_it_was_raised(kind: type[LlamadError]) -> None:
    for error in samples(kind):
        reply = crossed(error_reply(error, is_original=False))
        found = error_from(reply)
        assert type(found) is kind
        assert crossed(fields_of(found)) == crossed(fields_of(error))
        assert str(found) == str(error)
        assert reply["error"] == error_text(error)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Busy(7, 8), "busy: 7 requests are waiting, the limit is 8"),
        (PromptTooLong(5000, 4095), "prompt too long: 5000 tokens, at most 4095 fit"),
        (ProtocolError("why"), "invalid request: why"),
        (InferenceError("why"), "inference: why"),
        (UnsupportedFeature("grammar", "why"), "invalid request: grammar is not supported: why"),
        (SessionFatal("why"), "inference: engine stopped: why"),
        (EngineClosed(), "inference: the engine is closed"),
        (
            ContextOverflow("decode", 10, 20, 25),
            "inference: context overflow in decode: 10 tokens resident, 20 more do not fit in 25",
        ),
    ],
)
def test_the_originals_errors_are_one_key_with_the_contracts_words(
    error: LlamadError, text: str
) -> None:
    assert error_reply(error, is_original=True) == {"error": text}


OF_ANOTHER_VERSION: list[tuple[str, object]] = [
    *(("Tomorrow", {}), ("LlamadError", {}), ("str", {}), ("errors", {}), ("Busy", None)),
    *(("Busy", {}), ("Busy", {"queued": "7", "max_queue": 8}), ("Busy", [7, 8])),
    *(("ProtocolError", {"reason": 5}), ("PromptTooLong", {"tokens": 1.5, "budget": True})),
    ("ContextOverflow", {"stage": "x", "resident_tokens": 1, "additional_tokens": 2, "n_ctx": 3}),
    *(
        ("InsufficientMemory", {"required": 1, "available": 1, "held_by": {}} | wrong)
        for wrong in ({"held_by": {"a": "b"}}, {"required": 10**400}, {"held_by": [1]})
    ),
]
WITH_MORE = {"type": "Busy", "details": {"queued": 7, "max_queue": 8, "tomorrow": 9}}


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        *(({"error": str(error)}, error) for error in (Busy(7, 8), PromptTooLong(5000, 4095))),
        *(({"error": str(error)}, error) for error in (ProtocolError("x"), InferenceError("x"))),
        ({"error": CLOSING}, EngineClosed()),
        ({"error": "empty request"}, ProtocolError("empty request")),
        ({"error": "request too large"}, ProtocolError("request too large")),
        ({"error": "read timeout"}, ProtocolError("read timeout")),
        ({"error": "stream timeout"}, InferenceError("stream timeout")),
        ({"error": "of tomorrow"}, InferenceError("of tomorrow")),
        ({"error": ""}, InferenceError("")),
        ({"error": "busy: x"}, InferenceError("busy: x")),
        ({"error": "busy: ...", **WITH_MORE}, Busy(7, 8)),
        *(
            ({"error": "inference: why", "type": kind, "details": it}, InferenceError("why"))
            for kind, it in OF_ANOTHER_VERSION
        ),
    ],
)
def test_an_error_is_rebuilt_as_far_as_it_is_known_and_keeps_its_text(
    reply: Json, error: LlamadError
) -> None:
    found = error_from(reply)
    assert type(found) is type(error)
    assert fields_of(found) == fields_of(error)


# -- the end of a completion ---------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
likely = st.builds(
    TokenLogprob,
    st.integers(0, 2**31 - 1),
    st.binary(max_size=6),
    st.floats(max_value=0, allow_nan=False),
)
logprobs = st.builds(
    lambda told, top: attrs.evolve(told, top=tuple(top)), likely, st.lists(likely, max_size=3)
)
reasons: st.SearchStrategy[Literal["stop", "length"]] = st.sampled_from(["stop", "length"])
completions = st.builds(
    Completion,
    text=texts,
    prompt_tokens=st.integers(0, 2**31),
    generated_tokens=st.integers(0, 2**31),
    finish_reason=reasons,
    stop_sequence=st.none() | texts,
    cached_tokens=st.integers(0, 2**31),
    ttft_s=st.floats(0, 1e6),
    duration_s=st.floats(0, 1e6),
    reasoning=st.none() | texts,
    tool_calls=st.lists(tool_calls, max_size=2).map(tuple),
    unfinished=texts,
    logprobs=st.none() | st.lists(logprobs, max_size=3).map(tuple),
)

ASKED = Request("a")


def returned(completion: Completion, request: Request = ASKED) -> Completion:
    return completion_from(crossed(completion_reply(completion, is_original=False)), request)


@given(completions)
def test_a_completion_is_equal_to_the_one_that_was_sent(completion: Completion) -> None:
    assert returned(completion) == completion


SIMPLE = Completion(text="a", prompt_tokens=1, generated_tokens=2, finish_reason="stop")


def test_all_fields_are_among_those_that_cross() -> None:
    crossing = {name for name in attrs.fields_dict(Completion) if name != "value"}
    told = TokenLogprob(5, b"\xff", -0.5, (TokenLogprob(5, b"\xff", -0.5),))
    full = Completion(
        text="a",
        prompt_tokens=1,
        generated_tokens=2,
        finish_reason="length",
        stop_sequence="s",
        cached_tokens=3,
        ttft_s=0.5,
        duration_s=1.5,
        reasoning="r",
        tool_calls=(ToolCall("1", "get", {"a": [1]}),),
        unfinished="u",
        logprobs=(told,),
    )
    assert completion_reply(full, is_original=False).keys() == crossing
    assert returned(full) == full
    assert told.text == "\N{REPLACEMENT CHARACTER}"


def test_a_token_that_cannot_be_is_minus_infinity_on_the_other_side_too() -> None:
    completion = attrs.evolve(SIMPLE, logprobs=(TokenLogprob(5, b"a", float("-inf")),))
    assert crossed(completion_reply(completion, is_original=False))["logprobs"] == [
        {"token": 5, "text": "a", "bytes": [97], "logprob": None}
    ]
    assert returned(completion) == completion


def test_the_originals_reply_has_three_keys_and_these_bytes() -> None:
    completion = Completion(
        text="4\n\N{SNOWMAN}",
        prompt_tokens=24,
        generated_tokens=2,
        finish_reason="stop",
        stop_sequence="s",
        reasoning="r",
        cached_tokens=20,
    )
    assert encode_line(completion_reply(completion, is_original=True)) == (
        '{"text":"4\\n\N{SNOWMAN}","prompt_tokens":24,"generated_tokens":2}\n'.encode()
    )


def test_the_originals_three_keys_are_a_completion() -> None:
    line = {"text": "4", "prompt_tokens": 24, "generated_tokens": 2}
    expected = attrs.evolve(SIMPLE, text="4", prompt_tokens=24)
    assert completion_from(line, ASKED) == expected
    assert completion_from({"done": True, "id": 1, "tomorrow": [], **line}, ASKED) == expected


def test_the_value_is_read_where_the_request_asked_for_json() -> None:
    done = attrs.evolve(SIMPLE, text='{"a":1}')
    asked = attrs.evolve(ASKED, json_schema={"type": "object"})
    assert returned(done, asked).value == {"a": 1}
    assert returned(done).value is None
    assert returned(attrs.evolve(done, finish_reason="length"), asked).value is None
    assert returned(attrs.evolve(done, stop_sequence="x"), asked).value is None
    with pytest.raises(InferenceError, match="JSON"):
        returned(attrs.evolve(done, text="{"), asked)


# -- parts of a stream ---------------------------------------------------------------------------

EVENTS: list[tuple[ReplyEvent, bytes]] = [
    (TextDelta("4\n"), b'{"token":"4\\n"}\n'),
    (ReasoningDelta("hm"), b'{"reasoning":"hm"}\n'),
    (ToolCallStart(0, "c1", "get"), b'{"tool_call":{"index":0,"id":"c1","name":"get"}}\n'),
    (ToolCallDelta(1, '{"a"'), b'{"tool_call":{"index":1,"arguments":"{\\"a\\""}}\n'),
]


@pytest.mark.parametrize(("event", "line"), EVENTS, ids=lambda part: type(part).__name__)
def test_a_part_of_a_stream_has_these_bytes_and_crosses(event: ReplyEvent, line: bytes) -> None:
    assert encode_line(event_reply(event)) == line
    assert event_from(json.loads(line)) == event
    assert event_from({"id": 7, **json.loads(line)}) == event


@pytest.mark.parametrize("reply", [{}, {"tomorrow": 1}, {"token": 5}, {"reasoning": None}])
def test_what_is_no_part_of_a_stream_is_passed_over(reply: Json) -> None:
    assert event_from(reply) is None


@pytest.mark.parametrize(
    "reply",
    [
        *({"tool_call": 5}, {"tool_call": {}}, {"tool_call": {"index": 0, "id": "a"}}),
        *({"tool_call": {"index": "0", "arguments": ""}}, {"tool_call": {"arguments": ""}}),
    ],
)
def test_a_part_of_a_wrong_type_is_refused(reply: Json) -> None:
    with pytest.raises(ProtocolError):
        event_from(reply)


# -- replies that no daemon of ours sends ----------------------------------------------------------

NO_COMPLETIONS: list[Json] = [
    *({}, {"text": 5}, {"text": "a"}, {"text": "a", "prompt_tokens": 1}),
    *({"prompt_tokens": "1"}, {"generated_tokens": True}, {"ttft_s": "1"}, {"stop_sequence": 5}),
    {"tool_calls": [{"id": "1", "name": "a b", "arguments": {}}]},
    *({"logprobs": [5]}, {"logprobs": [{"token": 5}]}),
    {"logprobs": [{"token": 5, "bytes": [999], "logprob": -1}]},
    {"logprobs": [{"token": "x", "bytes": [], "logprob": -1}]},
    *({"finish_reason": "tomorrow"}, {"finish_reason": 5}, {"ttft_s": 10**400}),
    *({"tool_calls": 5}, {"tool_calls": [5]}, {"tool_calls": [{"id": "1"}]}),
    *({"logprobs": 5}, {"logprobs": {"a": 1}}),
]
COMPLETE: Json = {"text": "a", "prompt_tokens": 1, "generated_tokens": 2}


@pytest.mark.parametrize("reply", NO_COMPLETIONS, ids=lambda reply: str(reply)[:40])
def test_what_is_no_completion_is_an_inference_error(reply: Json) -> None:
    line = {**COMPLETE, **reply} if reply and "text" not in reply else reply
    with pytest.raises(InferenceError, match="reply is not understood"):
        reading_reply(partial(completion_from, line, ASKED))
