"""Statistics of this moment, also of an engine in another process.

Decides how long to wait for them.  `RemoteEngine.stats` is what was told last; here it is told
again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol, runtime_checkable

import trio

from llamad_trio.core.errors import LlamadError
from llamad_trio.core.info import EngineStats

REFRESH_S = 1.0
"""How long an engine has to answer, in seconds."""


@runtime_checkable
class _Refreshable(Protocol):
    async def refresh(self) -> EngineStats: ...


async def refresh_if_possible(engine: object) -> None:
    """Call `refresh`, if an engine has it, for its `stats()` to be of this moment.

    A checkpoint.  If nobody answers within `REFRESH_S`, they stay what they were.
    """
    await trio.lowlevel.checkpoint()
    if isinstance(engine, _Refreshable):
        with trio.move_on_after(REFRESH_S), suppress(LlamadError):
            await engine.refresh()


async def refresh_all(engines: Iterable[object]) -> None:
    """`refresh_if_possible` for several engines, all at once.  A checkpoint."""
    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(refresh_if_possible, engine)
