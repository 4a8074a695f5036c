from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from tests.daemon.support import HANG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def no_hang() -> AsyncIterator[None]:
    """Ends a test that hangs.  Only an asynchronous test can have it: it is not automatic."""

    async def watch() -> None:
        await trio.sleep(HANG_S)
        raise AssertionError(f"the test still runs after {HANG_S} s")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        yield
        nursery.cancel_scope.cancel()


@pytest.fixture
def sock(tmp_path: Path, no_hang: None) -> Path:
    """Where to listen, for asynchronous tests."""
    return tmp_path / "d.sock"
