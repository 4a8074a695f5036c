"""Where a chat's lines come from, and where its answers go.

Knows nothing of what they mean.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Protocol, TextIO

import platformdirs
import trio
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from llamad_trio.cli.history import COMMANDS, visible
from llamad_trio.system.nursery import new_shield, open_plain_nursery

PROMPT = "> "

CHUNK_BYTES = 64 * 1024


class Key(Enum):
    """What can come instead of a line."""

    INTERRUPT = "Ctrl-C with nothing typed"
    END = "Ctrl-D, or the end of the input"


class Reader(Protocol):
    """Where lines come from.

    Attributes:
        is_terminal: whether Ctrl-C is meant for what is going on, not for the program.
        read: the next line, without its end.  A checkpoint; cancelled, it stops reading.
    """

    is_terminal: bool

    async def read(self) -> str | Key: ...


class Lines:
    """Lines of a file, a pipe, or whatever else can be read."""

    is_terminal = False

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._ahead = bytearray()
        self._is_over = False

    async def read(self) -> str | Key:
        """The next line; bytes that are no UTF-8 become lone surrogates.

        A checkpoint.  Cancelled, it leaves what it has read for the next call.
        """
        await trio.lowlevel.checkpoint()
        searched = 0
        while (end := self._ahead.find(b"\n", searched)) < 0 and not self._is_over:
            searched = len(self._ahead)
            # A file cannot be waited for: it can always be read.
            with suppress(PermissionError):
                await trio.lowlevel.wait_readable(self._fd)
            chunk = os.read(self._fd, CHUNK_BYTES)
            self._ahead += chunk
            self._is_over = not chunk
        if end < 0:
            if not self._ahead:
                return Key.END
            end = len(self._ahead)
        line = bytes(self._ahead[:end])
        del self._ahead[: end + 1]
        return line.removesuffix(b"\r").decode(errors="surrogateescape")


class Prompt:
    """Lines typed at the terminal, with editing, history and completion."""

    is_terminal = True

    def __init__(self, history: History) -> None:
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=" " * len(PROMPT),
            key_bindings=_bindings(),
            history=history,
            completer=WordCompleter([f"/{name}" for name in COMMANDS], sentence=True),
        )
        self._stop: Callable[[], object] | None = None
        self._is_cancelled = False

    async def read(self) -> str | Key:
        """What is typed next.

        A checkpoint.  Cancelled, it gives the terminal back as it was.
        """
        self._is_cancelled = False
        async with open_plain_nursery() as nursery:
            nursery.start_soon(self._stop_when_cancelled)
            with new_shield():
                # On a worker thread: prompt_toolkit runs on asyncio only.
                typed = await trio.to_thread.run_sync(lambda: asyncio.run(self._prompt()))
        return typed

    async def _stop_when_cancelled(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self._is_cancelled = True
            if self._stop is not None:
                self._stop()

    def _can_stop(self, stop: Callable[[], object] | None) -> None:
        self._stop = stop
        if stop is not None and self._is_cancelled:  # it came before the thread had begun
            stop()

    async def _prompt(self) -> str | Key:
        task = asyncio.current_task()
        assert task is not None
        stop = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        trio.from_thread.run_sync(self._can_stop, stop)
        try:
            return await self._session.prompt_async(handle_sigint=False)
        except EOFError:
            return Key.END
        except KeyboardInterrupt:
            return "" if self._session.default_buffer.text else Key.INTERRUPT
        except asyncio.CancelledError:
            return Key.INTERRUPT  # nobody receives it: whoever waited was cancelled
        finally:
            trio.from_thread.run_sync(self._can_stop, None)


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


class _OwnHistory(FileHistory):
    """A full disk costs a line of history, not the chat."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


def open_history() -> History:
    """The lines of earlier chats, in a file of this user alone; in memory if there can be none."""
    path = Path(platformdirs.user_state_dir("llamad-trio")) / "chat_history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return _OwnHistory(path)


class Screen:
    """Where answers go, and what is said beside them.

    Control characters do not reach a terminal, and what is beside the answers is dim there.
    """

    def __init__(self, answers: TextIO, asides: TextIO) -> None:
        self._answers = answers
        self._asides = asides
        self._unfinished: tuple[TextIO, bool] | None = None

    def answer(self, text: str) -> None:
        self._write(self._answers, text, dim=False)

    def reasoning(self, text: str) -> None:
        self._write(self._asides, text, dim=True)

    def note(self, *lines: str) -> None:
        """Lines of the program's own."""
        self.end_line()
        for line in lines:
            self._write(self._asides, f"{line}\n", dim=True)

    def end_line(self) -> None:
        """What comes next begins a line."""
        if self._unfinished is not None:
            stream, _ = self._unfinished
            self._unfinished = None
            stream.write("\n")
            stream.flush()

    def _write(self, stream: TextIO, text: str, *, dim: bool) -> None:
        if self._unfinished not in {None, (stream, dim)}:
            self.end_line()
        self._unfinished = None if text.endswith("\n") else (stream, dim)
        if stream.isatty():
            text = visible(text)
            if dim and os.environ.get("TERM") != "dumb":
                text = f"\x1b[2m{text}\x1b[0m"
        stream.write(text)
        stream.flush()
