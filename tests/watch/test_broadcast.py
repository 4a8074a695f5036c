"""Every reader gets every event in order, or is told how many it has lost; nobody waits."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from hypothesis import given, strategies as st
from trio.testing import MockClock

from llamad_trio.core.engine_events import EngineStopped, FirstToken, Lagged
from llamad_trio.core.errors import InferenceError
from llamad_trio.isolation.relay import EventRelay
from llamad_trio.watch.broadcast import ATTACH_S, Broadcast

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llamad_trio.core.engine_events import EngineEvent
    from llamad_trio.watch.broadcast import EventReader


def event(time: float) -> EngineStopped:
    return EngineStopped(time=time, engine="e", reason=None)


def publish(broadcast: Broadcast, *times: float) -> None:
    for time in times:
        broadcast.publish(event(time))


@pytest.fixture
def broadcast() -> Broadcast:
    return Broadcast()


async def the_rest(reader: EventReader) -> list[EngineEvent]:
    return [event async for event in reader]


async def test_every_reader_gets_every_event_in_order(broadcast: Broadcast) -> None:
    async with broadcast.subscribe() as early, broadcast.subscribe() as other:
        publish(broadcast, 1, 2)
        async with broadcast.subscribe() as late:
            publish(broadcast, 3)
            broadcast.close()
            assert await the_rest(late) == [event(3)]
        assert await the_rest(early) == [event(1), event(2), event(3)]
        assert await the_rest(other) == [event(1), event(2), event(3)]


async def test_a_reader_that_lags_loses_the_oldest_and_is_told_how_many(
    broadcast: Broadcast,
) -> None:
    async with broadcast.subscribe(max_events=2) as slow, broadcast.subscribe() as quick:
        publish(broadcast, 1, 2, 3, 4, 5)
        assert await slow.receive() == Lagged(time=3, engine="", n_lost=3)
        assert await slow.receive() == event(4)
        publish(broadcast, 6, 7)
        broadcast.close()
        assert await the_rest(slow) == [Lagged(time=5, engine="", n_lost=1), event(6), event(7)]
        assert await the_rest(quick) == [event(n) for n in range(1, 8)]


async def test_what_is_lost_on_the_way_to_a_waiting_reader_is_told_in_its_place(
    broadcast: Broadcast,
) -> None:
    got: list[EngineEvent] = []
    async with broadcast.subscribe(max_events=1) as reader, trio.open_nursery() as nursery:

        async def read() -> None:
            got.extend([await reader.receive() for _ in range(3)])

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        publish(broadcast, 1, 2, 3)
    assert got == [event(1), Lagged(time=2, engine="", n_lost=1), event(3)]


@given(st.lists(st.integers(1, 5) | st.just("read"), max_size=60), st.integers(1, 4))
async def test_what_is_read_and_what_was_lost_is_what_was_published(
    script: list[int | str], max_events: int
) -> None:
    broadcast = Broadcast()
    n_published = n_accounted = 0
    async with broadcast.subscribe(max_events) as reader:
        for line in [*script, *["read"] * (max_events + 1)]:
            if isinstance(line, int):
                publish(broadcast, *range(n_published, n_published + line))
                n_published += line
            elif n_accounted < n_published:
                got = await reader.receive()
                n_accounted += got.n_lost if isinstance(got, Lagged) else 1
                assert got.time == n_accounted - 1, "in order, and none left out"
        broadcast.close()
        assert await the_rest(reader) == []
    assert n_accounted == n_published


async def test_a_reader_ends_after_what_it_has_when_the_broadcast_is_closed(
    broadcast: Broadcast,
) -> None:
    async with broadcast.subscribe(max_events=1) as reader:
        publish(broadcast, 1, 2)
        broadcast.close()
        assert await the_rest(reader) == [Lagged(time=1, engine="", n_lost=1), event(2)]
        with pytest.raises(trio.EndOfChannel):
            await reader.receive()


async def test_closing_wakes_a_reader_that_waits(broadcast: Broadcast) -> None:
    async with broadcast.subscribe() as reader, trio.open_nursery() as nursery:

        async def read() -> None:
            assert await the_rest(reader) == []

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        broadcast.close()


async def test_who_subscribes_after_the_end_gets_the_end(broadcast: Broadcast) -> None:
    broadcast.close()
    async with broadcast.subscribe() as reader:
        assert not broadcast.has_readers
        assert await the_rest(reader) == []


async def test_it_knows_whether_anybody_listens(broadcast: Broadcast) -> None:
    heard = [broadcast.has_readers]
    async with broadcast.subscribe() as one:
        async with broadcast.subscribe():
            heard.append(broadcast.has_readers)
        heard.append(broadcast.has_readers)
        await one.aclose()
        heard.append(broadcast.has_readers)
    assert heard == [False, True, True, False]


async def test_what_goes_onward_is_published_there_too_and_ends_here_only() -> None:
    shared = Broadcast()
    own = Broadcast(onward=shared)
    async with shared.subscribe() as of_all:
        assert own.has_readers
        async with own.subscribe() as of_one:
            publish(own, 1)
            publish(shared, 2)
            own.close()
            assert await the_rest(of_one) == [event(1)]
        publish(shared, 3)
        shared.close()
        assert await the_rest(of_all) == [event(1), event(2), event(3)]
    assert not own.has_readers


async def test_a_cancelled_receive_loses_nothing(broadcast: Broadcast) -> None:
    async with broadcast.subscribe(max_events=1) as reader:
        publish(broadcast, 1, 2)
        for expected in (Lagged(time=1, engine="", n_lost=1), event(2)):
            with trio.move_on_after(0) as scope:
                await reader.receive()
            assert scope.cancelled_caught
            assert await reader.receive() == expected


async def test_every_receive_is_a_checkpoint(broadcast: Broadcast) -> None:
    async with broadcast.subscribe(max_events=1) as reader:
        publish(broadcast, 1, 2)
        for _ in range(2):
            with trio.testing.assert_checkpoints():
                await reader.receive()


async def test_a_closed_reader_gets_nothing_and_costs_nobody_anything(broadcast: Broadcast) -> None:
    async with broadcast.subscribe(max_events=1) as closed, broadcast.subscribe() as other:
        publish(broadcast, 1, 2)
        await closed.aclose()
        publish(broadcast, 3)
        with pytest.raises(trio.ClosedResourceError):
            await closed.receive()
        assert [await other.receive() for _ in range(3)] == [event(1), event(2), event(3)]


@pytest.mark.parametrize("max_events", [0, -1])
async def test_a_reader_without_any_room_is_refused(max_events: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        async with Broadcast().subscribe(max_events):
            pytest.fail("it was let in")


async def test_a_reader_that_waits_has_no_task_and_no_deadline_of_its_own(
    broadcast: Broadcast,
) -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    async with broadcast.subscribe() as reader:
        assert trio.lowlevel.current_statistics().tasks_living == before
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.receive)
            await trio.testing.wait_all_tasks_blocked()
            # That of a test that hangs is far away.
            assert trio.lowlevel.current_statistics().seconds_to_next_deadline > 60
            publish(broadcast, 1)


# -- sources ------------------------------------------------------------------------------


class Stuck:
    """A source that never answers."""

    async def attach(self) -> None:
        await trio.sleep_forever()


class Healthy:
    """A source that answers at once."""

    def __init__(self) -> None:
        self.attached = trio.Event()

    async def attach(self) -> None:
        self.attached.set()


class Refused:
    """A source that cannot be attached, as is found out after a while."""

    async def attach(self) -> None:
        await trio.sleep(0.5)
        raise InferenceError("no descriptors")


async def test_a_source_that_is_stuck_keeps_a_reader_for_a_bounded_time(
    broadcast: Broadcast, autojump_clock: MockClock
) -> None:
    began = trio.current_time()
    with broadcast.fed_by(Stuck()), broadcast.fed_by(Stuck()):
        async with broadcast.subscribe() as reader:
            assert trio.current_time() - began == pytest.approx(ATTACH_S)
            publish(broadcast, 1)
            assert await reader.receive() == event(1)


async def test_a_source_that_is_stuck_keeps_no_other_from_being_attached(
    autojump_clock: MockClock,
) -> None:
    broadcast, healthy = Broadcast(), Healthy()
    with broadcast.fed_by(Stuck()), broadcast.fed_by(healthy):
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                async with broadcast.subscribe():
                    pytest.fail("it was let in")

            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            assert healthy.attached.is_set()
            nursery.cancel_scope.cancel()
    assert not broadcast.has_readers


async def test_a_source_that_cannot_be_attached_is_told_although_another_is_stuck(
    broadcast: Broadcast, autojump_clock: MockClock
) -> None:
    async with broadcast.subscribe() as other:
        with broadcast.fed_by(Stuck()), broadcast.fed_by(Refused()):
            began = trio.current_time()
            with pytest.raises(InferenceError, match="no descriptors"):
                async with broadcast.subscribe():
                    pytest.fail("it was let in")
            assert trio.current_time() - began == pytest.approx(0.5)
        publish(broadcast, 1)
        assert await other.receive() == event(1)


async def test_the_events_of_a_source_that_was_stuck_come_once_it_answers(
    autojump_clock: MockClock,
) -> None:
    elsewhere, here = Broadcast(), Broadcast()
    answers = trio.Event()
    token = FirstToken(time=1.0, engine="e", request_id=1, ttft_s=0.1)

    @asynccontextmanager
    async def open_events() -> AsyncIterator[EventReader]:
        await answers.wait()
        async with elsewhere.subscribe() as events:
            yield events

    relay = EventRelay(open_events, here)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay.run)
        with here.fed_by(relay):
            async with here.subscribe() as reader:
                answers.set()
                await trio.testing.wait_all_tasks_blocked()
                elsewhere.publish(token)
                assert await reader.receive() == token
        relay.end(InferenceError("over"))
