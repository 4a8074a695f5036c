"""An engine behind a Unix socket, for programs that take an engine.

Each request has a connection of its own: a slow reader delays nobody else, and closing it
is the cancel.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from os import PathLike, fspath
from typing import Any, TypeVar, overload

import attrs
import msgspec

from llamad_trio.core.completion import Choice, Completion
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import (
    Disconnected,
    EngineClosed,
    InferenceError,
    ProtocolError,
    SocketUnavailable,
)
from llamad_trio.core.request import Request
from llamad_trio.engine import as_request
from llamad_trio.info import DaemonStats, EngineStats, ModelInfo
from llamad_trio.remote_reply import RemoteReply, RemoteSource, called, understood
from llamad_trio.stream import EventStream, TokenStream
from llamad_trio.typed_request import typed_request, with_value
from llamad_trio.wire.calls import (
    Call,
    Choose,
    CountTokens,
    Detokenize,
    Generate,
    Render,
    Score,
    Stats,
    Tokenize,
)
from llamad_trio.wire.converter import structure_known

__all__ = ["RemoteEngine", "connect", "daemon_stats"]

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
    name = fspath(path)
    try:
        stats = await daemon_stats(name)
    except Disconnected:
        raise SocketUnavailable(name, "whoever listens there hangs up") from None
    engine = RemoteEngine(name, model, stats)
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
    async with called(fspath(path), Stats()) as reply:
        line = await reply.next_line()
    return understood(partial(structure_known, line, DaemonStats))


class RemoteEngine:
    """One model of a daemon, with the interface of `Engine`.  Made by `connect`.

    Every method that asks something raises what `Engine`'s does, and `Disconnected` when
    the daemon has gone away.
    """

    def __init__(self, path: str, model: str | None, daemon: DaemonStats) -> None:
        self._path = path
        self._name = daemon.default if model is None else model
        if self._name not in daemon.models:
            known = ", ".join(daemon.models)
            raise ProtocolError(f"unknown model {self._name!r}; known are {known}")
        self._seen = daemon.models[self._name]
        self._is_closed = False

    # -- requests ---------------------------------------------------------------------------

    @overload
    async def complete(
        self, request: Request | str, *, into: type[T], describe: bool = False, **fields: Any
    ) -> Completion[T]: ...

    @overload
    async def complete(
        self, request: Request | str, *, into: object = None, describe: bool = False, **fields: Any
    ) -> Completion: ...

    async def complete(
        self, request: Request | str, *, into: object = None, describe: bool = False, **fields: Any
    ) -> Completion:
        """As `Engine.complete`.

        A checkpoint.  Cancelled, it hangs up, which stops the work.
        """
        asked = as_request(request, fields)
        if into is not None:
            asked = typed_request(asked, into, describe=describe)
        async with self._reply(asked) as reply:
            completion = await reply.outcome()
        return completion if into is None else with_value(completion, into)

    async def complete_text(self, request: Request | str, **fields: Any) -> str:
        """`complete`, but only its text."""
        return (await self.complete(request, **fields)).text

    @asynccontextmanager
    async def stream(self, request: Request | str, **fields: Any) -> AsyncIterator[TokenStream]:
        """As `Engine.stream`: leaving the block early hangs up, which stops the work."""
        async with self._reply(as_request(request, fields), stream=True) as reply:
            yield TokenStream(reply)

    @asynccontextmanager
    async def stream_events(
        self, request: Request | str, **fields: Any
    ) -> AsyncIterator[EventStream]:
        """As `Engine.stream_events`: leaving the block early hangs up, which stops the work."""
        async with self._reply(as_request(request, fields), events=True) as reply:
            yield EventStream(reply)

    async def score(
        self, request: Request | str, continuations: Sequence[str], **fields: Any
    ) -> list[float]:
        """As `Engine.score`.  A checkpoint; cancelled, it stops the work."""
        asked = as_request(request, fields)
        call = Score(request=asked, continuations=continuations, model=self._name)
        return await self._ask(call, "scores", list[float])

    async def choose(self, request: Request | str, options: Sequence[str], **fields: Any) -> Choice:
        """As `Engine.choose`.  A checkpoint; cancelled, it stops the work."""
        asked = as_request(request, fields)
        call = Choose(request=asked, options=options, model=self._name)
        choice = await self._ask(call, "choice", dict[str, object])
        return understood(partial(structure_known, choice, Choice))

    # -- text and tokens --------------------------------------------------------------------

    async def render(self, request: Request | str, **fields: Any) -> str:
        """As `Engine.render`.  A checkpoint."""
        call = Render(request=as_request(request, fields), model=self._name)
        return await self._ask(call, "text", str)

    async def count_tokens(self, request: Request | str, **fields: Any) -> int:
        """As `Engine.count_tokens`.  A checkpoint."""
        call = CountTokens(request=as_request(request, fields), model=self._name)
        return await self._ask(call, "count", int)

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """As `Engine.tokenize`.  A checkpoint."""
        call = Tokenize(text=text, special=special, model=self._name)
        return await self._ask(call, "tokens", list[int])

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """As `Engine.detokenize`.  A checkpoint."""
        return await self._ask(Detokenize(tokens=tokens, model=self._name), "text", str)

    # -- looking around ---------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """What is known of the model."""
        return self._seen.info

    @property
    def config(self) -> EngineConfig:
        """The settings in force at the daemon."""
        return self._seen.config

    def stats(self) -> EngineStats:
        """What the daemon last told of this engine: with the end of a request of this
        object, by `refresh`, or when it connected.  Never blocks."""
        return self._seen.stats

    async def refresh(self) -> EngineStats:
        """Ask the daemon for the engine's statistics of this moment.  A checkpoint."""
        async with self._called(Stats()) as reply:
            line = await reply.next_line()
        daemon = understood(partial(structure_known, line, DaemonStats))
        if self._name not in daemon.models:
            raise EngineClosed
        self._seen = daemon.models[self._name]
        return self._seen.stats

    # -- inside -----------------------------------------------------------------------------

    def close(self) -> None:
        """Let no request begin any more."""
        self._is_closed = True

    @asynccontextmanager
    async def _reply(
        self, request: Request, *, stream: bool = False, events: bool = False
    ) -> AsyncIterator[RemoteSource]:
        call = Generate(
            request=request, stream=stream, events=events, with_stats=True, model=self._name
        )
        async with self._called(call) as reply:
            yield RemoteSource(reply, request, self._take_stats)

    async def _ask(self, call: Call, key: str, kind: type[T]) -> T:
        async with self._called(call) as reply:
            line = await reply.next_line()
        try:
            return msgspec.convert(line.get(key), kind)
        except msgspec.ValidationError as error:
            raise InferenceError(f"the daemon's reply is not understood: {error}") from None

    @asynccontextmanager
    async def _called(self, call: Call) -> AsyncIterator[RemoteReply]:
        if self._is_closed:
            raise EngineClosed
        try:
            opened = called(self._path, call)
            async with opened as reply:
                yield reply
        except SocketUnavailable:
            raise Disconnected from None  # it was there when this began

    def _take_stats(self, line: dict[str, object]) -> None:
        stats = line.get("stats")
        if isinstance(stats, dict):
            self._seen = attrs.evolve(
                self._seen, stats=understood(partial(structure_known, stats, EngineStats))
            )
