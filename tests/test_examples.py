"""Every example runs as it stands."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "LLAMAD_N_THREADS": "1"}

ASK_A_DAEMON = ("client", "remote")
OF_THEIR_OWN = (*ASK_A_DAEMON, "batch_pipeline", "pytest_real_model")
EXAMPLES = sorted(p for p in FOLDER.glob("*.py") if p.stem not in OF_THEIR_OWN)


def run(*command: str) -> str:
    """What a command prints; it must end well, and have nothing to complain of."""
    result = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.strip()


@pytest.fixture(scope="module")
def daemon(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a daemon that serves SmolLM2."""
    folder = tmp_path_factory.mktemp("daemon")
    path = str(folder / "d.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(folder / "n.sock"))
        manager.settimeout(60)
        process = subprocess.Popen(
            [sys.executable, "-m", "llamad_trio", "serve", str(smollm2_path), "--socket", path],
            env={**ENVIRONMENT, "NOTIFY_SOCKET": str(folder / "n.sock")},
            stderr=subprocess.DEVNULL,
        )
        try:
            assert manager.recv(64) == b"READY=1"
            yield path
        finally:
            process.terminate()
            assert process.wait(60) == 0


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, smollm2_path: Path) -> None:
    assert run(sys.executable, str(example), str(smollm2_path))


def test_batch_goes_on_where_it_was_stopped(smollm2_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for n in (5, 9):
        run(
            sys.executable,
            str(FOLDER / "batch_pipeline.py"),
            str(output),
            str(n),
            str(smollm2_path),
        )
        results = [json.loads(line) for line in output.read_text().splitlines()]
        assert sorted(result["number"] for result in results) == list(range(n))
        assert {result["sentiment"] for result in results} <= {"good", "bad"}


def test_application_is_tested_with_both_kinds_of_model(smollm2_path: Path) -> None:
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        str(FOLDER / "pytest_real_model.py"),
    )
    assert "2 passed" in run(*command)


def test_program_uses_a_daemon_s_engine(daemon: str) -> None:
    output = run(sys.executable, str(FOLDER / "remote.py"), daemon)
    assert "Review(sentiment=" in output
    assert output.endswith(("-- out of time --", "-- done --"))


def test_client_of_the_standard_library_asks_a_daemon(daemon: str) -> None:
    assert run(sys.executable, str(FOLDER / "client.py"), daemon, "Tell me a joke")


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node here")
def test_client_of_node_asks_a_daemon(daemon: str) -> None:
    assert run("node", str(FOLDER / "client.mjs"), daemon, "Tell me a joke")
