"""Sessions that fail, are cancelled or closed, and are beside others: who holds what, and how long."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from llamad_trio import EngineClosed, InferenceError, Request, UnsupportedFeature
from llamad_trio.llama.llama_runtime import LlamaRuntime
from llamad_trio.scheduling.plan import StepResult, StepStatus
from tests.engine.sessions import PREFIX, SUFFIX, cold, opened, raw, said, tokens_of
from tests.models import DECODER_KINDS
from tests.support import HeldSteps, before_steps, held_steps, until, until_idle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from llamad_trio import Engine, Session
    from llamad_trio.scheduling.plan import StepPlan

kinds = pytest.mark.parametrize("kind", DECODER_KINDS)


async def cancel_in_a_step(
    monkeypatch: pytest.MonkeyPatch, prefill: Callable[[str], Awaitable[object]], text: str
) -> None:
    """Cancel it in the middle of its first step."""
    with held_steps(monkeypatch) as steps:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefill, text)
            await until(steps.begun.is_set)
            nursery.cancel_scope.cancel()
            steps.let_go()


# -- what fails or is cancelled -------------------------------------------------------------


async def test_a_cancelled_suffix_leaves_the_prefix(
    exact: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = await session.ensure_prefix(PREFIX)
    await session.prefill_suffix("and a hat")
    await cancel_in_a_step(monkeypatch, session.prefill_suffix, SUFFIX)
    report = session.explain()
    assert (report.state, report.resident) == ("prefix", status.resident)
    assert await said(session) == await raw(exact, PREFIX)
    await session.prefill_suffix(SUFFIX)
    assert await said(session) == await raw(exact, PREFIX + SUFFIX)


async def test_a_cancelled_prefix_leaves_what_there_was(
    exact: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    await session.ensure_prefix(PREFIX)
    before = session.explain()
    await cancel_in_a_step(monkeypatch, session.ensure_prefix, "another one altogether")
    await until_idle(exact)
    assert session.explain() == before
    assert await said(session) == await raw(exact, PREFIX)


@kinds
async def test_a_failed_suffix_leaves_the_prefix(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runtime: LlamaRuntime, plan: StepPlan) -> StepResult:
        runtime._arrange(plan.memory)
        return runtime._roll_back(plan, -3)

    async with opened(path) as engine, engine.session() as session:
        status = await session.ensure_prefix(PREFIX)
        with monkeypatch.context() as patch:
            patch.setattr(LlamaRuntime, "step", fail)
            with pytest.raises(InferenceError):
                await session.prefill_suffix(SUFFIX)
        report = session.explain()
        assert (report.state, report.resident) == ("prefix", status.resident)
        before = engine.stats().prefill_tokens
        again = await session.prefill_suffix(SUFFIX)
        assert engine.stats().prefill_tokens - before == again.resident - status.resident
        assert await said(session) == await cold(path, PREFIX + SUFFIX)


async def test_no_room_for_a_batch_is_no_end_of_a_session(
    exact: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    step = LlamaRuntime.step

    def no_room_once(runtime: LlamaRuntime, plan: StepPlan) -> StepResult:
        nonlocal calls
        calls += 1
        if calls > 1:
            return step(runtime, plan)
        runtime._arrange(plan.memory)
        return StepResult(status=StepStatus.NO_ROOM)

    await session.ensure_prefix(PREFIX)
    monkeypatch.setattr(LlamaRuntime, "step", no_room_once)
    await session.prefill_suffix(SUFFIX)
    assert calls > 1
    assert await said(session) == await raw(exact, PREFIX + SUFFIX)


# -- the end --------------------------------------------------------------------------------


USES: list[Callable[[Session], Awaitable[object]]] = [
    lambda session: session.ensure_prefix(PREFIX),
    lambda session: session.prefill_suffix(SUFFIX),
    lambda session: session.decode().__aenter__(),
    lambda session: session.fork().__aenter__(),
]


async def test_a_closed_session_takes_nothing_more(exact: Engine) -> None:
    async with exact.session() as session:
        await session.ensure_prefix(PREFIX)
    for use in USES:
        with pytest.raises(trio.ClosedResourceError):
            await use(session)
    assert exact.stats().kv_used_tokens == 0


async def test_a_session_outlives_its_engine_as_closed(tiny_path: Path) -> None:
    async with opened(tiny_path) as engine:
        manager = engine.session()
        session = await manager.__aenter__()
        await session.ensure_prefix(PREFIX)
    for use in USES:
        with pytest.raises(EngineClosed):
            await use(session)
    with pytest.raises(EngineClosed):
        engine.session()
    await manager.__aexit__(None, None, None)


async def test_an_engine_that_closes_meanwhile_ends_a_prefill(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prefill(session: Session) -> None:
        with pytest.raises(EngineClosed):
            await session.ensure_prefix(PREFIX)

    async with trio.open_nursery() as nursery:
        with held_steps(monkeypatch) as steps:
            async with opened(tiny_path) as engine:
                manager = engine.session()
                nursery.start_soon(prefill, await manager.__aenter__())
                await until(steps.begun.is_set)
                steps.let_go()
    await manager.__aexit__(None, None, None)


async def test_without_the_kv_cache_there_are_no_sessions(tiny_path: Path) -> None:
    async with opened(tiny_path, kv_cache=False) as engine:
        with pytest.raises(UnsupportedFeature):
            engine.session()


async def test_a_session_closed_while_it_prefills_holds_nothing(
    exact: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_steps(monkeypatch) as steps:
        async with trio.open_nursery() as nursery:
            async with exact.session() as session:
                nursery.start_soon(session.ensure_prefix, PREFIX)
                await until(steps.begun.is_set)
            steps.let_go()
    assert exact._desk.decode.scheduler._pool._held == {}


async def test_a_prefill_cancelled_with_its_session_holds_nothing(
    exact: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = HeldSteps()

    async def prefill() -> None:
        async with exact.session() as session:
            await session.ensure_prefix(PREFIX)

    before_steps(monkeypatch, lambda plan: shared.hold() if len(plan.work) == 2 else None)
    async with exact.stream("the cat", max_tokens=200) as other:
        await other.receive()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefill)
            await until(shared.begun.is_set)
            nursery.cancel_scope.cancel()
        shared.let_go()  # the step is shared: it is not aborted, and completes the prefill
        await other.result()
    assert exact.stats().aborted_steps == 0
    assert exact._desk.decode.scheduler._pool._held == {}


# -- sessions beside each other -------------------------------------------------------------


async def test_two_tasks_in_one_session_wait_for_each_other(
    exact: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    async def prefill(session: Session, text: str) -> None:
        await session.ensure_prefix(text)
        order.append(text)
        assert session.explain().segments[0].bytes == (0, len(text))

    with held_steps(monkeypatch) as steps:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefill, session, PREFIX)
            await until(steps.begun.is_set)
            nursery.start_soon(prefill, session, "a hat")
            await trio.testing.wait_all_tasks_blocked()
            assert exact.stats().queued == 0
            assert exact.stats().slots["prefill"] == 1
            steps.let_go()
    assert order == [PREFIX, "a hat"]
    assert await said(session) == await raw(exact, "a hat")


async def test_a_fork_shares_the_cells_and_goes_its_own_way(
    exact: Engine, session: Session
) -> None:
    status = await session.ensure_prefix(PREFIX)
    cells = exact.stats().kv_retained_tokens
    computed = exact.stats().prefill_tokens
    async with session.fork() as fork:
        assert fork.explain().segments == session.explain().segments
        assert fork.explain().resident == status.resident
        await fork.prefill_suffix(SUFFIX)
        await session.prefill_suffix("and a hat")
        n_suffixes = sum(
            [
                len(await tokens_of(exact, PREFIX + suffix)) - status.resident
                for suffix in (SUFFIX, "and a hat")
            ]
        )
        stats = exact.stats()
        assert stats.kv_retained_tokens == cells + n_suffixes
        assert stats.prefill_tokens == computed + n_suffixes
        assert await said(fork) == await raw(exact, PREFIX + SUFFIX)
        assert await said(session) == await raw(exact, PREFIX + "and a hat")
        await session.ensure_prefix("a hat")
        assert await said(fork) == await raw(exact, PREFIX + SUFFIX)
    assert await said(session) == await raw(exact, "a hat")


async def test_a_fork_of_a_suffix_can_go_back_to_its_prefix(
    exact: Engine, session: Session
) -> None:
    await session.ensure_prefix(PREFIX)
    await session.prefill_suffix(SUFFIX)
    async with session.fork() as fork:
        assert fork.explain().state == "suffix"
        await fork.prefill_suffix("and a hat")
        assert await said(fork) == await raw(exact, PREFIX + "and a hat")
    assert session.explain().state == "suffix"
    assert await said(session) == await raw(exact, PREFIX + SUFFIX)


async def test_a_fork_outlives_what_it_came_from(exact: Engine) -> None:
    first = exact.session()
    session = await first.__aenter__()
    status = await session.ensure_prefix(PREFIX)
    async with session.fork() as fork:
        await first.__aexit__(None, None, None)
        assert fork.explain().resident == status.resident
        assert await said(fork) == await raw(exact, PREFIX)


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
async def test_more_sessions_than_sequences_all_work(path: Path) -> None:
    suffixes = [f"{letter} hat" for letter in "abcdefghijklmnopqrstuvwx"]
    async with opened(path) as engine:
        async with AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(engine.session()) for _ in suffixes]
            for session, suffix in zip(sessions, suffixes, strict=True):
                await session.ensure_prefix(PREFIX)
                await session.prefill_suffix(suffix)
            texts = [await said(session, 6) for session in sessions]
        assert engine._desk.decode.scheduler._pool._held == {}
        stats = engine.stats()
        assert stats.kv_used_tokens == 0
        assert stats.kv_retained_tokens + stats.kv_free_tokens == 512
    assert texts == [await cold(path, PREFIX + suffix, 6) for suffix in suffixes]


# -- who gives way --------------------------------------------------------------------------


def crowd(n: int) -> list[Request]:
    """Requests of 60 tokens that have nothing in common."""
    return [Request([20 + i] * 60, max_tokens=1) for i in range(n)]


async def test_what_a_session_holds_outlives_others_and_failed_suffixes_that_went_on_from_it(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tiny_path, 256) as engine, engine.session() as session:
        status = await session.ensure_prefix(PREFIX)
        await raw(engine, PREFIX + "and a hat", 1)
        await cancel_in_a_step(monkeypatch, session.prefill_suffix, SUFFIX)
        for asked in crowd(12):
            await engine.complete(asked)
        assert session.explain().resident == status.resident
        before = engine.stats().prefill_tokens
        assert (await session.ensure_prefix(PREFIX)).prefilled == 0
        assert engine.stats().prefill_tokens == before


async def test_what_a_session_holds_gives_way_to_what_runs_and_is_computed_again(
    tiny_path: Path,
) -> None:
    async with opened(tiny_path, 256) as engine, engine.session() as session:
        status = await session.ensure_prefix(PREFIX)
        expected = await said(session)
        done = await engine.complete(Request([7] * 250, max_tokens=6))
        assert done.generated_tokens == 6
        assert engine.stats().preemptions == 0
        report = session.explain()
        assert report.resident <= 1
        assert report.segments[0].tokens == (0, status.resident)
        assert await said(session) == expected
        again = await session.ensure_prefix(PREFIX)
        assert again.resident == session.explain().resident == status.resident


async def test_what_a_closed_session_held_is_kept_like_all_else(tiny_path: Path) -> None:
    async with opened(tiny_path, 256) as engine:
        async with engine.session() as session:
            await session.ensure_prefix(PREFIX)
        done = await engine.complete(PREFIX, raw=True, max_tokens=1)
        assert done.cached_tokens == done.prompt_tokens - 1
        for asked in crowd(12):
            await engine.complete(asked)
        assert (await engine.complete(PREFIX, raw=True, max_tokens=1)).cached_tokens <= 1


async def test_requests_of_a_session_keep_their_prefix_in_preference(tiny_path: Path) -> None:
    async with opened(tiny_path, 256) as engine:
        mine = Request([285] * 60, max_tokens=1, session="mine")
        others = Request([286] * 60, max_tokens=1)
        for asked in (mine, others, *crowd(12)):
            await engine.complete(asked)
        assert (await engine.complete(others)).cached_tokens == 0
        assert (await engine.complete(mine)).cached_tokens == 59
