"""Several engines in one program, and engines in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
from pathlib import Path

import trio

from llamad_trio import (
    EngineLike,
    EngineSpec,
    LlamadError,
    Request,
    RestartPolicy,
    open_engine,
    open_models,
)
from llamad_trio.manifest import known_model, resolve_model

PAIRS = 5
OTHER = "gemma3-270m"


async def _seconds(engines: list[tuple[EngineLike, int]], n_tokens: int = 64) -> float:
    """Seconds that streams take, so many of each engine at once."""

    async def read(eng: EngineLike, index: int) -> None:
        request = Request(
            f"{index} One, two, three, ", raw=True, temperature=0, max_tokens=n_tokens
        )
        async with eng.stream(request) as pieces:
            async for _ in pieces:
                pass

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for eng, n_streams in engines:
            for index in range(n_streams):
                nursery.start_soon(read, eng, index)
    return trio.current_time() - began


def _other() -> str:
    known_model(OTHER)
    return str(resolve_model(OTHER))


async def neighbour_ratio(model: str) -> dict[str, float]:
    """Speed beside an idle engine on the same lane, against alone, in turns."""
    ratios = []
    for _ in range(PAIRS):
        async with open_engine(model, kv_cache=False) as eng:
            await _seconds([(eng, 1)])
            alone = await _seconds([(eng, 1)])
            async with open_engine(_other()):
                await _seconds([(eng, 1)])
                ratios.append(alone / await _seconds([(eng, 1)]))
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
            await _seconds([(one, 1)], 8)
            await _seconds([(two, 1)], 8)
            in_turn = await _seconds([(one, 1)]) + await _seconds([(two, 1)])
        await trio.sleep(11)
        async with (
            open_engine(model, kv_cache=False, lane="own", n_threads=1) as one,
            open_engine(_other(), kv_cache=False, lane="own", n_threads=1) as two,
        ):
            await _seconds([(one, 1), (two, 1)], 8)
            ratios.append(in_turn / await _seconds([(one, 1), (two, 1)]))
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
            await _seconds([(apart, n_streams)])
            await _seconds([(here, n_streams)])
            for _ in range(PAIRS):
                through = await _seconds([(apart, n_streams)])
                ratios[n_streams].append(await _seconds([(here, n_streams)]) / through)
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
