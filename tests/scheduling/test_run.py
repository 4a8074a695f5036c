"""A request's text: whatever its tokens cut, nothing is shown too early, and nothing too late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from llamad_trio.core.completion import FinishReason, TokenLogprob
from llamad_trio.scheduling.plan import Prepared, Sampled
from llamad_trio.scheduling.run import Event, Finished, Piece, Run
from tests.scheduling.fake_memory import END, forcing
from tests.scheduling.oracles import decoded, first_stop, undecided
from tests.scheduling.tracked import sampling

SOME_BYTES = st.binary(max_size=6) | st.text("ab🙂é\ufffd", max_size=4).map(str.encode)
TOGETHER = st.lists(SOME_BYTES, min_size=1, max_size=3)
STOPS = st.lists(st.text("ab🙂\ufffd", max_size=3), max_size=3)

SMILE = "🙂".encode()
THE_END = Sampled(END, b"</s>", ends=True)


def run_of(max_tokens: int = 100, stop: Sequence[str] = (), *, streams: bool = True) -> Run:
    prepared = Prepared(
        id=1, tokens=(5, 5), max_tokens=max_tokens, sampling=sampling(), stop=stop, streams=streams
    )
    return Run(prepared, arrival=1)


def pieces_of(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Piece)]


def finish(run: Run) -> tuple[list[str], Finished]:
    """The last of its text, and the outcome."""
    *pieces, finished = run.finish()
    assert isinstance(finished, Finished)
    return pieces_of(pieces), finished


@given(st.lists(TOGETHER, max_size=6), STOPS)
@example([[b"\xf0\x9f"], [b"\x99\x82"]], [])
@example([[b"\xf0\x9f", b"a"]], [])
@example([[b"\xed\xa0"], [b"\x80"]], [])  # a surrogate
@example([[b"\xc0"], [b"\x80"]], [])  # NUL in disguise
@example([[b"a" + SMILE[:-1]]], ["\ufffd"])  # half a character completes the stop sequence
def test_any_bytes_cut_anywhere_give_the_text_of_the_whole_as_soon_as_it_is_certain(
    script: list[list[bytes]], stops: list[str]
) -> None:
    run, raw, shown = run_of(stop=stops), b"", ""
    for together in script:
        shown += "".join(pieces_of(run.take(forcing(*together))))
        raw += b"".join(together)
        text = decoded(raw, final=False)
        stop = first_stop(text, stops)
        assert run.ends == ("stop" if stop else None)
        assert shown == text[: stop[0] if stop else len(text) - undecided(text, stops)]
        if stop:
            break
    run.ends = run.ends or "length"
    rest, finished = finish(run)
    whole = decoded(raw, final=True)
    stop = first_stop(whole, stops)
    assert finished.text == shown + "".join(rest) == (whole[: stop[0]] if stop else whole)
    assert finished.stop_sequence == (stop[1] if stop else None)
    assert finished.finish_reason == ("stop" if stop else "length")


@given(st.lists(TOGETHER, min_size=1, max_size=6), st.integers(1, 20))
def test_no_more_tokens_are_taken_than_were_asked_for(
    script: list[list[bytes]], max_tokens: int
) -> None:
    run, n_tokens = run_of(max_tokens), 0
    while script and not run.ends:
        together = script.pop(0)
        n_tokens += len(together)
        run.take(forcing(*together))
        assert run.n_generated == min(n_tokens, max_tokens)
        assert run.ends == ("length" if n_tokens >= max_tokens else None)


def complete(piece: bytes, *forced: bytes) -> Sampled:
    """After these, the constraint lets nothing follow."""
    return forcing(piece, *forced, is_complete=True)


@pytest.mark.parametrize(
    ("script", "fields", "pieces", "reason", "n_generated"),
    [
        ([forcing(b"1"), forcing(b""), forcing(b" 2"), THE_END], {}, ["1", " 2"], "stop", 4),
        ([forcing(b"a"), forcing(b"b")], {"streams": False, "max_tokens": 2}, [], "length", 2),
        # Forced tokens come in one piece with the sampled one.
        ([forcing(b"{", b"a", b":"), forcing(b"}"), THE_END], {}, ["{a:", "}"], "stop", 5),
        ([forcing(SMILE[:1], SMILE[1:3]), forcing(SMILE[3:]), THE_END], {}, ["🙂"], "stop", 4),
        ([forcing(b"a", b"b", b"c", b"d")], {"max_tokens": 2}, ["ab"], "length", 2),
        ([forcing(b"a", b"b", b"c")], {"max_tokens": 3}, ["abc"], "length", 3),
        # A stop sequence ends the text before it, also in the middle of what was forced.
        ([forcing(b"a", b" ST", b"OP", b"c")], {"stop": ["STOP"]}, ["a "], "stop", 3),
        ([forcing(b"a", b"ST"), forcing(b"OP")], {"stop": ["STOP"]}, ["a"], "stop", 3),
        ([forcing(b"STOP", b"a")], {"stop": ["STOP"]}, [], "stop", 1),
        ([forcing(b"a ST"), THE_END], {"stop": ["STOP"]}, ["a ", "ST"], "stop", 2),
        (
            [forcing(b"a"), forcing(SMILE[:2])],
            {"max_tokens": 2, "stop": ["\ufffd"]},
            ["a"],
            "stop",
            2,
        ),
        # A complete text ends without another token, and was not cut off, even at the limit.
        ([complete(b"a")], {}, ["a"], "stop", 1),
        ([complete(b"a", b"b", b"c")], {}, ["abc"], "stop", 3),
        ([complete(b"a", b"b", b"c")], {"max_tokens": 3}, ["abc"], "stop", 3),
        ([complete(b"a")], {"max_tokens": 1}, ["a"], "stop", 1),
        ([complete(b"a", b"b", b"c")], {"max_tokens": 2}, ["ab"], "length", 2),
        ([complete(b"a", b"b", b"c")], {"stop": ["b"]}, ["a"], "stop", 2),
        ([complete(b"a", b" ST")], {"stop": ["STOP"]}, ["a ", "ST"], "stop", 2),
    ],
)
def test_how_a_text_ends(
    script: list[Sampled],
    fields: dict[str, Any],
    pieces: list[str],
    reason: FinishReason,
    n_generated: int,
) -> None:
    run, shown = run_of(**fields), list[str]()
    for sampled in script:
        assert run.ends is None
        shown += pieces_of(run.take(sampled))
    rest, finished = finish(run)
    assert shown + rest == pieces
    assert finished.text == ("".join(pieces) if run.prepared.streams else "ab")
    assert (finished.finish_reason, finished.generated_tokens) == (reason, n_generated)


def test_probabilities_are_told_in_the_order_of_the_tokens() -> None:
    run, told = run_of(), [TokenLogprob(token, b"a", -1.0 * token) for token in (3, 2, 4)]
    for each in told:
        run.take(Sampled(each.token, each.piece, ends=False, logprobs=each))
    run.ends = "length"
    assert finish(run)[1].logprobs == tuple(told)
