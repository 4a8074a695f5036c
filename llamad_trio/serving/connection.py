"""One client's connection: whole lines in, whole lines out.  Knows nothing of what they say."""

from __future__ import annotations

import math
import os

import trio

from llamad_trio.core.config import Limits
from llamad_trio.system.nursery import new_scope
from llamad_trio.wire.lines import LineBuffer

CHUNK_BYTES = 64 * 1024

LINGER_S = 1.0
"""How long a client may go on sending what nobody reads, so that it gets its reply."""

MOST_LEFT_BYTES = 1024 * 1024
"""How much of what a client has sent is thrown away before its socket is closed: a socket
that is closed with something unread resets the connection."""


class Connection:
    """Reads requests of and sends replies to one client.

    Cancels `scope` when the client cannot be talked to any more.
    """

    def __init__(self, stream: trio.SocketStream, limits: Limits, scope: trio.CancelScope) -> None:
        self._stream = stream
        self._fd = stream.socket.fileno()
        self._limits = limits
        self._scope = scope
        self._lines = LineBuffer(limits.max_request_bytes)
        self._unsent = bytearray()
        self._flushing = trio.Lock()
        self.at_end = False

    async def next_line(self, *, is_first: bool) -> bytes | None:
        """The next request, without its newline; `None` when the client has no more.

        The time for it runs from the call for the first request, from its first byte for
        any other.  A checkpoint; cancelled, nothing is lost.

        Raises:
            trio.TooSlowError, LineTooLong: there will be no request.
        """
        await trio.lowlevel.checkpoint()
        started = is_first or not self._lines.is_empty
        with trio.fail_at(math.inf) as scope:
            while True:
                if started and scope.deadline == math.inf:
                    scope.deadline = trio.current_time() + self._limits.request_timeout_s
                try:
                    if (line := self._lines.pop()) is not None:
                        return line
                    if self.at_end:
                        return None
                    data = await self._stream.receive_some(CHUNK_BYTES)
                    self._lines.push(data)
                    started = True
                    if not data:
                        self.at_end = True
                        line = self._lines.pop_rest()
                        return line if line or is_first else None
                except trio.BrokenResourceError:
                    await self._leave()

    async def send(self, line: bytes) -> None:
        """Send a line.

        Waits while the client does not read, and drops the client when that takes longer
        than the stream timeout.  Cancelled, it sends none of the line, or its rest goes out
        before the next one: lines stay whole.  No checkpoint where the line goes out at once.
        """
        if not self._unsent:
            # Nearly always all there is to do, and much cheaper than to wait first.
            self._unsent += line
            try:
                if self._write():
                    return
            except OSError:
                await self._leave()
            line = b""
        async with self._flushing:
            self._unsent += line
            with new_scope() as scope:
                try:
                    while not self._write():
                        scope.deadline = trio.current_time() + self._limits.stream_timeout_s
                        await trio.lowlevel.wait_writable(self._fd)
                except OSError:
                    await self._leave()
            if scope.cancelled_caught:
                await self._leave()

    def send_now(self, line: bytes) -> None:
        """Send as much as can be sent without waiting: for last words."""
        self._unsent += line
        try:
            self._write()
        except OSError:
            self._unsent.clear()

    async def linger(self) -> None:
        """End the replies, and let the client send the rest of what nobody reads.  A checkpoint."""
        with trio.move_on_after(LINGER_S):
            try:
                await self._stream.send_eof()
                while await self._stream.receive_some(CHUNK_BYTES):
                    pass
            except trio.BrokenResourceError:
                pass

    def discard(self) -> None:
        """Throw away what has arrived and nobody will read, so that the close is no reset."""
        for _ in range(MOST_LEFT_BYTES // CHUNK_BYTES):
            try:
                if not os.read(self._fd, CHUNK_BYTES):
                    return
            except OSError:
                return

    def _write(self) -> bool:
        """Write what can be written; whether that is all."""
        try:
            del self._unsent[: os.write(self._fd, self._unsent)]
        except BlockingIOError:
            return False
        return not self._unsent

    async def _leave(self) -> None:
        self._scope.cancel()
        await trio.lowlevel.checkpoint()
