"""Several engines in one program, and engines in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
from pathlib import Path

import trio

from llamad_trio import EngineSpec, LlamadError, open_engine, open_models
from tests.benchmarks.streams import seconds_of, speed_ratios

PAIRS = 5
OTHER = "gemma3-270m"


async def neighbour_ratio(model: str) -> dict[str, float]:
    """Speed beside an idle engine on the same lane, against alone, in turns."""
    ratios = []
    for _ in range(PAIRS):
        async with open_engine(model, kv_cache=False) as eng:
            await seconds_of([(eng, 1)])
            alone = await seconds_of([(eng, 1)])
            async with open_engine(OTHER):
                await seconds_of([(eng, 1)])
                ratios.append(alone / await seconds_of([(eng, 1)]))
    return {"ratio": statistics.median(ratios)}


async def isolation_ratio(model: str) -> dict[str, float]:
    """Tokens/s of an engine in a process of its own, against in this one, in turns."""
    async with (
        open_engine(model, isolation="process", n_slots=8, kv_cache=False) as apart,
        open_engine(model, n_slots=8, kv_cache=False) as here,
    ):
        return await speed_ratios(apart, here, PAIRS)


async def restart_delay(model: str) -> dict[str, float]:
    """From the kill of an engine's process to the first token of a request that waits, beyond
    what a load takes.  Each time it is the model's first failure."""
    beyond = []
    for _ in range(PAIRS):
        began = trio.current_time()
        async with open_models({"a": EngineSpec(model, isolation="process")}) as models:
            await models.load("a")
            load_s = trio.current_time() - began
            _kill_children()
            with contextlib.suppress(LlamadError):
                await models.complete("x", max_tokens=1)
            began = trio.current_time()
            await models.complete("x", max_tokens=1)
            beyond.append(trio.current_time() - began - load_s)
    return {"median_s": statistics.median(beyond), "max_s": max(beyond)}


def _kill_children() -> None:
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
