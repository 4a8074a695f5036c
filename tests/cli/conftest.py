from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from llamad_trio.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Iterator


class Ended(NamedTuple):
    """How a command has ended: its exit status, and what it wrote."""

    status: object
    out: str
    err: str


CommandLine = Callable[..., Ended]


@pytest.fixture
def command_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[CommandLine]:
    """Runs a command in this process: a new one takes a second for its imports."""
    monkeypatch.setenv("LLAMAD_N_THREADS", "1")
    monkeypatch.setenv("LLAMAD_N_THREADS_BATCH", "1")

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["llamad-trio", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        return Ended(left.value.code, *capfd.readouterr())

    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield run


def run_process(
    *arguments: str, stdin: bytes = b"", **env: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "llamad_trio", *arguments],
        input=stdin,
        capture_output=True,
        env={**os.environ, "LLAMAD_N_THREADS": "1", **env},
        timeout=120,
        check=False,
    )
