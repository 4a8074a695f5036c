"""Several engines in one program, and engines in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
from pathlib import Path

import trio

from llamad_trio import (
    EngineSpec,
    LlamadError,
    RestartPolicy,
    open_engine,
    open_models,
)
from llamad_trio.manifest import known_model, resolve_model
from tests.benchmarks.streams import seconds_of

PAIRS = 5
OTHER = "gemma3-270m"


def _other() -> str:
    known_model(OTHER)
    return str(resolve_model(OTHER))


async def neighbour_ratio(model: str) -> dict[str, float]:
    """Speed beside an idle engine on the same lane, against alone, in turns."""
    ratios = []
    for _ in range(PAIRS):
        async with open_engine(model, kv_cache=False) as eng:
            await seconds_of([(eng, 1)])
            alone = await seconds_of([(eng, 1)])
            async with open_engine(_other()):
                await seconds_of([(eng, 1)])
                ratios.append(alone / await seconds_of([(eng, 1)]))
    return {"ratio": statistics.median(ratios)}


async def own_lanes(model: str) -> dict[str, float]:
    """Two engines at once on lanes of their own, against one after the other on all cores.

    Opened anew for each, with a pause: Trio keeps an idle thread for 10 s, libgomp a team for
    each thread that has computed, and a third team slows both others down.
    """
    ratios = []
    for _ in range(3):
        async with (
            open_engine(model, kv_cache=False) as one,
            open_engine(_other(), kv_cache=False) as two,
        ):
            await seconds_of([(one, 1)], 8)
            await seconds_of([(two, 1)], 8)
            in_turn = await seconds_of([(one, 1)]) + await seconds_of([(two, 1)])
        await trio.sleep(11)
        async with (
            open_engine(model, kv_cache=False, lane="own", n_threads=1) as one,
            open_engine(_other(), kv_cache=False, lane="own", n_threads=1) as two,
        ):
            await seconds_of([(one, 1), (two, 1)], 8)
            ratios.append(in_turn / await seconds_of([(one, 1), (two, 1)]))
        await trio.sleep(11)
    return {"ratio": statistics.median(ratios)}


async def isolation_ratio(model: str) -> dict[str, float]:
    """Tokens/s of an engine in a process of its own, against in this one, in turns."""
    ratios: dict[int, list[float]] = {1: [], 8: []}
    async with (
        open_engine(model, isolation="process", n_slots=8, kv_cache=False) as apart,
        open_engine(model, n_slots=8, kv_cache=False) as here,
    ):
        for n_streams in ratios:
            await seconds_of([(apart, n_streams)])
            await seconds_of([(here, n_streams)])
            for _ in range(PAIRS):
                through = await seconds_of([(apart, n_streams)])
                ratios[n_streams].append(await seconds_of([(here, n_streams)]) / through)
    return {f"at {n}": statistics.median(of_n) for n, of_n in ratios.items()}


async def restart_delay(model: str) -> dict[str, float]:
    """From the kill of an engine's process to the first token of a request that waits, beyond
    what a load takes."""
    spec = EngineSpec(model, isolation="process")
    async with open_models({"a": spec}, restart=RestartPolicy(jitter=0.0)) as models:
        beyond = []
        for _ in range(3):
            began = trio.current_time()
            await models.load("a")
            load_s = trio.current_time() - began
            _kill_children()
            with contextlib.suppress(LlamadError):
                await models.complete("x", max_tokens=1)
            began = trio.current_time()
            await models.complete("x", max_tokens=1)
            beyond.append(trio.current_time() - began - load_s)
            await models.unload("a")
    return {"median_s": statistics.median(beyond)}


def _kill_children() -> None:
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
