"""`doctor` tells all that a bug report needs, and what is wrong, and never dies of it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import llamad_trio.doctor
from llamad_trio.daemon.config import DEFAULT_SOCKET
from llamad_trio.preflight import store
from llamad_trio.preflight.advice import available_sets
from llamad_trio.system.host import physical_cores

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Break = Callable[[str, str], Path]


def doctor(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llamad_trio", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def report() -> tuple[int, dict[str, Any]]:
    done = doctor("--json")
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def test_it_tells_what_is_here() -> None:
    status, told = report()
    works = told["use_extra_bufts"] is True
    assert (status, told["problems"] == []) == ((0, True) if works else (1, False))
    assert told["packages"]["llama-cpp-python"]
    assert told["packages"]["trio"]
    assert told["llama_cpp"]
    assert told["built_for"]
    assert set(told["cpu_has"]) <= set(available_sets(store.cpu_flags()))
    assert told["cores"]["physical"] == physical_cores()
    assert told["memory"]["total"] >= told["memory"]["available"] > 0
    assert told["open_files"] > 0
    assert [device["kind"] for device in told["devices"] if device["kind"] == "CPU"] == ["CPU"]
    assert {"1", str(physical_cores())} == set(told["speeds"])
    assert all(speed > 0 for speed in told["speeds"].values())
    assert told["socket"]["path"] == DEFAULT_SOCKET


def test_the_table_has_it_all() -> None:
    done = doctor()
    names = [line.split("  ")[0] for line in done.stdout.splitlines() if line]
    for name in ("python", "CPU", "packages", "llama.cpp", "cores", "memory", "devices", "speed"):
        assert name in names
    assert "nothing is wrong" in done.stdout or "wrong: " in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("where", "how", "says"),
    [
        ("extra buffers", "undefined instruction", "without them, more slowly, it does"),
        ("compute", "abort", "llama.cpp does not work on this machine: SIGABRT"),
    ],
)
def test_a_library_that_kills_is_told_with_what_mends_it(
    broken: Break, where: str, how: str, says: str
) -> None:
    broken(where, how)
    status, told = report()
    assert status == 1
    (problem,) = told["problems"]
    assert says in problem
    assert "pip install --force-reinstall" in problem
    assert told["use_extra_bufts"] is (False if where == "extra buffers" else None)
    assert bool(told["speeds"]) is (where == "extra buffers")
    assert told["cores"]["logical"] >= 1


def test_a_library_that_cannot_be_loaded_is_told(library_instead: Break) -> None:
    folder = library_instead("nowhere", "")
    status, told = report()
    assert status == 1
    assert "could not be tried" in told["problems"][0]
    assert (folder / "libllama.so").exists()
    assert told["llama_cpp"] == ""


def test_what_was_found_earlier_is_not_believed(cache: Path) -> None:
    report()
    assert not cache.exists()


def test_an_engine_with_other_settings_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAD_N_THREADS", "1")
    monkeypatch.setenv("LLAMAD_N_THREADS_BATCH", "1")
    _, told = report()
    assert list(told["speeds"]) == ["1"]


async def test_it_can_be_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLAMAD_MODELS_DIR", str(tmp_path))
    found = await llamad_trio.doctor.examine_machine()
    assert found.models == {"folder": str(tmp_path), "installed": []}
