from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING

import pytest
import trio
from hypothesis import settings

from llamad_trio import EngineConfig, ModelLoadError
from llamad_trio.preflight.prove import proven_config
from tests.engines import engine, kept_smollm2, smollm2_is_kept, tiny, tiny_path
from tests.models import gemma3_path, smollm2_path, tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

__all__ = [
    "engine",
    "gemma3_path",
    "kept_smollm2",
    "smollm2_is_kept",
    "smollm2_path",
    "tiny",
    "tiny_model",
    "tiny_path",
]

HANG_S = 120
"""Far more than any test takes: a test that is still running then hangs, and fails."""

# For the tests that name no number themselves.
settings.register_profile("default run", max_examples=25, deadline=None)
settings.load_profile("default run")


@pytest.fixture
async def no_hang() -> AsyncIterator[None]:
    """Ends a test that hangs; every asynchronous test of the real clock has it."""

    async def watch() -> None:
        await trio.sleep(HANG_S)
        raise AssertionError(f"the test still runs after {HANG_S} s")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        yield
        nursery.cancel_scope.cancel()


@pytest.fixture
def sock(tmp_path: Path) -> Path:
    """Where to listen."""
    return tmp_path / "d.sock"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not isinstance(item, pytest.Function) or not inspect.iscoroutinefunction(item.obj):
            continue
        if not {"autojump_clock", "mock_clock"} & set(item.fixturenames):
            item.fixturenames.insert(0, "no_hang")


def pytest_configure() -> None:
    """Have programs that tests start say nothing of special kernels that fail on this machine."""
    try:
        config = trio.run(proven_config, EngineConfig.from_env(), "tests")
    except ModelLoadError as error:
        pytest.exit(str(error), returncode=1)
    if config.use_extra_bufts is False:
        os.environ["LLAMAD_USE_EXTRA_BUFTS"] = "0"
