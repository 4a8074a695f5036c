"""What the manifest promises: it is checked when read, and a name finds its file or a clear error."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from llamad_trio.core.errors import ModelLoadError
from llamad_trio.hub.manifest import (
    DEFAULT_MODEL,
    FileDigest,
    HubSource,
    KnownModel,
    ManifestError,
    PypiSource,
    converter,
    installed_path,
    known_digest,
    known_model,
    load_manifest,
    models_dir,
    receipt_path,
    resolve_model,
)

MODEL = """
[[models]]
name = "tiny"
file = "tiny.gguf"
description = "A stand-in"
licence = "CC0-1.0"
tests = ["nothing much"]
"""
DIGEST = f'size_bytes = 3\nsha256 = "{"0" * 64}"\n'
PACKAGES = '[[models.sources]]\nkind = "pypi"\npackages = ["a==1", "b==1"]\nmember = "*/x"\n'
HUB = '[[models.sources]]\nkind = "hub"\nrepo = "me/tiny"\nfile = "tiny.gguf"\n'


def read(folder: Path, text: str) -> dict[str, KnownModel]:
    """A manifest given as text."""
    path = folder / "models.toml"
    path.write_text(text)
    load_manifest.cache_clear()
    return dict(load_manifest(path))


def place(model: KnownModel, size_bytes: int | None = None) -> Path:
    """A file of the model's size, or of another, that takes no room on the disk."""
    path = models_dir() / model.file
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        out.truncate(model.size_bytes if size_bytes is None else size_bytes)
    return path


def test_the_manifest_that_comes_with_the_library_lists_the_promised_models() -> None:
    manifest = load_manifest()
    assert DEFAULT_MODEL in manifest
    assert set(manifest) == {
        "smollm2-135m",
        "gemma3-270m",
        "lfm2.5-230m",
        "lfm2.5-1.2b-thinking",
        "qwen3-0.6b",
    }
    assert all(name == model.name for name, model in manifest.items())
    assert len({model.file for model in manifest.values()}) == len(manifest)
    assert all(model.tests and model.licence for model in manifest.values())


def test_models_from_packages_are_pinned_by_version_size_and_digest() -> None:
    smollm2, gemma3 = known_model("smollm2-135m"), known_model("gemma3-270m")
    assert smollm2.digest == FileDigest(
        98362432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    )
    assert gemma3.digest == FileDigest(
        253113024, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    )
    (source,) = gemma3.sources
    assert isinstance(source, PypiSource)
    assert [package[-9:] for package in source.packages] == [
        f"t{part}==1.0.0" for part in (1, 2, 3, 4)
    ]


def test_each_kind_of_source_is_read(tmp_path: Path) -> None:
    model = read(tmp_path, MODEL + DIGEST + PACKAGES + HUB)["tiny"]
    assert model.sources == (
        PypiSource(("a==1", "b==1"), "*/x"),
        HubSource("me/tiny", "tiny.gguf", "main"),
    )
    assert model.digest == FileDigest(3, "0" * 64)
    assert read(tmp_path, MODEL + HUB)["tiny"].digest is None


def test_a_model_survives_the_way_to_plain_data_and_back() -> None:
    for model in load_manifest().values():
        assert converter.structure(converter.unstructure(model), KnownModel) == model


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (MODEL + "colour = 'red'\n" + HUB, "unknown key colour @"),
        (MODEL + "license = 'x'\n" + HUB, "unknown key license (did you mean licence?) @"),
        ("model = 'x'\n" + MODEL + HUB, "unknown key model (did you mean models?) @"),
        (MODEL + HUB + "revison = 'x'\n", "unknown key revison (did you mean revision?) @"),
        (MODEL + HUB.replace('"hub"', '"ftp"'), "ftp"),
        (MODEL.replace('licence = "CC0-1.0"\n', "") + HUB, "licence"),
        (MODEL, "sources"),
        (MODEL + "sources = []\n", "sources"),
        (MODEL + PACKAGES, "packages need size_bytes and sha256"),
        (MODEL + "size_bytes = 3\n" + HUB, "go together"),
        (MODEL + DIGEST.replace("= 3", "= 0") + HUB, "size_bytes"),
        (MODEL + DIGEST.replace("00", "zz", 1) + HUB, "sha256"),
        (MODEL.replace("tiny.gguf", "../tiny.gguf") + HUB, "file"),
        (MODEL + HUB.replace("me/tiny", "../tiny"), "repo"),
        (MODEL + DIGEST + PACKAGES.replace("a==1", "a"), "packages"),
        (MODEL + DIGEST + PACKAGES.replace("a==1", "--pre a==1"), "packages"),
        ((MODEL + HUB) * 2, "same name"),
        ("[[models", "models.toml"),
    ],
)
def test_a_manifest_with_a_mistake_is_refused_and_the_mistake_named(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        read(tmp_path, text)
    assert complaint in str(caught.value)
    assert caught.value.path.endswith("models.toml")


def test_a_missing_manifest_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="No such file"):
        load_manifest(tmp_path / "none.toml")


def test_the_models_directory_is_what_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAD_MODELS_DIR", str(tmp_path))
    assert models_dir() == tmp_path
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLAMAD_MODELS_DIR", "here")
    assert models_dir() == tmp_path / "here"


@pytest.mark.skipif(sys.platform != "linux", reason="XDG_CACHE_HOME is honoured on Linux")
def test_the_models_directory_is_in_the_users_cache_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAD_MODELS_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_dir() == tmp_path / "llamad-trio" / "models"


@pytest.mark.parametrize("name", ["smolm2-135m", "SmolLM2", "smollm2"])
def test_an_unknown_name_suggests_the_near_one(name: str) -> None:
    with pytest.raises(ModelLoadError, match="did you mean smollm2-135m") as caught:
        known_model(name)
    assert caught.value.path == name


def test_an_unknown_name_that_is_near_nothing_lists_all() -> None:
    with pytest.raises(ModelLoadError) as caught:
        known_model("zzz")
    assert all(name in caught.value.reason for name in load_manifest())


def test_a_known_model_that_is_not_pulled_names_the_command() -> None:
    with pytest.raises(ModelLoadError, match="llamad_trio pull smollm2-135m") as caught:
        resolve_model("smollm2-135m")
    assert caught.value.path == "smollm2-135m"
    assert installed_path("smollm2-135m") is None


def test_a_known_model_that_is_pulled_is_found(models: Path) -> None:
    path = place(known_model("smollm2-135m"))
    assert path.parent == models
    assert resolve_model("smollm2-135m") == path
    assert installed_path("smollm2-135m") == path


def test_a_file_of_the_wrong_size_or_kind_is_not_installed() -> None:
    model = known_model("smollm2-135m")
    path = place(model, size_bytes=5)
    assert installed_path(model) is None
    path.unlink()
    path.mkdir()
    assert installed_path(model) is None


@pytest.mark.parametrize("path", ["missing.gguf", "some/where.gguf", "./smollm2-135m", "zzz"])
def test_anything_else_is_a_path(path: str) -> None:
    assert resolve_model(path) == Path(path)
    assert resolve_model(Path("smollm2-135m")) == Path("smollm2-135m")


def test_a_model_without_a_declared_digest_is_installed_only_with_its_receipt() -> None:
    model = known_model("qwen3-0.6b")
    path = place(model, size_bytes=7)
    assert known_digest(model) is None
    assert installed_path(model) is None
    receipt_path(model).write_text("not json")
    assert installed_path(model) is None
    receipt_path(model).write_text(f'{{"size_bytes": 7, "sha256": "{"a" * 64}"}}')
    assert known_digest(model) == FileDigest(7, "a" * 64)
    assert installed_path(model) == path
    place(model, size_bytes=6)
    assert installed_path(model) is None


def test_errors_and_models_pickle() -> None:
    error = ManifestError("models.toml", "no good")
    again = pickle.loads(pickle.dumps(error))
    assert attrs.asdict(again) == attrs.asdict(error)
    model = known_model(DEFAULT_MODEL)
    assert pickle.loads(pickle.dumps(model)) == model


def test_reading_the_manifest_loads_no_client_and_no_terminal_library() -> None:
    code = (
        "import sys, llamad_trio.hub.manifest as m; m.load_manifest();"
        "print(*sorted({'huggingface_hub', 'rich', 'click', 'platformdirs'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.split() == []
