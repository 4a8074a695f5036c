"""Two engines that generate at once, each on a lane of its own with its share of the cores."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from llamad_trio import EngineConfig, Lane
from llamad_trio.bench.speed import BesideLoop, open_beside_loop
from tests.benchmarks.several import OTHER
from tests.benchmarks.streams import seconds_of

ROUNDS = 3

TOGETHER_S = 3.0

THREAD_LEAVES_S = 11.0
"""Trio keeps an idle thread for 10 s, libgomp a team for each thread that has computed, and
one team more slows all others down."""


async def own_lanes(model: str) -> dict[str, float]:
    """Tokens of two engines at once on lanes of their own, a core each, against the same tokens

    - one after the other on the same lanes;
    - at once on one shared lane with all cores, where they take turns;
    - one after the other with all cores; and the same of plain loops, which is what llama.cpp
      has to gain there.

    Both generate all the time that is measured: how much each gets done in it is what is then
    asked of one after the other.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        async with _opened(model, n_threads=1, lanes=[Lane(), Lane()]) as sides:
            shares = await _shares(sides)
            apart_s = await _seconds(sides, shares, at_once=True)
            raw_apart_s = await _seconds(sides, shares, at_once=True, raw=True)
            in_turn_s = await _seconds(sides, shares, at_once=False)
            ratios["one after the other"].append(in_turn_s / apart_s)
        await trio.sleep(THREAD_LEAVES_S)
        async with _opened(model, n_threads=None, lanes=[Lane()] * 2) as sides:
            await _shares(sides)
            together_s = await _seconds(sides, shares, at_once=True)
            ratios["taking turns, all cores"].append(together_s / apart_s)
            in_turn_s = await _seconds(sides, shares, at_once=False)
            ratios["one after the other, all cores"].append(in_turn_s / apart_s)
            raw_in_turn_s = await _seconds(sides, shares, at_once=False, raw=True)
            ratios["the same of plain loops"].append(raw_in_turn_s / raw_apart_s)
        await trio.sleep(THREAD_LEAVES_S)
    return {name: statistics.median(values) for name, values in ratios.items()}


@asynccontextmanager
async def _opened(
    model: str, n_threads: int | None, lanes: Sequence[Lane]
) -> AsyncIterator[list[BesideLoop]]:
    config = EngineConfig(
        kv_cache=False, n_ctx=2048, n_threads=n_threads, n_threads_batch=n_threads
    )
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(open_beside_loop(name, config, lane))
            for name, lane in zip((model, OTHER), lanes, strict=True)
        ]


async def _stream(side: BesideLoop, n_tokens: int) -> None:
    await seconds_of([(side.engine, 1)], n_tokens)


async def _loop(side: BesideLoop, n_tokens: int) -> None:
    await side.run_loop([[1] * 8], n_tokens)


async def _shares(sides: Sequence[BesideLoop]) -> list[int]:
    """How many tokens each gets done while all generate."""
    for side in sides:
        await _stream(side, 8)
        await _loop(side, 8)
    before = [side.engine.stats().decode_tokens for side in sides]
    with trio.move_on_after(TOGETHER_S):
        await seconds_of([(side.engine, 1) for side in sides], 1500)
    return [side.engine.stats().decode_tokens - n for side, n in zip(sides, before, strict=True)]


async def _seconds(
    sides: Sequence[BesideLoop], shares: Sequence[int], *, at_once: bool, raw: bool = False
) -> float:
    generate = _loop if raw else _stream
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for side, n_tokens in zip(sides, shares, strict=True):
            if at_once:
                nursery.start_soon(generate, side, n_tokens)
            else:
                await generate(side, n_tokens)
    return trio.current_time() - began
