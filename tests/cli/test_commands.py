"""The command line as a newcomer meets it: real processes, real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import TinyModels


def run(
    *args: str, stdin: str | bytes | None = None, **env: str
) -> subprocess.CompletedProcess[bytes]:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    return subprocess.run(
        [sys.executable, "-m", "llamad_trio", *args],
        input=b"" if data is None else data,
        capture_output=True,
        env={**os.environ, "LLAMAD_N_THREADS": "1", **env},
        timeout=120,
        check=False,
    )


def test_complete_prints_the_text_and_stats(smollm2_path: Path) -> None:
    args = ("complete", "Say hello", "-m", str(smollm2_path), "--seed", "1", "-n", "6")
    plain = run(*args, "--stats")
    assert plain.returncode == 0
    assert plain.stdout.strip()
    assert b"prompt tokens" in plain.stderr
    as_json = json.loads(run(*args, "--json").stdout)
    assert as_json["text"].strip() == plain.stdout.decode().strip()
    assert as_json["generated_tokens"] <= 6


def test_the_prompt_can_be_piped(tiny_model: TinyModels) -> None:
    args = ("complete", "-m", str(tiny_model("attention")), "--seed", "1", "-n", "8", "--json")
    piped = json.loads(run(*args, stdin="Say hello").stdout)
    given = json.loads(run(*args, "Say hello").stdout)
    assert piped["text"] == given["text"]


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (("complete", "x", "-m", "/no/such/file.gguf"), 1, b"no such file"),
        (("complete", "x", "-m", "smollm2-135n"), 1, b"smollm2-135m"),
        (("complete", "x", "--temperature", "hot"), 2, b"temperature"),
        (("nonsense",), 2, b"No such command"),
        (("inspect", "/"), 1, b"directory"),
        (("pull", "nonsense"), 1, b"nonsense"),
    ],
)
def test_an_error_is_one_line(args: tuple[str, ...], status: int, message: bytes) -> None:
    result = run(*args)
    assert result.returncode == status
    assert message in result.stderr
    assert b"Traceback" not in result.stderr
    if status == 1:
        assert len(result.stderr.splitlines()) == 1


def test_a_prompt_that_is_no_text_is_one_line(tiny_model: TinyModels) -> None:
    result = run("complete", "-m", str(tiny_model("attention")), stdin=b"\xff\xfe")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1


def test_ctrl_c_stops_at_once_with_130(tiny_model: TinyModels) -> None:
    model = str(tiny_model("attention", n_ctx_train=100_000))
    args = ["complete", "the cat", "-m", model, "-n", "90000", "--raw"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "llamad_trio", *args, "--temperature", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "LLAMAD_N_THREADS": "1", "LLAMAD_N_CTX": "100000"},
    )
    assert process.stdout is not None
    assert process.stdout.read(1)  # it is generating
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == b""


def test_a_reader_that_leaves_ends_it_quietly(tiny_model: TinyModels) -> None:
    model = str(tiny_model("attention", n_ctx_train=100_000))
    args = ["complete", "the cat", "-m", model, "-n", "90000", "--raw"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "llamad_trio", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "LLAMAD_N_THREADS": "1", "LLAMAD_N_CTX": "100000"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    assert errors == b""


def test_inspect_tells_what_a_file_is(tiny_model: TinyModels) -> None:
    path = tiny_model("hybrid")
    info = json.loads(run("inspect", str(path), "--json").stdout)
    assert info["architecture"] == "lfm2"
    assert info["can_rewind"] is False
    assert info["file_bytes"] == path.stat().st_size
    table = run("inspect", str(path)).stdout.decode()
    assert info["identity"] in table
    assert run("inspect", str(path), "--template").stdout.decode().strip()


def test_bench_reports_ratios(tiny_model: TinyModels) -> None:
    args = (
        "--json",
        "-c",
        "1",
        "-c",
        "2",
        "--prompt-tokens",
        "16",
        "--tokens",
        "8",
        "--pairs",
        "1",
    )
    report = json.loads(run("bench", str(tiny_model("attention")), *args).stdout)
    assert [row["concurrency"] for row in report["rows"]] == [1, 2]
    for row in report["rows"]:
        assert row["decode_ratio"] > 0
        assert row["raw_decode_tps"] > 0
        assert row["ttft_s"] > 0


def test_bench_tells_what_reusing_a_prefix_is_worth(tiny_model: TinyModels) -> None:
    args = ("--prefix", "--json", "--prompt-tokens", "64", "--pairs", "1")
    report = json.loads(run("bench", str(tiny_model("attention")), *args).stdout)
    reused = {row["case"]: row["cached_tokens"] for row in report["rows"]}
    assert reused == {
        "cold": 0,
        "warm, same prompt": 83,
        "warm, changed suffix": 64,
        "warm, beside the first": 83,
        "restored from RAM": 83,
        "restored from disk": 83,
    }


def test_help_and_import_load_neither_trio_nor_llama_cpp() -> None:
    code = (
        "import sys, llamad_trio, llamad_trio.cli\n"
        "print([m for m in ('trio', 'llama_cpp', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stdout.strip() == b"[]"
    assert b"complete" in run("--help").stdout
