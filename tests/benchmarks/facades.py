"""What it costs to read a stream outside of Trio, against the same engine read inside."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

import trio

from llamad_trio import Engine, blocking, open_engine
from tests.benchmarks.streams import N_TOKENS, count_to, seconds_of

PAIRS = 15


def _read_outside(eng: blocking.BlockingEngine, n_streams: int) -> None:
    def read(index: int) -> None:
        with eng.stream(count_to(N_TOKENS, index)) as pieces:
            for _ in pieces:
                pass

    if n_streams == 1:
        read(0)
        return
    with ThreadPoolExecutor(n_streams) as pool:
        list(pool.map(read, range(n_streams)))


def _seconds(read: Callable[[], object]) -> float:
    began = time.perf_counter()
    read()
    return time.perf_counter() - began


def _ratios(model: str) -> dict[str, float]:
    engines: list[tuple[Engine, trio.lowlevel.TrioToken]] = []

    @asynccontextmanager
    async def opened() -> AsyncIterator[Engine]:
        async with open_engine(model, n_slots=8, kv_cache=False) as engine:
            engines.append((engine, trio.lowlevel.current_trio_token()))
            yield engine

    ratios: dict[int, list[float]] = {1: [], 8: []}
    # One engine for both: two would compute on two lanes, which slows down each of them.
    with blocking.open_with(opened) as outside:
        inside, token = engines[0]
        for n_streams, of_n in ratios.items():
            read_outside = partial(_read_outside, outside, n_streams)
            streams = [(inside, n_streams)]
            read_inside = partial(trio.from_thread.run, seconds_of, streams, trio_token=token)
            read_outside()
            read_inside()
            for turn in range(PAIRS):
                # Neither is always the first: the processor's clock changes in the midst.
                order = (read_outside, read_inside)[:: 1 if turn % 2 else -1]
                seconds = {read: _seconds(read) for read in order}
                of_n.append(seconds[read_inside] / seconds[read_outside])
    return {f"at {n}": statistics.median(of_n) for n, of_n in ratios.items()}


async def blocking_ratio(model: str) -> dict[str, float]:
    """Tokens/s of blocking streams, each in a thread of its own, against the same in Trio."""
    return await trio.to_thread.run_sync(_ratios, model)
