"""What it costs to tell what happens in an engine: with nobody listening, and with a reader."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio

from llamad_trio import Engine, Request, open_engine
from llamad_trio.engine.decode import DecodeActor
from llamad_trio.scheduling.plan import StepPlan, StepResult
from llamad_trio.system.nursery import TaskStatus
from llamad_trio.testing import open_scripted_engine

ROUNDS = 10
N_TOKENS = 64
N_STEPS = 2000


async def events_cost(model: str) -> dict[str, float]:
    """Decode tokens/s with nobody listening, against an engine that reports nothing, and with
    one reader, against nobody listening; and the CPU time that each adds to a step of a
    scripted engine, which says as much on a noisy machine."""
    async with open_engine(model, n_slots=1, kv_cache=False) as eng:
        silent, unheard, heard = await _in_turns(eng, _tokens_per_s)
    async with open_scripted_engine("x" * N_STEPS, kv_cache=False) as eng:
        silent_us, unheard_us, heard_us = await _in_turns(eng, _cpu_us_per_step)
    return {
        "no reader": statistics.median(map(float.__truediv__, unheard, silent)),
        "one reader": statistics.median(map(float.__truediv__, heard, unheard)),
        "no reader_us": statistics.median(map(float.__sub__, unheard_us, silent_us)),
        "one reader_us": statistics.median(map(float.__sub__, heard_us, unheard_us)),
    }


async def _in_turns(
    eng: Engine, measure: Callable[[Engine], Awaitable[float]]
) -> tuple[list[float], list[float], list[float]]:
    """Measurements without reports, with nobody listening, and with a reader."""
    silent: list[float] = []
    unheard: list[float] = []
    heard: list[float] = []
    await measure(eng)
    for _ in range(ROUNDS):
        with _without_reports(eng):
            silent.append(await measure(eng))
        unheard.append(await measure(eng))
        async with _a_reader(eng):
            heard.append(await measure(eng))
    return silent, unheard, heard


async def _tokens_per_s(eng: Engine) -> float:
    request = Request("One, two, three, ", raw=True, temperature=0, max_tokens=N_TOKENS)
    done = await eng.complete(request)
    return (done.generated_tokens - 1) / (done.duration_s - done.ttft_s)


async def _cpu_us_per_step(eng: Engine) -> float:
    before = time.thread_time()
    await eng.complete("x", max_tokens=N_STEPS)
    return 1e6 * (time.thread_time() - before) / N_STEPS


@asynccontextmanager
async def _a_reader(eng: Engine) -> AsyncIterator[None]:
    async def read(*, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with eng.events() as events:
            task_status.started(None)
            async for _ in events:
                pass

    async with trio.open_nursery() as nursery:
        await nursery.start(read)
        yield
        nursery.cancel_scope.cancel()


class _Unreported(DecodeActor):
    """What the actor would do if there were no events."""

    def _report_plan(self, plan: StepPlan | None) -> None:
        pass

    def _report_step(self, plan: StepPlan, result: StepResult, n_running: int) -> None:
        for ticket_id in result.sampled:
            if ticket := self._tickets.get(ticket_id):
                ticket.token_sampled()


@contextmanager
def _without_reports(eng: Engine) -> Iterator[None]:
    eng._desk.decode.__class__ = _Unreported
    try:
        yield
    finally:
        eng._desk.decode.__class__ = DecodeActor
