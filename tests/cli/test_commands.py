"""The command line as a newcomer meets it; in a process of its own where that is what matters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from llamad_trio import EngineConfig
from llamad_trio.core.errors import InferenceError
from llamad_trio.llama.raw_loop import RawLoop, Speed
from llamad_trio.memory import estimate_memory
from tests.cli.conftest import CommandLine, run_process
from tests.models import TinyModels

ROOT = Path(__file__).parents[2]

NO_SOCKET = "'/no/such.sock': there is no such socket"


def test_complete_prints_the_text_and_stats_of_a_prompt_given_or_piped(
    command_line: CommandLine, tiny_model: TinyModels
) -> None:
    args = ("complete", "-m", str(tiny_model("attention")), "--seed", "1", "-n", "8")
    given = command_line(*args, "Say hello", "--stats")
    assert given.status == 0
    assert given.out.strip()
    assert "prompt tokens" in given.err
    assert json.loads(command_line(*args, "Say hello", "--json").out)["text"] + "\n" == given.out
    piped = json.loads(run_process(*args, "--json", stdin=b"Say hello").stdout)
    assert piped["text"].strip() == given.out.strip()
    assert piped["generated_tokens"] == 8


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (("complete", "x", "-m", "/no/such/file.gguf"), 1, "no such file"),
        (("complete", "x", "-m", "smollm2-135n"), 1, "smollm2-135m"),
        (("complete", "x", "--temperature", "hot"), 2, "temperature"),
        (("nonsense",), 2, "No such command"),
        ((), 2, "inspect "),  # the help
        (("inspect", "/"), 1, "directory"),
        (("pull", "nonsense"), 1, "nonsense"),
        (("complete", "x", "--socket", "/no/such.sock"), 1, NO_SOCKET),
        (("top", "--once", "--socket", "/no/such.sock"), 1, NO_SOCKET),
        (("chat", "-m", "/no/such/file.gguf"), 1, "no such file"),
        (("chat", "--socket", "/no/such.sock"), 1, NO_SOCKET),
    ],
)
def test_an_error_is_one_line(
    command_line: CommandLine, args: tuple[str, ...], status: int, message: str
) -> None:
    ended = command_line(*args)
    assert ended.status == status
    assert message in ended.err
    assert "Traceback" not in ended.err
    if status == 1:
        assert len(ended.err.splitlines()) == 1
        assert ended.err.startswith("error: ")


def test_a_prompt_that_is_no_text_is_one_line(tiny_model: TinyModels) -> None:
    result = run_process("complete", "-m", str(tiny_model("attention")), stdin=b"\xff\xfe")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1


@contextmanager
def endless(tiny_model: TinyModels, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    """A `complete` that goes on and on, and has begun."""
    model = str(tiny_model("attention", n_ctx_train=100_000))
    command = ["complete", "the cat", "-m", model, "-n", "90000", "--raw", *args]
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "llamad_trio", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "LLAMAD_N_THREADS": "1", "LLAMAD_N_CTX": "100000"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        yield process


def test_ctrl_c_stops_at_once_with_130(tiny_model: TinyModels) -> None:
    with endless(tiny_model, "--temperature", "2") as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.strip()) == (130, b"")


def test_a_reader_that_leaves_ends_it_quietly(tiny_model: TinyModels) -> None:
    with endless(tiny_model) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


def test_ctrl_c_stops_a_plain_loop_of_bench(
    command_line: CommandLine, tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_run = RawLoop.run
    endings: list[str] = []

    def interrupted(self: RawLoop, prompts: Sequence[Sequence[int]], n_tokens: int) -> Speed:
        signal.raise_signal(signal.SIGINT)
        try:
            speed = whole_run(self, prompts, n_tokens)
        except InferenceError:
            endings.append("aborted")
            raise
        endings.append("went on to its end")
        return speed

    monkeypatch.setattr(RawLoop, "run", interrupted)
    ended = command_line("bench", str(tiny_model("attention")), "-c", "8", "--tokens", "512")
    assert ended.status == 130
    assert endings == ["aborted"]
    assert ended.err.strip() == "measuring 8 at once"


@pytest.mark.parametrize("start", ["module", "script"])
def test_ctrl_c_during_the_imports_is_130_too(start: str) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["llamad-trio"].partition(":")
    code = {
        "module": "import runpy; runpy.run_module('llamad_trio', run_name='__main__')",
        "script": f"from {module} import {function}; {function}()",
    }
    interrupt = (
        "import signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name == 'llamad_trio.cli.serve': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt)\n"
    )
    command = [sys.executable, "-c", interrupt + code[start]]
    result = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (130, b"")


def test_inspect_tells_what_a_file_is(command_line: CommandLine, tiny_model: TinyModels) -> None:
    path = tiny_model("hybrid")
    info = json.loads(command_line("inspect", str(path), "--json").out)
    assert info["architecture"] == "lfm2"
    assert info["can_rewind"] is False
    assert info["file_bytes"] == path.stat().st_size
    assert info["identity"] in command_line("inspect", str(path)).out
    assert command_line("inspect", str(path), "--template").out.strip()


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


def first_words(table: str) -> list[str]:
    """What stands in the first column of a table's rows."""
    return [line.split("│")[1].strip() for line in table.splitlines() if line.startswith("│")]


def test_bench_reports_ratios(
    command_line: CommandLine, tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shape = ["-c", "1", "-c", "2", "--prompt-tokens", "16", "--tokens", "8"]
    args = ("bench", str(tiny_model("attention")), *shape, "--pairs", "1", "--threads", "1")
    report = json.loads(command_line(*args, "--json").out)
    assert [row["concurrency"] for row in report["rows"]] == [1, 2]
    assert report["n_threads"] == 1
    for row in report["rows"]:
        assert row["decode_ratio"] > 0
        assert row["raw_decode_tps"] > 0
        assert row["ttft_s"] > 0
    table = command_line(*args).out
    assert "16 prompt + 8 tokens, medians of 1 pairs" in " ".join(table.split())
    assert first_words(table) == ["1", "2"]
    columns = {"decode": 1, "prefill": 1, "TTFT": 1, "raw": 3, "ratio": 2}
    assert {name: table.splitlines()[2].count(name) for name in columns} == columns


def test_bench_tells_what_reusing_a_prefix_is_worth(
    command_line: CommandLine, tiny_model: TinyModels
) -> None:
    shape = ["--prefix", "--prompt-tokens", "64", "--pairs", "1"]
    args = ("bench", str(tiny_model("attention")), *shape)
    report = json.loads(command_line(*args, "--json").out)
    reused = {row["case"]: row["cached_tokens"] for row in report["rows"]}
    assert reused == {
        "cold": 0,
        "warm, same prompt": 83,
        "warm, changed suffix": 64,
        "warm, beside the first": 83,
        "restored from RAM": 83,
        "restored from disk": 83,
    }
    assert first_words(command_line(*args).out) == list(reused)


def test_help_and_import_load_neither_trio_nor_llama_cpp(command_line: CommandLine) -> None:
    code = (
        "import sys, llamad_trio, llamad_trio.cli\n"
        "print([m for m in ('trio', 'llama_cpp', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stdout.strip() == b"[]"
    assert "complete" in command_line("--help").out
