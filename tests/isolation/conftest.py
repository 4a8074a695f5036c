"""The processes of isolated engines, as the tests see them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llamad_trio.isolation import isolation as isolation_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


ROOT = Path(__file__).parents[2]


def children(pid: int | str = "self") -> set[int]:
    """A process's children that have not been waited for, whichever thread has started them."""
    return {
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    }


def exists(pid: int) -> bool:
    """Whether the process runs: not a zombie either."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def n_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def child() -> Iterator[Callable[[], int]]:
    """The process of the isolated engine; afterwards there must be none."""
    before = children()

    def pid_of_child() -> int:
        (pid,) = children() - before
        return pid

    yield pid_of_child
    assert children() <= before


@pytest.fixture
def child_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Run another program as the engine's process."""

    def use(program: str) -> None:
        script = tmp_path / "child.py"
        script.write_text(program)
        monkeypatch.setattr(isolation_module, "COMMAND", (sys.executable, str(script)))
        monkeypatch.setenv("PYTHONPATH", str(ROOT))

    return use
