# ruff: noqa: ASYNC240  (tests look at a few small files)
"""An engine trusts llama.cpp only after a process has computed with it, and lived.

The library is the real one.  Where it has to be broken, a preloaded library makes it execute an
undefined instruction, abort, hang or compute nonsense, in processes that really end so.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from llamad_trio import EngineConfig, EngineSpec, ModelLoadError, Request, open_engine, open_models
from llamad_trio.memory import estimate_memory
from llamad_trio.preflight import prove, store, trial
from llamad_trio.preflight.prove import proven_config
from llamad_trio.preflight.trial import try_llama_cpp
from llamad_trio.preflight.verdict import Verdict
from tests.isolation.conftest import children
from tests.preflight.conftest import processes_of_ours
from tests.support import side_by_side

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.models import TinyModels

    Break = Callable[[str, str], Path]

PLAIN = EngineConfig(n_threads=2, n_threads_batch=2)

FAULTS = {
    "undefined instruction": r"SIGILL \(Illegal instruction\)",
    "abort": r"SIGABRT \(Aborted\)",
    "wild pointer": r"SIGSEGV \(Segmentation fault\)",
}


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """The verdicts of the processes that were started."""
    seen: list[Verdict] = []

    async def counted(*args: object, **kwargs: object) -> Verdict:
        verdict = await try_llama_cpp(*args, **kwargs)  # type: ignore[arg-type]
        seen.append(verdict)
        return verdict

    monkeypatch.setattr(prove, "try_llama_cpp", counted)
    return seen


@pytest.fixture
def tiny_path(tiny_model: TinyModels) -> Path:
    return tiny_model("attention")


# -- the real library -------------------------------------------------------------------------


async def test_the_library_works_here_and_the_engine_knows(tries: list[Verdict]) -> None:
    config = await proven_config(PLAIN, "model")
    (verdict,) = tries
    assert verdict.plain.outcome == "works"
    assert verdict.extra.outcome in ("works", "died")  # AMX and GCC 12: see docs/install.md
    assert config.use_extra_bufts is verdict.extra.is_good
    assert "CPU : " in verdict.system_info
    assert verdict.version
    assert [device["kind"] for device in verdict.devices if device["kind"] == "CPU"] == ["CPU"]


@pytest.mark.parametrize(
    "fields",
    [
        {"flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"},
        {"flash_attn": False, "type_k": "f32", "type_v": "bf16"},
        {"n_threads": 1, "n_threads_batch": 3},
        {"use_extra_bufts": False},
    ],
)
async def test_it_is_tried_with_the_settings_of_the_engine(
    fields: dict[str, object], tries: list[Verdict]
) -> None:
    config = await proven_config(EngineConfig(**fields), "model")  # type: ignore[arg-type]
    (verdict,) = tries
    assert verdict.plain.outcome == "works"
    assert (verdict.extra.outcome == "untried") is (fields.get("use_extra_bufts") is False)
    assert {name: getattr(config, name) for name in fields} == fields


async def test_what_llama_cpp_refuses_is_left_for_it_to_say(tries: list[Verdict]) -> None:
    config = EngineConfig(flash_attn=False, type_v="q4_0")  # it takes no such V without flash_attn
    assert (await proven_config(config, "model")).use_extra_bufts is True
    assert [verdict.plain.outcome for verdict in tries] == ["refused"]


async def test_many_at_once_wait_for_one_and_the_second_time_costs_no_process(
    tries: list[Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = await side_by_side([partial(proven_config, PLAIN, "model")] * 5)
    others.append(await proven_config(PLAIN, "model"))
    monkeypatch.setattr(prove, "_known", {})  # as another process would be
    others.append(await proven_config(PLAIN, "model"))
    assert others == [first] * 6
    assert len(tries) == 1


async def test_other_settings_and_another_library_are_tried_anew(
    tries: list[Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    await proven_config(PLAIN, "model")
    await proven_config(EngineConfig(n_threads=2, n_threads_batch=2, type_k="q8_0"), "model")
    assert len(tries) == 2
    path, size, changed = store.libraries()[0]
    monkeypatch.setattr(store, "libraries", lambda: [(path, size, changed + 1)])
    await proven_config(PLAIN, "model")
    assert len(tries) == 3


async def test_it_can_be_left_out(tries: list[Verdict]) -> None:
    config = EngineConfig(preflight=False)
    assert await proven_config(config, "model") is config
    assert tries == []


async def test_an_engine_tells_what_it_uses(tiny_path: Path) -> None:
    config = EngineConfig(n_threads=1, n_threads_batch=1)
    expected = (await proven_config(config, tiny_path)).use_extra_bufts
    async with open_engine(tiny_path, config) as engine:
        assert engine.config.use_extra_bufts is expected is not None
        await engine.complete(Request([3, 4, 5]), max_tokens=2)


# -- a library that is broken -----------------------------------------------------------------


@pytest.mark.parametrize("how", FAULTS)
async def test_one_that_dies_with_the_extra_buffers_computes_without(
    broken: Break, how: str, tries: list[Verdict], caplog: pytest.LogCaptureFixture
) -> None:
    broken("extra buffers", how)
    config = await proven_config(PLAIN, "model")
    assert config.use_extra_bufts is False
    (verdict,) = tries
    assert (verdict.plain.outcome, verdict.extra.outcome) == ("works", "died")
    await proven_config(PLAIN, "other")
    (said,) = [record.getMessage() for record in caplog.records]
    assert re.search(FAULTS[how], said)
    assert "without them, more slowly, it does" in said
    assert f"{sys.executable} -m pip install --force-reinstall" in said
    assert len(tries) == 1, "the verdict is lasting"


async def test_one_that_computes_nonsense_with_them_computes_without(
    broken: Break, tries: list[Verdict]
) -> None:
    broken("numbers", "")
    assert (await proven_config(PLAIN, "model")).use_extra_bufts is False
    # Where the real ones fail, too, it does not come to numbers.
    assert [verdict.extra.outcome for verdict in tries] in (["wrong"], ["died"])


@pytest.mark.parametrize("how", FAULTS)
async def test_one_that_dies_anyhow_is_a_load_error(broken: Break, how: str) -> None:
    broken("compute", how)
    with pytest.raises(ModelLoadError, match=FAULTS[how]) as caught:
        await proven_config(PLAIN, "some/model.gguf")
    assert caught.value.path == "some/model.gguf"
    assert "built for " in caught.value.reason
    assert "this CPU lacks " in caught.value.reason
    assert "pip install --force-reinstall" in caught.value.reason


async def test_who_insists_on_the_extra_buffers_is_told(broken: Break) -> None:
    broken("extra buffers", "undefined instruction")
    with pytest.raises(ModelLoadError, match="SIGILL"):
        await proven_config(EngineConfig(use_extra_bufts=True), "model")
    assert (await proven_config(EngineConfig(use_extra_bufts=False), "m")).use_extra_bufts is False


@pytest.mark.parametrize("how", ["undefined instruction", "abort", "hang"])
async def test_a_library_that_kills_whoever_loads_it_is_a_load_error(
    library_instead: Break, how: str, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_instead("load", how)
    monkeypatch.setattr(trial, "DEADLINE_S", 2.0 if how == "hang" else 30.0)
    with pytest.raises(ModelLoadError, match="did not end in time" if how == "hang" else "SIG"):
        async with open_engine(tiny_path):
            pass


@pytest.mark.parametrize(("where", "how"), [("compute", "spin"), ("extra buffers", "hang")])
async def test_one_that_hangs_is_killed_and_told(
    broken: Break, where: str, how: str, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    broken(where, how)
    monkeypatch.setattr(trial, "DEADLINE_S", 3.0)
    if where == "compute":
        with pytest.raises(ModelLoadError, match="did not end in time"):
            await proven_config(PLAIN, "model")
    else:
        assert (await proven_config(PLAIN, "model")).use_extra_bufts is False
    assert not processes_of_ours()
    assert not list(cache.glob("*")), "another time the machine may be less busy"


async def test_cancelled_it_leaves_no_process(broken: Break) -> None:
    broken("compute", "hang")
    with trio.move_on_after(1.0) as scope:
        await proven_config(PLAIN, "model")
    assert scope.cancelled_caught
    assert not processes_of_ours()


async def test_ctrl_c_ends_it_and_the_program(broken: Break, tiny_path: Path) -> None:
    broken("compute", "hang")
    command = [sys.executable, "-m", "llamad_trio", "complete", "hi", "--model", str(tiny_path)]
    program = await trio.lowlevel.open_process(command, stderr=subprocess.PIPE)
    assert program.stderr is not None
    while not (tried := children(program.pid)):  # noqa: ASYNC110  (there is nothing to wait for)
        await trio.sleep(0.01)
    program.send_signal(signal.SIGINT)
    said = b"".join([data async for data in program.stderr])
    assert (await program.wait(), said.strip()) == (130, b"")
    assert not any(Path(f"/proc/{child}").exists() for child in tried)


async def test_one_that_ends_by_itself_proves_nothing(
    broken: Break, caplog: pytest.LogCaptureFixture, cache: Path
) -> None:
    broken("compute", "exit")
    config = await proven_config(PLAIN, "model")
    await proven_config(PLAIN, "model")
    assert config is PLAIN
    (said,) = [record.getMessage() for record in caplog.records]
    assert "not known" in said
    assert "status 3" in said
    assert not cache.exists()


async def test_a_library_that_is_no_llama_cpp_is_a_load_error(
    library_instead: Break, tiny_path: Path
) -> None:
    folder = library_instead("nowhere", "")
    code = (
        "import sys, trio, llamad_trio\n"
        "async def main():\n"
        "    async with llamad_trio.open_engine(sys.argv[1]): pass\n"
        "try:\n    trio.run(main)\n"
        "except llamad_trio.ModelLoadError as error:\n    print(error)\n"
    )
    done = await trio.run_process(
        [sys.executable, "-c", code, str(tiny_path)], capture_stdout=True, capture_stderr=True
    )
    assert b"library cannot be loaded" in done.stdout
    assert str(folder).encode() in done.stdout or b"undefined symbol" in done.stdout


# -- a program of its own ---------------------------------------------------------------------


async def run_complete(tiny_path: Path) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "llamad_trio", "complete", "hi", "--model", str(tiny_path)]
    return await trio.run_process(
        [*command, "-n", "2"], capture_stdout=True, capture_stderr=True, check=False
    )


async def test_a_program_lives_with_a_library_that_dies_with_the_extra_buffers(
    broken: Break, tiny_path: Path
) -> None:
    """The library stays broken: what does not die here really does without them."""
    broken("extra buffers", "undefined instruction")
    done = await run_complete(tiny_path)
    assert (done.returncode, done.stdout != b"") == (0, True)
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("warning: llama.cpp does not work on this machine with its special")


async def test_a_program_ends_in_order_where_nothing_works(broken: Break, tiny_path: Path) -> None:
    broken("compute", "undefined instruction")
    done = await run_complete(tiny_path)
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: ")
    assert "SIGILL" in line
    assert "pip install" in line


async def test_isolated_engines_are_not_opened_again_and_again(
    broken: Break, tiny_path: Path, tmp_path: Path
) -> None:
    broken("compute", "undefined instruction")
    with pytest.raises(ModelLoadError, match="SIGILL"):
        async with open_engine(tiny_path, isolation="process"):
            pass
    spec = EngineSpec(tiny_path, isolation="process", load="lazy")
    async with open_models({"tiny": spec}) as models:
        with pytest.raises(ModelLoadError, match="SIGILL"):
            await models["tiny"].complete("hi")
        assert models["tiny"].state == "failed"
        assert not processes_of_ours()


async def test_of_an_isolated_engine_its_parent_is_told(
    broken: Break, tiny_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken("extra buffers", "undefined instruction")
    async with open_engine(tiny_path, isolation="process") as engine:
        assert engine.config.use_extra_bufts is False
        await engine.complete("hi", max_tokens=2)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "llamad_trio.preflight"]
    assert "without them, more slowly, it does" in said


async def test_two_programs_at_once_find_the_same(tiny_path: Path, cache: Path) -> None:
    done = await side_by_side([partial(run_complete, tiny_path)] * 2)
    assert [(ended.returncode, ended.stdout != b"") for ended in done] == [(0, True)] * 2
    assert len(list(cache.iterdir())) == 1


async def test_an_estimate_does_not_load_what_kills(
    library_instead: Break, tiny_path: Path
) -> None:
    library_instead("load", "undefined instruction")
    with pytest.raises(ModelLoadError, match="SIGILL"):
        await estimate_memory(tiny_path)


async def test_nothing_is_printed_and_nothing_is_left(
    broken: Break,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TMPDIR", str(folder))
    broken("extra buffers", "abort")
    await proven_config(PLAIN, "model")
    assert capfd.readouterr() == ("", "")
    assert list(folder.iterdir()) == [], "a core file, or a model"
    assert not processes_of_ours()


async def test_a_child_whose_parent_was_killed_ends_by_itself(broken: Break) -> None:
    broken("compute", "hang")
    order = {
        "deadline_s": 1,
        "path": None,
        "settings": {"n_threads": 1, "n_threads_batch": 1},
        "extra": [False],
        "measure": None,
    }
    command = [sys.executable, "-m", "llamad_trio.preflight.probe", json.dumps(order)]
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    assert done.returncode == -signal.SIGALRM


# -- a machine that lacks something -----------------------------------------------------------


@pytest.mark.parametrize("trouble", ["read-only", "no home", "a file there", "full"])
async def test_without_a_place_for_verdicts_the_engine_opens(
    trouble: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    tries: list[Verdict],
    tmp_path: Path,
    tiny_path: Path,
) -> None:
    if trouble == "read-only":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")  # not even for root
    elif trouble == "no home":

        def nobody(_: int) -> None:
            raise KeyError("no such user")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", nobody)
        monkeypatch.chdir(tmp_path)
    elif trouble == "a file there":
        cache.parent.mkdir(parents=True)
        cache.write_text("no folder")
    else:

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store, "replace_text", full)
    for _ in range(2):
        async with open_engine(tiny_path, PLAIN) as engine:
            assert engine.config.use_extra_bufts is not None
    assert len(tries) == 1, "this process remembers"
    assert not (tmp_path / "~").exists()


async def test_a_verdict_that_cannot_be_read_is_none(cache: Path, tries: list[Verdict]) -> None:
    await proven_config(PLAIN, "model")
    (kept,) = cache.iterdir()
    for damage in (b"", b"{", b"[]", b'{"plain": 1}', b"\xff", kept.read_bytes()[:-9]):
        kept.write_bytes(damage)
        prove._known.clear()
        tries.clear()
        await proven_config(PLAIN, "model")
        assert len(tries) == 1
        assert kept.read_bytes() != damage


async def test_where_no_process_can_be_had_the_engine_opens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(trio.lowlevel, "open_process", refuse)
    assert await proven_config(PLAIN, "model") is PLAIN
    assert "Operation not permitted" in caplog.text


@pytest.mark.parametrize(("name", "value"), [("frozen", True), ("executable", "")])
async def test_a_frozen_program_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    async def started(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(trio.lowlevel, "open_process", started)
    monkeypatch.setattr(sys, name, value, raising=False)
    assert await proven_config(PLAIN, "model") is PLAIN


async def test_without_files_in_memory_a_folder_is_made_and_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: Break
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    broken("extra buffers", "undefined instruction")
    before = set(tmp_path.iterdir())
    assert (await proven_config(PLAIN, "model")).use_extra_bufts is False
    assert set(tmp_path.iterdir()) - before <= {tmp_path / "cache"}
