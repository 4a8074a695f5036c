"""The listener actor: engines offered on a Unix socket, to every program of this user.

A shell around `wire/`, which decides what lines mean: here they are read, answered and
sent.  Each connection is a task; that its client goes away ends it, and with it the work.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

import attrs
import trio

from llamad_trio.core.completion import Done, TextDelta
from llamad_trio.core.config import Limits
from llamad_trio.core.engine_spec import pick_model
from llamad_trio.core.errors import (
    Busy,
    InferenceError,
    LlamadError,
    ProtocolError,
    UnsupportedFeature,
)
from llamad_trio.core.info import DaemonStats, ModelStats
from llamad_trio.serving.connection import Connection
from llamad_trio.serving.unix_socket import (
    HangupWatcher,
    open_hangup_watcher,
    open_listener,
    peer_is_trusted,
)
from llamad_trio.system.nursery import TaskStatus, new_scope, open_plain_nursery
from llamad_trio.watch import refresh_all
from llamad_trio.wire import calls
from llamad_trio.wire.calls import Call, CallId, decode_call
from llamad_trio.wire.converter import unstructure
from llamad_trio.wire.lines import LineTooLong, encode_line
from llamad_trio.wire.replies import (
    CLOSING,
    call_id,
    completion_reply,
    engine_event_reply,
    error_reply,
    event_reply,
)

if TYPE_CHECKING:
    from llamad_trio.core.completion import Completion
    from llamad_trio.engine.engine_like import EngineLike
    from llamad_trio.watch.prometheus import EngineMetrics

logger = logging.getLogger("llamad_trio")

LONG_LINE_BYTES = 16 * 1024
"""Longer ones are taken apart in a thread: a megabyte of JSON takes up to 0.2 s."""

LAST_WORDS_S = 1.0
"""How long clients may take to read the rest when nobody can connect any more."""

MAX_CALLS = 64
"""Calls under way on one connection; a client that wants more opens another."""

Reply = dict[str, Any]


async def serve_unix(
    engines: EngineLike | Mapping[str, EngineLike],
    path: str | PathLike[str] | socket.socket,
    *,
    default: str | None = None,
    limits: Limits | None = None,
    metrics: EngineMetrics | None = None,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer on a Unix socket until cancelled.

    Args:
        engines: one engine, or several by name.  The mapping is looked into for each
            request: models may come and go.
        path: where to listen, with mode 0600; or a socket that listens already.
        default: the model of requests that name none; else the first.
        limits: what clients may do.
        metrics: what `{"op": "metrics"}` tells; its `run` is the caller's affair.
        task_status: for `nursery.start`, which returns when clients can connect.

    Cancelled, it stops accepting, stops the work of its clients, tells those whose request
    was under way, and removes the socket if it is still its own.

    Raises:
        SocketUnavailable: a daemon answers there, or the path cannot be listened on.
    """
    if not isinstance(engines, Mapping):
        engines = {"default": engines}
    async with AsyncExitStack() as stack:
        if isinstance(path, socket.socket):
            path.setblocking(False)
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(path))
        else:
            listener = await stack.enter_async_context(open_listener(path))
        await serve_listener(
            engines,
            listener,
            default=default,
            limits=limits,
            metrics=metrics,
            task_status=task_status,
        )


async def serve_listener(
    engines: Mapping[str, EngineLike],
    listener: trio.abc.Listener[trio.SocketStream],
    *,
    default: str | None = None,
    limits: Limits | None = None,
    metrics: EngineMetrics | None = None,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """`serve_unix`, for connections that come by any way.

    When the listener ends, the calls under way are answered, as far as their clients listen.
    """
    async with open_hangup_watcher() as watcher, trio.open_nursery() as clients:
        server = _Server(engines, default, limits or Limits(), metrics, watcher)
        task_status.started(None)
        try:
            await trio.serve_listeners(server.handle, [listener], handler_nursery=clients)
        except* trio.EndOfChannel:
            with trio.move_on_after(LAST_WORDS_S):
                while server.n_calls:
                    server.answered = trio.Event()
                    await server.answered.wait()
            clients.cancel_scope.cancel()


@attrs.define(eq=False)
class _Server:
    """What all connections share."""

    engines: Mapping[str, EngineLike]
    default: str | None
    limits: Limits
    metrics: EngineMetrics | None
    watcher: HangupWatcher
    n_connections: int = 0
    n_calls: int = 0
    answered: trio.Event = attrs.field(factory=trio.Event)
    started_at: float = attrs.field(factory=trio.current_time)
    decoding: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(2))

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve a client.  Never raises: one client's trouble is its own."""
        async with stream:
            if not peer_is_trusted(stream.socket):
                logger.warning("refused a connection of another user")
                return
            scope = new_scope()
            connection = Connection(stream, self.limits, scope)
            if self.n_connections >= self.limits.max_connections:
                busy = Busy(self.n_connections, self.limits.max_connections)
                connection.send_now(encode_line(error_reply(busy, is_original=True)))
                connection.discard()
                return
            self.n_connections += 1
            try:
                with scope:
                    async with open_plain_nursery() as nursery:
                        nursery.start_soon(self._leave_with_client, stream, scope)
                        await _Client(self, connection, scope).answer_calls()
            finally:
                self.n_connections -= 1
                connection.discard()

    async def _leave_with_client(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        await self.watcher.wait_gone(stream.socket)
        scope.cancel()

    def name(self, name: str | None) -> str:
        return pick_model(name, self.engines, self.default)

    def engine(self, name: str | None) -> EngineLike:
        return self.engines[self.name(name)]


def _state(engine: EngineLike) -> str:
    """A model's state, as `Models.state`; an engine alone is ready or it is not."""
    return str(getattr(engine, "state", "ready" if engine.is_open else "failed"))


def _stats_if_loaded(engine: EngineLike) -> ModelStats | None:
    try:
        return ModelStats(info=engine.info, config=engine.config, stats=engine.stats())
    except LlamadError:
        return None


_UNEXPECTED = InferenceError("internal error; the daemon's log tells more")

_REFUSALS = {trio.TooSlowError: "read timeout", LineTooLong: "request too large"}


@attrs.define(eq=False)
class _Client:
    """The calls of one connection."""

    _server: _Server
    _connection: Connection
    _scope: trio.CancelScope
    _calls: dict[CallId, trio.CancelScope] = attrs.field(factory=dict)
    _n_calls: int = 0
    _has_said_closing: bool = False
    # Those of calls under way, and of replies that wait to be sent.
    _tasks: trio.Semaphore = attrs.field(factory=lambda: trio.Semaphore(2 * MAX_CALLS))

    async def answer_calls(self) -> None:
        """Answer until the client has all it asked for."""
        async with trio.open_nursery() as nursery:
            await self._read_calls(nursery)
        # A client that is still sending would lose its reply to a reset.  Not before those
        # under way have theirs: it ends the sending side.
        await self._connection.linger()

    async def _read_calls(self, nursery: trio.Nursery) -> None:
        goes_on = True
        is_first = True
        while goes_on and not self._connection.at_end:
            # A client that takes no replies is not listened to.
            await self._tasks.acquire()
            self._tasks.release()
            try:
                line = await self._connection.next_line(is_first=is_first)
            except trio.Cancelled:
                # Trio cancels in any order: the calls may have ended, and said so, before.
                if not self._n_calls and not self._has_said_closing:
                    self._say_closing({})
                raise
            except (trio.TooSlowError, LineTooLong) as error:
                await self._refuse(_REFUSALS[type(error)])
                return
            if line is None:
                return
            call = await self._call(line)
            if call is not None:
                goes_on = call.keep
                self._tasks.acquire_nowait()
                nursery.start_soon(self._answer, call)
            elif is_first:
                return
            is_first = False

    async def _call(self, line: bytes) -> Call | None:
        """What a line asks for; `None` for one that was refused."""
        if not line.strip():
            await self._refuse("empty request")
            return None
        try:
            if len(line) < LONG_LINE_BYTES:
                return decode_call(line)
            return await trio.to_thread.run_sync(decode_call, line, limiter=self._server.decoding)
        except ProtocolError as error:
            await self._refuse(str(error))
        except Exception:  # such as a MemoryError: the other clients are served
            logger.exception("a request could not be read")
            await self._send(error_reply(_UNEXPECTED, is_original=True))
        return None

    async def _refuse(self, text: str) -> None:
        await self._send({"error": text})

    async def _answer(self, call: Call) -> None:
        try:
            await self._answer_it(call)
        finally:
            self._tasks.release()

    async def _answer_it(self, call: Call) -> None:
        head: Reply = {} if call.id is None else {"id": call.id}
        is_original = isinstance(call, calls.Generate) and call.is_original
        call_id.set(call.id)
        with new_scope() as scope:
            try:
                with self._register_call(call, scope):
                    await self._reply(call, head)
            except LlamadError as error:
                await self._send(head | error_reply(error, is_original=is_original))
            except trio.TooSlowError:
                await self._send(head | {"error": "stream timeout"})
            except trio.Cancelled:
                if not scope.cancel_called:
                    self._say_closing(head)
                raise
            except Exception:  # whatever it is, the other clients are served
                logger.exception("a request failed in an unexpected way")
                await self._send(head | error_reply(_UNEXPECTED, is_original=is_original))
        if scope.cancelled_caught:
            await self._send(head | {"error": "cancelled"})

    @contextmanager
    def _register_call(self, call: Call, scope: trio.CancelScope) -> Iterator[None]:
        if isinstance(call, calls.Cancel):
            yield
            return
        if self._n_calls >= MAX_CALLS:
            raise Busy(self._n_calls, MAX_CALLS)
        if call.id in self._calls:
            raise ProtocolError(f"a call with the id {call.id!r} is under way")
        self._n_calls += 1
        self._server.n_calls += 1
        if call.id is not None:
            self._calls[call.id] = scope
        try:
            yield
        finally:
            self._n_calls -= 1
            self._server.n_calls -= 1
            self._server.answered.set()
            if call.id is not None:
                del self._calls[call.id]

    async def _reply(self, call: Call, head: Reply) -> None:
        if query := _QUERIES.get(type(call)):
            key, ask = query
            reply: Reply = {key: await ask(self._server.engine(call.model), call)}
        else:
            reply = await _HANDLERS[type(call)](self, call, head)
        await self._send(head | reply)

    async def _ping(self, _call: calls.Ping, _head: Reply) -> Reply:
        return {"pong": True}

    async def _models(self, _call: calls.ListModels, _head: Reply) -> Reply:
        default = self._server.name(None)
        models: list[Reply] = []
        for name, engine in self._server.engines.items():
            model: Reply = {"name": name, "default": name == default, "state": _state(engine)}
            if (known := _stats_if_loaded(engine)) is not None:
                model["description"] = known.info.description
                model |= {"n_ctx": known.config.n_ctx, "n_slots": known.config.n_slots}
            models.append(model)
        return {"models": models}

    async def _stats(self, _call: calls.GetStats, _head: Reply) -> Reply:
        server = self._server
        await refresh_all(server.engines.values())
        known = {name: _stats_if_loaded(engine) for name, engine in server.engines.items()}
        return unstructure(
            DaemonStats(
                uptime_s=trio.current_time() - server.started_at,
                connections=server.n_connections,
                default=server.name(None),
                models={name: stats for name, stats in known.items() if stats is not None},
                states={name: _state(engine) for name, engine in server.engines.items()},
            )
        )

    async def _metrics(self, _call: calls.GetMetrics, _head: Reply) -> Reply:
        if self._server.metrics is None:
            raise UnsupportedFeature("metrics", "this server counts none")
        return {"metrics": (await self._server.metrics.scrape()).decode()}

    async def _cancel(self, call: calls.Cancel, _head: Reply) -> Reply:
        wanted = None if call.id is None else self._calls.get(call.id)
        if wanted is not None:
            wanted.cancel()
        return {"cancelled": wanted is not None}

    async def _generate(self, call: calls.Generate, head: Reply) -> Reply:
        engine = self._server.engine(call.model)
        if call.stream or call.events:
            completion = await self._stream(engine, call, head)
        else:
            completion = await engine.complete(call.request)
        done: Reply = {"done": True} if call.stream or call.events else {}
        stats = {"stats": unstructure(engine.stats())} if call.with_stats else {}
        return done | completion_reply(completion, is_original=call.is_original) | stats

    async def _stream(self, engine: EngineLike, call: calls.Generate, head: Reply) -> Completion:
        timeout_s = self._server.limits.stream_timeout_s
        with trio.fail_after(timeout_s) as patience:
            # Whatever is generated counts as progress, also what only events tell.
            async with engine.stream_events(call.request) as events:
                async for event in events:
                    if isinstance(event, Done):
                        return event.completion
                    if call.events or isinstance(event, TextDelta):
                        # The client has time of its own to read.
                        patience.deadline = math.inf
                        await self._send(head | event_reply(event))
                    patience.deadline = trio.current_time() + timeout_s
                return await events.result()

    async def _watch(self, call: calls.WatchEvents, head: Reply) -> Reply:
        async with self._server.engine(call.model).events(call.max_events) as events:
            await self._send(head | {"watching": True})
            # Times are sent by the clock that all processes of a machine share.
            shift_s = time.monotonic() - trio.current_time()
            async for event in events:
                await self._send(head | engine_event_reply(event, shift_s))
        return {"done": True}

    async def _send(self, reply: Reply) -> None:
        await self._connection.send(encode_line(reply))

    def _say_closing(self, head: Reply) -> None:
        """The daemon stops: last words, unless it is the client who has gone."""
        self._has_said_closing = True
        if not self._scope.cancel_called:
            self._connection.send_now(encode_line(head | {"error": CLOSING}))


async def _choose(engine: EngineLike, call: calls.Choose) -> Reply:
    return unstructure(await engine.choose(call.request, call.options))


_QUERIES: dict[type[Call], tuple[str, Callable[[EngineLike, Any], Awaitable[object]]]] = {
    calls.Tokenize: (
        "tokens",
        lambda engine, call: engine.tokenize(call.text, special=call.special),
    ),
    calls.Detokenize: ("text", lambda engine, call: engine.detokenize(call.tokens)),
    calls.Render: ("text", lambda engine, call: engine.render(call.request)),
    calls.CountTokens: ("count", lambda engine, call: engine.count_tokens(call.request)),
    calls.Score: ("scores", lambda engine, call: engine.score(call.request, call.continuations)),
    calls.Choose: ("choice", _choose),
}
"""What an engine answers with one value: the key of that, and how the engine is asked."""

_HANDLERS: dict[type[Call], Callable[[_Client, Any, Reply], Awaitable[Reply]]] = {
    calls.Generate: _Client._generate,
    calls.WatchEvents: _Client._watch,
    calls.Ping: _Client._ping,
    calls.ListModels: _Client._models,
    calls.GetStats: _Client._stats,
    calls.GetMetrics: _Client._metrics,
    calls.Cancel: _Client._cancel,
}
"""All other calls: each gives the last line of its reply, and sends those before it."""
