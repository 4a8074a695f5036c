"""SHA-256 of model files, read once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from llamad_trio.hub.manifest import CHUNK_BYTES, file_sha256


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x")
    return path


def reads_of(path: Path) -> tuple[str, int]:
    """The digest, and the number of chunks that were read for it."""
    chunks: list[None] = []
    digest = file_sha256(path, between_chunks=lambda: chunks.append(None))
    return digest, len(chunks)


def test_a_file_is_read_once_until_it_changes(path: Path) -> None:
    path.write_bytes(b"x" * (CHUNK_BYTES + 1))
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert reads_of(path) == (expected, 2)
    assert reads_of(path) == (expected, 0)
    path.write_bytes(b"y")
    assert reads_of(path) == (hashlib.sha256(b"y").hexdigest(), 1)
    os.utime(path, ns=(1, 1))
    assert reads_of(path)[1] == 1


@pytest.mark.parametrize("damage", [b"", b"no json", b"[]", b'{"a": 1}'])
def test_a_damaged_memory_is_forgotten(path: Path, models: Path, damage: bytes) -> None:
    models.mkdir(parents=True)
    (models / "digests.json").write_bytes(damage)
    assert reads_of(path) == (hashlib.sha256(b"x").hexdigest(), 1)
    assert reads_of(path)[1] == 0


def test_without_a_place_for_the_memory_each_time_is_the_first(path: Path, models: Path) -> None:
    models.parent.write_text("a file where a directory should be")
    assert reads_of(path)[1] == 1
    assert reads_of(path)[1] == 1


def test_what_is_raised_between_chunks_ends_the_reading(path: Path, models: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        file_sha256(path, between_chunks=stop)
    assert not (models / "digests.json").exists()


def test_a_full_disk_leaves_no_half_written_memory(
    path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert file_sha256(path) == hashlib.sha256(b"x").hexdigest()
    assert list(models.iterdir()) == []
