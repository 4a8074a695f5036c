"""Every example runs as it stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import trio

from llamad_trio import Engine, EngineClosed, EngineCrashed, PromptTooLong
from llamad_trio.testing import open_scripted_engine
from tests.models import TinyModels
from tests.serving.support import running_daemon

FOLDER = Path(__file__).parent.parent / "examples"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "LLAMAD_N_THREADS": "1"}

ASK_A_DAEMON = ("client", "remote")
OF_THEIR_OWN = (*ASK_A_DAEMON, "batch_pipeline", "pytest_real_model")
SENSIBLE = ("multi_model", "tools")  # with a tiny model they would show little
EXAMPLES = sorted(p for p in FOLDER.glob("*.py") if p.stem not in OF_THEIR_OWN)


def run(*command: str, cwd: Path | None = None) -> str:
    """What a command prints; it must end well, and have nothing to complain of."""
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.strip()


@pytest.fixture
def model(tiny_model: TinyModels) -> str:
    """A model that says nothing sensible, which is enough for most examples."""
    return str(tiny_model("attention"))


@pytest.fixture(scope="module")
def daemon(tiny_model: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a daemon that serves a tiny model."""
    path = tmp_path_factory.mktemp("daemon") / "d.sock"
    with running_daemon(path, tiny_model("attention")):
        yield str(path)


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, is_real: bool, model: str, smollm2_path: Path) -> None:
    if is_real or example.stem in SENSIBLE:
        model = str(smollm2_path)
    assert run(sys.executable, str(example), model, model)  # those of one model ignore the second


def test_batch_goes_on_where_it_was_stopped(model: str, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for n in (5, 9):
        run(sys.executable, str(FOLDER / "batch_pipeline.py"), str(output), str(n), model)
        results = [json.loads(line) for line in output.read_text().splitlines()]
        assert sorted(result["number"] for result in results) == list(range(n))
        assert {result["sentiment"] for result in results} <= {"good", "bad"}


class BatchPipeline:
    """The example, with an engine in which one document goes wrong."""

    def __init__(self, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(FOLDER)
        self._example = import_module("batch_pipeline")
        self._monkeypatch = monkeypatch
        self.output = output

    def run(self, n_documents: int, *, error: Exception | None = None, at: int = -1) -> None:
        @asynccontextmanager
        async def opened(*_: object, n_slots: int) -> AsyncIterator[Engine]:
            async with open_scripted_engine('{"sentiment": "good"}', n_slots=n_slots) as engine:
                complete = engine.complete

                async def troubled(prompt: str, **fields: Any) -> Any:
                    if error is not None and f"Review {at}:" in prompt:
                        await trio.lowlevel.checkpoint()
                        raise error
                    return await complete(prompt, **fields)

                engine.complete = troubled  # type: ignore[method-assign, assignment]
                yield engine

        self._monkeypatch.setattr(self._example, "open_engine", opened)
        trio.run(self._example.main, self.output, n_documents, "a model")

    def results(self) -> dict[int, Any]:
        lines = [json.loads(line) for line in self.output.read_text().splitlines()]
        results = {line["number"]: line.get("sentiment") or line["error"] for line in lines}
        assert len(results) == len(lines), "each document is done once"
        return results


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BatchPipeline:
    return BatchPipeline(tmp_path / "out.jsonl", monkeypatch)


def test_batch_goes_on_behind_a_torn_line(batch: BatchPipeline) -> None:
    batch.run(12)
    whole = batch.output.read_bytes()
    for n_torn in (1, 5, len(whole.splitlines(keepends=True)[-1]) - 1):
        batch.output.write_bytes(whole[:-n_torn])
        batch.run(12)
        assert batch.results() == dict.fromkeys(range(12), "good")


def test_batch_keeps_only_numbers_of_what_it_has_done(batch: BatchPipeline) -> None:
    line = json.dumps({"number": 0, "sentiment": "good", "more": "x" * 10_000}) + "\n"
    batch.output.write_text(line * 2000)
    tracemalloc.start()
    try:
        batch.run(1)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < batch.output.stat().st_size / 4


@pytest.mark.parametrize("error", [EngineCrashed(-9), EngineClosed()])
def test_batch_blames_no_document_for_trouble_of_the_engine(
    batch: BatchPipeline, error: Exception
) -> None:
    with pytest.raises(BaseExceptionGroup) as raised:
        batch.run(30, error=error, at=20)
    assert raised.group_contains(type(error))
    assert set(batch.results().values()) <= {"good"}
    batch.run(30)
    assert batch.results() == dict.fromkeys(range(30), "good")


def test_batch_tells_of_a_document_that_cannot_be_done_and_does_the_others(
    batch: BatchPipeline,
) -> None:
    error = PromptTooLong(5000, 4096)
    batch.run(12, error=error, at=7)
    assert batch.results() == {**dict.fromkeys(range(12), "good"), 7: str(error)}
    batch.run(12)
    assert batch.results()[7] == str(error), "it is not tried again"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, "usage:"),
        ([], 2, "output"),
        (["out", "many"], 2, "invalid int value: 'many'"),
        (["out", "1", "a model", "and more"], 2, "unrecognized arguments: and more"),
    ],
)
def test_batch_explains_how_it_is_used(arguments: list[str], status: int, said: str) -> None:
    command = [sys.executable, str(FOLDER / "batch_pipeline.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert result.returncode == status
    assert said in result.stdout + result.stderr


def test_application_is_tested_with_both_kinds_of_model(smollm2_path: Path) -> None:
    example = str(FOLDER / "pytest_real_model.py")
    assert "2 passed" in run(sys.executable, "-m", "pytest", "-q", "-n", "0", example)


def test_program_uses_a_daemon_s_engine(daemon: str) -> None:
    output = run(sys.executable, str(FOLDER / "remote.py"), daemon)
    assert "Review(sentiment=" in output
    assert output.endswith(("-- out of time --", "-- done --"))
