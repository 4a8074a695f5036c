"""Metrics on a Unix socket of their own, for scrapers: the least of HTTP there can be."""

from __future__ import annotations

from os import PathLike

import trio

from llamad_trio.serving.unix_socket import open_listener, peer_is_trusted
from llamad_trio.system.nursery import TaskStatus
from llamad_trio.watch.prometheus import CONTENT_TYPE, EngineMetrics

MAX_REQUEST_BYTES = 8 * 1024
TIMEOUT_S = 10.0

OK = "200 OK"


async def serve_metrics(
    metrics: EngineMetrics,
    path: str | PathLike[str],
    *,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer `GET /metrics`, or `GET /`, over HTTP on a Unix socket, until cancelled.

    The socket has mode 0600 and is removed in the end.  Clients can connect when it has started.

    Raises:
        SocketUnavailable: the path cannot be listened on.
    """

    async def answer(stream: trio.SocketStream) -> None:
        with trio.move_on_after(TIMEOUT_S):
            async with stream:
                if not peer_is_trusted(stream.socket):
                    return
                try:
                    status = _status(await _head(stream))
                    body = await metrics.scrape() if status == OK else b""
                    head = (
                        f"HTTP/1.0 {status}\r\nContent-Type: {CONTENT_TYPE}\r\n"
                        f"Content-Length: {len(body)}\r\nAllow: GET\r\n\r\n"
                    )
                    await stream.send_all(head.encode() + body)
                except trio.BrokenResourceError:
                    return  # it has gone

    async with open_listener(path) as listener:
        task_status.started(None)
        await trio.serve_listeners(answer, [listener])


async def _head(stream: trio.SocketStream) -> bytes:
    """What comes up to an empty line; nothing if the client ends before it, or sends too much."""
    head = b""
    while b"\r\n\r\n" not in head and b"\n\n" not in head:
        data = await stream.receive_some(MAX_REQUEST_BYTES)
        head += data
        if not data or len(head) > MAX_REQUEST_BYTES:
            return b""
    return head


def _status(head: bytes) -> str:
    """What a request gets: its first line says all that matters."""
    match head.partition(b"\n")[0].split():
        case [method, target, version] if version.startswith(b"HTTP/1."):
            if target.partition(b"?")[0] not in (b"/", b"/metrics"):
                return "404 Not Found"
            return OK if method == b"GET" else "405 Method Not Allowed"
        case _:
            return "400 Bad Request"
