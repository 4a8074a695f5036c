"""An engine in a process of its own: whatever becomes of that, here it is a typed error."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from llamad_trio import (
    Disconnected,
    EngineClosed,
    EngineConfig,
    EngineCrashed,
    EngineSpec,
    InferenceError,
    Lane,
    ModelLoadError,
    ProtocolError,
    RemoteEngine,
    RestartPolicy,
    open_engine,
    open_models,
)
from llamad_trio.core.engine_events import (
    EngineStopped,
    FirstToken,
    RequestFailed,
    RequestFinished,
    StepDone,
)
from llamad_trio.isolation import handover as handover_module, isolation as isolation_module
from llamad_trio.system.host import physical_cores
from tests.isolation.conftest import ROOT, children, exists, n_fds
from tests.support import ENDLESS, EXACT, ONE_THREAD, must_not_run, until
from tests.watch.support import Watcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamad_trio import Engine

HANG_S = 30

DYING = """
import ctypes, os, sys
from llamad_trio.isolation import isolated
from llamad_trio.llama.llama_runtime import LlamaRuntime

step, n_steps = LlamaRuntime.step, 0

def dying_step(runtime, plan):
    global n_steps
    n_steps += 1
    if n_steps > 20:
        {die}
    return step(runtime, plan)

LlamaRuntime.step = dying_step
isolated.main()
"""
"""The process of an isolated engine that dies in the middle of a stream."""


# -- as an engine -------------------------------------------------------------------------


async def test_it_behaves_as_the_engine_of_this_process(tiny: Engine, tiny_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with open_engine(tiny_path, EXACT, isolation="process", n_ctx=8192) as engine:
            assert isinstance(engine, RemoteEngine)
            assert engine.info == tiny.info
            assert engine.config == tiny.config
            here = await tiny.complete("the cat", temperature=0, max_tokens=24)
            there = await engine.complete("the cat", temperature=0, max_tokens=24)
            assert (there.text, there.generated_tokens) == (here.text, here.generated_tokens)
            async with engine.stream("the cat", temperature=0, max_tokens=24) as pieces:
                assert "".join([piece async for piece in pieces]) == here.text
            raise KeyError("mine")
    with pytest.raises(EngineClosed):
        await engine.complete("x")


async def test_progress_is_told_and_a_failed_load_is_its_error(tiny_path: Path) -> None:
    told: list[float] = []
    async with open_engine(
        tiny_path, ONE_THREAD, isolation="process", on_load=lambda part: told.append(part)
    ):
        pass
    assert told == sorted(told)
    assert told[-1] == 1.0
    with pytest.raises(ModelLoadError, match="no such file"):
        async with open_engine(tiny_path.with_name("no.gguf"), isolation="process"):
            must_not_run("opened")


async def test_another_isolation_is_refused(tiny_path: Path) -> None:
    with pytest.raises(ProtocolError):
        open_engine(tiny_path, isolation="thread")  # type: ignore[call-overload]


async def test_a_cancelled_load_leaves_nothing(tiny_path: Path) -> None:
    for after_s in (0.0, 0.05, 0.3):
        with trio.move_on_after(after_s):
            async with open_engine(tiny_path, ONE_THREAD, isolation="process"):
                await trio.sleep_forever()


# -- when it ends ----------------------------------------------------------------------------


async def test_a_killed_process_is_an_error_of_block_and_request_and_ends_the_events(
    tiny_path: Path, child: Callable[[], int]
) -> None:
    watcher = Watcher()
    async with trio.open_nursery() as nursery:
        with pytest.raises(EngineCrashed) as caught:
            async with open_engine(tiny_path, ONE_THREAD, isolation="process") as engine:
                await nursery.start(watcher.run, engine)
                async with engine.stream("x", max_tokens=ENDLESS) as pieces:
                    await pieces.receive()
                    await until(lambda: bool(watcher.all(FirstToken)))
                    os.kill(child(), signal.SIGKILL)
                    with pytest.raises(EngineCrashed) as of_request:
                        async for _ in pieces:
                            pass
                    assert of_request.value.status == -signal.SIGKILL
                    assert not engine.is_open
                await trio.sleep_forever()
    assert caught.value.status == -signal.SIGKILL
    (failed,) = watcher.all(RequestFailed)
    assert isinstance(failed.error, EngineCrashed)
    assert isinstance(watcher.events[-1], EngineStopped)


@pytest.mark.parametrize(
    ("die", "status"),
    [
        ("ctypes.string_at(8)", -signal.SIGSEGV),
        ("os.abort()", -signal.SIGABRT),
        ("os._exit(0)", 0),
        ("print('last words', file=sys.stderr, flush=True); os._exit(3)", 3),
    ],
)
async def test_however_it_dies_in_mid_stream(
    tiny_path: Path, child_of: Callable[[str], None], die: str, status: int
) -> None:
    child_of(DYING.format(die=die))
    with pytest.raises(EngineCrashed) as caught:
        async with open_engine(tiny_path, ONE_THREAD, isolation="process") as engine:
            async with engine.stream("x", max_tokens=ENDLESS) as pieces:
                with pytest.raises(EngineCrashed):
                    async for _ in pieces:
                        pass
            await trio.sleep_forever()
    assert caught.value.status == status
    if status == 3:
        assert caught.value.last_log_lines[-1] == "last words"
        assert "last words" in str(caught.value)


async def test_a_process_that_hangs_is_killed_when_the_block_ends(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, child: Callable[[], int]
) -> None:
    monkeypatch.setattr(isolation_module, "GRACE_S", 0.3)
    async with open_engine(tiny_path, ONE_THREAD, isolation="process") as engine:
        os.kill(child(), signal.SIGSTOP)
        with trio.move_on_after(0.2) as scope:
            await engine.complete("x")
        assert scope.cancelled_caught


GARBAGE = [
    "os.write(fd, b'\\xff\\xfe garbage\\n' * 100); time.sleep(60)",
    "os.write(fd, b'[1, 2]\\n'); time.sleep(60)",
    'os.write(fd, b\'{"ready": true}\\n{"ready": true}\\n\'); time.sleep(60)',
    'os.write(fd, b\'{"error": 5, "type": [], "details": {}}\\n\'); time.sleep(60)',
    # No such error can be made, or shown.
    'os.write(fd, b\'{"error": "", "type": "InsufficientMemory", "details": \''
    'b\'{"required": 1, "available": 1, "held_by": {"a": "b"}}}\\n\'); time.sleep(60)',
    "os.write(fd, b'{\"progress\": 1%s}\\n' % (b'0' * 400) * 3); sys.exit(0)",
    "os.close(fd); time.sleep(60)",
    "sys.exit(0)",
    "\nwhile True: os.write(fd, b'x' * 65536)",
]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_is_a_typed_error(
    tiny_path: Path, child_of: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, garbage: str
) -> None:
    monkeypatch.setattr(isolation_module, "GRACE_S", 0.3)
    child_of(f"import os, sys, time\nfd = int(sys.argv[1])\n{garbage}\n")
    with pytest.raises((EngineCrashed, InferenceError)):
        async with open_engine(tiny_path, isolation="process"):
            must_not_run("opened")


@pytest.mark.parametrize("is_supervised", [False, True])
async def test_a_process_that_is_gone_before_it_is_told_anything_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_supervised: bool
) -> None:
    started = isolation_module._start_process

    async def started_and_gone(fd: int) -> trio.Process:
        process = await started(fd)
        await process.wait()
        return process

    monkeypatch.setattr(isolation_module, "COMMAND", ("false",))
    monkeypatch.setattr(isolation_module, "_start_process", started_and_gone)
    with pytest.raises(EngineCrashed):
        if is_supervised:
            async with open_models({"a": EngineSpec(tmp_path, isolation="process")}) as models:
                await models.wait_ready("a")
        else:
            async with open_engine(tmp_path, isolation="process"):
                must_not_run("opened")


async def test_a_request_to_a_process_that_has_just_ended_says_so(
    tiny_path: Path, child: Callable[[], int]
) -> None:
    with pytest.raises(EngineCrashed):
        async with open_engine(tiny_path, ONE_THREAD, isolation="process") as engine:
            pid = child()
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  (Trio is not to know)
            with pytest.raises(EngineCrashed):
                await engine.complete("x")
            await trio.sleep_forever()


async def test_however_a_connection_ends_its_slot_is_free_and_the_engine_goes_on(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation_module, "GRACE_S", 0.3)
    connect = isolation_module._Child.connect
    held: list[int] = []

    async def connect_and_hold(child: isolation_module._Child) -> trio.SocketStream:
        stream = await connect(child)
        held.append(os.dup(stream.socket.fileno()))  # as a process that was forked off does
        return stream

    async with open_engine(tiny_path, ONE_THREAD, isolation="process", n_slots=1) as engine:

        async def leave_a_stream() -> None:
            async with engine.stream("x", max_tokens=ENDLESS) as pieces:
                await pieces.receive()
            assert (await engine.complete("y", max_tokens=2)).generated_tokens == 2

        await leave_a_stream()
        with monkeypatch.context() as patched:
            patched.setattr(isolation_module._Child, "connect", connect_and_hold)
            await leave_a_stream()
        with monkeypatch.context() as patched:
            # As when the other side has no descriptor left to take it.
            patched.setattr(handover_module, "_as_bytes", lambda _: b"")
            with pytest.raises(Disconnected):
                await engine.complete("x")
        await leave_a_stream()
        for fd in held:
            os.close(fd)


async def test_a_stream_that_nobody_reads_does_not_hold_up_the_end(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation_module, "GRACE_S", 2 * HANG_S)
    specs = {"a": EngineSpec(tiny_path, ONE_THREAD, isolation="process")}
    async with open_models(specs) as models, models.stream("x", max_tokens=ENDLESS) as pieces:
        await pieces.receive()
        with trio.fail_after(HANG_S):
            await models.unload("a")
        with pytest.raises(EngineClosed):
            await pieces.result()


async def test_a_process_that_hangs_when_it_is_unloaded_has_not_crashed(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, child: Callable[[], int]
) -> None:
    monkeypatch.setattr(isolation_module, "GRACE_S", 0.3)
    specs = {"a": EngineSpec(tiny_path, ONE_THREAD, isolation="process")}
    async with (
        open_models(specs) as models,
        trio.open_nursery() as nursery,
        models.stream("x", max_tokens=ENDLESS) as pieces,
    ):
        await pieces.receive()
        os.kill(child(), signal.SIGSTOP)
        nursery.start_soon(models.unload, "a")
        with pytest.raises(EngineClosed):
            await pieces.result()


async def test_it_looks_after_its_parent_before_it_imports_much() -> None:
    program = "import sys, llamad_trio.isolation.isolated; assert not {'trio', 'numpy'} & sys.modules.keys()"
    await trio.run_process([sys.executable, "-c", program], cwd=ROOT)


async def test_the_process_ends_with_its_parent_whatever_the_parent_has_forked(
    tiny_path: Path,
) -> None:
    program = textwrap.dedent(
        f"""
        import os, time, trio
        from llamad_trio import open_engine
        from tests.isolation.conftest import children

        async def main():
            async with open_engine({str(tiny_path)!r}, isolation="process", n_threads=1, n_threads_batch=1) as eng:
                (engine,) = children()
                if (fork := os.fork()) == 0:
                    time.sleep({HANG_S})
                    os._exit(0)
                async with eng.stream("x", max_tokens=10**6) as pieces:
                    await pieces.receive()
                    print(f"{{engine}} {{fork}}", flush=True)
                    await trio.sleep_forever()

        trio.run(main)
        """
    )
    parent = await trio.lowlevel.open_process(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert parent.stdout is not None
    engine, fork = map(int, (await parent.stdout.receive_some()).split())
    assert exists(engine)
    parent.kill()
    await parent.wait()
    await until(lambda: not exists(engine))
    assert exists(fork)
    os.kill(fork, signal.SIGKILL)


async def test_it_imports_what_this_process_imports_and_loads_names_that_are_no_text(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong queue')")
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.gguf")
    os.link(tiny_path, path)
    monkeypatch.chdir(tmp_path)
    async with open_engine(path, ONE_THREAD, isolation="process") as engine:
        assert (await engine.complete("x", max_tokens=2)).generated_tokens == 2


async def test_the_working_directory_may_be_gone(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.syspath_prepend("")
    monkeypatch.chdir(gone)
    gone.rmdir()
    async with open_engine(tiny_path, ONE_THREAD, isolation="process") as engine:
        assert (await engine.complete("x", max_tokens=2)).generated_tokens == 2


async def test_it_computes_with_the_threads_of_its_lane_and_they_count(
    tiny_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many = Lane(threads=physical_cores() + 1)
    config = EngineConfig(lane=Lane(threads=1))
    async with open_engine(tiny_path, config):
        assert not [r for r in caplog.records if "threads on" in r.getMessage()]
        async with open_engine(tiny_path, isolation="process", lane=many) as other:
            assert other.config.n_threads == physical_cores() + 1
            assert other.config.n_threads_batch == physical_cores() + 1
            (record,) = [r for r in caplog.records if "threads on" in r.getMessage()]
            assert "2 lanes" in record.getMessage()


async def test_a_load_that_is_given_up_is_not_waited_for(
    child_of: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation_module, "GRACE_S", 2 * HANG_S)
    child_of("import time; time.sleep(60)")
    async with open_models({"a": EngineSpec(tmp_path, isolation="process")}) as models:
        await until(lambda: models.state("a") == "loading" and bool(children()))
        with trio.fail_after(HANG_S):
            await models.unload("a")


async def test_without_descriptors_it_is_a_typed_error_and_the_engine_goes_on(
    tiny_path: Path,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with open_engine(tiny_path, ONE_THREAD, isolation="process") as engine:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (n_fds() - 1, limits[1]))
            with pytest.raises(InferenceError, match="Too many open files"):
                await engine.complete("x")
            for isolation in (None, "process"):
                with pytest.raises(ModelLoadError, match="Too many open files"):
                    async with open_engine(tiny_path, ONE_THREAD, isolation=isolation):
                        pass
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (await engine.complete("x", max_tokens=2)).generated_tokens == 2


# -- Ctrl-C -----------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys
import trio
from llamad_trio import EngineConfig, open_engine
from llamad_trio.isolation import isolation

path, moment, is_stuck = sys.argv[1], sys.argv[2], sys.argv[3] == "stuck"
# Whoever runs the tests in the background may have them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
press_ctrl_c = trio.lowlevel.enable_ki_protection(lambda: signal.raise_signal(signal.SIGINT))

processes = []
open_process = trio.lowlevel.open_process

async def open_and_keep(*args, **kwargs):
    processes.append(await open_process(*args, **kwargs))
    return processes[0]

trio.lowlevel.open_process = open_and_keep
isolation.GRACE_S = 0.2 if is_stuck else 1000

async def wait(process):
    if moment == "ending" and closing:
        press_ctrl_c()
    return await wait_for(process)

closing = []
wait_for = trio.Process.wait
trio.Process.wait = wait

async def main():
    try:
        async with open_engine(path, EngineConfig(n_threads=1, n_threads_batch=1), isolation="process") as engine:
            async with engine.stream("the cat", max_tokens=10**5) as pieces:
                await pieces.receive()
                if is_stuck:
                    os.kill(processes[0].pid, signal.SIGSTOP)
                closing.append(True)
                if moment == "closing":
                    press_ctrl_c()
                else:
                    raise KeyboardInterrupt
    finally:
        # Raises if it is not a child any more: it was waited for.
        print("killed" if processes[0].returncode == -signal.SIGKILL else processes[0].returncode)
        try:
            os.waitpid(processes[0].pid, os.WNOHANG)
        except ChildProcessError:
            print("reaped")

try:
    trio.run(main)
except KeyboardInterrupt:
    print("KeyboardInterrupt")
"""


@pytest.mark.parametrize("state", ["well", "stuck"])
@pytest.mark.parametrize("moment", ["closing", "ending"])
async def test_ctrl_c_while_an_isolated_engine_closes_ends_the_process_and_the_program(
    tiny_path: Path, moment: str, state: str
) -> None:
    with trio.fail_after(2 * HANG_S):
        done = await trio.run_process(
            [sys.executable, "-c", INTERRUPTED, tiny_path, moment, state], capture_stdout=True
        )
    end = "killed" if state == "stuck" else "0"
    assert done.stdout.decode().split() == [end, "reaped", "KeyboardInterrupt"]


# -- supervised ----------------------------------------------------------------------------


async def test_a_crash_is_one_models_affair_its_events_tell_of_it_and_it_comes_back(
    tiny_path: Path, child: Callable[[], int]
) -> None:
    watcher = Watcher()
    specs = {
        "apart": EngineSpec(tiny_path, ONE_THREAD, isolation="process"),
        "here": EngineSpec(tiny_path, ONE_THREAD),
    }
    policy = RestartPolicy(first_delay_s=0.01)
    async with trio.open_nursery() as nursery, open_models(specs, restart=policy) as models:
        await nursery.start(watcher.run, models["apart"])
        async with models["here"].stream("x", max_tokens=ENDLESS) as beside:
            with pytest.raises(EngineCrashed):
                async with models["apart"].stream("x", max_tokens=ENDLESS) as pieces:
                    await pieces.receive()
                    await until(lambda: bool(watcher.all(FirstToken)))
                    os.kill(child(), signal.SIGKILL)
                    await pieces.result()
            done = await models["apart"].complete("x", max_tokens=3)
            assert done.generated_tokens == 3
            await beside.receive()
        await until(lambda: bool(watcher.all(RequestFinished)))
    (failed,) = watcher.all(RequestFailed)
    assert isinstance(failed.error, EngineCrashed)
    told = [type(event).__name__ for event in watcher.events if not isinstance(event, StepDone)]
    assert told == [
        *("EngineLoaded", "RequestQueued", "RequestStarted", "FirstToken"),
        *("RequestFailed", "EngineStopped", "EngineFailed", "EngineLoaded", "EngineRestarted"),
        *("RequestQueued", "RequestStarted", "FirstToken", "RequestFinished", "EngineStopped"),
    ]


SCRIPTED = """
from contextlib import asynccontextmanager
from llamad_trio.isolation import isolated
from llamad_trio.isolation import isolated_engine
from llamad_trio.testing import open_scripted_engine

@asynccontextmanager
async def opener(model, config, name, on_load=None):
    async with open_scripted_engine("hello") as engine:
        yield engine

isolated_engine.open_named_engine = opener
isolated.main()
"""
"""The process of an isolated engine whose model is scripted: there at once."""


@pytest.mark.parametrize("n", [3, pytest.param(200, marks=pytest.mark.slow)])
async def test_restarts_leak_nothing(
    child_of: Callable[[str], None], n: int, tmp_path: Path, child: Callable[[], int]
) -> None:
    child_of(SCRIPTED)
    policy = RestartPolicy(first_delay_s=0.0, max_restarts=1000)
    fds = []
    specs = {"a": EngineSpec(tmp_path / "scripted", isolation="process")}
    async with open_models(specs, restart=policy) as models:
        for _ in range(n):
            assert await models.complete_text("x") == "hello"
            fds.append(n_fds())
            os.kill(child(), signal.SIGKILL)
            await until(lambda: models.state("a") != "ready")
    assert max(fds[2:]) <= max(fds[:2])
