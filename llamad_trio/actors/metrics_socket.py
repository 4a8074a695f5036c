"""Metrics on a Unix socket of their own, for scrapers: the least of HTTP there can be."""

from __future__ import annotations

from os import PathLike

import trio

from llamad_trio.actors.nursery import TaskStatus
from llamad_trio.actors.unix_socket import listening, peer_is_trusted
from llamad_trio.watch.prometheus import CONTENT_TYPE, EngineMetrics

__all__ = ["serve_metrics"]

MAX_REQUEST_BYTES = 8 * 1024
TIMEOUT_S = 10.0


async def serve_metrics(
    metrics: EngineMetrics,
    path: str | PathLike[str],
    *,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer every HTTP request on a Unix socket with the metrics, until cancelled.

    Args:
        metrics: what to tell.
        path: where to listen, with mode 0600; removed in the end.
        task_status: for `nursery.start`, which returns when clients can connect.

    Raises:
        SocketUnavailable: the path cannot be listened on.
    """

    async def answer(stream: trio.SocketStream) -> None:
        with trio.move_on_after(TIMEOUT_S):
            async with stream:
                if not peer_is_trusted(stream.socket):
                    return
                try:
                    if await _is_whole(stream):
                        await stream.send_all(_response(await metrics.scrape()))
                except trio.BrokenResourceError:
                    return  # it has gone

    async with listening(path) as listener:
        task_status.started(None)
        await trio.serve_listeners(answer, [listener])


async def _is_whole(stream: trio.SocketStream) -> bool:
    """Whether a request has come: what it asks for does not matter."""
    request = b""
    while b"\r\n\r\n" not in request and b"\n\n" not in request:
        data = await stream.receive_some(MAX_REQUEST_BYTES)
        request += data
        if not data or len(request) > MAX_REQUEST_BYTES:
            return False
    return True


def _response(body: bytes) -> bytes:
    head = f"HTTP/1.0 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
