"""Metrics over the daemon's protocol, and over HTTP on a socket of their own."""

from __future__ import annotations

import json
import stat
from functools import partial
from typing import TYPE_CHECKING

import trio
from prometheus_client.parser import text_string_to_metric_families

from llamad_trio import serve_unix
from llamad_trio.actors.metrics_socket import serve_metrics
from llamad_trio.testing import open_scripted_engine
from llamad_trio.watch.prometheus import EngineMetrics
from tests.daemon.support import ask

if TYPE_CHECKING:
    from pathlib import Path


def n_completed(text: str) -> float:
    """Requests that were completed, in the text format."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "llamad_requests_total" and sample.labels.get("outcome") == "completed"
    )


async def http(path: Path, request: bytes) -> bytes:
    async with await trio.open_unix_socket(str(path)) as stream:
        await stream.send_all(request)
        await stream.send_eof()
        return b"".join([data async for data in stream])


async def test_metrics_tell_what_was_done(sock: Path, tmp_path: Path) -> None:
    second = tmp_path / "metrics.sock"
    async with open_scripted_engine("hello") as engine, trio.open_nursery() as nursery:
        metrics = EngineMetrics(lambda: {"": engine.stats()})
        await nursery.start(metrics.run, engine)
        await nursery.start(partial(serve_unix, engine, sock, metrics=metrics))
        await nursery.start(serve_metrics, metrics, second)
        for _ in range(3):
            await engine.complete("x")
        assert n_completed(json.loads(await ask(sock, {"op": "metrics"}))["metrics"]) == 3
        head, body = (await http(second, b"GET /metrics HTTP/1.1\r\n\r\n")).split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain")
        assert b"Content-Length: %d" % len(body) in head
        assert n_completed(body.decode()) == 3
        assert stat.S_IMODE(second.lstat().st_mode) == 0o600
        nursery.cancel_scope.cancel()
    assert not second.exists()


async def test_what_is_no_request_gets_no_answer_and_hurts_nobody(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    async with open_scripted_engine("hello") as engine, trio.open_nursery() as nursery:
        metrics = EngineMetrics(lambda: {"": engine.stats()})
        await nursery.start(serve_metrics, metrics, path)
        assert await http(path, b"") == b""
        assert await http(path, b"x" * 8000) == b""
        assert (await http(path, b"GET / HTTP/1.0\n\n")).startswith(b"HTTP/1.0 200")
        nursery.cancel_scope.cancel()


async def test_a_server_without_metrics_says_so(sock: Path) -> None:
    async with open_scripted_engine("hello") as engine, trio.open_nursery() as nursery:
        await nursery.start(serve_unix, engine, sock)
        assert json.loads(await ask(sock, {"op": "metrics"}))["type"] == "UnsupportedFeature"
        nursery.cancel_scope.cancel()
