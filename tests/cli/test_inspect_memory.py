"""`inspect` tells what an engine would take in memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from llamad_trio import EngineConfig
from llamad_trio.memory import estimate_memory
from tests.cli.test_commands import CommandLine
from tests.models import TinyModels


@pytest.mark.parametrize(
    ("options", "fields"),
    [((), {}), (("--n-ctx", "999", "--n-slots", "9"), {"n_ctx": 999, "n_slots": 9})],
)
def test_inspect_tells_the_estimate_for_a_config(
    command_line: CommandLine,
    tiny_model: TinyModels,
    options: tuple[str, ...],
    fields: dict[str, Any],
) -> None:
    path = tiny_model("hybrid")
    told = json.loads(command_line("inspect", str(path), "--json", *options).out)["memory"]
    found = trio.run(estimate_memory, path, EngineConfig(n_threads=1, n_threads_batch=1, **fields))
    assert told.pop("total_bytes") == found.total_bytes == sum(told.values())
    assert told == {
        "weights_bytes": found.weights_bytes,
        "kv_bytes": found.kv_bytes,
        "compute_bytes": found.compute_bytes,
        "overhead_bytes": found.overhead_bytes,
    }


def test_the_table_says_for_what_the_memory_is(
    command_line: CommandLine, tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tiny_model("attention"))
    by_default = command_line("inspect", path).out
    assert "2,048 tokens in the pool and 4 slots" in by_default  # what it was trained for
    monkeypatch.setenv("LLAMAD_N_CTX", "1500")
    table = command_line("inspect", path, "--n-slots", "7").out
    (line,) = [line for line in table.splitlines() if line.startswith("memory ")]
    assert "1,500 tokens" in line
    assert "7 slots" in line


@pytest.mark.parametrize("option", ["--n-ctx", "--n-slots"])
def test_a_number_that_makes_no_sense_is_wrong_usage(
    command_line: CommandLine, tiny_model: TinyModels, option: str
) -> None:
    assert command_line("inspect", str(tiny_model("attention")), option, "0").status == 2
