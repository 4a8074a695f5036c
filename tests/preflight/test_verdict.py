"""What is made of what a process said before it ended, and what is kept of it."""

from __future__ import annotations

import os
import platform
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from llamad_trio.preflight import store
from llamad_trio.preflight.advice import (
    CppCompiler,
    advice_on,
    available_sets,
    built_sets,
    rebuild_command,
)
from llamad_trio.preflight.store import key_of, recall, remember
from llamad_trio.preflight.verdict import Attempt, Verdict, judge

LOADED: dict[str, Any] = {
    "loaded": {"system": "CPU : AVX2 = 1 | AMX_INT8 = 1 |", "version": "1", "devices": []}
}
GOOD = {"outcome": {"wrong": False}}
BAD = {"outcome": {"wrong": True}}
REFUSED = {"outcome": {"refused": "no such cache"}}
PLAIN, EXTRA = {"trying": False}, {"trying": True}
BOTH = [LOADED, PLAIN, GOOD, EXTRA, GOOD]


@pytest.mark.parametrize(
    ("lines", "status", "plain", "extra", "allowed"),
    [
        (BOTH, 0, "works", "works", (True, True, False)),
        ([LOADED, PLAIN, GOOD], 0, "works", "untried", (False, None, False)),
        ([LOADED, PLAIN, GOOD, EXTRA], 4, "works", "died", (False, None, False)),
        ([LOADED, PLAIN, GOOD, EXTRA], -4, "works", "died", (False, None, False)),
        ([LOADED, PLAIN, GOOD, EXTRA], None, "works", "hung", (False, None, False)),
        ([LOADED, PLAIN, GOOD, EXTRA, BAD], 0, "works", "wrong", (False, None, False)),
        ([LOADED, PLAIN, REFUSED, EXTRA, REFUSED], 0, "refused", "refused", (True, True, False)),
        ([LOADED, PLAIN], 6, "died", "untried", (None, None, None)),
        ([LOADED, PLAIN], None, "hung", "untried", (None, None, None)),
        ([LOADED, PLAIN, BAD, EXTRA, GOOD], 0, "wrong", "works", (None, None, None)),
        ([], 11, "died", "untried", (None, None, None)),
        ([], None, "hung", "untried", (None, None, None)),
        (BOTH, 11, "works", "works", (True, True, False)),  # while the speed was measured
    ],
)
def test_how_far_it_came_decides(
    lines: list[dict[str, Any]],
    status: int | None,
    plain: str,
    extra: str,
    allowed: tuple[bool | None, bool | None, bool | None],
) -> None:
    verdict = judge(lines, status, "")
    assert (verdict.plain.outcome, verdict.extra.outcome) == (plain, extra)
    assert not verdict.trouble
    assert tuple(map(verdict.allows, (None, True, False))) == allowed
    assert verdict.is_lasting is (status is not None)


@pytest.mark.parametrize("status", [1, 3, 120, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGALRM])
def test_who_ends_for_another_reason_proves_nothing(status: int) -> None:
    verdict = judge([LOADED, PLAIN], status, "MemoryError")
    assert verdict.trouble == "MemoryError"
    assert not verdict.is_lasting
    assert judge([], status, "").trouble == f"it ended with status {status}"


def test_last_words_are_told() -> None:
    detail = judge([LOADED, PLAIN], 6, "GGML_ASSERT(x > 0) failed").plain.detail
    assert detail == "SIGABRT (Aborted): GGML_ASSERT(x > 0) failed"


def test_it_reads_again_what_it_wrote() -> None:
    verdict = judge([*BOTH, {"speeds": {"1": 2.5}}], 0, "")
    assert Verdict.from_text(verdict.as_text()) == verdict


@given(st.text() | st.sampled_from(['{"plain": {}}', "[1]", "null", '{"plain": {"x": 1}}']))
def test_what_is_no_verdict_is_none(text: str) -> None:
    assert Verdict.from_text(text) is None


# -- instruction sets and compilers -----------------------------------------------------------

FSF = "Copyright (C) 2022 Free Software Foundation, Inc.\n"
GCC = f"g++ (GCC) {{}}\n{FSF}"


@pytest.mark.parametrize(
    ("text", "expected", "breaks"),
    [
        (GCC.format("11.4.0"), "gcc 11.4.0", True),
        (f"c++ (Debian 12.2.0-14+deb12u1) 12.2.0\n{FSF}", "gcc 12.2.0", True),
        (GCC.format("12.4.0"), "gcc 12.4.0", False),
        (GCC.format("13.0.1"), "gcc 13.0.1", True),
        (GCC.format("13.2.0"), "gcc 13.2.0", True),
        (GCC.format("13.3.0"), "gcc 13.3.0", False),
        (GCC.format("15.0"), "gcc 15.0", False),
        ("Debian clang version 12.0.6\nTarget: x86_64-pc-linux-gnu\n", "clang 12.0.6", False),
        ("Apple clang version 15.0.0 (clang-1500.3.9.4)\n", "clang 15.0.0", False),
        ("icpx 2024\n", None, False),
        ("", None, False),
    ],
)
def test_compilers_are_known_by_what_they_say(
    text: str, expected: str | None, breaks: bool
) -> None:
    compiler = CppCompiler.from_version_text(text)
    assert (compiler and str(compiler)) == expected
    assert bool(compiler and compiler.breaks_amx({"amx_tile"})) is breaks
    assert not (compiler and compiler.breaks_amx({"avx2"}))


def test_instruction_sets_of_both_sides_have_the_same_names() -> None:
    info = "CPU : SSE3 = 1 | AVX512 = 1 | AMX_INT8 = 1 | NEON = 0 | OPENMP = 1 | REPACK = 1 | "
    assert built_sets(info) == {"SSE3", "AVX512", "AMX_INT8"}
    assert available_sets({"pni", "avx512f", "sse2"}) == {"SSE3", "AVX512"}


def test_only_where_it_is_needed_amx_is_left_out() -> None:
    old, new = CppCompiler("gcc", (12, 2, 0)), CppCompiler("gcc", (14, 1, 0))
    for compiler, flags, needed in [
        (old, {"amx_tile"}, True),
        (old, {"avx2"}, False),
        (new, {"amx_tile"}, False),
        (None, {"amx_tile"}, False),
    ]:
        command = rebuild_command("/a b/python", "0.3.36", flags, compiler)
        assert ('CXXFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"' in command) is needed
        assert command.endswith(
            "'/a b/python' -m pip install --force-reinstall --no-deps --no-cache-dir "
            "--no-binary llama-cpp-python llama-cpp-python==0.3.36"
        )


def advice(verdict: Verdict, flags: set[str], compiler: CppCompiler | None) -> str:
    return advice_on(verdict, flags, compiler, python="python", binding_version=None)


def test_advice_for_amx_and_an_old_gcc() -> None:
    verdict = judge([LOADED, PLAIN, GOOD, EXTRA], 4, "")
    text = advice(verdict, {"avx2", "amx_int8", "amx_tile"}, CppCompiler("gcc", (12, 2)))
    assert "SIGILL (Illegal instruction); without them, more slowly, it does" in text
    assert "built for AMX_INT8, AVX2; this CPU lacks nothing of these" in text
    assert "gcc 12.2 compiles AMX code that faults" in text
    assert 'compile it for this machine: CFLAGS="-mno-amx-tile' in text
    assert "\n" not in text


def test_advice_for_a_build_of_a_newer_cpu_where_there_is_no_compiler() -> None:
    verdict = Verdict(plain=Attempt("died", "SIGILL"), system_info="CPU : AVX2 = 1 | AVX512 = 1 |")
    text = advice(verdict, {"avx2"}, None)
    assert text.startswith("llama.cpp does not work on this machine: SIGILL; ")
    assert "this CPU lacks AVX512" in text
    assert "install a C++ compiler first" in text


def test_what_is_not_known_is_not_told() -> None:
    text = advice(Verdict(plain=Attempt("died", "SIGSEGV")), set(), None)
    assert "built for" not in text


# -- what a verdict hangs on, and how many are kept -------------------------------------------

KEPT = Verdict(plain=Attempt("works"), extra=Attempt("died", "SIGILL"))

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
    remember("a", KEPT)
    assert recall("a") == KEPT
    assert recall("b") is None
    assert [path.name for path in cache.iterdir()] == ["a.json"]


def test_no_more_than_some_are_kept(cache: Path) -> None:
    for i in range(store.MOST_KEPT + 5):
        remember(f"{i:03}", KEPT)
        os.utime(cache / f"{i:03}.json", (i, i))
    assert len(list(cache.iterdir())) == store.MOST_KEPT
    assert recall("000") is None
    assert recall(f"{store.MOST_KEPT + 4:03}") == KEPT


def test_a_full_disk_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    remember("a", KEPT)
    assert list(cache.iterdir()) == []
    assert recall("a") is None
