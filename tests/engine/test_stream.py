"""A stream gives the whole text, in whole characters, at its reader's pace."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import trio

from llamad_trio import EngineClosed, PromptTooLong, Request, open_engine
from llamad_trio.engine import ticket as ticket_module
from tests.support import (
    ENDLESS,
    EXACT,
    SURE_PROMPTS,
    count_pieces,
    read_all,
    until,
    until_idle,
)

if TYPE_CHECKING:
    from pathlib import Path

    from llamad_trio import Engine

COUNTING = Request(SURE_PROMPTS[0], raw=True, max_tokens=16, temperature=0)
EMOJI = Request("🎉🐈👍🎉🐈👍🎉🐈👍🎉🐈👍", raw=True, max_tokens=18, temperature=0)


async def test_a_stream_gives_the_text_of_the_completion(engine: Engine) -> None:
    done = await engine.complete(COUNTING)
    async with engine.stream(COUNTING) as tokens:
        at_first = tokens.completion
        assert at_first is None
        pieces = await read_all(tokens)
        assert "".join(pieces) == tokens.text == done.text
        assert all(pieces)
        assert len(pieces) > 1
        assert tokens.completion is not None
        assert tokens.completion == await tokens.result()
        assert tokens.completion.generated_tokens == done.generated_tokens
        assert tokens.completion.finish_reason == done.finish_reason


async def test_pieces_come_while_the_text_is_being_generated(tiny: Engine) -> None:
    async with tiny.stream("the cat", max_tokens=ENDLESS) as tokens:
        await count_pieces(tokens, 3)
        assert tokens.completion is None
        assert tokens.text


async def test_pieces_are_whole_characters(engine: Engine) -> None:
    # A token of this vocabulary is a part of an emoji: bytes that are no text by themselves.
    done = await engine.complete(EMOJI)
    async with engine.stream(EMOJI) as tokens:
        pieces = await read_all(tokens)
    assert "🐈" in pieces
    assert len(pieces) < done.generated_tokens
    # Only a text that is cut off can end in half a character, which is then told as such.
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces[:-1])
    assert "".join(pieces) == done.text


async def test_nothing_of_a_stop_sequence_is_ever_streamed(engine: Engine) -> None:
    async with engine.stream(COUNTING, stop=[", 10, 11", "15"]) as tokens:
        pieces = await read_all(tokens)
        done = await tokens.result()
    assert "".join(pieces) == done.text == " 9"
    assert (done.finish_reason, done.stop_sequence) == ("stop", ", 10, 11")


async def test_what_looked_like_a_stop_sequence_is_given_back_at_the_end(engine: Engine) -> None:
    async with engine.stream(COUNTING, max_tokens=8, stop=["10, 99"]) as tokens:
        pieces = await read_all(tokens)
    assert "".join(pieces) == await engine.complete_text(COUNTING, max_tokens=8) == " 9, 10, "


async def test_result_drains_the_stream(tiny: Engine) -> None:
    async with tiny.stream("the cat", max_tokens=20, temperature=0) as tokens:
        first = await tokens.receive()
        done = await tokens.result()
        assert tokens.text == done.text
        assert done.text.startswith(first)
        assert done == await tokens.result() == tokens.completion
        with pytest.raises(trio.EndOfChannel):
            await tokens.receive()


async def test_a_cancelled_receive_loses_no_piece(tiny: Engine) -> None:
    asked = Request("the cat", max_tokens=60, temperature=0)
    text = await tiny.complete_text(asked)
    n_cancelled = 0
    deadlines_s = itertools.cycle([0, 0.001, 0.003])
    async with tiny.stream(asked) as tokens:
        while tokens.text != text:
            with trio.move_on_after(next(deadlines_s)) as scope:
                await tokens.receive()
            n_cancelled += scope.cancelled_caught
    assert n_cancelled > 0


async def test_nothing_is_submitted_before_a_stream_is_entered(tiny: Engine) -> None:
    stream = tiny.stream("the cat", max_tokens=ENDLESS)
    await trio.lowlevel.checkpoint()
    assert tiny.stats().slots["free"] == tiny.config.n_slots
    assert tiny.stats().queued == 0
    async with stream as tokens:
        await tokens.receive()
        assert tiny.stats().slots["free"] == tiny.config.n_slots - 1


async def test_an_error_of_the_request_comes_out_of_the_stream(tiny: Engine) -> None:
    async with tiny.stream(Request([7] * 9000)) as tokens:
        for _ in range(2):
            with pytest.raises(PromptTooLong):
                await tokens.receive()
        with pytest.raises(PromptTooLong):
            await tokens.result()
        assert tokens.completion is None


async def test_closing_a_stream_cancels_its_request(tiny: Engine) -> None:
    async with tiny.stream("the cat", max_tokens=ENDLESS) as tokens:
        text = await tokens.receive()
        await tokens.aclose()
        await tokens.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await tokens.receive()
        with pytest.raises(trio.ClosedResourceError):
            await tokens.result()
        assert tokens.text == text
        await until_idle(tiny)
    assert tiny.stats().requests == {"completed": 0, "failed": 0, "cancelled": 1}
    assert (await tiny.complete("the cat", max_tokens=2)).generated_tokens == 2


async def test_a_stream_can_be_read_to_its_end_after_its_request_is_complete(
    tiny: Engine,
) -> None:
    async with tiny.stream("the cat", max_tokens=20, temperature=0) as tokens:
        await until(lambda: tokens.completion is not None)
        await tokens.receive()
        assert tokens.completion is not None
        assert tokens.text != tokens.completion.text
        assert (await tokens.result()).text == tokens.text


async def test_a_stream_left_after_its_end_was_no_cancel(tiny: Engine) -> None:
    async with tiny.stream("the cat", max_tokens=4) as tokens:
        await tokens.result()
    assert tiny.stats().requests == {"completed": 1, "failed": 0, "cancelled": 0}


# -- slow readers ---------------------------------------------------------------------------


async def test_a_slow_reader_pauses_only_itself_and_loses_nothing(tiny: Engine) -> None:
    asked = Request("the cat", max_tokens=300, temperature=0)
    text = await tiny.complete_text(asked)
    async with tiny.stream(asked) as slow:
        await until(lambda: tiny.stats().slots["paused"] == 1)
        before = tiny.stats().decode_tokens
        # The others go on, and the paused one has computed nothing beside them.
        n = [(await tiny.complete("a hat", max_tokens=30)).generated_tokens for _ in range(3)]
        assert n == [30, 30, 30]
        assert tiny.stats().decode_tokens - before == 3 * 29
        assert tiny.stats().slots["paused"] == 1
        assert slow.completion is None
        assert (await slow.result()).generated_tokens == 300
        assert slow.text == text


async def test_a_slow_reader_of_a_real_model_gets_everything(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket_module, "STREAM_BUFFER", 8)
    async with engine.stream(COUNTING, max_tokens=24) as slow:
        await until(lambda: engine.stats().slots["paused"] == 1)
        other = await engine.complete("The quick brown fox", raw=True, max_tokens=4)
        assert other.generated_tokens == 4
        done = await slow.result()
    assert done.generated_tokens == 24
    assert slow.text == done.text


async def test_a_paused_slot_can_be_left(tiny: Engine) -> None:
    async with tiny.stream("the cat", max_tokens=ENDLESS):
        await until(lambda: tiny.stats().slots["paused"] == 1)
    await until_idle(tiny)
    assert tiny.stats().requests["cancelled"] == 1


async def test_all_slots_paused_wait_without_computing_until_one_is_read(tiny: Engine) -> None:
    asked = Request("the cat", max_tokens=100, temperature=0)
    async with trio.open_nursery() as nursery:
        go = trio.Event()
        texts: list[str] = []

        async def read_late() -> None:
            async with tiny.stream(asked) as tokens:
                await go.wait()
                texts.append((await tokens.result()).text)

        for _ in range(4):
            nursery.start_soon(read_late)
        await until(lambda: tiny.stats().slots["paused"] == 4)
        steps = tiny.stats().steps
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        assert tiny.stats().steps == steps
        go.set()
    assert texts == [await tiny.complete_text(asked)] * 4


async def test_a_reader_that_pauses_lets_those_who_wait_have_its_room(tiny_path: Path) -> None:
    async with open_engine(tiny_path, EXACT, n_ctx=256, n_slots=1) as engine:
        asked = Request("the cat", max_tokens=150, temperature=0)
        text = await engine.complete_text(asked)
        async with engine.stream(asked) as slow:
            await until(lambda: engine.stats().slots["paused"] == 1)
            # There is one slot only.
            other = await engine.complete("a hat", max_tokens=30)
            assert other.generated_tokens == 30
            assert engine.stats().preemptions == 1
            assert (await slow.result()).text == text
        assert slow.text == text


async def test_a_stream_under_way_when_the_engine_closes_gets_engine_closed(
    tiny_path: Path,
) -> None:
    errors: list[Exception] = []
    received: list[str] = []

    async def read(engine: Engine) -> None:
        async with engine.stream("the cat", max_tokens=ENDLESS) as tokens:
            try:
                while True:
                    received.append(await tokens.receive())
            except EngineClosed as error:
                errors.append(error)

    async with (
        trio.open_nursery() as nursery,
        open_engine(tiny_path, EXACT, n_ctx=8192) as engine,
    ):
        nursery.start_soon(read, engine)
        await until(lambda: len(received) >= 3)
    assert len(errors) == 1
