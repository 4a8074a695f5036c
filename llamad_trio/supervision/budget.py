"""What the models of one program may take in memory together."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import ProtocolError
from llamad_trio.memory import check_budget, estimate_memory, total_memory

AUTO_SHARE = 0.8
"""What is left is for the program itself, and for what the estimate does not see."""


class Budget:
    """Who holds how much of a number of bytes.

    Args:
        limit: the bytes; `"auto"` is 80 % of what the machine or the cgroup has, `None` no
            limit.

    Raises:
        ProtocolError: the limit is something else, or negative.
    """

    def __init__(self, limit: int | Literal["auto"] | None) -> None:
        if limit == "auto":
            limit = int(AUTO_SHARE * total_memory())
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
            raise ProtocolError(f'memory_budget_bytes must be bytes or "auto", not {limit!r}')
        if limit is not None and limit < 0:
            raise ProtocolError("memory_budget_bytes must not be negative")
        self._limit = limit
        self._held: Counter[str] = Counter()

    @asynccontextmanager
    async def hold(self, name: str, model: str, config: EngineConfig) -> AsyncIterator[None]:
        """Hold what a model needs inside the block.  A checkpoint if there is a limit.

        Raises:
            InsufficientMemory: there is not so much left.
            ModelLoadError: the file cannot be read.
        """
        if self._limit is None:
            yield
            return
        need = (await estimate_memory(model, config)).total_bytes
        check_budget(need, self._limit, +self._held)
        self._held[name] += need
        try:
            yield
        finally:
            self._held[name] -= need
