from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llamad_trio import connect
from llamad_trio.testing import open_scripted_engine
from tests.remote.daemons import served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llamad_trio import Engine, RemoteEngine


@pytest.fixture
async def behind() -> AsyncIterator[Engine]:
    """An engine with a long reply."""
    async with open_scripted_engine("abcdefgh" * 2000, n_ctx=100_000) as engine:
        yield engine


@pytest.fixture
async def remote(sock: Path, behind: Engine) -> AsyncIterator[RemoteEngine]:
    """The same, on the other side of a socket."""
    async with served(sock, behind), connect(sock) as remote:
        yield remote
