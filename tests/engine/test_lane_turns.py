"""Whose turn it is on a lane, and when too many threads are a warning."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import pytest
import trio
import trio.lowlevel
import trio.testing

from llamad_trio import ProtocolError
from llamad_trio.engine import lane as lane_module
from llamad_trio.engine.lane import Lane, counting_threads

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not end a turn."""
    monkeypatch.setattr(lane_module, "HANDOVER_S", 10.0)


async def turns(weights: Mapping[str, int], n_jobs: int) -> list[tuple[str, int]]:
    """Who had how many jobs in a row, of engines that always have another one."""
    order: list[str] = []
    lane = Lane()
    held = threading.Event()

    def step(name: str) -> None:
        order.append(name)
        time.sleep(0.01)  # as steps do: meanwhile the others ask for their next

    async def engine(name: str, weight: int) -> None:
        for _ in range(n_jobs):
            await lane.run(partial(step, name), abort=lambda: None, engine=name, weight=weight)

    async with lane.hosted(), trio.open_nursery() as nursery:
        # So that all of them have a job in the queue when the first begins.
        nursery.start_soon(lambda: lane.run(held.wait, abort=held.set))
        await trio.testing.wait_all_tasks_blocked()
        for name, weight in weights.items():
            nursery.start_soon(engine, name, weight)
        await trio.testing.wait_all_tasks_blocked()
        held.set()
    return [(name, len(list(group))) for name, group in groupby(order)]


async def test_engines_of_the_same_weight_take_turns_by_step() -> None:
    rounds = await turns({"a": 1, "b": 1, "c": 1}, 20)
    assert len(rounds) == 60
    assert all({name for name, _ in rounds[i : i + 3]} == {"a", "b", "c"} for i in range(0, 60, 3))


async def test_a_weight_is_the_number_of_steps_in_a_turn() -> None:
    rounds = await turns({"a": 3, "b": 1}, 12)
    heavy = [n for name, n in rounds if name == "a"]
    light = [n for name, n in rounds if name == "b"]
    assert heavy == [3, 3, 3, 3]
    assert light[:3] == [1, 1, 1]


async def test_an_engine_that_has_nothing_to_do_delays_nobody() -> None:
    lane = Lane()
    async with lane.hosted():
        with trio.fail_after(5):  # half of what would be waited for it
            await lane.run(lambda: None, abort=lambda: None, engine="a", weight=100)
            await lane.run(lambda: None, abort=lambda: None, engine="a", weight=100)


async def test_no_job_is_lost_when_the_host_changes_in_a_turn() -> None:
    lane = Lane()
    done: list[str] = []
    has_begun = trio.Event()

    async def engine(name: str) -> None:
        for _ in range(50):
            await lane.run(lambda: done.append(name), abort=lambda: None, engine=name, weight=2)
            if len(done) >= 20:
                has_begun.set()

    async with lane.hosted(), trio.open_nursery() as nursery, lane.hosted():
        nursery.start_soon(engine, "a")
        nursery.start_soon(engine, "b")
        await has_begun.wait()
    assert sorted(done) == ["a"] * 50 + ["b"] * 50


async def test_a_lane_belongs_to_one_run_at_a_time_and_then_to_another() -> None:
    lane = Lane()

    async def use_it() -> str:
        async with lane.hosted():
            return await lane.run(lambda: "done", abort=lambda: None)

    async def fail_in_it() -> None:
        async with lane.hosted():
            raise KeyError("mine")

    async with lane.hosted():
        async with lane.hosted():
            pass
        with pytest.raises(ProtocolError, match="one Trio run at a time"):
            await trio.to_thread.run_sync(trio.run, use_it)
        assert await lane.run(lambda: "mine", abort=lambda: None) == "mine"
    with pytest.raises(KeyError):
        await trio.to_thread.run_sync(trio.run, fail_in_it)
    assert await trio.to_thread.run_sync(trio.run, use_it) == "done"
    assert await use_it() == "done"


async def test_more_threads_than_cores_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    one, other = Lane(), Lane()
    with caplog.at_level(logging.WARNING, "llamad_trio"):
        with counting_threads(one, 2, 2), counting_threads(one, 2, 2):
            assert caplog.records == []
            with counting_threads(other, 2, 2), counting_threads(other, 1, 2):
                (record,) = caplog.records
                assert "2 lanes" in record.getMessage()
                assert "4 threads on 2 cores" in record.getMessage()
        with counting_threads(one, 1, 2), counting_threads(other, 1, 2):
            assert len(caplog.records) == 1


def test_a_lane_has_a_number_of_threads() -> None:
    assert Lane().threads is None
    assert Lane(threads=3).threads == 3
    with pytest.raises(ProtocolError):
        Lane(threads="3")  # type: ignore[arg-type]
