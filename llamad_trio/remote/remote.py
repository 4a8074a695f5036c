"""An engine behind a Unix socket, for programs that take an engine.

Each request has a connection of its own: a slow reader delays nobody else, and closing it
is the cancel.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from os import PathLike, fspath
from typing import TypeVar

import attrs
import msgspec
import trio
import trio.abc

from llamad_trio.core.completion import Choice, Completion
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.engine_events import EngineEvent
from llamad_trio.core.engine_spec import pick_model
from llamad_trio.core.errors import (
    Disconnected,
    EngineClosed,
    InferenceError,
    LlamadError,
    SocketUnavailable,
)
from llamad_trio.core.info import DaemonStats, EngineStats, ModelInfo, ModelStats
from llamad_trio.core.request import Request
from llamad_trio.engine.engine_like import EngineLike
from llamad_trio.engine.stream import ReplySource
from llamad_trio.remote.reply import (
    Callers,
    Daemon,
    Peer,
    RemoteEvents,
    RemoteReply,
    RemoteSource,
    open_call,
    reading_reply,
)
from llamad_trio.watch.broadcast import check_max_events
from llamad_trio.wire.calls import (
    Call,
    Choose,
    CountTokens,
    Detokenize,
    Generate,
    GetStats,
    Render,
    Score,
    Tokenize,
    WatchEvents,
)
from llamad_trio.wire.converter import structure_known

T = TypeVar("T")


@asynccontextmanager
async def connect(
    path: str | PathLike[str], *, model: str | None = None
) -> AsyncIterator[RemoteEngine]:
    """Use a daemon's engine inside the block.

    Args:
        path: the daemon's socket.
        model: which of its models; `None` is its default one.

    Entering asks the daemon what it has: a checkpoint.  Leaving the block cancels nothing
    that is still running in other tasks, but lets nothing begin.

    Raises:
        SocketUnavailable: nobody listens there, or this user may not connect.
        ProtocolError: it has no such model.
    """
    daemon = Daemon(fspath(path))
    try:
        stats = await stats_of(daemon)
    except Disconnected:
        raise SocketUnavailable(daemon.path, "whoever listens there hangs up") from None
    engine = RemoteEngine(daemon, model, stats)
    try:
        yield engine
    finally:
        engine.close()


async def daemon_stats(path: str | PathLike[str]) -> DaemonStats:
    """A snapshot of all that a daemon is doing.

    A checkpoint.

    Raises:
        SocketUnavailable: nobody listens there, or this user may not connect.
        Disconnected: the daemon went away.
    """
    return await stats_of(Daemon(fspath(path)))


async def stats_of(peer: Peer) -> DaemonStats:
    """`daemon_stats`, of whoever answers."""
    async with open_call(peer, GetStats()) as reply:
        return await _stats_in(reply)


async def _stats_in(reply: RemoteReply) -> DaemonStats:
    return reading_reply(partial(structure_known, await reply.next_line(), DaemonStats))


class RemoteEngine(EngineLike):
    """One model of a daemon, with the interface of `Engine`.  Made by `connect`.

    Every method that asks something raises what `Engine`'s does, and `Disconnected` when
    the daemon has gone away.  `info`, `config` and `stats` raise `EngineClosed` while nothing
    is known of the model: it was not loaded when this object began, and neither `refresh` nor
    a reply has told of it since.
    """

    def __init__(self, peer: Peer, model: str | None, daemon: DaemonStats) -> None:
        self._peer = peer
        self._name = pick_model(model, {**daemon.models, **daemon.states}, daemon.default)
        self._known = daemon.models.get(self._name)
        self._stats = None if self._known is None else self._known.stats
        self._is_closed = False
        self._callers = Callers()

    # -- looking around ---------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        return self._model.info

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: not after its block, nor when its process has ended."""
        return not self._is_closed and not self._peer.has_gone

    @property
    def config(self) -> EngineConfig:
        return self._model.config

    def stats(self) -> EngineStats:
        """What the daemon last told of this engine.  Never blocks.

        It tells when this object is made, with the last line of each `complete`, `stream` and
        `stream_events` of this object that was received to its end, and by `refresh`.  So what
        was cancelled or failed, other calls (`score`, `tokenize`), the requests of others and
        what is under way are in it only from the next of these on.
        """
        if self._stats is None:
            raise EngineClosed
        return self._stats

    async def refresh(self) -> EngineStats:
        """Ask the daemon for the engine's statistics of this moment.

        A checkpoint; cancelled, nothing has changed.  A request that was cancelled counts as
        such once the daemon has noticed, which takes a moment.  Raises `EngineClosed` if the
        model is not loaded.
        """
        async with self._open_call(GetStats()) as reply:
            daemon = await _stats_in(reply)
        if self._name not in daemon.models:
            raise EngineClosed
        self._known = daemon.models[self._name]
        self._stats = self._known.stats
        return self._stats

    def events(
        self, max_events: int = 1024
    ) -> AbstractAsyncContextManager[trio.abc.ReceiveChannel[EngineEvent]]:
        """As `Engine.events`; `max_events` wait at the daemon.

        Entering is a checkpoint.  The iteration ends when the engine has stopped, and raises
        `Disconnected` when the daemon went away.  Times are of this program's Trio clock;
        `context` is known for the requests of this object.
        """
        return self._events(max_events)

    @asynccontextmanager
    async def _events(self, max_events: int) -> AsyncIterator[RemoteEvents]:
        check_max_events(max_events)
        call = WatchEvents(max_events=max_events, model=self._name)
        with self._callers.remember_ended():  # before it watches over there
            async with self._open_call(call) as reply:
                await reply.next_line()  # it watches from here on
                events = RemoteEvents(reply, self._callers)
                try:
                    yield events
                finally:
                    events.close()

    # -- requests: see `EngineLike`.  A cancel hangs up, which stops the work ---------------

    async def _complete(self, request: Request) -> Completion:
        async with self._open_reply(request, stream=False, events=False) as reply:
            return await reply.outcome()

    @asynccontextmanager
    async def _reply_to(self, request: Request, *, events: bool) -> AsyncIterator[ReplySource]:
        async with self._open_reply(request, stream=not events, events=events) as reply:
            yield reply

    async def _score(self, request: Request, continuations: Sequence[str]) -> list[float]:
        call = Score(request=request, continuations=continuations, model=self._name)
        return await self._ask(call, "scores", list[float])

    async def _choose(self, request: Request, options: Sequence[str]) -> Choice:
        call = Choose(request=request, options=options, model=self._name)
        choice = await self._ask(call, "choice", dict[str, object])
        return reading_reply(partial(structure_known, choice, Choice))

    async def _render(self, request: Request) -> str:
        return await self._ask(Render(request=request, model=self._name), "text", str)

    async def _count_tokens(self, request: Request) -> int:
        return await self._ask(CountTokens(request=request, model=self._name), "count", int)

    async def _tokenize(self, text: str, *, special: bool) -> list[int]:
        call = Tokenize(text=text, special=special, model=self._name)
        return await self._ask(call, "tokens", list[int])

    async def _detokenize(self, tokens: Sequence[int]) -> str:
        return await self._ask(Detokenize(tokens=tokens, model=self._name), "text", str)

    # -- inside -----------------------------------------------------------------------------

    @property
    def _model(self) -> ModelStats:
        """What the daemon told of the model; of one that was never loaded there is nothing."""
        if self._known is None:
            raise EngineClosed
        return self._known

    def close(self) -> None:
        """Let no request begin any more."""
        self._is_closed = True

    @asynccontextmanager
    async def _open_reply(
        self, request: Request, *, stream: bool, events: bool
    ) -> AsyncIterator[RemoteSource]:
        call = Generate(
            request=request, stream=stream, events=events, with_stats=True, model=self._name
        )
        async with self._open_call(call) as reply:
            source = RemoteSource(reply, request, self._take_stats)
            yield source
        if source.completion is not None:
            await self._learn()

    async def _ask(self, call: Call, key: str, kind: type[T]) -> T:
        async with self._open_call(call) as reply:
            line = await reply.next_line()
        await self._learn()
        try:
            return msgspec.convert(line.get(key), kind)
        except msgspec.ValidationError as error:
            raise InferenceError(f"the daemon's reply is not understood: {error}") from None

    @asynccontextmanager
    async def _open_call(self, call: Call) -> AsyncIterator[RemoteReply]:
        if self._is_closed:
            raise EngineClosed
        async with AsyncExitStack() as stack:
            if isinstance(call, Generate | Score | Choose):  # what events tell of
                call_id = stack.enter_context(self._callers.register_call())
                call = attrs.evolve(call, id=call_id)
            try:
                reply = await stack.enter_async_context(open_call(self._peer, call))
            except SocketUnavailable:
                raise Disconnected from None  # it was there when this began
            yield reply

    async def _learn(self) -> None:
        """Ask what the model is, now that a reply has come from it, if that is not known."""
        if self._known is None and not self._is_closed:
            # The reply counts, whatever becomes of this.
            with suppress(LlamadError):
                await self.refresh()

    def _take_stats(self, line: dict[str, object]) -> None:
        stats = line.get("stats")
        if isinstance(stats, dict):
            self._stats = reading_reply(partial(structure_known, stats, EngineStats))
