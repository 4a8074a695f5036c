from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from llamad_trio import open_engine
from tests.engine.support import EXACT, ONE_THREAD

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from llamad_trio import Engine
    from tests.models import TinyModels

HANG_S = 120
"""Far more than any test takes: a test that is still running then hangs, and fails."""


@pytest.fixture(autouse=True)
async def no_hang() -> AsyncIterator[None]:
    async def watch() -> None:
        await trio.sleep(HANG_S)
        raise AssertionError(f"the test still runs after {HANG_S} s")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        yield
        nursery.cancel_scope.cancel()


@pytest.fixture
async def engine(smollm2_path: Path) -> AsyncIterator[Engine]:
    """SmolLM2, with the settings of nobody's environment."""
    async with open_engine(smollm2_path, ONE_THREAD) as engine:
        yield engine


@pytest.fixture
def tiny_path(tiny_model: TinyModels) -> Path:
    """A tiny attention model, which never ends a text of itself and has much room."""
    return tiny_model("attention", n_ctx_train=100_000)


@pytest.fixture
async def tiny(tiny_path: Path) -> AsyncIterator[Engine]:
    """An engine of the tiny attention model, which says to each what it says to it alone."""
    async with open_engine(tiny_path, EXACT, n_ctx=8192) as engine:
        yield engine
