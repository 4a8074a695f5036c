"""One call of a daemon, from the caller's side: who asks, a connection, and what comes through it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import Context, copy_context
from functools import partial
from itertools import count
from secrets import token_hex
from typing import Protocol, TypeVar

import attrs
import msgspec
import trio
import trio.abc

from llamad_trio.core.completion import Completion, ReplyEvent
from llamad_trio.core.engine_events import EngineEvent
from llamad_trio.core.errors import (
    Disconnected,
    InferenceError,
    LlamadError,
    ProtocolError,
    SocketUnavailable,
)
from llamad_trio.core.request import Request
from llamad_trio.wire.calls import Call, encode_call
from llamad_trio.wire.lines import LineBuffer, LineTooLong
from llamad_trio.wire.replies import completion_from, engine_event_from, error_from, event_from

MOST_ENDED = 16_384
"""Calls whose contexts are kept though they have ended, while somebody reads events: the end of
a request may be told later than its reply.  A context takes 0.1 KB, and keeps alive what its
variables hold."""


class Callers:
    """The contexts of those who wait for one engine, and of those who did so lately."""

    def __init__(self) -> None:
        self._name = token_hex(8)  # the engine has other clients, too
        self._numbers = count()
        self._waiting: dict[str, Context] = {}
        self._ended: dict[str, Context] = {}
        self._n_readers = 0

    @contextmanager
    def remember_ended(self) -> Iterator[None]:
        """Somebody reads events inside the block."""
        self._n_readers += 1
        try:
            yield
        finally:
            self._n_readers -= 1
            if not self._n_readers:
                self._ended.clear()

    @contextmanager
    def register_call(self) -> Iterator[str]:
        """This task waits for a call inside the block.  Gives the call's id."""
        call_id = f"{self._name}-{next(self._numbers)}"
        self._waiting[call_id] = copy_context()
        try:
            yield call_id
        finally:
            context = self._waiting.pop(call_id)
            if self._n_readers:
                self._ended[call_id] = context
            if len(self._ended) > MOST_ENDED:
                del self._ended[next(iter(self._ended))]

    def context_of(self, call_id: object) -> Context | None:
        """The context of the task that made a call; `None` if it is not known."""
        if not isinstance(call_id, str):
            return None
        # Not `or`: a context without variables is false.
        return self._waiting.get(call_id, self._ended.get(call_id))


T = TypeVar("T")

CHUNK_BYTES = 64 * 1024

MAX_REPLY_BYTES = 64 * 1024 * 1024
"""Longest line of a reply: a megabyte of text with the log-probabilities of its tokens."""

Line = dict[str, object]


class Peer(Protocol):
    """Who answers calls."""

    @property
    def has_gone(self) -> bool:
        """Whether it will not come back."""
        ...

    async def connect(self) -> trio.SocketStream:
        """A new connection.  Raises `SocketUnavailable` or `Disconnected`."""
        ...

    async def explain(self) -> LlamadError:
        """Why it hung up in the middle of a reply."""
        ...


@attrs.frozen
class Daemon:
    """The daemon that listens at a path."""

    path: str

    @property
    def has_gone(self) -> bool:
        return False  # another daemon may come

    async def connect(self) -> trio.SocketStream:
        try:
            return await trio.open_unix_socket(self.path)
        except (OSError, ValueError) as error:
            raise SocketUnavailable(self.path, _reason(error)) from error

    async def explain(self) -> LlamadError:
        return Disconnected()


@asynccontextmanager
async def open_call(peer: Peer, call: Call) -> AsyncIterator[RemoteReply]:
    """Send a call, and receive its reply inside the block; leaving it hangs up.

    A checkpoint.

    Raises:
        SocketUnavailable: nobody listens there, or this user may not connect.
        Disconnected: the daemon went away.
    """
    stream = await peer.connect()
    reply = RemoteReply(stream, peer.explain)
    try:
        # A daemon that refuses a call need not read all of it: its reply says why.
        with suppress(trio.BrokenResourceError):
            await stream.send_all(_line(call))
        yield reply
    finally:
        # No checkpoint, which would put `Cancelled` in the place of what the body raises.
        reply.close()


class RemoteReply:
    """The lines of one reply; `explain` gives the error when they end too early."""

    def __init__(
        self, stream: trio.SocketStream, explain: Callable[[], Awaitable[LlamadError]]
    ) -> None:
        self._stream = stream
        self._explain = explain
        self._lines = LineBuffer(MAX_REPLY_BYTES)

    async def next_line(self) -> Line:
        """The next line, as JSON.

        A checkpoint; cancelled, nothing is lost.

        Raises:
            LlamadError: the line tells of an error, or the daemon went away.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            if (line := self._lines.pop()) is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
            while line is None:
                data = await self._stream.receive_some(CHUNK_BYTES)
                if not data:
                    raise await self._explain()
                self._lines.push(data)
                line = self._lines.pop()
            reply = msgspec.json.decode(line)
        except trio.BrokenResourceError:
            raise await self._explain() from None
        except (LineTooLong, msgspec.DecodeError, RecursionError) as error:
            raise InferenceError(f"the daemon's reply is no line of JSON: {error}") from None
        if not isinstance(reply, dict):
            raise InferenceError("the daemon's reply is no JSON object")
        if "error" in reply:
            raise error_from(reply)
        return reply

    def close(self) -> None:
        """Hang up."""
        # A process that was forked off meanwhile may hold the socket, too.
        with suppress(OSError):
            self._stream.socket.shutdown(trio.socket.SHUT_RDWR)
        self._stream.socket.close()


class RemoteSource:
    """The reply to a completion, part by part: what streams are made of."""

    def __init__(
        self, reply: RemoteReply, request: Request, on_end: Callable[[Line], None]
    ) -> None:
        self._reply = reply
        self._request = request
        self._on_end = on_end
        self._error: LlamadError | None = None
        self._completion: Completion | None = None
        self._is_closed = False

    @property
    def completion(self) -> Completion | None:
        return self._completion

    async def next_event(self) -> ReplyEvent:
        while self._completion is None:
            event = await self._advance()
            if event is not None:
                return event
        await trio.lowlevel.checkpoint()
        if self._is_closed:
            raise trio.ClosedResourceError
        raise trio.EndOfChannel

    async def outcome(self) -> Completion:
        while self._completion is None:
            await self._advance()
        await trio.lowlevel.checkpoint()
        return self._completion

    def close(self) -> None:
        self._is_closed = True
        self._reply.close()

    async def _advance(self) -> ReplyEvent | None:
        """Take the next line: a part of the reply, or its end."""
        if self._is_closed:
            raise trio.ClosedResourceError
        if self._error is not None:
            raise self._error
        try:
            line = await self._reply.next_line()
            if "text" in line:
                self._on_end(line)
                self._completion = reading_reply(partial(completion_from, line, self._request))
                return None
            return reading_reply(partial(event_from, line))
        except LlamadError as error:
            self._error = error
            raise


class RemoteEvents(trio.abc.ReceiveChannel[EngineEvent]):
    """What happens in an engine, line by line, after the first."""

    def __init__(self, reply: RemoteReply, callers: Callers) -> None:
        self._reply = reply
        self._callers = callers
        # Once, not for each event: their times would go back by what reading two clocks takes.
        self._shift_s = trio.current_time() - time.monotonic()
        self._has_ended = False
        self._is_closed = False

    async def receive(self) -> EngineEvent:
        """The next event.

        A checkpoint; cancelled, none is lost.

        Raises:
            trio.EndOfChannel: the engine has stopped.
            trio.ClosedResourceError: this reader is closed.
            LlamadError: the other side went away.
        """
        event: EngineEvent | None = None
        while event is None:
            if self._is_closed:
                raise trio.ClosedResourceError
            if self._has_ended:
                await trio.lowlevel.checkpoint()
                raise trio.EndOfChannel
            line = await self._reply.next_line()
            self._has_ended = "done" in line
            if not self._has_ended:
                context_of = self._callers.context_of
                event = reading_reply(partial(engine_event_from, line, self._shift_s, context_of))
        return event

    async def aclose(self) -> None:
        """Read no more.  A checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """As `aclose`, at once."""
        self._is_closed = True
        self._reply.close()


def reading_reply(read: Callable[[], T]) -> T:
    """What `read` makes of a reply.

    Raises:
        InferenceError: it does not understand it.
    """
    try:
        return read()
    except ProtocolError as error:
        raise InferenceError(f"the daemon's reply is not understood: {error.reason}") from error


def _line(call: Call) -> bytes:
    """A call as it is sent.  Unlike msgspec, `json` takes subclasses of `str` and `int`."""
    data = json.dumps(encode_call(call), ensure_ascii=False, separators=(",", ":"))
    return data.encode() + b"\n"


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such socket"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    return getattr(error, "strerror", None) or str(error)
