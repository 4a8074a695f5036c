"""An engine that answers those who come through a socket, in a process of its own.

What goes back through that socket are lines: the progress of the load, that the engine is
ready, or the error that ended it.  What the process is, and when it ends, `isolated` decides.
"""

from __future__ import annotations

import json
import os
import socket

import trio

from llamad_trio.core.config import EngineConfig, Limits
from llamad_trio.core.errors import LlamadError
from llamad_trio.engine.assembly import open_named_engine
from llamad_trio.engine.engine import Engine
from llamad_trio.isolation.handover import HandedOver
from llamad_trio.serving.listener import serve_listener
from llamad_trio.system.nursery import open_plain_nursery
from llamad_trio.wire.converter import structure
from llamad_trio.wire.lines import LineBuffer, encode_line
from llamad_trio.wire.replies import error_reply


async def serve(sock: socket.socket) -> None:
    """Open the engine that the first line says, and serve until nobody comes any more.

    Args:
        sock: one end of a socket pair.

    A checkpoint.

    Raises:
        LlamadError: the engine could not be opened, or broke; the other side was told.
    """
    channel = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
    try:
        order = json.loads(await _first_line(channel))
        config = structure(order["config"], EngineConfig)

        def tell(fraction: float) -> None:  # a few short lines: they fit into the socket's buffer
            os.write(sock.fileno(), encode_line({"progress": fraction}))

        listener = HandedOver(channel)
        async with open_plain_nursery() as nursery:
            served = trio.Event()
            async with open_named_engine(
                order["model"], config, name=order["name"], on_load=tell
            ) as engine:
                await channel.send_all(encode_line({"ready": True}))
                nursery.start_soon(_answer, engine, listener, served)
                await listener.has_ended.wait()
            # Clients are told how their requests ended, and readers of events all of it.
            await served.wait()
    except (trio.EndOfChannel, trio.BrokenResourceError):
        return  # the parent wants no more
    except LlamadError as error:
        await channel.send_all(encode_line(error_reply(error, is_original=False)))
        raise


async def _answer(engine: Engine, listener: HandedOver, served: trio.Event) -> None:
    limits = Limits(max_request_bytes=1 << 30, stream_timeout_s=86_400, max_connections=65_536)
    await serve_listener({"isolated": engine}, listener, limits=limits)
    served.set()


async def _first_line(channel: trio.SocketStream) -> bytes:
    lines = LineBuffer(None)
    while (line := lines.pop()) is None:
        data = await channel.receive_some()
        if not data:
            raise trio.EndOfChannel
        lines.push(data)
    return line
