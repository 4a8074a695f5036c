"""What engines have in common, whether their model runs in this program or behind a socket."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar, overload

from trio.abc import ReceiveChannel

from llamad_trio.core.completion import Choice, Completion
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.engine_events import EngineEvent
from llamad_trio.core.info import EngineStats, ModelInfo
from llamad_trio.core.request import Request
from llamad_trio.engine.stream import EventStream, TokenStream

T = TypeVar("T")


class EngineLike(Protocol):
    """An `Engine`, a `RemoteEngine`, or whatever else does the same.

    Each member is as `Engine` describes it.
    """

    @overload
    async def complete(
        self, request: Request | str, *, into: type[T], describe: bool = False, **fields: Any
    ) -> Completion[T]: ...

    @overload
    async def complete(
        self, request: Request | str, *, into: object = None, describe: bool = False, **fields: Any
    ) -> Completion: ...

    async def complete_text(self, request: Request | str, **fields: Any) -> str: ...

    def stream(
        self, request: Request | str, **fields: Any
    ) -> AbstractAsyncContextManager[TokenStream]: ...

    def stream_events(
        self, request: Request | str, **fields: Any
    ) -> AbstractAsyncContextManager[EventStream]: ...

    async def score(
        self, request: Request | str, continuations: Sequence[str], **fields: Any
    ) -> list[float]: ...

    async def choose(
        self, request: Request | str, options: Sequence[str], **fields: Any
    ) -> Choice: ...

    async def render(self, request: Request | str, **fields: Any) -> str: ...

    async def count_tokens(self, request: Request | str, **fields: Any) -> int: ...

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]: ...

    async def detokenize(self, tokens: Sequence[int]) -> str: ...

    def events(
        self, max_events: int = 1024
    ) -> AbstractAsyncContextManager[ReceiveChannel[EngineEvent]]: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def info(self) -> ModelInfo: ...

    @property
    def config(self) -> EngineConfig: ...

    def stats(self) -> EngineStats: ...
