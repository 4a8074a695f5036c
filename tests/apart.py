"""Functions that are called in a fresh process, for what a process has done before shows in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_apart(function: Callable[..., None], *args: str) -> Any:
    """Call a function in a fresh process; return what it prints, as JSON."""
    name = function.__name__
    code = f"import sys; from {function.__module__} import {name}; {name}(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return json.loads(done.stdout)
