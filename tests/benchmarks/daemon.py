"""What the way through the socket costs, against the same engine in this process."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from llamad_trio import EngineLike, RemoteEngine, connect, open_engine
from tests.benchmarks.streams import count_to, speed_ratios

PAIRS = 5

CLIENT = """
import json, socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.sendall(json.dumps({"prompt": "One, two, three, " * 500, "raw": True}).encode() + b"\\n")
print("sent", flush=True)
s.recv(1)
"""


@asynccontextmanager
async def running_daemon(model: str, n_slots: int) -> AsyncIterator[str]:
    """A daemon in a process of its own; gives its socket."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "llamad.sock")
        command = [sys.executable, "-m", "llamad_trio", "serve", model, "--socket", path]
        environment = {**os.environ, "LLAMAD_N_SLOTS": str(n_slots), "LLAMAD_KV_CACHE": "off"}
        run = partial(
            trio.run_process, command, env=environment, stderr=subprocess.PIPE, stdout=None
        )
        async with trio.open_nursery() as nursery:
            process = await nursery.start(run)
            log = b""
            while b"listening" not in log:
                log += await process.stderr.receive_some()
            yield path
            process.send_signal(signal.SIGTERM)


async def socket_ratio(model: str) -> dict[str, float]:
    """Tokens/s of streams through the socket against the same in-process, in turns."""
    async with (
        running_daemon(model, 8) as path,
        connect(path) as remote,
        open_engine(model, n_slots=8, kv_cache=False) as local,
    ):
        return await speed_ratios(remote, local, PAIRS)


async def socket_latency(model: str) -> dict[str, float]:
    """Time that a request for one token takes longer through the socket."""

    async def seconds(eng: EngineLike) -> float:
        began = trio.current_time()
        await eng.complete(count_to(1))
        return trio.current_time() - began

    added = []
    async with (
        running_daemon(model, 1) as path,
        connect(path) as remote,
        open_engine(model, n_slots=1, kv_cache=False) as local,
    ):
        for _ in range(10 * PAIRS):
            through = await seconds(remote)
            added.append(through - await seconds(local))
    return {"added_ms": 1e3 * statistics.median(added)}


async def killed_client(model: str) -> dict[str, float]:
    """From the kill -9 of a client in mid-prefill until its slot is free."""
    seconds = []
    async with running_daemon(model, 1) as path, connect(path) as remote:
        for _ in range(PAIRS):
            command = [sys.executable, "-c", CLIENT, path]
            client = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
            assert client.stdout is not None
            await client.stdout.receive_some()
            await _slot_is(remote, "prefill")
            await trio.sleep(0.3)  # well inside the step
            client.kill()
            began = trio.current_time()
            await _slot_is(remote, "free")
            seconds.append(trio.current_time() - began)
            await client.wait()
    return {"median_ms": 1e3 * statistics.median(seconds), "max_ms": 1e3 * max(seconds)}


async def _slot_is(remote: RemoteEngine, state: str) -> None:
    while not (await remote.refresh()).slots[state]:  # noqa: ASYNC110  (it is another process)
        await trio.sleep(0.001)
