"""The numbers the project promises, each measured in one run.

    python -m tests.benchmarks.promises [MODEL] [--only NAME] [--json]

Machines are shared and noisy: ratios compare two things measured in turns, in the same
process.  Nothing here is a test; nothing fails when a number is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import trio

from llamad_trio import Engine, Request, open_engine
from llamad_trio.bench import TEXT
from llamad_trio.bench.prefix import run_prefix_bench
from llamad_trio.bench.speed import run_bench
from tests.benchmarks.constrained import constrained_streams, fixed_keys, gbnf_factor, schema_ratio
from tests.benchmarks.daemon import killed_client, socket_latency, socket_ratio
from tests.benchmarks.events import events_cost
from tests.benchmarks.facades import blocking_ratio
from tests.benchmarks.lanes import own_lanes
from tests.benchmarks.neighbours import busy_neighbour
from tests.benchmarks.several import isolation_ratio, neighbour_ratio, restart_delay
from tests.benchmarks.streams import complete_all, read_through

MIB = 1 << 20


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def prompt_of(eng: Engine, n_tokens: int, *, first: str = "") -> list[int]:
    return (await eng.tokenize(first + TEXT * (n_tokens // 8 + 1)))[:n_tokens]


async def decode_ratio(model: str) -> dict[str, float]:
    """Decode tokens/s through `stream` against the raw loop, at 1, 4 and 8 requests."""
    report = await run_bench(model, pairs=5, prompt_tokens=32, n_tokens=64)
    return {f"at {row.concurrency}": row.decode_ratio for row in report.rows}


async def abort_latency(model: str) -> dict[str, float]:
    """From the cancel of a 2,000-token prefill to the first token of the next request."""
    seconds = []
    async with open_engine(model, n_slots=1, kv_cache=False) as eng:
        long = Request(await prompt_of(eng, 2000), temperature=0)
        short = Request(await prompt_of(eng, 1), temperature=0, max_tokens=1)
        for _ in range(5):
            cancelled_at = 0.0
            async with trio.open_nursery() as nursery:
                scope = trio.CancelScope()

                async def prefill(scope: trio.CancelScope = scope) -> None:
                    with scope:
                        await eng.complete(long)

                nursery.start_soon(prefill)
                await trio.sleep(0.5)  # well inside the step
                async with eng.stream(short) as pieces:
                    scope.cancel()
                    cancelled_at = trio.current_time()
                    await pieces.result()
                    seconds.append(trio.current_time() - cancelled_at)
        aborted = eng.stats().aborted_steps
    return {"median_s": statistics.median(seconds), "max_s": max(seconds), "aborted": aborted}


async def loop_lag(model: str) -> dict[str, float]:
    """How late a task that sleeps 1 ms wakes, while 8 streams run and prompts arrive."""
    lags: list[float] = []
    async with open_engine(model, n_slots=8, kv_cache=False) as eng:
        prompts = [await prompt_of(eng, 200, first=f"{i} ") for i in range(8)]
        long_text = TEXT * 60

        async def measure() -> None:
            while True:
                due = trio.current_time() + 0.001
                await trio.sleep_until(due)
                lags.append(trio.current_time() - due)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(measure)
            async with trio.open_nursery() as readers:
                for prompt in prompts:
                    request = Request(prompt, temperature=0.8, max_tokens=96)
                    readers.start_soon(read_through, eng, request)
                for i in range(8):
                    await trio.sleep(0.2)
                    text = Request(f"{i} {long_text}", raw=True, max_tokens=8)
                    readers.start_soon(eng.complete, text)
            nursery.cancel_scope.cancel()
    return {"p50_ms": 1e3 * percentile(lags, 0.5), "p99_ms": 1e3 * percentile(lags, 0.99)}


async def joining_gap(model: str) -> dict[str, float]:
    """p99 gap between tokens of 3 streams while a 2,000-token prompt joins, against one
    whole 512-token step."""
    gaps: list[float] = []
    async with open_engine(model, n_slots=4, kv_cache=False) as eng:
        step = await eng.complete(Request(await prompt_of(eng, 512), max_tokens=1, temperature=0))
        joining = Request(await prompt_of(eng, 2000), max_tokens=1, temperature=0)
        joined = trio.Event()
        running = 0
        started = trio.Event()

        async def read(i: int) -> None:
            nonlocal running
            prompt = await prompt_of(eng, 32, first=f"{i} ")
            async with eng.stream(Request(prompt, temperature=0, max_tokens=600)) as pieces:
                await pieces.receive()
                running += 1
                if running == 3:
                    started.set()
                await started.wait()
                last = trio.current_time()
                async for _ in pieces:
                    now = trio.current_time()
                    gaps.append(now - last)
                    last = now
                    if joined.is_set():
                        return

        async with trio.open_nursery() as nursery:
            for i in range(3):
                nursery.start_soon(read, i)
            await started.wait()
            await eng.complete(joining)
            joined.set()
    gap_s = percentile(gaps, 0.99)
    return {"gap_s": gap_s, "step_s": step.ttft_s, "ratio": gap_s / step.ttft_s}


async def prefix_reuse(model: str) -> dict[str, float]:
    """TTFT with a 1,000-token prefix warm or restored, against cold."""
    report = await run_prefix_bench(model, rounds=3)
    return {row.case: row.ratio for row in report.rows if row.case != "cold"}


async def shared_prefill(model: str) -> dict[str, float]:
    """Prompt tokens computed for 8 simultaneous requests that share 1,000 tokens."""
    async with open_engine(model, n_slots=8) as eng:
        shared = await prompt_of(eng, 1000)
        prompts = [shared + await prompt_of(eng, 20, first=f"{i} ") for i in range(8)]
        await complete_all(eng, [Request(prompt, max_tokens=4) for prompt in prompts])
        return {"computed": eng.stats().prefill_tokens}


async def cache_cost(model: str) -> dict[str, float]:
    """Decode speed with the cache on against off, nothing to share."""
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(4):
        for kv_cache in speeds:
            async with open_engine(model, n_slots=4, kv_cache=kv_cache) as eng:
                prompts = [await prompt_of(eng, 32, first=f"{i} ") for i in range(4)]
                requests = [Request(prompt, temperature=0, max_tokens=96) for prompt in prompts]
                await complete_all(eng, requests)
                stats = eng.stats()
                speeds[kv_cache].append(stats.decode_tokens / stats.decode_s)
    ratios = [on / off for on, off in zip(speeds[True], speeds[False], strict=True)]
    return {"ratio": statistics.median(ratios)}


async def idle_cpu(model: str) -> dict[str, float]:
    """CPU time of an idle engine over 5 s."""
    async with open_engine(model) as eng:
        await eng.complete("Hello", max_tokens=4)
        await trio.sleep(0.5)
        before = time.process_time()
        await trio.sleep(5)
        return {"cpu_ms": 1e3 * (time.process_time() - before)}


async def reopen_growth(model: str) -> dict[str, float]:
    """Memory growth from the 6th to the 30th open and close."""
    sizes = []
    for _ in range(30):
        async with open_engine(model) as eng:
            await eng.complete("Hello", max_tokens=4)
        sizes.append(rss_bytes())
    return {"growth_mib": (sizes[29] - sizes[5]) / MIB}


async def memory_on_top(model: str) -> dict[str, float]:
    """Memory of an engine beyond its model file and its KV pool."""
    async with open_engine(model, n_slots=1, n_ctx=256):
        pass  # what Python and llama.cpp themselves need is not the engine's
    before = rss_bytes()
    with kv_sizes() as kv:
        async with open_engine(model) as eng:
            prompts = [await prompt_of(eng, 900, first=f"{i} ") for i in range(4)]
            await complete_all(eng, [Request(prompt, max_tokens=32) for prompt in prompts])
            grown = rss_bytes() - before
            file_bytes = eng.info.file_bytes
    on_top = grown - file_bytes - sum(kv) * MIB
    return {"on_top_mib": on_top / MIB, "file_mib": file_bytes / MIB, "kv_mib": sum(kv)}


@contextlib.contextmanager
def kv_sizes() -> Iterator[list[float]]:
    """The sizes in MiB of the KV pools that llama.cpp reports in its log."""
    sizes: list[float] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := re.search(r"KV buffer size = +([0-9.]+) MiB", record.getMessage()):
                sizes.append(float(found[1]))

    logger, reader = logging.getLogger("llamad_trio.llama_cpp"), Reader()
    level = logger.level
    logger.addHandler(reader)
    logger.setLevel(logging.DEBUG)
    try:
        yield sizes
    finally:
        logger.removeHandler(reader)
        logger.setLevel(level)


MEASUREMENTS: dict[str, tuple[Callable[[str], Awaitable[dict[str, float]]], str]] = {
    "decode_ratio": (decode_ratio, "at 1: 0.93, at 8: 0.95 at least"),
    "abort_latency": (abort_latency, "100 ms at most"),
    "loop_lag": (loop_lag, "p99 under 3 ms"),
    "joining_gap": (joining_gap, "ratio 0.25 at most"),
    "prefix_reuse": (prefix_reuse, "same 0.08, beside 0.15, RAM 0.15, disk 0.15 at most"),
    "shared_prefill": (shared_prefill, "1,250 tokens at most"),
    "cache_cost": (cache_cost, "0.98 at least"),
    "schema_ratio": (schema_ratio, "0.92 at least"),
    "fixed_keys": (fixed_keys, "1.0 at least"),
    "constrained_streams": (constrained_streams, "0.90 at least"),
    "gbnf_factor": (gbnf_factor, "none: for the record"),
    "socket_ratio": (socket_ratio, "0.95 at least"),
    "socket_latency": (socket_latency, "3 ms at most"),
    "killed_client": (killed_client, "100 ms at most"),
    "events_cost": (events_cost, "no reader 0.995, one reader 0.98 at least"),
    "blocking_ratio": (blocking_ratio, "0.97 at least"),
    "neighbour_ratio": (neighbour_ratio, "0.97 at least"),
    "busy_neighbour": (
        busy_neighbour,
        "quiet 0.97, busy 1.8, two processes 1.5 at least, back in 3 s at most",
    ),
    "own_lanes": (own_lanes, "1.3 at least"),
    "isolation_ratio": (isolation_ratio, "0.95 at least"),
    "restart_delay": (restart_delay, "0.5 s at most"),
    "idle_cpu": (idle_cpu, "under 20 ms"),
    "reopen_growth": (reopen_growth, "under 5 MiB"),
    "memory_on_top": (memory_on_top, "under 150 MiB"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--only", choices=MEASUREMENTS, action="append")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {}
    for name in options.only or MEASUREMENTS:
        measure, target = MEASUREMENTS[name]
        results[name] = trio.run(partial(measure, options.model))
        if not options.json:
            figures = ", ".join(f"{key} {value:.3f}" for key, value in results[name].items())
            print(f"{name:15} {figures}   (promised: {target})", flush=True)
    if options.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
