"""Every example runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, smollm2_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(example), str(smollm2_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(example.parent.parent), "LLAMAD_N_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert result.stderr == ""
