"""Engines share a lane or have their own; each works as if it were alone."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal

import pytest
import trio

from llamad_trio import Lane, Request, open_engine
from tests.support import (
    ENDLESS,
    ONE_THREAD,
    SURE_PROMPTS,
    before_steps,
    count_pieces,
    must_not_run,
    threads_of_ours,
    until_idle,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llamad_trio import Engine
    from llamad_trio.core.config import LaneLike

SURE = Request(SURE_PROMPTS[0], raw=True, max_tokens=8, temperature=0)
TINY = Request("the cat", max_tokens=40, temperature=0)

LaneChoice = Literal["shared", "own", "given"]


def lanes(choice: LaneChoice) -> list[LaneLike | Literal["own"] | None]:
    """The lanes of two engines."""
    if choice == "shared":
        return [None, None]
    return ["own", "own"] if choice == "own" else [Lane()] * 2


@pytest.fixture
def step_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The thread of each step, as they come."""
    threads: list[int] = []
    before_steps(monkeypatch, lambda _: threads.append(threading.get_ident()))
    return threads


@pytest.mark.usefixtures("smollm2_is_kept")
@pytest.mark.parametrize("choice", ["shared", "own", "given"])
async def test_two_engines_generate_at_once(
    smollm2_path: Path, tiny_path: Path, choice: LaneChoice, step_threads: list[int]
) -> None:
    first, second = lanes(choice)
    texts: dict[str, list[str]] = {"real": [], "tiny": []}

    async def complete(name: str, engine: Engine, request: Request) -> None:
        texts[name].append(await engine.complete_text(request))

    async with (
        open_engine(smollm2_path, ONE_THREAD, lane=first) as real,
        open_engine(tiny_path, ONE_THREAD, lane=second) as tiny,
    ):
        for _ in range(2):  # the first alone, the second beside each other
            await complete("real", real, SURE)
            await complete("tiny", tiny, TINY)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(complete, "real", real, SURE)
                nursery.start_soon(complete, "tiny", tiny, TINY)
    assert len(set(texts["real"])) == len(set(texts["tiny"])) == 1
    assert texts["real"][0].startswith(" 9, 10")
    assert len(set(step_threads)) == (2 if choice == "own" else 1)
    assert threading.get_ident() not in step_threads


@pytest.mark.parametrize("choice", ["shared", "own", "given"])
@pytest.mark.parametrize("leaves", ["host", "guest"])
async def test_an_engine_goes_on_when_its_neighbour_closes(
    tiny_path: Path, choice: LaneChoice, leaves: str
) -> None:
    # The engine that came first hosts a shared lane.
    close, closed = {"host": trio.Event(), "guest": trio.Event()}, trio.Event()
    engines: dict[str, Engine] = {}

    async def run(
        name: str, lane: LaneLike | Literal["own"] | None, opened: Callable[[], None]
    ) -> None:
        async with open_engine(tiny_path, ONE_THREAD, lane=lane, n_ctx=8192) as engine:
            engines[name] = engine
            opened()
            await close[name].wait()
        if name == leaves:
            closed.set()

    stays = "guest" if leaves == "host" else "host"
    async with trio.open_nursery() as nursery:
        for name, lane in zip(("host", "guest"), lanes(choice), strict=True):
            ready = trio.Event()
            nursery.start_soon(run, name, lane, ready.set)
            await ready.wait()
        text = await engines[leaves].complete_text(TINY)
        async with engines[stays].stream(TINY, max_tokens=ENDLESS) as tokens:
            await count_pieces(tokens, 3)
            close[leaves].set()
            await closed.wait()
            await count_pieces(tokens, 60)
            assert tokens.text.startswith(text)
        await until_idle(engines[stays])
        assert await engines[stays].complete_text(TINY) == text
        close[stays].set()
    assert threads_of_ours() == []


async def test_engines_come_and_go_on_one_lane(tiny_path: Path) -> None:
    texts: list[str] = []

    async def open_and_ask(n: int) -> None:
        for _ in range(n):
            async with open_engine(tiny_path, ONE_THREAD, n_ctx=256) as engine:
                texts.append(await engine.complete_text(TINY))

    async with trio.open_nursery() as nursery:
        for n in range(1, 5):
            nursery.start_soon(open_and_ask, n)
    assert len(texts) == 10
    assert len(set(texts)) == 1
    assert threads_of_ours() == []


async def test_a_cancelled_open_leaves_its_neighbour_alone(tiny_path: Path) -> None:
    async with open_engine(tiny_path, ONE_THREAD, n_ctx=8192) as engine:
        async with engine.stream(TINY, max_tokens=ENDLESS) as tokens:
            for _ in range(3):
                with trio.CancelScope() as scope:
                    async with open_engine(tiny_path, ONE_THREAD, on_load=lambda _: scope.cancel()):
                        must_not_run("loaded")
                await count_pieces(tokens, 3)
        await until_idle(engine)


@pytest.mark.usefixtures("smollm2_is_kept")
async def test_an_abort_stops_only_the_engine_it_is_meant_for(
    smollm2_path: Path, tiny_path: Path
) -> None:
    async with (
        open_engine(smollm2_path, ONE_THREAD) as real,
        open_engine(tiny_path, ONE_THREAD, n_ctx=8192) as tiny,
    ):
        async with tiny.stream(TINY, max_tokens=ENDLESS) as tokens:
            await tokens.receive()
            with trio.CancelScope() as scope:
                async with real.stream(Request([7] * 4000)):
                    while real.stats().slots["prefill"] == 0:
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
                    await trio.lowlevel.checkpoint()
            await until_idle(real)
            await count_pieces(tokens, 3)
        assert tiny.stats().aborted_steps <= 1
        assert await real.complete_text(SURE) == " 9, 10, "
