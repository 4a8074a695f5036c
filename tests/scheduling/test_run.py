"""A request's text: whatever its tokens cut, nothing is shown too early, and nothing too late."""

from __future__ import annotations

from hypothesis import example, given, strategies as st

from llamad_trio.scheduling.plan import Prepared
from llamad_trio.scheduling.run import Event, Finished, Piece, Run
from tests.scheduling.checked_scheduler import sampling
from tests.scheduling.fake_memory import forcing
from tests.scheduling.oracles import decoded, first_stop, undecided

SOME_BYTES = st.binary(max_size=6) | st.text("ab🙂é\ufffd", max_size=4).map(str.encode)
TOGETHER = st.lists(SOME_BYTES, min_size=1, max_size=3)
STOPS = st.lists(st.text("ab🙂\ufffd", max_size=3), max_size=3)


def run_of(max_tokens: int = 100, stops: list[str] | None = None) -> Run:
    prepared = Prepared(
        id=1, tokens=(5, 5), max_tokens=max_tokens, sampling=sampling(), stop=stops or []
    )
    return Run(prepared, arrival=1)


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Piece))


@given(st.lists(TOGETHER, max_size=6), STOPS)
@example([[b"\xf0\x9f"], [b"\x99\x82"]], [])
@example([[b"\xf0\x9f", b"a"]], [])
@example([[b"\xed\xa0"], [b"\x80"]], [])  # a surrogate
@example([[b"\xc0"], [b"\x80"]], [])  # NUL in disguise
@example([["a🙂".encode()[:-1]]], ["\ufffd"])  # the stop sequence is completed by the end
def test_any_bytes_cut_anywhere_give_the_text_of_the_whole_as_soon_as_it_is_certain(
    script: list[list[bytes]], stops: list[str]
) -> None:
    run, raw, shown = run_of(stops=stops), b"", ""
    for together in script:
        shown += text_of(run.take(forcing(*together)))
        raw += b"".join(together)
        text = decoded(raw, final=False)
        stop = first_stop(text, stops)
        assert run.ends == ("stop" if stop else None)
        assert shown == text[: stop[0] if stop else len(text) - undecided(text, stops)]
        if stop:
            break
    run.ends = run.ends or "length"
    events = run.finish()
    whole = decoded(raw, final=True)
    stop = first_stop(whole, stops)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.text == shown + text_of(events) == (whole[: stop[0]] if stop else whole)
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
