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
    from collections.abc import Awaitable, Callable, Sequence
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


def run_without_hanging(
    test: Callable[[], Awaitable[None]],
    *,
    clock: trio.abc.Clock | None,
    instruments: Sequence[trio.abc.Instrument],
) -> None:
    """`trio.run` of a test with its fixtures, which ends one that hangs, on the real clock."""

    async def run() -> None:
        with trio.fail_after(HANG_S):
            await test()

    trio.run(run if clock is None else test, clock=clock, instruments=instruments)


@pytest.fixture
def sock(tmp_path: Path) -> Path:
    """Where to listen."""
    return tmp_path / "d.sock"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not isinstance(item, pytest.Function) or not inspect.iscoroutinefunction(item.obj):
            continue
        if item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.trio(run=run_without_hanging))


def pytest_configure() -> None:
    """Have programs that tests start say nothing of special kernels that fail on this machine."""
    try:
        config = trio.run(proven_config, EngineConfig.from_env(), "tests")
    except ModelLoadError as error:
        pytest.exit(str(error), returncode=1)
    if config.use_extra_bufts is False:
        os.environ["LLAMAD_USE_EXTRA_BUFTS"] = "0"
