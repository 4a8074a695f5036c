"""How long streams take, and how two ways to have them compare."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import trio

from llamad_trio import Engine, EngineLike, Request
from tests.support import side_by_side

N_TOKENS = 64


def count_to(n_tokens: int, index: int = 0) -> Request:
    """A request for so many tokens; no two of another index share a prefix."""
    return Request(f"{index} One, two, three, ", raw=True, temperature=0, max_tokens=n_tokens)


async def read_through(eng: EngineLike, request: Request) -> None:
    """Read a stream to its end."""
    async with eng.stream(request) as pieces:
        async for _ in pieces:
            pass


async def seconds_of(engines: Sequence[tuple[EngineLike, int]], n_tokens: int = N_TOKENS) -> float:
    """Seconds that streams take, so many of each engine at once."""

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for eng, n_streams in engines:
            for index in range(n_streams):
                nursery.start_soon(read_through, eng, count_to(n_tokens, index))
    return trio.current_time() - began


async def speed_ratio(
    ours: Sequence[EngineLike],
    theirs: Sequence[EngineLike],
    n_streams: int,
    n_pairs: int,
    n_tokens: int = N_TOKENS,
) -> float:
    """Our tokens/s against theirs, so many streams of each: the median of pairs.

    Neither is always the first of a pair: the processor's clock changes in the midst.
    """
    ratios = []
    for i in range(n_pairs):
        seconds: dict[bool, float] = {}
        for is_ours in (False, True) if i % 2 else (True, False):
            engines = [(engine, n_streams) for engine in (ours if is_ours else theirs)]
            seconds[is_ours] = await seconds_of(engines, n_tokens)
        ratios.append(seconds[False] / seconds[True])
    return statistics.median(ratios)


async def speed_ratios(ours: EngineLike, theirs: EngineLike, n_pairs: int) -> dict[str, float]:
    """Our tokens/s against theirs, at 1 and at 8 streams, once both have computed."""
    ratios = {}
    for n_streams in (1, 8):
        await seconds_of([(ours, n_streams)])
        await seconds_of([(theirs, n_streams)])
        ratios[f"at {n_streams}"] = await speed_ratio([ours], [theirs], n_streams, n_pairs)
    return ratios


async def complete_all(eng: Engine, requests: Sequence[Request]) -> None:
    """Complete all of them at once."""
    await side_by_side(partial(eng.complete, request) for request in requests)
