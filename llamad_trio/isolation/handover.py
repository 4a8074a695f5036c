"""Connections handed from one process to another, through the socket pair between them."""

from __future__ import annotations

import array
import os
import socket

import trio

from llamad_trio.core.errors import InferenceError

_INT_BYTES = array.array("i").itemsize


class Handover:
    """The giving side."""

    def __init__(self, channel: trio.SocketStream) -> None:
        self._channel = channel
        self._sending = trio.Lock()

    async def connect(self) -> trio.SocketStream:
        """A new connection to the other process.

        A checkpoint; cancelled, the other side has at most one that is closed.

        Raises:
            trio.BrokenResourceError: the other process has gone.
            InferenceError: there are no descriptors left.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise InferenceError(
                f"no connection to the engine's process: {error.strerror}"
            ) from error
        with theirs:
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
            try:
                async with self._sending:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _as_bytes(theirs.fileno()))
                    await self._channel.socket.sendmsg([b"c"], [rights])
            except OSError as error:
                stream.socket.close()
                raise trio.BrokenResourceError from error
            except BaseException:
                stream.socket.close()
                raise
        return stream


class HandedOver(trio.abc.Listener[trio.SocketStream]):
    """The taking side: a listener whose connections are those that come through a socket.

    `has_ended` is set when no more will come.
    """

    def __init__(self, channel: trio.SocketStream) -> None:
        self.has_ended = trio.Event()
        self._channel = channel

    async def accept(self) -> trio.SocketStream:
        """Wait for a connection.  A checkpoint; cancelled, none is lost.

        Raises:
            trio.EndOfChannel: the other process has gone, or wants no more.
        """
        while True:
            data, rights, _, _ = await self._channel.socket.recvmsg(
                1, socket.CMSG_SPACE(_INT_BYTES)
            )
            if not data:
                self.has_ended.set()
                raise trio.EndOfChannel
            for level, kind, fds in rights:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    (fd,) = array.array("i", fds[:_INT_BYTES])
                    os.set_inheritable(fd, False)
                    connection = socket.socket(fileno=fd)
                    return trio.SocketStream(trio.socket.from_stdlib_socket(connection))

    async def aclose(self) -> None:
        """Take no more.  A checkpoint."""
        await self._channel.aclose()


def _as_bytes(fd: int) -> bytes:
    return array.array("i", [fd]).tobytes()
