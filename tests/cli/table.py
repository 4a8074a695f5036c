"""A chat whose lines are known before, on scripted models and on paper."""

from __future__ import annotations

import io
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import trio
import trio.testing

from llamad_trio import Engine, EngineLike, ModelLoadError
from llamad_trio.cli.chat_loop import ChatLoop
from llamad_trio.cli.chat_terminal import Key, Screen
from llamad_trio.cli.history import Conversation
from llamad_trio.testing import open_scripted_engine

__all__ = ["Paper", "Table"]


class Typed:
    """A reader of lines that are all known before; what may be done between them is done."""

    def __init__(self, *lines: str | Key | Callable[[], object], is_terminal: bool = True) -> None:
        self.is_terminal = is_terminal
        self._lines = iter(lines)

    async def read(self) -> str | Key:
        for line in self._lines:
            await trio.lowlevel.checkpoint()
            if isinstance(line, str | Key):
                return line
            line()
            await trio.testing.wait_all_tasks_blocked()  # a signal has arrived by then
        await trio.lowlevel.checkpoint()
        return Key.END


class Paper(io.StringIO):
    """A file in memory, that interrupts when something is written to it."""

    def __init__(self, *, is_terminal: bool = False, interrupt_at: str | None = None) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self._interrupt_at = interrupt_at

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        n = super().write(text)
        if self._interrupt_at is not None and self._interrupt_at in self.getvalue():
            self._interrupt_at = None
            signal.raise_signal(signal.SIGINT)
        return n


class Table:
    """A chat and all that it needs, on scripted models."""

    def __init__(
        self,
        replies: Any,
        *typed: str | Key | Callable[[], object],
        is_terminal: bool = True,
        interrupt_at: str | None = None,
        system: str | None = None,
        n_ctx: int = 4096,
        models: Mapping[str, Any] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.engines: list[Engine] = []
        self.closed: list[str] = []
        self.answers = Paper(interrupt_at=interrupt_at)
        self.asides = Paper()
        self.conversation = Conversation(system)
        self._models = {"first": replies, **(models or {})}
        self._n_ctx = n_ctx
        self._chat = ChatLoop(
            self._opened,
            Typed(*typed, is_terminal=is_terminal),
            Screen(self.answers, self.asides),
            self.conversation,
            {"max_tokens": 1000, **(fields or {})},
        )

    def _opened(self, name: str | None) -> AbstractAsyncContextManager[EngineLike]:
        return self._open(name)

    @asynccontextmanager
    async def _open(self, name: str | None) -> AsyncIterator[EngineLike]:
        assert name is not None
        if name == "endless":
            signal.raise_signal(signal.SIGINT)
            await trio.sleep_forever()
        if name not in self._models:
            raise ModelLoadError(name, "no such\nmodel")
        async with open_scripted_engine(self._models[name], n_slots=1, n_ctx=self._n_ctx) as engine:
            self.engines.append(engine)
            yield engine
        self.closed.append(name)

    async def talk(self) -> int:
        return await self._chat.run("first")

    @property
    def notes(self) -> list[str]:
        return self.asides.getvalue().splitlines()

    @property
    def said(self) -> list[str]:
        return [message.content for message in self.conversation.history]
