"""Every example runs as it stands."""

from __future__ import annotations

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
EXAMPLES = sorted(p for p in FOLDER.glob("*.py") if p.stem not in ASK_A_DAEMON)


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


def test_program_uses_a_daemon_s_engine(daemon: str) -> None:
    output = run(sys.executable, str(FOLDER / "remote.py"), daemon)
    assert "Review(sentiment=" in output
    assert output.endswith(("-- out of time --", "-- done --"))


def test_client_of_the_standard_library_asks_a_daemon(daemon: str) -> None:
    assert run(sys.executable, str(FOLDER / "client.py"), daemon, "Tell me a joke")


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node here")
def test_client_of_node_asks_a_daemon(daemon: str) -> None:
    assert run("node", str(FOLDER / "client.mjs"), daemon, "Tell me a joke")
