"""What only an engine on the other side of a socket has: somebody else there, who may be
nobody, not a daemon, gone, or talking nonsense.  Whatever it is, it is a `LlamadError`.

What a `RemoteEngine` has in common with other engines is in `tests/conformance`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, settings, strategies as st
from trio.testing import wait_all_tasks_blocked

from llamad_trio import (
    Busy,
    Choice,
    Completion,
    ConfigError,
    ContextOverflow,
    DaemonStats,
    Disconnected,
    EngineClosed,
    EngineSpec,
    EngineStats,
    IncompleteOutput,
    InferenceError,
    Limits,
    LlamadError,
    ModelInfo,
    ModelLoadError,
    PromptTooLong,
    ProtocolError,
    SessionFatal,
    SocketUnavailable,
    TextDelta,
    ToolCallStart,
    UnsupportedFeature,
    connect,
    daemon_stats,
    serve_unix,
)
from llamad_trio.system.nursery import open_plain_nursery
from llamad_trio.testing import ScriptedModel, open_scripted_engine, open_scripted_models
from llamad_trio.watch.freshness import refresh_if_possible
from llamad_trio.wire.converter import unstructure
from llamad_trio.wire.replies import error_reply
from tests.support import ENDLESS, read_all, until, until_idle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from llamad_trio import Engine, EngineLike, Models, RemoteEngine
    from llamad_trio.system.nursery import TaskStatus


ROOT = Path(__file__).parents[2]

MIB = 1024 * 1024

Line = dict[str, Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "d.sock"


# -- daemons, and others --------------------------------------------------------------------


@asynccontextmanager
async def served(
    path: Path, engines: EngineLike | Mapping[str, EngineLike], **options: Any
) -> AsyncIterator[trio.CancelScope]:
    """A daemon, inside the block; the scope stops it."""
    scope = trio.CancelScope()

    async def serve(task_status: TaskStatus[None]) -> None:
        with scope:
            await serve_unix(engines, path, task_status=task_status, **options)

    async with open_plain_nursery() as nursery:
        await nursery.start(serve)
        yield scope
        scope.cancel()


@pytest.fixture
async def behind() -> AsyncIterator[Engine]:
    """An engine with a long reply."""
    async with open_scripted_engine("abcdefgh" * 2000, n_ctx=100_000) as engine:
        yield engine


@pytest.fixture
async def remote(path: Path, behind: Engine) -> AsyncIterator[RemoteEngine]:
    """The same, on the other side of a socket."""
    async with served(path, behind), connect(path) as remote:
        yield remote


@asynccontextmanager
async def handling(
    path: Path, handle: Callable[[trio.SocketStream], Awaitable[None]]
) -> AsyncIterator[None]:
    """Somebody who does this with each connection, and hangs up."""

    async def handle_and_close(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            async with stream:
                await handle(stream)

    with suppress(FileNotFoundError):
        os.unlink(path)
    with trio.socket.socket(socket.AF_UNIX) as sock:
        await sock.bind(str(path))
        sock.listen(64)
        async with open_plain_nursery() as nursery:
            listeners = [trio.SocketListener(sock)]
            nursery.start_soon(trio.serve_listeners, handle_and_close, listeners)
            yield
            nursery.cancel_scope.cancel()


def as_lines(*replies: object) -> bytes:
    return b"".join(json.dumps(reply).encode() + b"\n" for reply in replies)


STATS = unstructure(
    EngineStats(
        slots={"free": 4, "prefill": 0, "decode": 0, "paused": 0},
        queued=0,
        kv_used_tokens=0,
        kv_retained_tokens=7,
        kv_free_tokens=93,
        prefill_tokens=0,
        prefill_s=0.0,
        decode_tokens=0,
        decode_s=0.0,
        cached_tokens=0,
        requests={"completed": 0, "failed": 0, "cancelled": 0},
        preemptions=0,
        steps=0,
        aborted_steps=0,
        n_threads=2,
        n_threads_batch=2,
    )
)

OF_DAEMON: Line = {
    "uptime_s": 1.5,
    "connections": 1,
    "default": "default",
    "models": {
        "default": {
            "info": unstructure(
                ModelInfo(
                    architecture="llama",
                    description="llama",
                    name=None,
                    n_params=1,
                    file_bytes=1,
                    n_vocab=1,
                    n_ctx_train=1,
                    has_template=False,
                    chat_template=None,
                    can_rewind=True,
                    identity="0" * 64,
                )
            ),
            "config": {"n_ctx": 100, "n_slots": 2},
            "stats": STATS,
        }
    },
}


def answering(
    path: Path, replies: list[bytes], n_at_once: int = MIB
) -> AbstractAsyncContextManager[None]:
    """Somebody who answers each request with the last of the replies, so many bytes at once."""

    async def answer(stream: trio.SocketStream) -> None:
        asked = b"-"
        while not asked.endswith(b"\n"):
            asked = await stream.receive_some()
        reply = replies[-1]
        for n in range(0, len(reply), n_at_once):
            await stream.send_all(reply[n : n + n_at_once])

    return handling(path, answer)


@asynccontextmanager
async def connected_to(
    path: Path, *reply: object, n_at_once: int = MIB
) -> AsyncIterator[RemoteEngine]:
    """An engine of a daemon that says what it should only when it is connected to."""
    replies = [as_lines(OF_DAEMON)]
    async with answering(path, replies, n_at_once), connect(path) as remote:
        replies.append(reply[0] if isinstance(reply[0], bytes) else as_lines(*reply))
        yield remote


# -- nobody, or no daemon -------------------------------------------------------------------


async def check_unavailable(path: Path | str, reason: str = "socket") -> None:
    for call in (connect(path).__aenter__, lambda: daemon_stats(path)):
        with pytest.raises(SocketUnavailable, match=reason) as caught:
            await call()
        assert caught.value.path == str(path)


async def test_where_nothing_is_no_daemon_is(path: Path, tmp_path: Path) -> None:
    await check_unavailable(path, "no such socket")
    await check_unavailable(tmp_path / "nowhere" / "d.sock", "no such socket")
    await check_unavailable(tmp_path)
    await check_unavailable("")
    await check_unavailable("a\0b")
    await check_unavailable("/tmp/" + "x" * 200)
    await check_unavailable("\ud800")


async def test_what_nobody_listens_on_is_no_daemon(path: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        await check_unavailable(path, "nobody listens")
    await check_unavailable(path, "nobody listens")
    (tmp_path / "file").write_text("hello")
    await check_unavailable(tmp_path / "file", "nobody listens")


async def test_who_hangs_up_is_no_daemon(path: Path) -> None:
    async with answering(path, [b""]):
        with pytest.raises(SocketUnavailable, match="hangs up"):
            async with connect(path):
                pass
        with pytest.raises(Disconnected):
            await daemon_stats(path)


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
]


@pytest.mark.parametrize("reply", GARBAGE, ids=lambda reply: repr(reply[:16]))
async def test_who_speaks_garbage_is_not_understood(path: Path, reply: bytes) -> None:
    async with answering(path, [reply]):
        with pytest.raises(InferenceError):
            async with connect(path):
                pass
    async with connected_to(path, reply) as remote:
        for ask in QUESTIONS.values():
            # What is no reply to one may be a part of the reply to another, which has no end.
            with pytest.raises((InferenceError, Disconnected)):
                await ask(remote)


async def test_a_line_without_end_is_refused(path: Path) -> None:
    n_sent = 0

    async def send_for_ever(stream: trio.SocketStream) -> None:
        nonlocal n_sent
        while True:
            await stream.send_all(b"x" * MIB)
            n_sent += 1

    async with handling(path, send_for_ever):
        with pytest.raises(InferenceError):
            await daemon_stats(path)
    assert n_sent <= 66


async def test_a_long_reply_is_read(path: Path) -> None:
    text = "long " * 1_000_000
    reply = {"text": text, "prompt_tokens": 1, "generated_tokens": 1}
    async with connected_to(path, reply) as remote:
        assert await remote.complete_text("x") == text


async def test_who_says_nothing_can_be_left(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        with trio.move_on_after(0.05) as deadline:
            async with connect(path):
                pass
        assert deadline.cancelled_caught


# -- replies --------------------------------------------------------------------------------

DONE: Line = {
    "done": True,
    "text": "ab",
    "prompt_tokens": 3,
    "generated_tokens": 2,
    "finish_reason": "length",
    "cached_tokens": 1,
    "ttft_s": 0.1,
    "duration_s": 0.2,
    "reasoning": "Hm.",
    "tool_calls": [{"id": "1", "name": "look", "arguments": {"city": "Rome"}}],
    "logprobs": [
        {
            "token": 5,
            "text": "a",
            "bytes": [97],
            "logprob": -0.5,
            "top": [{"token": 5, "text": "a", "bytes": [97], "logprob": None}],
        }
    ],
    "stats": STATS,
}

EVENTS: list[Line] = [
    {"reasoning": "Hm."},
    {"tool_call": {"index": 0, "id": "1", "name": "look"}},
    {"tool_call": {"index": 0, "arguments": '{"city": "Rome"}'}},
    {"token": "ab"},
    DONE,
]


async def streamed(remote: RemoteEngine) -> Completion:
    async with remote.stream("x") as tokens:
        pieces = await read_all(tokens)
        assert all(type(piece) is str for piece in pieces)
        return await tokens.result()


async def all_events(remote: RemoteEngine) -> list[object]:
    async with remote.stream_events("x") as stream:
        return [event async for event in stream]


QUESTIONS: dict[str, Callable[[RemoteEngine], Awaitable[object]]] = {
    "complete": lambda remote: remote.complete("x"),
    "complete into": lambda remote: remote.complete("x", into=int),
    "stream": streamed,
    "stream_events": all_events,
    "score": lambda remote: remote.score("x", ["y"]),
    "choose": lambda remote: remote.choose("x", ["y"]),
    "render": lambda remote: remote.render("x"),
    "count_tokens": lambda remote: remote.count_tokens("x"),
    "tokenize": lambda remote: remote.tokenize("x"),
    "detokenize": lambda remote: remote.detokenize([1]),
    "refresh": lambda remote: remote.refresh(),
}

ERROR = error_reply(Busy(3, 2), is_original=False)

REPLIES: dict[str, list[Line]] = {
    "complete": [DONE],
    "complete into": [DONE | {"text": "5", "finish_reason": "stop"}],
    "stream": [{"token": "a"}, {"token": "b"}, DONE],
    "stream_events": EVENTS,
    "score": [{"scores": [-0.5, 0]}],
    "choose": [{"choice": {"text": "y", "index": 0, "probabilities": [0.25, 0.75]}}],
    "render": [{"text": "x"}],
    "count_tokens": [{"count": 5}],
    "tokenize": [{"tokens": [1, 2]}],
    "detokenize": [{"text": "x"}],
    "refresh": [OF_DAEMON],
}
"""A good one to each of the questions."""

RESULTS: dict[str, object] = {
    "score": [-0.5, 0.0],
    "choose": Choice(text="y", index=0, probabilities=(0.25, 0.75)),
    "render": "x",
    "count_tokens": 5,
    "tokenize": [1, 2],
    "detokenize": "x",
}


@pytest.mark.parametrize("name", QUESTIONS)
async def test_a_reply_is_understood_however_it_is_cut(path: Path, name: str) -> None:
    results = []
    for n_at_once in (1, 7, MIB):
        async with connected_to(path, *REPLIES[name], n_at_once=n_at_once) as remote:
            results.append(await QUESTIONS[name](remote))
    assert results[0] == results[1] == results[2] == RESULTS.get(name, results[0])


async def test_all_that_a_reply_tells_is_in_the_completion(path: Path) -> None:
    async with connected_to(path, *EVENTS) as remote:
        *events, last = await all_events(remote)
        done = await streamed(remote)
    assert [type(event).__name__ for event in events] == [
        *("ReasoningDelta", "ToolCallStart", "ToolCallDelta", "TextDelta"),
    ]
    assert events[1] == ToolCallStart(0, "1", "look")
    assert events[3] == TextDelta("ab")
    assert getattr(last, "completion", None) == done
    assert (done.text, done.reasoning, done.finish_reason) == ("ab", "Hm.", "length")
    assert [(call.name, call.arguments) for call in done.tool_calls] == [
        ("look", {"city": "Rome"}),
    ]
    assert done.logprobs is not None
    (told,) = done.logprobs
    assert (told.token, told.piece, told.logprob) == (5, b"a", -0.5)
    assert told.top[0].logprob == float("-inf")


async def test_a_daemon_of_the_original_protocol_says_enough(path: Path) -> None:
    reply = {"text": "4", "prompt_tokens": 24, "generated_tokens": 2}
    async with connected_to(path, {"token": "4"}, {"done": True, **reply}) as remote:
        done = await streamed(remote)
    assert done == Completion(text="4", prompt_tokens=24, generated_tokens=2, finish_reason="stop")


async def test_what_a_newer_daemon_adds_is_passed_over(path: Path) -> None:
    for name, question in QUESTIONS.items():
        lines: list[Line] = [{"new": {}}] if name.startswith("stream") else []
        lines += [line | {"new": [1]} for line in REPLIES[name]]
        async with connected_to(path, *lines) as remote:
            assert await question(remote) is not None


async def test_a_reply_that_breaks_off_is_a_disconnect(path: Path) -> None:
    for name, question in QUESTIONS.items():
        whole = as_lines(*REPLIES[name])
        for n in (0, 1, len(whole) // 2, len(whole) - 1):
            async with connected_to(path, whole[:n]) as remote:
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


async def outcome(path: Path, name: str, reply: bytes) -> object:
    """What comes of a reply: whatever it is, it is a result or one of our errors."""
    async with connected_to(path, reply) as remote:
        try:
            return await QUESTIONS[name](remote)
        except LlamadError as error:
            return error


async def answer_with_a_wrong_part(path: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(QUESTIONS)))
    lines = [*REPLIES[name]]
    if data.draw(st.booleans()):
        lines.insert(data.draw(st.integers(0, len(lines) - 1)), ERROR)
    n = data.draw(st.integers(0, len(lines) - 1))
    place = data.draw(st.sampled_from([(), *places(lines[n])]))
    lines[n] = replaced(lines[n], place, data.draw(json_values))
    check_result(name, await outcome(path, name, as_lines(*lines)))


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


@settings(max_examples=60)
@given(name=st.sampled_from(sorted(QUESTIONS)), reply=st.binary(max_size=40), ends=st.booleans())
async def test_a_reply_of_any_bytes_is_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, name: str, reply: bytes, ends: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.sock"
    result = await outcome(path, name, reply + b"\n" * ends)
    assert isinstance(result, LlamadError)


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
                assert type(call.arguments) is dict
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

ERRORS: list[LlamadError] = [
    Busy(3, 2),
    ConfigError("a", "b", "c"),
    ContextOverflow("decode", 1, 2, 3),
    Disconnected(),
    EngineClosed(),
    IncompleteOutput('{"a'),
    InferenceError("no luck"),
    ModelLoadError("a.gguf", "no GGUF"),
    PromptTooLong(10, 5),
    ProtocolError("unknown field 'x'"),
    SessionFatal("lost count"),
    SocketUnavailable("a", "b"),
    UnsupportedFeature("flying", "no wings"),
]

ORIGINAL = (Busy, InferenceError, PromptTooLong, ProtocolError)
"""What the texts of the original protocol tell apart."""


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_errors_come_as_they_were_raised(path: Path, error: LlamadError) -> None:
    for is_original in (False, True):
        async with connected_to(path, error_reply(error, is_original=is_original)) as remote:
            for question in QUESTIONS.values():
                with pytest.raises(LlamadError) as caught:
                    await question(remote)
                if not is_original or isinstance(error, ORIGINAL):
                    assert caught.value.__reduce__() == error.__reduce__()
                assert str(error).split(": ")[-1] in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "details"),
    [
        (
            "ContextOverflow",
            {**dict.fromkeys(["resident_tokens", "additional_tokens", "n_ctx"], 1), "stage": "x"},
        ),
        ("Busy", {"queued": "1", "max_queue": 2}),
        ("Busy", {}),
        ("Busy", 5),
        ("Newer", {"reason": "x"}),
        ("LlamadError", {}),
        ("__all__", {}),
        (["Busy"], {}),
    ],
)
async def test_an_error_of_another_version_is_told_by_its_text(
    path: Path, kind: object, details: object
) -> None:
    reply = {"error": "inference: something new", "type": kind, "details": details}
    async with connected_to(path, reply) as remote:
        with pytest.raises(InferenceError, match="something new"):
            await remote.complete("x")


@pytest.mark.parametrize("text", ["empty request", "request too large", "read timeout"])
async def test_what_the_daemon_has_against_a_request_is_a_protocol_error(
    path: Path, text: str
) -> None:
    async with connected_to(path, {"error": text}) as remote:
        with pytest.raises(ProtocolError) as caught:
            await remote.complete("x")
    assert caught.value.reason == text


async def test_an_error_ends_a_stream_for_good(path: Path) -> None:
    async with (
        connected_to(path, {"token": "a"}, {"error": "inference: no luck"}, DONE) as remote,
        remote.stream("x") as tokens,
    ):
        assert await tokens.receive() == "a"
        for _ in range(2):
            with pytest.raises(InferenceError, match="no luck"):
                await tokens.receive()
        with pytest.raises(InferenceError, match="no luck"):
            await tokens.result()
        assert tokens.completion is None
        assert tokens.text == "a"


async def test_errors_of_other_sockets_are_left_alone(remote: RemoteEngine, path: Path) -> None:
    with pytest.raises(SocketUnavailable):
        async with remote.stream("x"), connect(f"{path}.not"):
            pass


# -- a daemon that goes ---------------------------------------------------------------------


def serve_for_ever(path: str) -> None:
    async def main() -> None:
        model = ScriptedModel("abc" * 10_000, decode_s=0.001, n_ctx_train=100_000)
        async with open_scripted_engine(model, n_ctx=50_000) as engine, trio.open_nursery() as n:
            await n.start(serve_unix, engine, path)
            print("ready", flush=True)

    trio.run(main)


@pytest.fixture
def process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A daemon in a process of its own."""
    code = f"import sys; from {__name__} import serve_for_ever; serve_for_ever(sys.argv[1])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_a_daemon_that_is_killed_disconnects(
    path: Path, process: subprocess.Popen[str]
) -> None:
    async with connect(path) as remote, remote.stream("x", max_tokens=ENDLESS) as tokens:
        await tokens.receive()
        process.kill()
        with pytest.raises(Disconnected):
            await read_all(tokens)
        with pytest.raises(Disconnected):
            await tokens.result()
        assert tokens.text
        assert tokens.completion is None
        for question in QUESTIONS.values():
            with pytest.raises(Disconnected):
                await question(remote)
        # What was known is still known.
        assert remote.info.architecture == "scripted"
        assert remote.stats().requests["completed"] == 0
    await check_unavailable(path, "nobody listens")


async def test_a_daemon_that_stops_closes_its_engines(path: Path, behind: Engine) -> None:
    async with (
        served(path, behind) as daemon,
        connect(path) as remote,
        remote.stream("x", max_tokens=ENDLESS) as tokens,
    ):
        await tokens.receive()
        daemon.cancel()
        with pytest.raises(EngineClosed):
            await read_all(tokens)
        with pytest.raises(Disconnected):
            await remote.complete("x")
    await until_idle(behind)


async def test_an_engine_that_stops_under_a_daemon_is_closed(path: Path) -> None:
    stop = trio.Event()

    async def run_engine(task_status: TaskStatus[Engine]) -> None:
        async with open_scripted_engine("abc" * 1000) as engine:
            task_status.started(engine)
            await stop.wait()

    async with trio.open_nursery() as nursery:
        engine = await nursery.start(run_engine)
        async with served(path, engine), connect(path) as remote:
            async with remote.stream("x", max_tokens=ENDLESS) as tokens:
                await tokens.receive()
                stop.set()
                with pytest.raises(EngineClosed):
                    await read_all(tokens)
            for ask in (remote.render, remote.complete_text):
                with pytest.raises(EngineClosed):
                    await ask("x")


async def test_a_cancelled_request_frees_its_slot_and_its_connection(
    remote: RemoteEngine, behind: Engine, path: Path
) -> None:
    scope = trio.CancelScope()

    async def complete() -> None:
        with scope:
            await remote.complete("x", max_tokens=ENDLESS)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete)
        await until(lambda: behind.stats().slots["decode"] == 1)
        assert (await daemon_stats(path)).connections == 2
        scope.cancel()
    assert scope.cancelled_caught
    await until_idle(behind)
    assert behind.stats().requests == {"completed": 0, "failed": 0, "cancelled": 1}
    # The connection of whoever asks.
    assert (await daemon_stats(path)).connections == 1


# -- the block ------------------------------------------------------------------------------


async def test_after_its_block_a_remote_engine_is_closed(path: Path, behind: Engine) -> None:
    async with served(path, behind):
        async with connect(path) as remote:
            pass
        for question in QUESTIONS.values():
            with pytest.raises(EngineClosed):
                await question(remote)
        assert remote.info == behind.info
        assert remote.stats().requests["completed"] == 0
    assert behind.stats().steps == 0


async def test_what_is_under_way_at_the_end_of_the_block_goes_on(
    path: Path, behind: Engine
) -> None:
    async with served(path, behind):
        async with connect(path) as remote:
            opened = remote.stream("x", max_tokens=20)
            tokens = await opened.__aenter__()
            await tokens.receive()
        assert len((await tokens.result()).text) == 20
        await opened.__aexit__(None, None, None)


# -- statistics -----------------------------------------------------------------------------


async def test_stats_are_those_of_the_last_end_or_of_a_refresh(
    remote: RemoteEngine, behind: Engine
) -> None:
    def completed() -> int:
        return remote.stats().requests["completed"]

    await behind.complete("x", max_tokens=2)
    assert completed() == 0
    stats = await remote.refresh()
    assert stats == remote.stats() == behind.stats()
    assert completed() == 1
    await behind.complete("x", max_tokens=2)
    assert completed() == 1
    await remote.complete("x", max_tokens=2)
    assert completed() == 3
    async with remote.stream("x", max_tokens=2) as tokens:
        await tokens.receive()
        assert completed() == 3
        await tokens.result()
        assert completed() == 4


async def test_a_refresh_tells_of_a_request_that_was_cancelled(
    remote: RemoteEngine, behind: Engine
) -> None:
    async with remote.stream("x", max_tokens=ENDLESS) as tokens:
        await tokens.receive()
    await until_idle(behind)
    assert remote.stats().requests["cancelled"] == 0
    await refresh_if_possible(remote)
    assert remote.stats() == behind.stats()
    assert remote.stats().requests["cancelled"] == 1


async def test_whoever_does_not_answer_leaves_what_was_told(path: Path, behind: Engine) -> None:
    async with served(path, behind) as daemon, connect(path) as remote:
        told = remote.stats()
        daemon.cancel()
        await wait_all_tasks_blocked()
        await refresh_if_possible(remote)
        assert remote.stats() == told
    await refresh_if_possible(remote)
    assert remote.stats() == told


@pytest.mark.parametrize("has_it", [False, True])
async def test_a_refresh_that_is_possible_or_not_is_a_checkpoint(
    remote: RemoteEngine, behind: Engine, has_it: bool
) -> None:
    with trio.testing.assert_checkpoints():
        await refresh_if_possible(remote if has_it else behind)


async def test_a_daemon_tells_of_all_its_models(path: Path, behind: Engine) -> None:
    async with open_scripted_engine("other", n_ctx=64) as other:
        engines = {"a": behind, "b": other}
        async with served(path, engines, default="b"):
            stats = await daemon_stats(path)
        assert isinstance(stats, DaemonStats)
        assert (stats.default, list(stats.models), stats.connections) == ("b", ["a", "b"], 1)
        assert stats.uptime_s >= 0
        for name, engine in engines.items():
            assert stats.models[name].info == engine.info
            assert stats.models[name].config == engine.config
            assert stats.models[name].stats == engine.stats()


# -- models ---------------------------------------------------------------------------------


async def test_a_model_is_chosen_by_its_name(path: Path) -> None:
    async with open_scripted_engine("first") as first, open_scripted_engine("second") as second:
        engines: dict[str, EngineLike] = {"a": first, "b": second}
        async with served(path, engines):
            async with connect(path) as default, connect(path, model="b") as chosen:
                assert await default.complete_text("x") == "first"
                assert await chosen.complete_text("x") == "second"
                async with chosen.stream("x") as tokens:
                    assert (await tokens.result()).text == "second"
                assert (await chosen.choose("x", ["first", "second"])).text == "second"
                assert chosen.stats().requests == {"completed": 2, "failed": 0, "cancelled": 0}
                assert default.stats().requests["completed"] == 1
            for name in ("c", ""):
                with pytest.raises(ProtocolError, match="known are a, b"):
                    async with connect(path, model=name):
                        pass
            with pytest.raises(ProtocolError, match="model must be text"):
                async with connect(path, model=5):  # type: ignore[arg-type]
                    pass


async def test_the_model_that_was_the_default_stays_the_one(path: Path) -> None:
    async with open_scripted_engine("first") as first, open_scripted_engine("second") as second:
        engines: dict[str, EngineLike] = {"a": first}
        async with served(path, engines), connect(path) as remote:
            engines.clear()
            engines["b"] = second
            for ask in (remote.complete_text, remote.render):
                with pytest.raises(ProtocolError, match="unknown model 'a'"):
                    await ask("x")
            with pytest.raises(EngineClosed):
                await remote.refresh()
            engines["a"] = first
            assert await remote.complete_text("x") == "first"


# -- a model that is not loaded -------------------------------------------------------------


@pytest.fixture
async def lazy(path: Path) -> AsyncIterator[Models]:
    """Models behind a socket: one that answers `"ok"` and is loaded when it is asked."""
    specs = {"lazy": EngineSpec("lazy", load="lazy")}
    async with open_scripted_models({"lazy": "ok"}, specs) as models, served(path, models):
        yield models


def check_unknown(remote: RemoteEngine) -> None:
    for look in (lambda: remote.info, lambda: remote.config, remote.stats):
        with pytest.raises(EngineClosed):
            look()


@pytest.mark.parametrize("name", ["complete", "stream", "stream_events", "render", "choose"])
async def test_the_first_reply_tells_what_a_lazy_model_is(
    path: Path, lazy: Models, name: str
) -> None:
    async with connect(path) as remote:
        check_unknown(remote)
        await QUESTIONS[name](remote)
        assert remote.info == lazy["lazy"].info
        assert remote.config.n_slots == lazy["lazy"].config.n_slots
        assert remote.stats() == lazy["lazy"].stats()


async def test_the_end_of_a_request_tells_the_stats_before_the_model_is_known(
    path: Path, lazy: Models
) -> None:
    async with connect(path) as remote, remote.stream("x") as tokens:
        await tokens.result()
        assert remote.stats().requests["completed"] == 1


async def test_a_reply_counts_also_when_nothing_more_can_be_learned(path: Path) -> None:
    unloaded = OF_DAEMON | {"models": {}, "states": {"default": "unloaded"}}
    replies = [as_lines(unloaded)]
    async with answering(path, replies), connect(path) as remote:
        replies.append(as_lines(DONE))  # to the request, and to what comes after it
        assert (await remote.complete("x")).text == "ab"
        assert remote.stats().kv_retained_tokens == 7
        with pytest.raises(EngineClosed):
            remote.info  # noqa: B018


async def test_what_was_known_of_a_model_stays_known_when_it_is_unloaded(
    path: Path, lazy: Models
) -> None:
    async with connect(path) as remote:
        await remote.complete("x")
        await lazy.unload("lazy")
        with pytest.raises(EngineClosed):
            await remote.refresh()
        assert remote.info.architecture == "scripted"
        assert remote.stats().requests["completed"] == 1


# -- limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n_mib", [1, 2, 20])
async def test_a_request_beyond_the_limit_is_refused_and_the_next_one_is_not(
    remote: RemoteEngine, n_mib: int
) -> None:
    for question in (remote.complete_text, remote.count_tokens):
        with pytest.raises(ProtocolError, match="request too large"):
            await question("x" * (n_mib * MIB))
    assert len(await remote.complete_text("x", max_tokens=3)) == 3


async def test_a_request_just_within_the_limit_is_taken(remote: RemoteEngine) -> None:
    with pytest.raises(PromptTooLong):
        await remote.complete("x" * (MIB - 1000))
    assert len(await remote.tokenize("x" * (MIB - 1000))) == MIB - 1000


async def test_a_daemon_may_take_larger_requests(path: Path, behind: Engine) -> None:
    limits = Limits(max_request_bytes=4 * MIB)
    async with served(path, behind, limits=limits), connect(path) as remote:
        with pytest.raises(PromptTooLong):
            await remote.complete("x" * (2 * MIB))


async def test_beyond_its_connections_a_daemon_is_busy(path: Path, behind: Engine) -> None:
    async with served(path, behind, limits=Limits(max_connections=1)), connect(path) as remote:
        await wait_all_tasks_blocked(0.05)  # until the daemon sees that `connect` has hung up
        async with remote.stream("x", max_tokens=ENDLESS) as tokens:
            await tokens.receive()
            for call in (connect(path).__aenter__, remote.refresh, lambda: remote.complete("x")):
                with pytest.raises(Busy) as caught:
                    await call()
                assert attrs.astuple(caught.value) == (1, 1)
        await wait_all_tasks_blocked(0.05)
        assert len(await remote.complete_text("x", max_tokens=3)) == 3
