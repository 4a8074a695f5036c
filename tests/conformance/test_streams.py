"""The streams of every `EngineLike`: the whole text, at the reader's pace, no work that nobody
wants any more, and what the engine tells of itself."""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import trio
from trio.testing import assert_checkpoints

from llamad_trio import (
    Done,
    EngineClosed,
    EventStream,
    InferenceError,
    PromptTooLong,
    RemoteEngine,
    Request,
    StreamEvent,
    TokenStream,
)
from llamad_trio.core.engine_events import (
    EngineStopped,
    Lagged,
    RequestFailed,
    RequestFinished,
    StepDone,
)
from tests.conformance.engines import FAILURE, N_CTX
from tests.engine.test_events import all_of, check
from tests.support import ENDLESS, read_all, side_by_side, until, until_idle, until_queued

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from llamad_trio import EngineLike
    from llamad_trio.core.engine_events import EngineEvent
    from llamad_trio.system.nursery import TaskStatus
    from tests.conformance.engines import Opener, Pair

CAT = Request("the cat", max_tokens=40, temperature=0)

MORE_THAN_A_SOCKET_HOLDS = 1000
"""Pieces: each line takes about a kilobyte of the 200 that a socket has for it."""

Stream: TypeAlias = TokenStream | EventStream
Streaming: TypeAlias = "Callable[..., AbstractAsyncContextManager[Stream]]"


@pytest.fixture(params=["stream", "stream_events"])
def streaming(request: pytest.FixtureRequest) -> Streaming:
    """One of the two ways to stream: of an engine, a request, and its other fields."""

    def open_stream(
        engine: EngineLike, asked: Request, **fields: Any
    ) -> AbstractAsyncContextManager[Stream]:
        if request.param == "stream":
            return engine.stream(asked, **fields)
        return engine.stream_events(asked, **fields)

    return open_stream


# -- the text -------------------------------------------------------------------------------


async def test_a_stream_gives_the_text_of_the_completion(pair: Pair) -> None:
    done = await pair.engine.complete(CAT)
    async with pair.engine.stream(CAT) as tokens:
        at_first = tokens.completion
        assert at_first is None
        pieces = await read_all(tokens)
        assert "".join(pieces) == tokens.text == done.text
        assert all(pieces)
        assert len(pieces) > 5
        assert tokens.completion is not None
        assert tokens.completion == await tokens.result()
        assert tokens.completion.generated_tokens == done.generated_tokens
        assert tokens.completion.finish_reason == done.finish_reason
    async with pair.behind.stream(CAT) as tokens:
        assert await read_all(tokens) == pieces


async def test_nothing_of_a_stop_sequence_is_ever_streamed(pair: Pair) -> None:
    text = await pair.engine.complete_text(CAT)
    stop = text[10:14]
    async with pair.engine.stream(CAT, stop=[stop]) as tokens:
        pieces = await read_all(tokens)
        done = await tokens.result()
    assert "".join(pieces) == done.text == text[: text.index(stop)]
    assert (done.finish_reason, done.stop_sequence) == ("stop", stop)
    at_once = await pair.engine.complete(CAT, stop=["never said", stop])
    assert (at_once.text, at_once.stop_sequence) == (done.text, stop)


async def test_events_are_the_reply_in_its_order_and_then_its_end(pair: Pair) -> None:
    at_once = await pair.engine.complete(CAT)
    async with pair.engine.stream_events(CAT) as stream:
        at_first = stream.completion
        assert at_first is None
        events = await all_of(stream)
        assert await stream.result() == stream.completion
    done = check(events)
    assert len(events) > 5
    assert done.text == at_once.text
    assert done == stream.completion


# -- its end --------------------------------------------------------------------------------


async def test_result_drains_a_stream_which_then_is_at_its_end(
    pair: Pair, streaming: Streaming
) -> None:
    async with streaming(pair.engine, CAT) as stream:
        await stream.receive()
        done = await stream.result()
        assert done.generated_tokens == 40
        assert done == stream.completion == await stream.result()
        for _ in range(3):
            with pytest.raises(trio.EndOfChannel):
                await stream.receive()
        await stream.aclose()
        assert done == stream.completion == await stream.result()
    if isinstance(stream, TokenStream):
        assert stream.text == done.text
        with pytest.raises(trio.ClosedResourceError):
            await stream.receive()
    await until_idle(pair.behind)
    assert pair.behind.stats().requests == {"completed": 1, "failed": 0, "cancelled": 0}


async def test_closing_a_stream_cancels_its_request(pair: Pair, streaming: Streaming) -> None:
    async with streaming(pair.engine, CAT, max_tokens=ENDLESS) as stream:
        first = await stream.receive()
        await stream.aclose()
        await stream.aclose()
        for ask in (stream.receive, stream.result):
            with pytest.raises(trio.ClosedResourceError):
                await ask()
        assert isinstance(stream, EventStream) or stream.text == first
        await until_idle(pair.behind)
    assert pair.behind.stats().requests == {"completed": 0, "failed": 0, "cancelled": 1}


async def test_closing_a_stream_wakes_its_reader(opener: Opener) -> None:
    async with (
        opener(n_slots=1) as pair,
        pair.engine.stream(CAT, max_tokens=ENDLESS) as running,
        pair.engine.stream(CAT) as waiting,
        trio.open_nursery() as nursery,
    ):
        await running.receive()

        async def read() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await waiting.receive()

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        await waiting.aclose()


async def test_an_error_of_the_request_comes_out_of_the_stream(
    pair: Pair, streaming: Streaming
) -> None:
    async with streaming(pair.engine, Request([97] * (N_CTX + 1))) as stream:
        for ask in (stream.receive, stream.receive, stream.result):
            with pytest.raises(PromptTooLong):
                await ask()
        assert stream.completion is None


async def test_what_the_body_raises_comes_out_as_itself(pair: Pair, streaming: Streaming) -> None:
    class OwnError(Exception):
        pass

    with pytest.raises(OwnError):
        async with streaming(pair.engine, CAT, max_tokens=ENDLESS) as stream:
            await stream.receive()
            raise OwnError
    # Even where leaving the block could be cancelled.
    with pytest.raises(OwnError), trio.CancelScope() as scope:
        async with streaming(pair.engine, CAT, max_tokens=ENDLESS) as stream:
            await stream.receive()
            scope.cancel()
            raise OwnError
    await until_idle(pair.behind)
    assert pair.behind.stats().requests["cancelled"] == 2


# -- checkpoints ----------------------------------------------------------------------------


async def test_a_cancelled_receive_loses_nothing(pair: Pair, streaming: Streaming) -> None:
    async with streaming(pair.engine, CAT) as stream:
        expected = [part async for part in stream]
    parts: list[str | StreamEvent] = []
    n_cancelled = 0
    deadlines_s = itertools.cycle([0, 0.001, 0.003])
    async with streaming(pair.engine, CAT) as stream:
        with suppress(trio.EndOfChannel):
            while True:
                with trio.move_on_after(next(deadlines_s)) as scope:
                    parts.append(await stream.receive())
                n_cancelled += scope.cancelled_caught
    assert n_cancelled > 0
    if isinstance(stream, EventStream):
        assert isinstance(expected.pop(), Done)  # with the times of another run
        assert isinstance(parts.pop(), Done)
    assert parts == expected


async def test_receive_is_a_checkpoint_though_much_has_arrived(
    pair: Pair, streaming: Streaming
) -> None:
    async with streaming(pair.engine, CAT) as stream:
        await until(lambda: pair.behind.stats().requests["completed"] == 1)
        with suppress(trio.EndOfChannel):
            while True:
                with assert_checkpoints():
                    await stream.receive()
        for ask in (stream.result, stream.aclose):
            with assert_checkpoints():
                await ask()


async def test_a_cancelled_result_leaves_the_stream_where_it_is(pair: Pair) -> None:
    async with pair.engine.stream(CAT) as tokens:
        first = await tokens.receive()
        with trio.CancelScope() as scope:
            scope.cancel()
            await tokens.result()
        assert scope.cancelled_caught
        assert tokens.text == first
        assert (await tokens.result()).text == tokens.text


# -- work that nobody wants -----------------------------------------------------------------


async def test_a_request_runs_while_its_block_does(pair: Pair, streaming: Streaming) -> None:
    n_slots = pair.behind.config.n_slots
    entered_later = streaming(pair.engine, CAT, max_tokens=ENDLESS)
    await trio.testing.wait_all_tasks_blocked()
    assert pair.behind.stats().slots["free"] == n_slots
    assert pair.behind.stats().queued == 0
    async with entered_later as stream:
        for _ in range(3):
            await stream.receive()
        assert pair.behind.stats().slots["free"] == n_slots - 1
        assert stream.completion is None
    await until_idle(pair.behind)
    assert pair.behind.stats().requests == {"completed": 0, "failed": 0, "cancelled": 1}
    assert (await pair.engine.complete(CAT)).generated_tokens == 40


async def test_a_stream_is_left_while_it_waits(opener: Opener) -> None:
    async with opener(n_slots=1) as pair:
        async with pair.engine.stream(CAT, max_tokens=ENDLESS) as running:
            await running.receive()
            async with pair.engine.stream(CAT):
                await until_queued(pair.behind, 1)
            await until_queued(pair.behind, 0)
            await running.receive()
        await until_idle(pair.behind)
        assert pair.behind.stats().requests["cancelled"] == 2


# -- slow readers ---------------------------------------------------------------------------


async def test_a_slow_reader_pauses_only_itself_and_loses_nothing(
    pair: Pair, streaming: Streaming
) -> None:
    asked = Request("the cat", max_tokens=MORE_THAN_A_SOCKET_HOLDS, temperature=0)
    text = await pair.engine.complete_text(asked)
    async with streaming(pair.engine, asked) as slow:
        await until(lambda: pair.behind.stats().slots["paused"] == 1)
        before = pair.behind.stats().decode_tokens
        for _ in range(3):
            assert (await pair.engine.complete(CAT)).generated_tokens == 40
        # The others went on, and it computed nothing beside them.
        assert pair.behind.stats().decode_tokens - before == 3 * 39
        assert pair.behind.stats().slots["paused"] == 1
        assert slow.completion is None
        if isinstance(slow, EventStream):
            assert check(await all_of(slow)).text == text
        else:
            assert "".join(await read_all(slow)) == slow.text == text
        assert (await slow.result()).generated_tokens == MORE_THAN_A_SOCKET_HOLDS


async def test_a_paused_stream_can_be_left(pair: Pair) -> None:
    async with pair.engine.stream(CAT, max_tokens=ENDLESS):
        await until(lambda: pair.behind.stats().slots["paused"] == 1)
    await until_idle(pair.behind)
    assert pair.behind.stats().requests["cancelled"] == 1


async def test_many_streams_or_completions_at_once_have_each_their_own_text(
    pair: Pair, streaming: Streaming
) -> None:
    asked = [Request(f"the cat {n}", max_tokens=8 + n, temperature=1.5, seed=n) for n in range(12)]

    async def read(request: Request) -> str:
        async with streaming(pair.engine, request) as stream:
            return (await stream.result()).text

    texts = await side_by_side(partial(read, request) for request in asked)
    assert texts == [await pair.engine.complete_text(request) for request in asked]
    assert texts == await side_by_side(
        partial(pair.engine.complete_text, request) for request in asked
    )
    await until_idle(pair.behind)
    assert pair.behind.stats().requests == {"completed": 36, "failed": 0, "cancelled": 0}


# -- what an engine tells of itself ---------------------------------------------------------


async def test_events_tell_of_a_request_from_its_beginning_to_its_end(pair: Pair) -> None:
    async with pair.engine.events() as events:
        began = trio.current_time()
        done = await pair.engine.complete(CAT)
        ended = trio.current_time()
        seen = [await events.receive()]
        while not isinstance(seen[-1], RequestFinished):
            seen.append(await events.receive())
    names = [type(event).__name__ for event in seen if not isinstance(event, StepDone)]
    assert names == ["RequestQueued", "RequestStarted", "FirstToken", "RequestFinished"]
    finished = seen[-1]
    assert isinstance(finished, RequestFinished)
    assert (finished.prompt_tokens, finished.generated_tokens, finished.finish_reason) == (
        done.prompt_tokens,
        done.generated_tokens,
        done.finish_reason,
    )
    assert finished.ttft_s == done.ttft_s
    assert began <= seen[0].time <= finished.time <= ended
    assert [event.time for event in seen] == sorted(event.time for event in seen)
    assert sum(event.duration_s for event in seen if isinstance(event, StepDone)) > 0
    with pytest.raises(trio.ClosedResourceError):
        await events.receive()


async def test_events_tell_of_failures_with_their_error(pair: Pair) -> None:
    async with pair.engine.events() as events:
        pair.fail_next_step()
        with pytest.raises(InferenceError):
            await pair.engine.complete(CAT)
        async for event in events:
            if isinstance(event, RequestFailed):
                assert isinstance(event.error, InferenceError)
                assert event.error.reason == FAILURE
                break


async def test_a_reader_of_events_that_lags_is_told_how_many_it_lost(pair: Pair) -> None:
    async with pair.engine.events(max_events=2) as slow:
        for _ in range(15):
            await pair.engine.complete(CAT)
        n_lost, last = 0, 0
        async for event in slow:
            match event:
                case Lagged():
                    n_lost += event.n_lost
                case RequestFinished():
                    last = event.request_id
            if last == 15:
                break
        assert n_lost > 0 or isinstance(pair.engine, RemoteEngine)  # its socket holds many
    for wrong in (0, 1.5, "many"):
        with pytest.raises(ValueError, match="max_events"):
            async with pair.engine.events(max_events=wrong):  # type: ignore[arg-type]
                pass


async def test_events_end_with_the_engine(opener: Opener) -> None:
    seen: list[EngineEvent] = []

    async def read(engine: EngineLike, *, task_status: TaskStatus[None]) -> None:
        async with engine.events() as events:
            task_status.started(None)
            try:
                while True:
                    seen.append(await events.receive())
            except trio.EndOfChannel:
                assert isinstance(seen[-1], EngineStopped)
            except EngineClosed:  # the daemon's last words
                assert isinstance(engine, RemoteEngine)

    async with trio.open_nursery() as nursery, opener() as pair:
        await nursery.start(read, pair.engine)
        await pair.engine.complete(CAT)
        await until(lambda: any(isinstance(event, RequestFinished) for event in seen))
