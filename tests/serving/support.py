"""What the tests of the daemon share: a listener in this program, raw clients, the real process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import trio

from llamad_trio import Limits, serve_unix
from llamad_trio.system.nursery import open_plain_nursery
from llamad_trio.testing import ScriptedModel, open_scripted_engine
from llamad_trio.wire.lines import LineBuffer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from llamad_trio import Engine

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]

HANG_S = 60
"""Far more than anything takes that these tests wait for."""

LONG_TEXT = "and so on, " * 9000
"""A reply that no test waits for the end of; a `served` engine has room for it."""


FOUR = b'{"text":"4","prompt_tokens":4,"generated_tokens":2}\n'
"""The reply to `ASKED`, of the scripted model, whose tokens are characters and an end."""

ASKED = b'{"prompt":"2+2?","raw":true}'
STREAMED = b'{"prompt":"20+22","raw":true,"stream":true}'
FORTY_TWO = (
    b'{"token":"4"}\n{"token":"2"}\n'
    b'{"done":true,"text":"42","prompt_tokens":5,"generated_tokens":3}\n'
)

STUCK = 3600.0
"""Seconds for a step of a model that is to come to nothing while a test looks."""

READ_TIMEOUT = b'{"error":"read timeout"}\n'


def as_line(data: object) -> bytes:
    return json.dumps(data).encode() + b"\n"


def is_there(path: Path) -> bool:
    return os.path.lexists(path)


# -- in this program ------------------------------------------------------------------------------


def says(reply: Any, **options: Any) -> ScriptedModel:
    """A scripted model that may say much."""
    return ScriptedModel(reply, n_ctx_train=1_048_576, **options)


def arithmetic(**options: Any) -> ScriptedModel:
    return says(
        {"2+2?": "4", "20+22": "42", "fail": ValueError("why"), "count": LONG_TEXT}, **options
    )


@asynccontextmanager
async def served(
    path: Path, model: ScriptedModel, *, limits: Limits | None = None, **config: Any
) -> AsyncIterator[Engine]:
    """An engine that answers on `path` inside the block."""
    async with (
        open_scripted_engine(model, **{"n_ctx": 1_048_576, **config}) as engine,
        open_plain_nursery() as nursery,
    ):
        await nursery.start(partial(serve_unix, engine, path, limits=limits))
        yield engine


class Client:
    """A client that knows bytes and lines only."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._lines = LineBuffer(None)

    async def send(self, *data: bytes | Json) -> None:
        """Send bytes as they are, objects as a line each."""
        parts = (part if isinstance(part, bytes) else as_line(part) for part in data)
        await self.stream.send_all(b"".join(parts))

    async def line(self) -> bytes:
        """The next line with its newline; at the end of the reply, what has none."""
        while (line := self._lines.pop()) is None:
            data = await self.stream.receive_some(65_536)
            if not data:
                return self._lines.pop_rest()
            self._lines.push(data)
        return line + b"\n"

    async def reply(self) -> Json:
        reply: Json = json.loads(await self.line())
        return reply

    async def replies(self, n: int) -> list[Json]:
        return [await self.reply() for _ in range(n)]

    async def rest(self) -> bytes:
        """All until the daemon closes."""
        lines = []
        while line := await self.line():
            lines.append(line)
        return b"".join(lines)


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[Client]:
    """A client inside the block; leaving it hangs up at once."""
    stream = await trio.open_unix_socket(str(path))
    try:
        yield Client(stream)
    finally:
        stream.socket.close()


async def ask(path: Path, data: bytes | Json, *, half_close: bool = False) -> bytes:
    """Everything a daemon replies to what is sent over a connection of its own."""
    async with connected(path) as client, trio.open_nursery() as nursery:

        async def send() -> None:
            # Whoever is refused may be refused before all is sent.
            try:
                await client.send(data)
                if half_close:
                    await client.stream.send_eof()
            except trio.BrokenResourceError:
                pass

        nursery.start_soon(send)
        reply = await client.rest()
        nursery.cancel_scope.cancel()
    return reply


# -- the real process -----------------------------------------------------------------------------


@attrs.frozen
class Daemon:
    """A daemon in a process of its own."""

    process: subprocess.Popen[bytes]
    path: Path
    log_path: Path
    manager: socket.socket
    """Where it sends its notices."""

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = HANG_S) -> int:
        return self.process.wait(timeout_s)

    def notice(self) -> bytes:
        """The next thing it tells its service manager; `running_daemon` has had READY=1."""
        return self.manager.recv(100)

    def connect(self) -> socket.socket:
        """A connection; it gives up after `HANG_S`."""
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(HANG_S)
        client.connect(str(self.path))
        return client

    def ask(self, data: bytes | Json, *, half_close: bool = False) -> bytes:
        """Everything it replies to what is sent over a connection of its own."""
        with self.connect() as client:
            try:
                client.sendall(data if isinstance(data, bytes) else as_line(data))
                if half_close:
                    client.shutdown(socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before all was sent
            with client.makefile("rb") as replies:
                return replies.read()

    def reply(self, data: Json) -> Json:
        reply: Json = json.loads(self.ask(data))
        return reply

    def stats(self, model: str | None = None) -> Json:
        """What it tells of a model; of the default one, if none is named."""
        reply = self.reply({"op": "stats"})
        stats: Json = reply["models"][model or reply["default"]]["stats"]
        return stats

    def is_idle(self) -> bool:
        """Whether no client is connected and nothing is computed."""
        reply = self.reply({"op": "stats"})
        models = [model["stats"] for model in reply["models"].values()]
        return reply["connections"] == 1 and all(
            sum(stats["slots"].values()) == stats["slots"]["free"]
            and stats["queued"] == stats["kv_used_tokens"] == 0
            for stats in models
        )


def wait_for(condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "it does not come about"
        time.sleep(0.005)


@contextmanager
def running_daemon(
    path: Path,
    *arguments: str | Path,
    command: Sequence[str] = (sys.executable, "-m", "llamad_trio", "serve"),
    pass_fds: Sequence[int] = (),
    is_ready: bool = True,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Daemon]:
    """`llamad-trio serve` on `path` inside the block, from READY=1 on; killed at its end."""
    folder = path.parent
    log_path = folder / f"{path.name}.log"
    ready = folder / f"{path.name}.ready"
    ready.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, log_path.open("wb") as log:
        manager.bind(str(ready))
        process = subprocess.Popen(
            [*command, *map(str, arguments), "--socket", str(path)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=pass_fds,
            env={**os.environ, "LLAMAD_N_THREADS": "1", "NOTIFY_SOCKET": str(ready), **env},
        )
        daemon = Daemon(process, path, log_path, manager)
        try:
            if is_ready:
                _await_ready(daemon, manager)
            manager.settimeout(HANG_S)
            yield daemon
        finally:
            process.kill()
            process.wait()


def _await_ready(daemon: Daemon, manager: socket.socket) -> None:
    manager.settimeout(0.1)
    for _ in range(HANG_S * 10):
        try:
            assert manager.recv(100) == b"READY=1"
        except TimeoutError:
            assert daemon.process.poll() is None, daemon.log
        else:
            return
    raise AssertionError(f"it is never ready: {daemon.log}")
