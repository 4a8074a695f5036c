"""A program that opens and closes a model again and again does not grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from tests.apart import run_apart
from tests.llama.growth import print_reopened

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20


@pytest.mark.parametrize("n_opens", [12, pytest.param(100, marks=pytest.mark.slow)])
async def test_it_grows_by_less_than_5_mib_after_the_sixth_time(
    smollm2_path: Path, n_opens: int
) -> None:
    sizes = await trio.to_thread.run_sync(
        run_apart, print_reopened, str(smollm2_path), str(n_opens)
    )
    assert len(sizes) == n_opens
    assert max(sizes[6:]) - sizes[5] < 5 * MIB
