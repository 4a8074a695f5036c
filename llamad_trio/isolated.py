"""What runs in the process of an isolated engine: `python -m llamad_trio.isolated FD PARENT`.

PARENT is the process that started it.  FD is one end of a socket pair.  The first line that comes through it says what to open;
afterwards connections come through it, which speak the daemon's protocol.  What goes back
are lines: the progress of the load, that the engine is ready, or the error that ended it.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import threading
import time
from functools import partial

import trio

from llamad_trio.actors.handover import HandedOver
from llamad_trio.actors.listener import serve_listener
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import LlamadError
from llamad_trio.core.limits import Limits
from llamad_trio.engine import open_named_engine
from llamad_trio.wire.converter import structure
from llamad_trio.wire.errors import error_reply
from llamad_trio.wire.lines import LineBuffer
from llamad_trio.wire.strict_json import decode_object, encode_line

__all__ = ["main"]

GRACE_S = 0.5
"""How long this process may take to end after its parent has gone."""


def main() -> None:
    """Run the engine until the parent has gone or wants it no more."""
    fd, parent = map(int, sys.argv[1:])
    # A process that is stuck cannot see that its parent has gone; a thread of its own can.
    threading.Thread(target=_end_with_parent, args=[os.dup(fd), parent], daemon=True).start()
    trio.run(_serve, socket.socket(fileno=fd))


def _end_with_parent(fd: int, parent: int) -> None:
    poll = select.poll()
    poll.register(fd, 0)  # hanging up is always reported
    if sys.platform == "linux":
        # A child that the parent forked off may hold its end of the socket pair, too.
        try:
            poll.register(os.pidfd_open(parent), select.POLLIN)
        except OSError as error:
            if error.errno == errno.ESRCH:
                os._exit(1)
    poll.poll()
    time.sleep(GRACE_S)
    os._exit(1)


async def _serve(sock: socket.socket) -> None:
    channel = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
    try:
        order = await _first_line(channel)
        config = structure(order["config"], EngineConfig)
        tell = partial(_tell_progress, sock.fileno())
        name = str(order["name"])
        async with open_named_engine(
            str(order["model"]), config, name=name, on_load=tell
        ) as engine:
            await channel.send_all(encode_line({"ready": True}))
            limits = Limits(
                max_request_bytes=1 << 30, stream_timeout_s=86_400, max_connections=65_536
            )
            await serve_listener({"isolated": engine}, HandedOver(channel), limits=limits)
    except (trio.EndOfChannel, trio.BrokenResourceError):
        return  # the parent wants no more
    except LlamadError as error:
        await channel.send_all(encode_line(error_reply(error, is_original=False)))
        raise


async def _first_line(channel: trio.SocketStream) -> dict[str, object]:
    lines = LineBuffer(None)
    while (line := lines.pop()) is None:
        data = await channel.receive_some()
        if not data:
            raise trio.EndOfChannel
        lines.push(data)
    return decode_object(line)


def _tell_progress(fd: int, fraction: float) -> None:
    """A few short lines in all: they fit into the socket's buffer."""
    os.write(fd, encode_line({"progress": fraction}))


if __name__ == "__main__":
    main()
