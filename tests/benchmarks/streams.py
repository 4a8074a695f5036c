"""How long streams take: what several measurements compare."""

from __future__ import annotations

import trio

from llamad_trio import EngineLike, Request

__all__ = ["seconds_of"]


async def seconds_of(engines: list[tuple[EngineLike, int]], n_tokens: int = 64) -> float:
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
