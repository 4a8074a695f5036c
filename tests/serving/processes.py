"""How the tests of a daemon's socket run functions of `socket_processes`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parents[2]
HANG_S = 60
"""Far more than any test takes."""

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux does this")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def start(function: Callable[..., None], *args: object) -> subprocess.Popen[str]:
    """Run a function of `socket_processes`, with its arguments as text, in a new process."""
    name = function.__name__
    code = f"import sys; from {function.__module__} import {name} as f; f(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def output_of(function: Callable[..., None], *args: object) -> list[str]:
    process = start(function, *args)
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    return output.splitlines()


@contextmanager
def running(function: Callable[..., None], *args: object) -> Iterator[subprocess.Popen[str]]:
    """The same, from its first line of output on; killed at the end if it still runs."""
    process = start(function, *args)
    try:
        assert stream_of(process.stdout).readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def stream_of(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
