"""What a verdict hangs on, and how many are kept."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pytest

from llamad_trio.preflight import store
from llamad_trio.preflight.store import key_of, recall, remember
from llamad_trio.preflight.verdict import Attempt, Verdict

VERDICT = Verdict(plain=Attempt("works"), extra=Attempt("died", "SIGILL"))

X86 = """\
processor\t: 0
model name\t: Some CPU
flags\t\t: fpu avx2 amx_tile

processor\t: 1
flags\t\t: none of them
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd i8mm\n\nprocessor\t: 1\n"


def test_the_key_changes_with_all_a_verdict_hangs_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = {key_of({"flash_attn": True}), key_of({"flash_attn": False}), key_of({})}

    def changed(target: object, name: str, value: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            keys.add(key_of({}))

    changed(store, "cpu_flags", lambda: frozenset({"avx2"}))
    changed(store, "cpu_model", lambda: "another")
    changed(store, "libraries", lambda: [("libllama.so", 1, 2)])
    changed(platform, "release", lambda: "1.0")
    changed(store, "FORMAT", 2)
    for variable in ("LD_PRELOAD", "LD_LIBRARY_PATH", "LLAMA_CPP_LIB_PATH"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, str(tmp_path))
            keys.add(key_of({}))
    assert len(keys) == 11
    assert key_of({}) == key_of({})


def test_the_libraries_are_those_that_would_be_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {Path(path).name for path, _, _ in store.libraries()}
    assert any("llama" in name for name in names)
    assert any("ggml-cpu" in name for name in names)
    (tmp_path / "libllama.so.0").write_bytes(b"abc")
    (tmp_path / "notes.txt").write_bytes(b"")
    os.utime(tmp_path / "libllama.so.0", ns=(1, 5))
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    assert store.libraries()[0] == (str(tmp_path / "libllama.so.0"), 3, 5)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path / "nowhere"))
    assert {Path(path).name for path, _, _ in store.libraries()} == names


@pytest.mark.parametrize(
    ("text", "flags", "model"),
    [
        (X86, {"fpu", "avx2", "amx_tile"}, "Some CPU"),
        (ARM, {"fp", "asimd", "i8mm"}, None),
        ("", set(), None),
    ],
)
def test_a_cpu_is_what_linux_says_of_the_first(
    text: str, flags: set[str], model: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(store, "CPUINFO", tmp_path / "cpuinfo")
    assert store.cpu_flags() == flags
    if model is not None:
        assert store.cpu_model() == model
    monkeypatch.setattr(store, "CPUINFO", tmp_path / "nowhere")
    assert store.cpu_flags() == frozenset()


def test_a_verdict_is_kept_for_its_key_alone(cache: Path) -> None:
    assert recall("a") is None
    remember("a", VERDICT)
    assert recall("a") == VERDICT
    assert recall("b") is None
    assert [path.name for path in cache.iterdir()] == ["a.json"]


def test_no_more_than_some_are_kept(cache: Path) -> None:
    for i in range(store.MOST_KEPT + 5):
        remember(f"{i:03}", VERDICT)
        os.utime(cache / f"{i:03}.json", (i, i))
    assert len(list(cache.iterdir())) == store.MOST_KEPT
    assert recall("000") is None
    assert recall(f"{store.MOST_KEPT + 4:03}") == VERDICT


def test_a_full_disk_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    remember("a", VERDICT)
    assert list(cache.iterdir()) == []
    assert recall("a") is None
