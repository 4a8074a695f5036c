"""The chat itself: lines in, answers out, and what Ctrl-C stops.

Knows no terminal: lines come from a `Reader`, and a `Screen` shows what is said.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import trio

from llamad_trio import (
    Done,
    EngineClosed,
    EngineLike,
    LlamadError,
    PromptTooLong,
    ReasoningDelta,
    RemoteEngine,
    TextDelta,
)
from llamad_trio.cli.chat_terminal import Key, Reader, Screen
from llamad_trio.cli.history import (
    COMMANDS,
    Command,
    Conversation,
    PartialReply,
    Say,
    one_line,
    parse,
    stats_lines,
)
from llamad_trio.system.nursery import TaskStatus, new_scope, open_plain_nursery

HOW_TO_LEAVE = "Ctrl-D or /quit leaves"

TYPING = (
    f"{'//TEXT':16} say something that begins with a slash",
    f"{'Alt-Enter':16} begin a new line; so does a backslash before Enter",
)

EngineOpener = Callable[[str | None], AbstractAsyncContextManager[EngineLike]]


@attrs.frozen
class _Opened:
    """An engine that stays open until it is told to close."""

    name: str | None
    engine: EngineLike
    close: trio.Event


@attrs.define(eq=False)
class ChatLoop:
    """One conversation, with engines by the names of their models; `None` is the default one.

    `fields` are `Request` fields for every answer.
    """

    _open_engine: EngineOpener
    _reader: Reader
    _screen: Screen
    _conversation: Conversation
    _fields: Mapping[str, Any]
    _under_way: trio.CancelScope = attrs.field(init=False, factory=new_scope)
    _outlives_interrupts: bool = attrs.field(init=False, default=False)
    _status: int = attrs.field(init=False, default=0)

    async def run(self, model: str | None) -> int:
        """Open `model`, talk until the reader ends, and return the exit status.

        SIGINT stops what is under way, or ends the chat where lines do not come from a
        terminal; SIGTERM ends it.  Raises `LlamadError` or `OSError` if the model cannot be
        opened, or the screen is gone.  A checkpoint.  Cancelled, it closes the engine.
        """
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with open_plain_nursery() as nursery:
                nursery.start_soon(self._obey, signals, nursery.cancel_scope)
                await self._talk(nursery, await nursery.start(self._host, model))
        return self._status

    async def _obey(self, signals: AsyncIterator[int], whole: trio.CancelScope) -> None:
        async for number in signals:
            if number == signal.SIGINT and self._outlives_interrupts:
                self._under_way.cancel()
            else:
                self._status = 128 + number
                whole.cancel()

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """A block that Ctrl-C at a terminal ends, and nothing else with it."""
        with new_scope() as self._under_way:
            yield

    async def _host(
        self, name: str | None, *, task_status: TaskStatus[_Opened] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Each engine lives in a task of its own: a new one opens before the old one closes."""
        close = trio.Event()
        is_open = False
        try:
            async with self._open_engine(name) as engine:
                is_open = True
                task_status.started(_Opened(name, engine, close))
                await close.wait()
        except LlamadError:
            if not is_open:
                raise
            # It crashed.  Whoever asks it next is told, and /model opens another.

    async def _talk(self, nursery: trio.Nursery, opened: _Opened) -> None:
        self._outlives_interrupts = self._reader.is_terminal
        if self._reader.is_terminal:
            self._screen.note(f"{_title(opened)}; /help lists the commands, {HOW_TO_LEAVE}")
        while True:
            line: str | Key = Key.INTERRUPT
            with self._interruptible():
                line = await self._reader.read()
            if line is Key.END:
                return
            if line is Key.INTERRUPT:
                self._screen.note(HOW_TO_LEAVE)
                continue
            try:
                match parse(line):
                    case Say(text):
                        await self._answer(opened.engine, text)
                    case Command("quit"):
                        return
                    case Command("model", name):
                        opened = await self._switch(nursery, opened, name)
                    case Command("stats"):
                        await self._tell_stats(opened.engine)
                    case Command("save" | "save!" as name, file):
                        await trio.to_thread.run_sync(self._save, file, name == "save!")
                    case Command(name, argument):
                        self._command(name, argument)
            except LlamadError as error:
                self._screen.note(one_line(error))

    async def _answer(self, engine: EngineLike, text: str) -> None:
        reply = PartialReply()
        with self._interruptible():
            await self._receive(engine, text, reply)
        self._conversation.keep(text, reply)
        if reply.completion is None:
            self._screen.note("stopped")
        elif reply.completion.finish_reason == "length":
            self._screen.note(f"cut off after {reply.completion.generated_tokens} tokens")
        self._screen.end_line()

    async def _receive(self, engine: EngineLike, text: str, reply: PartialReply) -> None:
        """Show an answer as it comes.  Where it does not fit, the oldest exchanges go."""
        too_many = 0
        while reply.completion is None:
            request = self._conversation.request(text, self._fields, without=too_many)
            try:
                async with engine.stream_events(request) as events:
                    async for event in events:
                        if too_many:  # now it is known that it helps to forget them
                            self._conversation.drop(too_many)
                            gone = f"its oldest part ({too_many} of yours) is gone"
                            self._screen.note(f"the conversation no longer fits: {gone}")
                            too_many = 0
                        match event:
                            case TextDelta(piece):
                                reply.text += piece
                                self._screen.answer(piece)
                            case ReasoningDelta(piece):
                                reply.reasoning += piece
                                self._screen.reasoning(piece)
                            case Done(completion):
                                reply.completion = completion
            except PromptTooLong:
                if too_many == len(self._conversation):
                    raise
                too_many += 1

    async def _tell_stats(self, engine: EngineLike) -> None:
        stats, n_ctx = None, None
        with self._interruptible():
            with suppress(EngineClosed):  # the model is not loaded
                if isinstance(engine, RemoteEngine):
                    await engine.refresh()  # an answer that was stopped has told nothing
                stats, n_ctx = engine.stats(), engine.config.n_ctx
            self._screen.note(*stats_lines(self._conversation.last, stats, n_ctx))

    async def _switch(self, nursery: trio.Nursery, old: _Opened, name: str) -> _Opened:
        """The engine of another model; the old one without a name, or if Ctrl-C stops the load."""
        new = old
        if name:
            with self._interruptible():
                new = await nursery.start(self._host, name)
            if new is not old:
                old.close.set()
        self._screen.note(_title(new))
        return new

    def _save(self, file: str, overwrite: bool) -> None:
        """On a worker thread."""
        try:
            path = Path(file).expanduser()
            text = self._conversation.text_as(path.suffix)
            with path.open("w" if overwrite else "x", encoding="utf-8") as target:
                target.write(text)
        except FileExistsError:
            self._screen.note(f"{file} exists: /save! overwrites it")
        except (OSError, ValueError, RuntimeError) as error:  # the last: nobody's home
            self._screen.note(one_line(error))
        else:
            self._screen.note(f"saved to {path}")

    def _command(self, name: str, argument: str) -> None:
        match name:
            case "reset":
                self._conversation.drop(len(self._conversation))
                self._screen.note("forgotten")
            case "system":
                if argument:
                    self._conversation.set_system(None if argument == "-" else argument)
                self._screen.note(self._conversation.system or "no system message")
            case "help":
                self._screen.note(
                    *(f"{usage:16} {what}" for usage, what in COMMANDS.values()), *TYPING
                )
            case _:
                self._screen.note(f"unknown command /{name}: /help lists them, // says a slash")


def _title(opened: _Opened) -> str:
    name = opened.name or "the default model"
    try:
        return f"{name} ({opened.engine.info.description})"
    except EngineClosed:  # a daemon loads it with the first question
        return name
