"""The engine: one model in this program, many requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import attrs

from llamad_trio.core.completion import Choice, Completion
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import UnsupportedFeature
from llamad_trio.core.info import EngineStats, ModelInfo
from llamad_trio.core.request import Request
from llamad_trio.engine.desk import Desk
from llamad_trio.engine.engine_like import EngineLike
from llamad_trio.engine.scoring import choose, score
from llamad_trio.engine.session import Session, open_session
from llamad_trio.engine.stream import ReplySource
from llamad_trio.watch.broadcast import Broadcast, EventReader


class Engine(EngineLike):
    """One loaded model, for any number of tasks of this Trio run.  Made by `open_engine`.

    A request from another Trio run is a `ProtocolError`.
    """

    def __init__(self, desk: Desk, broadcast: Broadcast) -> None:
        self._desk = desk
        self._broadcast = broadcast

    def session(self) -> AbstractAsyncContextManager[Session]:
        """Explicit control of prefix, suffix and decode: see `Session`.

        An async context manager; leaving it lets go of what the session holds.

        Raises:
            UnsupportedFeature: the engine reuses nothing (`kv_cache=False`).
            EngineClosed: the engine has stopped.
        """
        self._desk.check_open()
        if not self.config.kv_cache:
            raise UnsupportedFeature("session", "kv_cache is off: nothing would be held")
        return open_session(self._desk)

    @property
    def info(self) -> ModelInfo:
        return self._desk.facts.info

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: not after its block, nor after it broke down."""
        return self._desk.decode.closed is None

    @property
    def config(self) -> EngineConfig:
        return self._desk.config

    def stats(self) -> EngineStats:
        decode = self._desk.decode
        return attrs.evolve(
            decode.scheduler.stats(),
            queued=decode.n_live - decode.scheduler.n_running,
            requests={name: decode.outcomes[name] for name in ("completed", "failed", "cancelled")},
        )

    def events(self, max_events: int = 1024) -> AbstractAsyncContextManager[EventReader]:
        return self._broadcast.subscribe(max_events)

    # -- requests: see `EngineLike` ----------------------------------------------------------

    async def _complete(self, request: Request) -> Completion:
        return await self._desk.complete(request)

    @asynccontextmanager
    async def _reply_to(self, request: Request, *, events: bool) -> AsyncIterator[ReplySource]:
        async with self._desk.reply_to(request) as reply:
            yield reply

    async def _score(self, request: Request, continuations: Sequence[str]) -> list[float]:
        return await score(self._desk, request, continuations)

    async def _choose(self, request: Request, options: Sequence[str]) -> Choice:
        return await choose(self._desk, request, options)

    async def _render(self, request: Request) -> str:
        return await self._desk.render(request)

    async def _count_tokens(self, request: Request) -> int:
        return len(await self._desk.prompt_tokens(request))

    async def _tokenize(self, text: str, *, special: bool) -> list[int]:
        return await self._desk.tokenize(text, parse_special=special)

    async def _detokenize(self, tokens: Sequence[int]) -> str:
        return await self._desk.render(Request(tokens))
