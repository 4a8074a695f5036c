"""An engine in a process of its own, behind the interface of `Engine`.

The two share a socket pair: connections go one way, what becomes of the engine comes back.
Whatever the other process does, here it is a typed error.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from os import PathLike, fspath
from socket import socketpair

import trio

from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import (
    Disconnected,
    EngineClosed,
    EngineCrashed,
    InferenceError,
    LlamadError,
    ModelLoadError,
)
from llamad_trio.core.info import DaemonStats
from llamad_trio.engine.lane import Lane, count_lane_threads, with_lane_threads
from llamad_trio.engine.reporter import Reporter
from llamad_trio.isolation.handover import Handover
from llamad_trio.isolation.relay import EventRelay
from llamad_trio.preflight.prove import proven_config
from llamad_trio.remote.remote import RemoteEngine, stats_of
from llamad_trio.remote.reply import RemoteEvents, RemoteReply
from llamad_trio.system.host import python_command, python_environment
from llamad_trio.system.nursery import ends_in_order, open_plain_nursery, run_uninterrupted
from llamad_trio.watch.broadcast import Broadcast, EventReader
from llamad_trio.wire.converter import unstructure

COMMAND = python_command("llamad_trio.isolation.isolated")

GRACE_S = 5.0
"""How long the process may take to end when it is told to, before it is killed: it may have
prefixes to write to disk."""

RELAYED_EVENTS = 65_536
"""How many may wait over there, whatever the readers here ask for: a second's or more."""

MAX_LOG_BYTES = 8 * 1024
MAX_LOG_LINES = 20


@asynccontextmanager
@ends_in_order
async def open_isolated_engine(
    model: str | PathLike[str],
    config: EngineConfig,
    on_load: Callable[[float], object] | None = None,
    *,
    name: str = "",
    broadcast: Broadcast | None = None,
) -> AsyncIterator[RemoteEngine]:
    """Run an engine in a process of its own inside the block.

    Arguments as for `open_engine`; `name` and `broadcast` as for `run_engine`.  Leaving the
    block ends the process, which takes a moment, or `GRACE_S` if it hangs, however often Ctrl-C
    comes meanwhile; the end of this process ends it, too.  If it ends by itself, the block ends
    with `EngineCrashed`, and so do the requests that were under way.
    """
    began = trio.current_time()
    own_broadcast = Broadcast(onward=broadcast)
    reporter = Reporter(own_broadcast, name)
    # Here already: who reads this program's log is told.
    config = await proven_config(with_lane_threads(config), model)
    async with _open_child(fspath(model)) as child:
        # What has ended already will be told when it is waited for.
        with suppress(trio.BrokenResourceError):
            await child.channel.send_all(_order_line(fspath(model), config, name))
        await child.wait_ready(on_load)
        async with open_plain_nursery() as nursery:
            nursery.start_soon(child.watch)
            engine = _IsolatedEngine(child, await stats_of(child), own_broadcast)
            relay = EventRelay(engine.sent_events, own_broadcast)
            nursery.start_soon(relay.run)
            try:
                # On a lane of its own, over there, but on the same cores.
                with own_broadcast.fed_by(relay), count_lane_threads(Lane(), engine.config):
                    if own_broadcast.has_readers:
                        await relay.attach()
                    reporter.tell_loaded(trio.current_time() - began)
                    yield engine
            finally:
                engine.close()
                await run_uninterrupted(partial(_close, child, relay, reporter, own_broadcast))


async def _close(
    child: _Child, relay: EventRelay, reporter: Reporter, broadcast: Broadcast
) -> None:
    """End the process, and tell how it and its requests ended."""
    try:
        await child.end()
        with trio.move_on_after(GRACE_S):
            await relay.drain()
    finally:
        relay.end(child.error or EngineClosed())
        reporter.tell_stopped(None if child.error is None else str(child.error))
        broadcast.close()


@asynccontextmanager
@ends_in_order
async def _open_child(model: str) -> AsyncIterator[_Child]:
    """The process, which does not outlive the block."""
    async with AsyncExitStack() as stack:
        try:
            ours, theirs = socketpair()
            channel = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
            await stack.enter_async_context(channel)
            with theirs:
                process = await _start_process(theirs.fileno())
        except OSError as error:
            raise ModelLoadError(model, f"no process for it: {error.strerror}") from error
        child = _Child(process, channel)
        async with open_plain_nursery() as nursery:
            nursery.start_soon(child.keep_log)
            try:
                yield child
            finally:
                await run_uninterrupted(child.end)


async def _start_process(fd: int) -> trio.Process:
    return await trio.lowlevel.open_process(
        [*COMMAND, str(fd), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=[fd],
        env=python_environment(),
        # Ctrl-C is for the program, which ends its engines itself.
        start_new_session=True,
    )


def _order_line(model: str, config: EngineConfig, name: str) -> bytes:
    """Paths may hold what is no text, which `json` writes in a way that it reads again."""
    order = {"model": model, "config": unstructure(config), "name": name}
    return json.dumps(order).encode() + b"\n"


class _IsolatedEngine(RemoteEngine):
    """An engine in a process of its own, whose events come by a broadcast of this one."""

    def __init__(self, child: _Child, daemon: DaemonStats, broadcast: Broadcast) -> None:
        super().__init__(child, None, daemon)
        self._broadcast = broadcast

    def events(self, max_events: int = 1024) -> AbstractAsyncContextManager[EventReader]:
        """As `Engine.events`."""
        return self._broadcast.subscribe(max_events)

    def sent_events(self) -> AbstractAsyncContextManager[RemoteEvents]:
        """What the other process tells, for the broadcast."""
        return self._events(RELAYED_EVENTS)


class _Child:
    """The process of an isolated engine."""

    def __init__(self, process: trio.Process, channel: trio.SocketStream) -> None:
        self.channel = channel
        self.has_gone = False
        self.error: LlamadError | None = None
        self._process = process
        self._reports = RemoteReply(channel, self._explain_end)
        self._is_ready = False
        self._is_told_to_end = False
        self._handover = Handover(channel)
        self._log = bytearray()
        self._log_ended = trio.Event()

    async def connect(self) -> trio.SocketStream:
        """A connection to the engine.  Raises what `explain` says if there is none."""
        try:
            return await self._handover.connect()
        except trio.BrokenResourceError:
            raise await self.explain() from None

    async def wait_ready(self, on_load: Callable[[float], object] | None) -> None:
        """Wait until the engine is open.  Raises what kept it from that."""
        while not self._is_ready:
            report = await self._reports.next_line()
            self._is_ready = "ready" in report
            progress = report.get("progress")
            if on_load is not None and isinstance(progress, float | int):
                on_load(float(min(max(progress, 0), 1)))

    @ends_in_order
    async def watch(self) -> None:
        """Wait until the engine ends, and raise why, unless it was told to."""
        try:
            await self._reports.next_line()
            raise InferenceError("the engine's process says what it should not")
        except LlamadError as error:
            if self._is_told_to_end:
                return
            self.error = error
            raise

    async def explain(self) -> LlamadError:
        """Why a connection ended early: most likely the process ended, which takes a moment."""
        with trio.move_on_after(GRACE_S):
            await self._process.wait()
        return Disconnected() if self._process.returncode is None else await self._explain_end()

    async def _explain_end(self) -> LlamadError:
        """How the process ended; it is killed if it only hung up."""
        self.has_gone = True
        with trio.move_on_after(GRACE_S):
            await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
        status = await self._process.wait()
        with trio.move_on_after(GRACE_S):
            await self._log_ended.wait()
        if self._is_told_to_end:
            return EngineClosed()
        lines = self._log.decode(errors="replace").splitlines()
        return EngineCrashed(status, tuple(lines[-MAX_LOG_LINES:]))

    @ends_in_order
    async def keep_log(self) -> None:
        """Keep the end of what the process writes on stderr."""
        assert self._process.stderr is not None
        async with self._process.stderr as log:
            async for data in log:
                self._log = (self._log + data)[-MAX_LOG_BYTES:]
        self._log_ended.set()

    async def end(self) -> None:
        """End the process: it is told to, and killed if it does not, or has nothing to lose."""
        if not self.has_gone:
            self._is_told_to_end = True
        with trio.move_on_after(GRACE_S if self._is_ready else 0.0):
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.channel.send_eof()
            await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
