"""An engine is its block: what goes in comes out as itself, and nothing is left behind."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from llamad_trio import (
    EngineClosed,
    EngineConfig,
    LlamadError,
    ProtocolError,
    Request,
    SessionFatal,
    open_engine,
)
from tests.apart import run_apart
from tests.conformance.test_engine_like import QUESTIONS
from tests.llama.growth import print_reopened
from tests.support import (
    ENDLESS,
    ONE_THREAD,
    before_steps,
    count_pieces,
    held_steps,
    must_not_run,
    threads_of_ours,
    until,
    until_queued,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from llamad_trio import Engine

ROOT = Path(__file__).parents[2]

MIB = 2**20

# -- exceptions of the body -----------------------------------------------------------------


class Unusual(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [
        ValueError("mine"),
        Unusual("mine"),
        KeyboardInterrupt(),
        StopIteration("mine"),
        StopAsyncIteration("mine"),
        EngineClosed(),
        ExceptionGroup("mine", [ValueError("one"), KeyError("two")]),
        BaseExceptionGroup("mine", [Unusual("one")]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_exception_of_the_body_comes_out_as_itself(
    tiny_path: Path, error: BaseException
) -> None:
    caught: BaseException | None = None
    cause = KeyError("cause")
    try:
        async with (
            open_engine(tiny_path, ONE_THREAD, n_ctx=8192) as engine,
            engine.stream("the cat", max_tokens=ENDLESS) as tokens,
        ):
            await tokens.receive()
            raise error from cause
    except BaseException as raised:
        caught = raised
    assert caught is error
    assert error.__cause__ is cause


async def test_a_group_of_errors_and_a_cancel_of_ours_leaves_the_errors(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("mine")

    crash(monkeypatch, SessionFatal("the books are wrong"))
    with pytest.raises(BaseExceptionGroup) as caught:
        async with open_engine(tiny_path, ONE_THREAD) as engine, trio.open_nursery() as nursery:
            nursery.start_soon(fail_when_cancelled)
            nursery.start_soon(trio.sleep_forever)
            async with engine.stream("the cat"):
                await trio.sleep_forever()
    assert caught.value.subgroup(trio.Cancelled) is None
    assert caught.value.subgroup(ValueError) is not None
    assert caught.value.subgroup(SessionFatal) is not None


async def test_a_cancel_around_the_block_is_no_error(tiny_path: Path) -> None:
    with trio.CancelScope() as scope:
        async with (
            open_engine(tiny_path, ONE_THREAD, n_ctx=8192) as engine,
            engine.stream("the cat", max_tokens=ENDLESS) as tokens,
        ):
            await count_pieces(tokens, 2)
            scope.cancel()
            await tokens.result()
    assert scope.cancelled_caught
    assert threads_of_ours() == []


# -- where it may be used -------------------------------------------------------------------


async def test_another_trio_run_is_refused_and_does_no_harm(tiny_path: Path) -> None:
    def use_elsewhere(use: Callable[[Engine], Awaitable[object]]) -> None:
        async def main() -> None:
            with pytest.raises(ProtocolError, match="another Trio run"):
                await use(engine)

        trio.run(main)

    async with open_engine(tiny_path, ONE_THREAD) as engine:
        for use in (*QUESTIONS, lambda engine: engine.stream("the cat").__aenter__()):
            await trio.to_thread.run_sync(use_elsewhere, use)
        assert (await engine.complete("the cat", max_tokens=2)).generated_tokens == 2


# -- after the block ------------------------------------------------------------------------


async def test_a_question_under_way_is_answered_or_refused_when_the_block_ends(
    tiny_path: Path,
) -> None:
    answers: list[object] = []

    async def ask(engine: Engine) -> None:
        try:
            answers.append(await engine.tokenize("the cat " * 1000))
        except EngineClosed as error:
            answers.append(error)

    async with trio.open_nursery() as nursery, open_engine(tiny_path, ONE_THREAD) as engine:
        for _ in range(5):
            nursery.start_soon(ask, engine)
        await trio.lowlevel.checkpoint()
    assert len(answers) == 5


@pytest.mark.usefixtures("smollm2_is_kept")
async def test_closing_aborts_the_step_that_runs(smollm2_path: Path) -> None:
    async with trio.open_nursery() as nursery, open_engine(smollm2_path, ONE_THREAD) as engine:

        async def ask() -> None:
            with pytest.raises(EngineClosed):
                await engine.complete(Request([7] * 4000))

        nursery.start_soon(ask)
        await until(lambda: engine.stats().slots["prefill"] == 1)
    # The rest of the prompt was never read.
    assert engine.stats().prefill_tokens < 4000
    assert threads_of_ours() == []


# -- a crash --------------------------------------------------------------------------------


def crash(monkeypatch: pytest.MonkeyPatch, error: Exception, *, after_steps: int = 0) -> None:
    """Make the steps of every engine raise `error` after so many have run."""
    n_steps = itertools.count()

    def fail(_: object) -> None:
        if next(n_steps) >= after_steps:
            raise error

    before_steps(monkeypatch, fail)


async def test_a_fatal_step_ends_the_block_and_every_request_with_its_error(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fatal = SessionFatal("the books are wrong")
    errors: list[LlamadError] = []

    async def ask(engine: Engine) -> None:
        try:
            await engine.complete("the cat", max_tokens=ENDLESS)
        except LlamadError as error:
            errors.append(error)

    async def read(engine: Engine) -> None:
        async with engine.stream("the cat", max_tokens=ENDLESS) as tokens:
            try:
                await tokens.result()
            except LlamadError as error:
                assert tokens.text
                errors.append(error)

    async with trio.open_nursery() as nursery:
        with pytest.raises(SessionFatal) as caught:
            async with open_engine(tiny_path, ONE_THREAD, n_slots=2, n_ctx=8192) as engine:
                nursery.start_soon(read, engine)
                await until(lambda: engine.stats().decode_tokens >= 5)
                for _ in range(4):
                    nursery.start_soon(ask, engine)
                await until_queued(engine, 3)
                crash(monkeypatch, fatal)
                await trio.sleep_forever()
    assert caught.value is fatal
    assert [(type(error), str(error)) for error in errors] == [(SessionFatal, str(fatal))] * 5
    # Each its own: a traceback tells where it was raised, and no other task's story.
    assert len({id(error) for error in (fatal, *errors)}) == 6
    assert threads_of_ours() == []
    with pytest.raises(SessionFatal):
        await engine.complete("the cat")


async def test_a_bug_in_a_step_ends_the_block_with_the_bug(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(monkeypatch, ZeroDivisionError("a bug"))
    errors: list[LlamadError] = []
    with pytest.raises(ZeroDivisionError, match="a bug"):
        async with open_engine(tiny_path, ONE_THREAD) as engine:
            try:
                await engine.complete("the cat")
            except LlamadError as error:
                errors.append(error)
            await trio.sleep_forever()
    assert [type(error) for error in errors] == [EngineClosed]


async def test_another_engine_outlives_a_crash(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Request("the cat", max_tokens=20, temperature=0)
    async with open_engine(tiny_path, ONE_THREAD) as survivor:
        text = await survivor.complete_text(asked)
        with monkeypatch.context() as patch, pytest.raises(SessionFatal):
            async with open_engine(tiny_path, ONE_THREAD) as engine:
                crash(patch, SessionFatal("the books are wrong"))
                await engine.complete("the cat")
        assert await survivor.complete_text(asked) == text


# -- loading --------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["tiny", "real"])
async def test_progress_rises_to_one(tiny_path: Path, smollm2_path: Path, which: str) -> None:
    told: list[float] = []
    thread = threading.get_ident()

    def on_load(fraction: float) -> None:
        assert threading.get_ident() == thread
        told.append(fraction)

    path = {"tiny": tiny_path, "real": smollm2_path}[which]
    async with open_engine(path, ONE_THREAD, on_load=on_load):
        assert told[-1] == 1.0
    assert told == sorted(set(told))
    assert told[0] > 0
    assert len(told) <= 101


@pytest.mark.parametrize(("which", "moments"), [("tiny", (-1.0, 0.0, 0.5, 1.0)), ("real", (0.5,))])
async def test_a_load_can_be_cancelled(
    tiny_path: Path, smollm2_path: Path, which: str, moments: tuple[float, ...]
) -> None:
    path = {"tiny": tiny_path, "real": smollm2_path}[which]
    for at in moments:
        with trio.CancelScope() as scope:

            def on_load(fraction: float, at: float = at, scope: trio.CancelScope = scope) -> None:
                if fraction >= at:
                    scope.cancel()

            if at < 0:  # before it begins
                scope.cancel()
            async with open_engine(path, ONE_THREAD, on_load=on_load):
                must_not_run("loaded")
        assert scope.cancelled_caught
        assert threads_of_ours() == []
    async with open_engine(path, ONE_THREAD) as engine:
        assert (await engine.complete("Hi", raw=True, max_tokens=1)).generated_tokens == 1


@pytest.mark.parametrize(
    "error",
    [ValueError("mine"), BrokenPipeError("mine"), Unusual("mine")],
    ids=["plain", "system", "base"],
)
@pytest.mark.parametrize("at", [0.0, 1.0])
async def test_an_exception_of_on_load_comes_out_as_itself(
    tiny_path: Path, error: BaseException, at: float
) -> None:
    def on_load(fraction: float) -> None:
        if fraction >= at:
            raise error

    with pytest.raises(type(error)) as caught:
        async with open_engine(tiny_path, ONE_THREAD, on_load=on_load):
            must_not_run("loaded")
    assert caught.value is error


# -- looking around -------------------------------------------------------------------------


async def test_info_describes_the_model(engine: Engine, smollm2_path: Path) -> None:
    info = engine.info
    assert info.architecture == "llama"
    assert "Q4_1" in info.description
    assert info.n_params == 134_515_008
    assert info.file_bytes == (await trio.Path(smollm2_path).stat()).st_size
    assert info.n_vocab == 49_152
    assert info.n_ctx_train == 8192
    assert info.has_template
    assert info.can_rewind


async def test_config_tells_the_settings_in_force(tiny_path: Path) -> None:
    async with open_engine(
        tiny_path, EngineConfig(n_threads=1, n_threads_batch=1, n_slots=9999)
    ) as engine:
        config = engine.config
        assert config.n_ctx == 4096
        assert (config.n_threads, config.n_threads_batch) == (1, 1)
        assert 4 < config.n_slots <= 512
        assert config.n_batch >= config.n_slots
        assert engine.stats().slots["free"] == config.n_slots


async def test_settings_come_from_the_environment_unless_they_are_given(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAD_N_THREADS", "1")
    monkeypatch.setenv("LLAMAD_N_SLOTS", "3")
    monkeypatch.setenv("LLAMAD_N_CTX", "128")
    async with open_engine(tiny_path, n_ctx=64) as engine:
        assert (engine.config.n_slots, engine.config.n_ctx) == (3, 64)
    async with open_engine(tiny_path, ONE_THREAD) as engine:
        assert engine.config.n_slots == 4


async def test_an_unknown_or_mistyped_setting_is_refused(tiny_path: Path) -> None:
    for overrides in ({"slots": 4}, {"n_slots": "4"}, {"n_ctx": 1.5}, {"kv_cache": 1}):
        with pytest.raises(ProtocolError):
            async with open_engine(tiny_path, ONE_THREAD, **overrides):
                must_not_run("loaded")


async def test_stats_count_what_was_done(tiny: Engine) -> None:
    before = tiny.stats()
    assert before.slots == {"free": 4, "prefill": 0, "decode": 0, "paused": 0}
    assert (before.steps, before.prefill_tokens, before.decode_tokens) == (0, 0, 0)
    assert before.kv_free_tokens == 8192
    done = await tiny.complete("the cat", max_tokens=10)
    after = tiny.stats()
    assert after.prefill_tokens == done.prompt_tokens
    assert after.decode_tokens == 9
    assert after.steps == 10
    assert after.prefill_s > 0
    assert after.decode_s > 0
    assert after.kv_retained_tokens == done.prompt_tokens + 9
    assert after.requests == {"completed": 1, "failed": 0, "cancelled": 0}
    assert before.steps == 0  # a snapshot


# -- threads and signals --------------------------------------------------------------------


async def test_no_thread_runs_our_code_after_the_block(tiny_path: Path) -> None:
    async with open_engine(tiny_path, ONE_THREAD) as engine:
        await engine.complete("the cat", max_tokens=2)
        assert len(threads_of_ours()) == 1  # the lane, which waits
    assert threads_of_ours() == []


async def test_the_engine_takes_no_place_in_the_default_thread_limiter(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = trio.to_thread.current_default_thread_limiter()
    loading: list[float] = []
    async with open_engine(
        tiny_path, ONE_THREAD, on_load=lambda _: loading.append(limiter.borrowed_tokens)
    ) as engine:
        with held_steps(monkeypatch) as steps:
            async with engine.stream("the cat", max_tokens=4) as tokens:
                await until(steps.begun.is_set)
                running = limiter.borrowed_tokens
                steps.let_go()
                await tokens.result()
    assert set(loading) == {0}
    assert running == 0


async def test_an_application_that_uses_up_all_its_threads_still_gets_tokens(tiny: Engine) -> None:
    limiter = trio.to_thread.current_default_thread_limiter()
    total, limiter.total_tokens = limiter.total_tokens, 1
    try:
        async with limiter:
            done = await tiny.complete("the cat " * 500, max_tokens=2)
    finally:
        limiter.total_tokens = total
    assert done.generated_tokens == 2


INTERRUPTED = """
import sys, trio
import tests  # has Ctrl-C heard
from llamad_trio import EngineConfig, Request, open_engine

path, moment = sys.argv[1:]
ready = lambda: print("ready", flush=True)
on_load = (lambda fraction: ready()) if moment == "loading" else None

async def main():
    config = EngineConfig(n_threads=1, n_threads_batch=1)
    async with open_engine(path, config, on_load=on_load) as engine:
        if moment == "loading":
            await trio.sleep_forever()
        prompt = Request([7] * 4000) if moment == "reading" else "Count to a million."
        async with engine.stream(prompt, max_tokens=10**6, temperature=2.0, seed=1) as tokens:
            if moment == "reading":
                ready()
            async for piece in tokens:
                ready()

trio.run(main)
"""


@pytest.mark.parametrize("moment", ["loading", "reading", "generating"])
def test_ctrl_c_ends_the_program_at_once_and_quietly(smollm2_path: Path, moment: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(smollm2_path), moment],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    # Python kills itself with the signal, once it has told what it was doing.
    assert process.returncode == -signal.SIGINT
    lines = errors.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "KeyboardInterrupt"
    assert not any("Exception in thread" in line or "ignored" in line for line in lines)
    assert not any("ExceptionGroup" in line for line in lines)


@pytest.mark.parametrize("n_opens", [12, pytest.param(100, marks=pytest.mark.slow)])
async def test_a_program_that_reopens_a_model_grows_by_less_than_5_mib_after_the_sixth_time(
    smollm2_path: Path, n_opens: int
) -> None:
    sizes = await trio.to_thread.run_sync(
        run_apart, print_reopened, str(smollm2_path), str(n_opens)
    )
    assert len(sizes) == n_opens
    assert max(sizes[6:]) - sizes[5] < 5 * MIB
