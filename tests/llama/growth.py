"""What a process grows by, measured in processes of their own, which print it as JSON.

Imports no more than it measures, for each of them starts anew.
"""

from __future__ import annotations

import gc
import json
import random
import re
import resource
from pathlib import Path

import trio

from llamad_trio import EngineConfig, Request, open_engine
from llamad_trio.llama.estimate import estimate

__all__ = ["peak_bytes", "print_growth", "print_peak", "print_reopened"]


def print_growth(path: str, warm: str, fields: str) -> None:
    """Open an engine, fill its pool, print the bytes it grew by."""
    # With time for whole batches, however slow the machine is: they fill the compute buffer.
    config = EngineConfig(n_threads=1, n_threads_batch=1, step_target_s=60.0, **json.loads(fields))
    n_ctx, rng = config.n_ctx or 4096, random.Random(1)
    # All made before, of small numbers: they are no part of the growth.
    length = n_ctx // config.n_slots - 8
    prompts = [rng.choices(range(3, 250), k=length) for _ in range(config.n_slots)]
    trio.run(
        _filled,
        warm,
        EngineConfig(n_threads=1, n_threads_batch=1, n_ctx=64, n_slots=1),
        [[3, 4, 5]],
    )
    gc.collect()
    before = resident_bytes()
    print(trio.run(_filled, path, config, prompts) - before)


async def _filled(path: str, config: EngineConfig, prompts: list[list[int]]) -> int:
    async with open_engine(path, config) as engine:
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(engine.complete, Request(prompt, raw=True, max_tokens=4))
        return resident_bytes()


def print_reopened(path: str, n_opens: str) -> None:
    """Open and close an engine again and again; print the bytes there are after each time."""
    print(trio.run(_reopened, path, int(n_opens)))


async def _reopened(path: str, n_opens: int) -> list[int]:
    sizes = []
    for _ in range(n_opens):
        async with open_engine(path, n_ctx=512) as engine:
            await engine.complete("Hello", max_tokens=4)
            await engine.complete("Hello", max_tokens=4, regex="[a-z]{2}")
        sizes.append(resident_bytes())
    return sizes


def resident_bytes() -> int:
    """What this process has in memory, but for memory that is shared."""
    status = Path("/proc/self/status").read_text()
    return sum(
        1024 * int(kb) for kb in re.findall(r"^Rss(?:Anon|File):\s+(\d+) kB", status, re.MULTILINE)
    )


def print_peak(path: str, fields: str) -> None:
    """Estimate, and print how much memory that took at its height."""
    estimate(Path(path), EngineConfig(n_threads=1, n_threads_batch=1, n_ctx=64), 1)
    before = peak_bytes()
    found = estimate(
        Path(path), EngineConfig(n_threads=1, n_threads_batch=1, **json.loads(fields)), 1
    )
    print(json.dumps({"total": found.total_bytes, "peak_growth": peak_bytes() - before}))


def peak_bytes() -> int:
    """What this process had in memory at its height."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
