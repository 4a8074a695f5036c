"""Daemons for the tests of remote engines, and others that say what a test wants."""

from __future__ import annotations

import json
import os
import socket
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import trio
import trio.testing

from llamad_trio import Busy, Completion, EngineStats, ModelInfo, connect, serve_unix
from llamad_trio.system.nursery import open_plain_nursery
from llamad_trio.wire.replies import error_reply
from tests.support import read_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from llamad_trio import EngineLike, RemoteEngine
    from llamad_trio.system.nursery import TaskStatus


MIB = 1024 * 1024

Line = dict[str, Any]


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


STATS: Line = dict.fromkeys(get_type_hints(EngineStats), 0) | {
    "slots": {"free": 4, "prefill": 0, "decode": 0, "paused": 0},
    "requests": {"completed": 0, "failed": 0, "cancelled": 0},
    "kv_retained_tokens": 7,
}

INFO: Line = {
    name: {int: 1, bool: False, str: "x"}.get(kind)
    for name, kind in get_type_hints(ModelInfo).items()
}

OF_DAEMON: Line = {
    "uptime_s": 1.5,
    "connections": 1,
    "default": "default",
    "models": {"default": {"info": INFO, "config": {"n_ctx": 100, "n_slots": 2}, "stats": STATS}},
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
