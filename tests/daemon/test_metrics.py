"""Metrics over the daemon's protocol, and over HTTP on a socket of their own."""

from __future__ import annotations

import contextlib
import json
import stat
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from llamad_trio import serve_unix
from llamad_trio.daemon.metrics_socket import serve_metrics
from llamad_trio.testing import open_scripted_engine
from llamad_trio.watch.prometheus import EngineMetrics
from tests.serving.support import ask

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


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.0", b"200 OK"),
        (b"GET /metrics?name[]=llamad_slots HTTP/1.1", b"200 OK"),
        (b"GET /favicon.ico HTTP/1.1", b"404 Not Found"),
        (b"GET /metrics/ HTTP/1.1", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1", b"405 Method Not Allowed"),
        (b"HEAD / HTTP/1.1", b"405 Method Not Allowed"),
        (b"GET /metrics", b"400 Bad Request"),
        (b"GET /metrics SPDY/3", b"400 Bad Request"),
        (b"\x16\x03\x01\x00\xff", b"400 Bad Request"),
        (b"", b"400 Bad Request"),
        (b"x" * 8000, b"400 Bad Request"),
    ],
)
async def test_metrics_are_at_one_place_and_can_only_be_got(
    tmp_path: Path, request_line: bytes, status: bytes
) -> None:
    path = tmp_path / "metrics.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_metrics, EngineMetrics(dict), path)
        answer = await http(path, request_line + b"\r\nHost: x\r\n\r\n")
        head, body = answer.split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.0 " + status + b"\r\n")
        assert (head.endswith(b"\r\nAllow: GET")) >= (status[:3] == b"405")
        assert bool(body) == (status == b"200 OK")
        nursery.cancel_scope.cancel()


async def test_what_is_no_request_hurts_nobody(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_metrics, EngineMetrics(dict), path)
        for cut_off in (b"", b"x" * 8000, b"GET /metrics HTTP/1.1\r\nHost: x"):
            assert (await http(path, cut_off)).startswith(b"HTTP/1.0 400 ")
        with contextlib.suppress(trio.BrokenResourceError):  # it may hang up first
            assert (await http(path, b"x" * 1_000_000)).startswith(b"HTTP/1.0 400 ")
        assert (await http(path, b"GET / HTTP/1.0\n\n")).startswith(b"HTTP/1.0 200")
        nursery.cancel_scope.cancel()
