"""The streams of every `EngineLike`: the whole text, at the reader's pace, and no work that
nobody wants any more."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import assert_checkpoints

from llamad_trio import Done, PromptTooLong, Request
from tests.conformance.engines import N_CTX
from tests.engine.test_events import all_of, check
from tests.support import ENDLESS, count_pieces, read_all, until, until_idle, until_queued

if TYPE_CHECKING:
    from llamad_trio import EventStream, StreamEvent, TokenStream
    from tests.conformance.engines import Opener, Pair

CAT = Request("the cat", max_tokens=40, temperature=0)

MORE_THAN_A_SOCKET_HOLDS = 1000
"""Pieces: each line takes about a kilobyte of the 200 that a socket has for it."""


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


async def test_a_stream_has_the_pieces_that_the_engine_behind_gives(pair: Pair) -> None:
    received = []
    for engine in (pair.engine, pair.behind):
        async with engine.stream(CAT) as tokens:
            received.append(await read_all(tokens))
    assert received[0] == received[1]


async def test_pieces_come_while_the_text_is_being_generated(pair: Pair) -> None:
    async with pair.engine.stream(CAT, max_tokens=ENDLESS) as tokens:
        await count_pieces(tokens, 3)
        assert tokens.completion is None
        assert tokens.text


async def test_nothing_of_a_stop_sequence_is_ever_streamed(pair: Pair) -> None:
    text = await pair.engine.complete_text(CAT)
    stop = text[10:14]
    async with pair.engine.stream(CAT, stop=[stop]) as tokens:
        pieces = await read_all(tokens)
        done = await tokens.result()
    assert "".join(pieces) == done.text == text[: text.index(stop)]
    assert (done.finish_reason, done.stop_sequence) == ("stop", stop)


async def test_events_are_the_reply_in_its_order_and_then_its_end(pair: Pair) -> None:
    at_once = await pair.engine.complete(CAT)
    async with pair.engine.stream_events(CAT) as stream:
        at_first = stream.completion
        assert at_first is None
        events = await all_of(stream)
        for _ in range(2):
            with pytest.raises(trio.EndOfChannel):
                await stream.receive()
        assert await stream.result() == stream.completion
    done = check(events)
    assert len(events) > 5
    assert done.text == at_once.text
    assert done == stream.completion


async def test_result_drains_a_stream_of_events(pair: Pair) -> None:
    async with pair.engine.stream_events(CAT) as stream:
        await stream.receive()
        done = await stream.result()
        assert done == stream.completion == await stream.result()
        assert done.generated_tokens == 40


# -- its end --------------------------------------------------------------------------------


async def test_after_the_end_a_stream_is_at_its_end(pair: Pair) -> None:
    async with pair.engine.stream(CAT) as tokens:
        await read_all(tokens)
        for _ in range(3):
            with pytest.raises(trio.EndOfChannel):
                await tokens.receive()
        assert (await tokens.result()).text == tokens.text
    assert tokens.completion == await tokens.result()
    await until_idle(pair.behind)
    assert pair.behind.stats().requests == {"completed": 1, "failed": 0, "cancelled": 0}


async def test_result_drains_the_stream(pair: Pair) -> None:
    async with pair.engine.stream(CAT) as tokens:
        first = await tokens.receive()
        done = await tokens.result()
        assert tokens.text == done.text
        assert done.text.startswith(first)
        assert done == await tokens.result() == tokens.completion
        with pytest.raises(trio.EndOfChannel):
            await tokens.receive()


async def test_closing_a_stream_cancels_its_request(pair: Pair) -> None:
    async with pair.engine.stream(CAT, max_tokens=ENDLESS) as tokens:
        text = await tokens.receive()
        await tokens.aclose()
        await tokens.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await tokens.receive()
        with pytest.raises(trio.ClosedResourceError):
            await tokens.result()
        assert tokens.text == text
        await until_idle(pair.behind)
    assert pair.behind.stats().requests == {"completed": 0, "failed": 0, "cancelled": 1}


async def test_a_stream_that_was_read_and_closed_is_closed(pair: Pair) -> None:
    async with pair.engine.stream(CAT) as tokens:
        done = await tokens.result()
        await tokens.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await tokens.receive()
        assert done == tokens.completion == await tokens.result()
    async with pair.engine.stream_events(CAT) as events:
        done = await events.result()
        await events.aclose()
        assert done == events.completion == await events.result()


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


async def test_an_error_of_the_request_comes_out_of_the_stream(pair: Pair) -> None:
    asked = Request([97] * (N_CTX + 1))
    async with pair.engine.stream(asked) as tokens:
        for _ in range(2):
            with pytest.raises(PromptTooLong):
                await tokens.receive()
        with pytest.raises(PromptTooLong):
            await tokens.result()
        assert tokens.completion is None
    async with pair.engine.stream_events(asked) as events:
        with pytest.raises(PromptTooLong):
            await events.receive()
        with pytest.raises(PromptTooLong):
            await events.result()


async def test_what_the_body_raises_comes_out_as_itself(pair: Pair) -> None:
    class OwnError(Exception):
        pass

    for opened in (pair.engine.stream, pair.engine.stream_events):
        with pytest.raises(OwnError):
            async with opened(CAT, max_tokens=ENDLESS) as parts:
                await parts.receive()
                raise OwnError
        # Even where leaving the block could be cancelled.
        with pytest.raises(OwnError), trio.CancelScope() as scope:
            async with opened(CAT, max_tokens=ENDLESS) as parts:
                await parts.receive()
                scope.cancel()
                raise OwnError
    await until_idle(pair.behind)
    assert pair.behind.stats().requests["cancelled"] == 4


# -- checkpoints ----------------------------------------------------------------------------


async def test_a_cancelled_receive_loses_no_piece(pair: Pair) -> None:
    text = await pair.engine.complete_text(CAT)
    n_cancelled = 0
    deadlines_s = itertools.cycle([0, 0.001, 0.003])
    async with pair.engine.stream(CAT) as tokens:
        while tokens.text != text:
            with trio.move_on_after(next(deadlines_s)) as scope:
                await tokens.receive()
            n_cancelled += scope.cancelled_caught
        assert (await tokens.result()).text == text
    assert n_cancelled > 0


async def test_a_cancelled_receive_loses_no_event(pair: Pair) -> None:
    async with pair.engine.stream_events(CAT) as expected:
        all_expected = await all_of(expected)
    events: list[StreamEvent] = []
    deadlines_s = itertools.cycle([0, 0.001, 0.003])
    async with pair.engine.stream_events(CAT) as stream:
        while not (events and isinstance(events[-1], Done)):
            with trio.move_on_after(next(deadlines_s)):
                events.append(await stream.receive())
    assert check(events).text == check(all_expected).text
    assert len(events) == len(all_expected)


async def test_receive_is_a_checkpoint_though_much_has_arrived(pair: Pair) -> None:
    text = await pair.engine.complete_text(CAT)
    async with pair.engine.stream(CAT) as tokens:
        await until(lambda: pair.behind.stats().requests["completed"] == 2)
        while tokens.text != text:
            with assert_checkpoints():
                await tokens.receive()
        with assert_checkpoints():
            await tokens.result()
        with assert_checkpoints():
            await tokens.aclose()


async def test_a_cancelled_result_leaves_the_stream_where_it_is(pair: Pair) -> None:
    async with pair.engine.stream(CAT) as tokens:
        await tokens.receive()
        with trio.CancelScope() as scope:
            scope.cancel()
            await tokens.result()
        assert scope.cancelled_caught
        assert (await tokens.result()).text == tokens.text


# -- work that nobody wants -----------------------------------------------------------------


async def test_nothing_is_submitted_before_a_stream_is_entered(pair: Pair) -> None:
    stream = pair.engine.stream(CAT, max_tokens=ENDLESS)
    await trio.testing.wait_all_tasks_blocked()
    assert pair.behind.stats().slots["free"] == pair.behind.config.n_slots
    assert pair.behind.stats().queued == 0
    async with stream as tokens:
        await tokens.receive()
        assert pair.behind.stats().slots["free"] == pair.behind.config.n_slots - 1


async def test_leaving_a_stream_early_frees_its_slot(pair: Pair) -> None:
    async with pair.engine.stream(CAT, max_tokens=ENDLESS) as tokens:
        await count_pieces(tokens, 2)
    async with pair.engine.stream_events(CAT, max_tokens=ENDLESS) as events:
        await events.receive()
    await until_idle(pair.behind)
    assert pair.behind.stats().requests == {"completed": 0, "failed": 0, "cancelled": 2}
    assert (await pair.engine.complete(CAT)).generated_tokens == 40


async def test_a_deadline_ends_a_stream(pair: Pair) -> None:
    with trio.move_on_after(0.1) as deadline:
        async with pair.engine.stream(CAT, max_tokens=ENDLESS) as tokens:
            await read_all(tokens)
    assert deadline.cancelled_caught
    await until_idle(pair.behind)
    assert pair.behind.stats().requests["cancelled"] == 1


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


async def test_a_stream_is_left_while_its_prompt_is_read(pair: Pair) -> None:
    async with pair.engine.stream(Request([97] * 7000)):
        await until(lambda: pair.behind.stats().slots["prefill"] == 1)
    await until_idle(pair.behind)
    assert pair.behind.stats().prefill_tokens < 7000
    assert pair.behind.stats().requests["cancelled"] == 1


# -- slow readers ---------------------------------------------------------------------------


async def test_a_slow_reader_pauses_only_itself_and_loses_nothing(pair: Pair) -> None:
    asked = Request("the cat", max_tokens=MORE_THAN_A_SOCKET_HOLDS, temperature=0)
    async with pair.engine.stream(asked) as slow:
        await until(lambda: pair.behind.stats().slots["paused"] == 1)
        # The others go on.
        for _ in range(3):
            assert (await pair.engine.complete(CAT)).generated_tokens == 40
        assert pair.behind.stats().slots["paused"] == 1
        assert slow.completion is None
        done = await slow.result()
        assert done.generated_tokens == MORE_THAN_A_SOCKET_HOLDS
        assert slow.text == done.text


async def test_a_paused_stream_can_be_left(pair: Pair) -> None:
    async with pair.engine.stream(CAT, max_tokens=ENDLESS):
        await until(lambda: pair.behind.stats().slots["paused"] == 1)
    await until_idle(pair.behind)
    assert pair.behind.stats().requests["cancelled"] == 1


async def test_many_streams_at_once_have_each_their_own_text(pair: Pair) -> None:
    texts: dict[int, str] = {}

    def asked(n: int) -> Request:
        return Request(f"the cat {n}", max_tokens=8 + n, temperature=1.5, seed=n)

    async def read(n: int) -> None:
        opened = pair.engine.stream if n % 2 else pair.engine.stream_events
        stream: TokenStream | EventStream
        async with opened(asked(n)) as stream:
            texts[n] = (await stream.result()).text

    async with trio.open_nursery() as nursery:
        for n in range(12):
            nursery.start_soon(read, n)
    assert texts == {n: await pair.engine.complete_text(asked(n)) for n in range(12)}
