"""Events that come from elsewhere are fetched while somebody reads, and none is missed."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

import pytest
import trio
import trio.testing

from llamad_trio import (
    Disconnected,
    EngineClosed,
    EngineCrashed,
    EngineSpec,
    InferenceError,
    LlamadError,
    PromptTooLong,
    open_engine,
    open_models,
)
from llamad_trio.core.engine_events import (
    EngineStopped,
    FirstToken,
    Lagged,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestQueued,
    StepDone,
)
from llamad_trio.isolation.relay import EventRelay, OpenEvents
from llamad_trio.system.nursery import open_plain_nursery
from llamad_trio.watch.broadcast import Broadcast
from tests.support import ENDLESS, ONE_THREAD, must_not_run, until
from tests.watch.support import Watcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from llamad_trio.core.engine_events import EngineEvent


def queued(n: int) -> RequestQueued:
    return RequestQueued(time=float(n), engine="e", request_id=n, kind="chat")


def first_token(n: int) -> FirstToken:
    return FirstToken(time=float(n), engine="e", request_id=n, ttft_s=1.0)


@asynccontextmanager
async def relayed(
    elsewhere: Broadcast, here: Broadcast, open_events: OpenEvents | None = None
) -> AsyncIterator[EventRelay]:
    relay = EventRelay(open_events or elsewhere.subscribe, here)
    async with open_plain_nursery() as nursery:
        nursery.start_soon(relay.run)  # it need not run yet
        try:
            with here.fed_by(relay):
                yield relay
        finally:
            relay.end(EngineClosed())


async def test_nothing_is_asked_for_before_there_is_a_reader() -> None:
    elsewhere, here = Broadcast(), Broadcast()
    async with relayed(elsewhere, here):
        assert not elsewhere.has_readers
        async with here.subscribe() as reader:
            elsewhere.publish(queued(1))  # at once: the source is attached
            assert await reader.receive() == queued(1)


async def test_a_reader_further_on_counts_too() -> None:
    elsewhere, onward = Broadcast(), Broadcast()
    async with relayed(elsewhere, Broadcast(onward=onward)), onward.subscribe() as reader:
        elsewhere.publish(queued(1))
        assert await reader.receive() == queued(1)


async def test_a_relay_that_begins_later_is_attached_when_it_is_told_to() -> None:
    elsewhere, here = Broadcast(), Broadcast()
    async with here.subscribe() as reader, relayed(elsewhere, here) as relay:
        await relay.attach()
        elsewhere.publish(queued(1))
        assert await reader.receive() == queued(1)


async def test_when_nobody_reads_any_more_it_stops_and_begins_again_for_the_next() -> None:
    elsewhere, here = Broadcast(), Broadcast()
    async with relayed(elsewhere, here):
        for n in range(1, 4):
            async with here.subscribe() as reader:
                elsewhere.publish(queued(n))
                assert await reader.receive() == queued(n)
            elsewhere.publish(first_token(n))
            await trio.testing.wait_all_tasks_blocked()
            assert not elsewhere.has_readers


async def test_a_reader_that_comes_while_it_stops_misses_nothing() -> None:
    elsewhere, here = Broadcast(), Broadcast()
    async with relayed(elsewhere, here):
        async with here.subscribe():
            pass
        elsewhere.publish(queued(1))  # which makes it see that nobody reads
        async with here.subscribe() as reader:
            elsewhere.publish(queued(2))
            elsewhere.publish(queued(3))
            seen = [await reader.receive()]
            while seen[-1] != queued(3):
                seen.append(await reader.receive())
        assert seen[-2:] == [queued(2), queued(3)]


async def test_those_without_an_end_are_told_why() -> None:
    elsewhere, here = Broadcast(), Broadcast()
    async with here.subscribe() as reader:
        async with relayed(elsewhere, here) as relay:
            await relay.attach()
            for n in (1, 2):
                elsewhere.publish(queued(n))
            elsewhere.publish(
                RequestCancelled(time=3.0, engine="e", request_id=1, kind="chat", duration_s=2.0)
            )
            await trio.testing.wait_all_tasks_blocked()
            relay.end(EngineClosed())  # and a second time, when the block ends
        here.close()
        seen = [event async for event in reader]
    *_, failed = seen
    assert len(seen) == 4
    assert isinstance(failed, RequestFailed)
    assert (failed.request_id, failed.engine, failed.kind) == (2, "e", "chat")
    assert isinstance(failed.error, EngineClosed)
    assert failed.duration_s == failed.time - 2.0


async def test_no_end_is_made_up_for_what_may_have_been_lost() -> None:
    elsewhere, here = Broadcast(), Broadcast()
    async with here.subscribe() as reader, relayed(elsewhere, here) as relay:
        await relay.attach()
        elsewhere.publish(queued(1))
        elsewhere.publish(Lagged(time=2.0, engine="", n_lost=1))
        await trio.testing.wait_all_tasks_blocked()
        relay.end(EngineClosed())
        here.close()
        assert [type(event) async for event in reader] == [RequestQueued, Lagged]


async def test_what_is_on_its_way_is_told_though_all_is_cancelled() -> None:
    elsewhere, here = Broadcast(), Broadcast()
    async with here.subscribe() as reader:
        with trio.CancelScope() as scope:
            async with relayed(elsewhere, here) as relay:
                await relay.attach()
                scope.cancel()
                try:
                    await trio.lowlevel.checkpoint()
                finally:
                    elsewhere.publish(queued(1))
                    elsewhere.publish(EngineStopped(time=2.0, engine="e", reason=None))
                    with trio.CancelScope(shield=True):
                        await relay.drain()
        assert await reader.receive() == queued(1)


async def test_nothing_is_on_its_way_that_nobody_asked_for() -> None:
    async with relayed(Broadcast(), Broadcast()) as relay:
        await relay.drain()


async def test_a_reader_that_cannot_be_attached_is_told_and_the_next_one_is_attached() -> None:
    elsewhere, here = Broadcast(), Broadcast()
    troubles: list[LlamadError] = [InferenceError("no descriptors")]

    @asynccontextmanager
    async def open_events() -> AsyncIterator[trio.abc.ReceiveChannel[EngineEvent]]:
        if troubles:
            raise troubles.pop()
        async with elsewhere.subscribe() as events:
            yield events

    async with relayed(elsewhere, here, open_events):
        with pytest.raises(InferenceError, match="no descriptors"):
            async with here.subscribe():
                must_not_run("attached")
        async with here.subscribe() as reader:
            elsewhere.publish(queued(1))
            assert await reader.receive() == queued(1)


@pytest.mark.parametrize("is_orderly", [True, False])
async def test_nobody_waits_for_an_engine_that_is_gone(is_orderly: bool) -> None:
    @asynccontextmanager
    async def gone() -> AsyncIterator[trio.abc.ReceiveChannel[EngineEvent]]:
        if not is_orderly:
            raise Disconnected
        elsewhere = Broadcast()
        async with elsewhere.subscribe() as events:
            elsewhere.publish(EngineStopped(time=1.0, engine="e", reason=None))
            yield events

    here = Broadcast()
    async with relayed(Broadcast(), here, gone):
        for _ in range(2):
            async with here.subscribe() as reader:
                here.publish(queued(1))
                assert await reader.receive() == queued(1)  # the stop is not its to tell


# -- of isolated engines ---------------------------------------------------------------------


def names(watcher: Watcher) -> list[str]:
    """Of the events it has seen, but for steps."""
    return [type(event).__name__ for event in watcher.events if not isinstance(event, StepDone)]


@pytest.mark.parametrize("isolation", [None, "process"])
async def test_its_events_are_those_of_an_engine_of_this_process(
    tiny_path: Path, isolation: Literal["process"] | None
) -> None:
    watcher = Watcher()
    specs = {"a": EngineSpec(tiny_path, ONE_THREAD, isolation=isolation)}
    async with trio.open_nursery() as nursery, open_models(specs) as models:
        await nursery.start(watcher.run, models)
        await models.wait_ready("a")
        began = trio.current_time()
        await models.complete("x", max_tokens=2)
        ended = trio.current_time()
        async with models.stream("y", max_tokens=ENDLESS) as pieces:
            await pieces.receive()
        await until(lambda: bool(watcher.all(RequestCancelled)))
        with pytest.raises(PromptTooLong):
            await models.complete("x" * 8000)
        async with models.stream("z", max_tokens=ENDLESS) as pieces:
            await pieces.receive()
            await until(lambda: len(watcher.all(FirstToken)) == 3)
            await models.unload("a")
    assert names(watcher) == [
        "EngineLoaded",
        *("RequestQueued", "RequestStarted", "FirstToken", "RequestFinished"),
        *("RequestQueued", "RequestStarted", "PrefixReused", "FirstToken", "RequestCancelled"),
        *("RequestQueued", "RequestFailed"),
        *("RequestQueued", "RequestStarted", "PrefixReused", "FirstToken", "RequestFailed"),
        "EngineStopped",
    ]
    assert {event.engine for event in watcher.events} == {"a"}
    assert all(began <= event.time <= ended for event in watcher.of(1))
    assert [type(event.error) for event in watcher.all(RequestFailed)] == [
        PromptTooLong,
        EngineClosed,
    ]
    assert watcher.all(EngineStopped)[0].reason is None


@pytest.mark.parametrize("how", ["unload", "remove", "leave"])
async def test_a_request_that_is_complete_is_told_so_however_soon_its_engine_ends(
    tiny_path: Path, how: str
) -> None:
    watcher = Watcher()
    specs = {"a": EngineSpec(tiny_path, ONE_THREAD, isolation="process")}
    async with trio.open_nursery() as nursery, open_models(specs) as models:
        await models.wait_ready("a")
        await nursery.start(watcher.run, models)
        await models.complete("x", max_tokens=2)
        if how == "unload":
            await models.unload("a")
        elif how == "remove":
            await models.remove("a")
    assert names(watcher) == [
        *("RequestQueued", "RequestStarted", "FirstToken", "RequestFinished", "EngineStopped")
    ]


@pytest.mark.parametrize("isolation", [None, "process"])
async def test_events_of_an_engine_that_was_opened_alone_end_with_it(
    tiny_path: Path, isolation: Literal["process"] | None
) -> None:
    watcher = Watcher()
    async with (
        trio.open_nursery() as nursery,
        open_engine(tiny_path, ONE_THREAD, isolation=isolation) as engine,
    ):
        await nursery.start(watcher.run, engine)
        async with engine.events() as late, engine.stream("x", max_tokens=ENDLESS) as pieces:
            await pieces.receive()
            assert isinstance(await late.receive(), RequestQueued)
        await until(lambda: bool(watcher.all(RequestCancelled)))
    assert names(watcher) == [
        *("RequestQueued", "RequestStarted", "FirstToken", "RequestCancelled", "EngineStopped")
    ]


who: ContextVar[str] = ContextVar("who")


async def test_its_events_have_the_context_of_who_asked(
    tiny_path: Path, child: Callable[[], int]
) -> None:
    watcher = Watcher()
    specs = {"a": EngineSpec(tiny_path, ONE_THREAD, isolation="process")}

    async def ask(name: str, max_tokens: int) -> None:
        who.set(name)
        await models.complete(name, max_tokens=max_tokens)

    async def crash() -> None:
        who.set("crash")
        with pytest.raises(EngineCrashed):
            async with models.stream("x", max_tokens=ENDLESS) as pieces:
                await until(lambda: len(watcher.all(RequestQueued)) == 3)
                os.kill(child(), signal.SIGKILL)
                await pieces.result()

    async with trio.open_nursery() as nursery, open_models(specs) as models:
        await models.wait_ready("a")
        await nursery.start(watcher.run, models)
        async with trio.open_nursery() as users:
            users.start_soon(ask, "one", 2)
            users.start_soon(ask, "two", 3)
        await until(lambda: len(watcher.all(RequestFinished)) == 2)
        await crash()

    def asked(event: RequestQueued | RequestFinished | RequestFailed) -> str | None:
        return None if event.context is None else event.context.get(who)

    assert sorted(map(str, map(asked, watcher.all(RequestQueued)))) == ["crash", "one", "two"]
    finished = {event.generated_tokens: asked(event) for event in watcher.all(RequestFinished)}
    assert finished == {2: "one", 3: "two"}
    assert list(map(asked, watcher.all(RequestFailed))) == ["crash"]
