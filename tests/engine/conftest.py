from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engine.sessions import opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from llamad_trio import Engine, Session
    from tests.models import Kind, TinyModels


@pytest.fixture
def path(tiny_model: TinyModels, kind: Kind) -> Path:
    """A tiny model of the kind of memory that the test is about."""
    return tiny_model(kind)


@pytest.fixture
async def exact(tiny_path: Path) -> AsyncIterator[Engine]:
    async with opened(tiny_path) as engine:
        yield engine


@pytest.fixture
async def session(exact: Engine) -> AsyncIterator[Session]:
    async with exact.session() as session:
        yield session
