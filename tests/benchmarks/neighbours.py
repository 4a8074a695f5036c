"""An engine that chooses its threads, against one that always computes with all of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import trio

from llamad_trio import EngineConfig, EngineLike, open_engine
from tests.benchmarks.streams import seconds_of, speed_ratio

QUIET_PAIRS = 15
BUSY_PAIRS = 5
RECOVERIES = 5
N_TOKENS = 192
FEW_TOKENS = 32
"""Two processes with a thread for each core, both, take up to half a second for a token."""
SETTLES_S = 2.0
"""For the scheduler to have moved everybody, and the engine to have noticed."""


async def busy_neighbour(model: str) -> dict[str, float]:
    """Tokens a second, adaptive against fixed, in turns of alternating order: on a quiet machine
    and beside one busy process, at 1 and at 4 streams; with two engines in two processes at once.

    And how many seconds after the neighbour has gone it computes with all threads again.
    """
    found: dict[str, float] = {}
    adaptive = EngineConfig(kv_cache=False, n_slots=4)
    async with (
        open_engine(model, adaptive) as ours,
        open_engine(model, adaptive, adaptive_threads=False) as fixed,
    ):
        # On one lane: a second one would be a neighbour, too.
        for n_streams in (1, 4):
            found[f"quiet at {n_streams}"] = await speed_ratio(
                [ours], [fixed], n_streams, QUIET_PAIRS, N_TOKENS
            )
        with _busy_process():
            await _generate([ours], 1, for_s=SETTLES_S)
            for n_streams in (1, 4):
                found[f"busy at {n_streams}"] = await speed_ratio(
                    [ours], [fixed], n_streams, BUSY_PAIRS, N_TOKENS
                )
        back_s = []
        for _ in range(RECOVERIES):
            with _busy_process():
                await _generate([ours], 1, for_s=SETTLES_S)
                assert ours.stats().n_threads < (ours.config.n_threads or 0), "it noticed nothing"
            back_s.append(await _seconds_until_all_compute(ours))
        found["back after, s"] = max(back_s)
    found["two processes"] = await _two_processes(model, adaptive)
    return found


async def _two_processes(model: str, config: EngineConfig) -> float:
    async with AsyncExitStack() as stack:

        async def opened(**fields: Any) -> EngineLike:
            engine = open_engine(model, config, isolation="process", **fields)
            return await stack.enter_async_context(engine)

        ours = [await opened(), await opened()]
        fixed = [await opened(adaptive_threads=False), await opened(adaptive_threads=False)]
        await _generate(ours, 1, for_s=SETTLES_S)
        return await speed_ratio(ours, fixed, 1, BUSY_PAIRS, FEW_TOKENS)


async def _generate(engines: Sequence[EngineLike], n_streams: int, *, for_s: float) -> None:
    with trio.move_on_after(for_s):
        while True:
            await seconds_of([(engine, n_streams) for engine in engines], N_TOKENS)


async def _seconds_until_all_compute(engine: EngineLike) -> float:
    began = trio.current_time()
    while engine.stats().n_threads != engine.config.n_threads:
        await seconds_of([(engine, 1)], 16)
        if trio.current_time() > began + 30:
            return 30.0
    return trio.current_time() - began


@contextmanager
def _busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
