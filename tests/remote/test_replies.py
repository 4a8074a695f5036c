"""Whatever the other side of a socket says, it is a result or a `LlamadError`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings, strategies as st

from llamad_trio import (
    Busy,
    Choice,
    Completion,
    Disconnected,
    EngineStats,
    InferenceError,
    LlamadError,
    PromptTooLong,
    ProtocolError,
    connect,
    daemon_stats,
)
from llamad_trio.wire.replies import error_reply
from tests.core.test_errors import EXAMPLES
from tests.remote.daemons import (
    ERROR,
    MIB,
    QUESTIONS,
    REPLIES,
    Line,
    answering,
    as_lines,
    connected_to,
    handling,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


GARBAGE = [
    b"\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\x16\x03\x01\x00\n",
    b"\xff\xfe\n",
    b'{"a": "\xff"}\n',
    b'{"a": "\\ud800"}\n',
    b"null\n",
    b"[]\n",
    b"5\n",
    b'"text"\n',
    b"NaN\n",
    b'{"uptime_s": 1e999}\n',
    b"{} {}\n",
    b"{}\n",
    b"[" * 200_000 + b"\n",
    b'{"a":' * 200_000 + b"\n",
    b"\xef\xbb\xbf{}\n",
    b"\0" * 1000 + b"\n",
    b'{"error": 5}\n',
    b'{"error": null}\n',
    b'{"error": {"message": "no"}}\n',
    b'{"error": "new", "type": ["Busy"], "details": {}}\n',
]


@pytest.mark.parametrize("reply", GARBAGE, ids=lambda reply: repr(reply[:16]))
async def test_who_speaks_garbage_is_not_understood(sock: Path, reply: bytes) -> None:
    async with answering(sock, [reply]):
        with pytest.raises(InferenceError):
            async with connect(sock):
                pass
    async with connected_to(sock, reply) as remote:
        for ask in QUESTIONS.values():
            # What is no reply to one may be a part of the reply to another, which has no end.
            with pytest.raises((InferenceError, Disconnected)):
                await ask(remote)


async def test_a_line_without_end_is_refused(sock: Path) -> None:
    n_sent = 0

    async def send_for_ever(stream: trio.SocketStream) -> None:
        nonlocal n_sent
        while True:
            await stream.send_all(b"x" * MIB)
            n_sent += 1

    async with handling(sock, send_for_ever):
        with pytest.raises(InferenceError):
            await daemon_stats(sock)
    assert n_sent <= 66


async def test_a_long_reply_is_read(sock: Path) -> None:
    text = "long " * 1_000_000
    reply = {"text": text, "prompt_tokens": 1, "generated_tokens": 1}
    async with connected_to(sock, reply) as remote:
        assert await remote.complete_text("x") == text


# -- replies --------------------------------------------------------------------------------

RESULTS: dict[str, object] = {
    "score": [-0.5, 0.0],
    "choose": Choice(text="y", index=0, probabilities=(0.25, 0.75)),
    "render": "x",
    "count_tokens": 5,
    "tokenize": [1, 2],
    "detokenize": "x",
}


@pytest.mark.parametrize("name", QUESTIONS)
async def test_a_reply_is_understood_however_it_is_cut(sock: Path, name: str) -> None:
    results = []
    for n_at_once in (1, 7, MIB):
        async with connected_to(sock, *REPLIES[name], n_at_once=n_at_once) as remote:
            results.append(await QUESTIONS[name](remote))
    assert results[0] == results[1] == results[2] == RESULTS.get(name, results[0])


async def test_what_a_newer_daemon_adds_is_passed_over(sock: Path) -> None:
    for name, question in QUESTIONS.items():
        lines: list[Line] = [{"new": {}}] if name.startswith("stream") else []
        lines += [line | {"new": [1]} for line in REPLIES[name]]
        async with connected_to(sock, *lines) as remote:
            assert await question(remote) is not None


async def test_a_reply_that_breaks_off_is_a_disconnect(sock: Path) -> None:
    for name, question in QUESTIONS.items():
        whole = as_lines(*REPLIES[name])
        for n in (0, 1, len(whole) // 2, len(whole) - 1):
            async with connected_to(sock, whole[:n]) as remote:
                with pytest.raises(Disconnected):
                    await question(remote)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2**16, 2**64, 10**30, 10**400])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "stop", "5", "é", "\0", "x" * 100]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["token", "text", "error", "index"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: object, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the parts of JSON data are."""
    found = [prefix] if prefix else []
    match value:
        case dict():
            items = list(value.items())
        case list():
            items = list(enumerate(value))
        case _:
            items = []
    for key, item in items:
        found += places(item, (*prefix, key))
    return found


def replaced(value: Any, place: Sequence[Any], new: object) -> Any:
    """JSON data with another part in one place."""
    if not place:
        return new
    copy = value.copy()
    copy[place[0]] = replaced(value[place[0]], place[1:], new)
    return copy


async def outcome(sock: Path, name: str, reply: bytes) -> object:
    """What comes of a reply: whatever it is, it is a result or one of our errors."""
    async with connected_to(sock, reply) as remote:
        try:
            return await QUESTIONS[name](remote)
        except LlamadError as error:
            return error


@settings(max_examples=60)
@given(name=st.sampled_from(sorted(QUESTIONS)), reply=st.binary(max_size=40), ends=st.booleans())
async def test_a_reply_of_any_bytes_is_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, name: str, reply: bytes, ends: bool
) -> None:
    sock = tmp_path_factory.getbasetemp() / "fuzz.sock"
    result = await outcome(sock, name, reply + b"\n" * ends)
    assert isinstance(result, LlamadError)


async def answer_with_a_wrong_part(sock: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(QUESTIONS)))
    lines = [*REPLIES[name]]
    if data.draw(st.booleans()):
        lines.insert(data.draw(st.integers(0, len(lines) - 1)), ERROR)
    n = data.draw(st.integers(0, len(lines) - 1))
    place = data.draw(st.sampled_from([(), *places(lines[n])]))
    lines[n] = replaced(lines[n], place, data.draw(json_values))
    check_result(name, await outcome(sock, name, as_lines(*lines)))


@settings(max_examples=50)
@given(data=st.data())
async def test_a_reply_with_a_wrong_part_is_a_result_or_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    await answer_with_a_wrong_part(tmp_path_factory.getbasetemp() / "fuzz.sock", data)


@pytest.mark.slow
@settings(max_examples=1500)
@given(data=st.data())
async def test_1500_replies_with_a_wrong_part_are_results_or_errors_of_ours(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    await answer_with_a_wrong_part(tmp_path_factory.getbasetemp() / "fuzz.sock", data)


def check_result(name: str, result: object) -> None:
    """What is said to be a result is one, in all its parts."""
    match result:
        case LlamadError():
            pass
        case Completion():
            assert type(result.text) is str
            assert type(result.prompt_tokens) is type(result.generated_tokens) is int
            assert result.finish_reason in ("stop", "length")
            assert type(result.ttft_s) is float
            for call in result.tool_calls:
                assert type(call.name) is str
                assert isinstance(call.arguments, dict)
            for told in result.logprobs or ():
                assert (type(told.token), type(told.piece)) == (int, bytes)
        case Choice():
            assert all(type(value) is float for value in result.probabilities)
        case EngineStats():
            assert all(type(value) is int for value in result.slots.values())
        case list():
            assert name in ("tokenize", "score", "stream_events")
            kind = {"tokenize": int, "score": float}.get(name, object)
            assert all(isinstance(item, kind) for item in result)
        case _:
            assert type(result) is type(RESULTS[name])


# -- errors ---------------------------------------------------------------------------------

ERRORS: list[LlamadError] = [error for error, *_ in EXAMPLES]

ORIGINAL = (Busy, InferenceError, PromptTooLong, ProtocolError)
"""What the texts of the original protocol tell apart."""


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_errors_come_as_they_were_raised(sock: Path, error: LlamadError) -> None:
    for is_original in (False, True):
        async with connected_to(sock, error_reply(error, is_original=is_original)) as remote:
            for question in QUESTIONS.values():
                with pytest.raises(LlamadError) as caught:
                    await question(remote)
                if not is_original or isinstance(error, ORIGINAL):
                    assert caught.value.__reduce__() == error.__reduce__()
                assert str(error).split(": ")[-1] in str(caught.value)
