"""Stop sequences: the same end for every way of cutting the text, and nothing withheld too long."""

from __future__ import annotations

import pytest
from hypothesis import example, given, strategies as st

from llamad_trio.scheduling.stop import StopMatcher
from tests.scheduling.oracles import first_stop, undecided

LETTERS = st.sampled_from("ab🙂")
STOPS = st.lists(st.text(LETTERS, max_size=5), max_size=4)
CHUNKS = st.lists(st.text(LETTERS, max_size=6), max_size=12)


def run(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    """All text that is shown, and the stop sequence that matched."""
    matcher = StopMatcher(stops)
    shown = "".join([matcher.push(chunk) for chunk in chunks]) + matcher.flush()
    return shown, matcher.matched


@given(stops=STOPS, chunks=CHUNKS)
@example(stops=["aab"], chunks=["aa", "aab"])  # the match begins inside a failed one
@example(stops=["ab", "b"], chunks=["a", "b"])  # two end at once: the longer
@example(
    stops=["abbb", "bb"], chunks=["abb", "b"]
)  # the first to end, though the other began first
def test_the_text_ends_where_a_search_of_the_whole_says(
    stops: list[str], chunks: list[str]
) -> None:
    text = "".join(chunks)
    end = first_stop(text, stops)
    assert run(stops, chunks) == ((text, None) if end is None else (text[: end[0]], end[1]))


@given(stops=STOPS, text=st.text(LETTERS, max_size=20))
def test_how_the_text_is_cut_changes_nothing(stops: list[str], text: str) -> None:
    whole = run(stops, [text])
    assert run(stops, list(text)) == whole
    for at in range(len(text) + 1):
        assert run(stops, [text[:at], text[at:]]) == whole


@given(stops=STOPS, chunks=CHUNKS)
def test_only_what_may_become_a_stop_sequence_is_withheld(
    stops: list[str], chunks: list[str]
) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for chunk in chunks:
        text += chunk
        shown += matcher.push(chunk)
        if matcher.matched is not None:
            break
        assert shown == text[: len(text) - undecided(text, stops)]


@given(stops=STOPS, chunks=CHUNKS)
def test_nothing_of_a_stop_sequence_is_ever_shown(stops: list[str], chunks: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    end = first_stop("".join(chunks), stops)
    for chunk in chunks:
        shown += matcher.push(chunk)
        assert end is None or len(shown) <= end[0]


@given(chunks=CHUNKS)
def test_without_stop_sequences_text_passes_through(chunks: list[str]) -> None:
    matcher = StopMatcher([""])
    assert [matcher.push(chunk) for chunk in chunks] == chunks
    assert matcher.flush() == ""


def test_after_a_match_nothing_more_is_shown() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("text END more") == "text "
    assert matcher.push("END") == ""
    assert matcher.flush() == ""
    assert matcher.matched == "END"


def test_what_was_withheld_is_released_once() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") == "the "
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""
    assert matcher.matched is None


@pytest.mark.parametrize("stops", [["a"], ["a", "a"], iter(["", "a"]), {"a"}])
def test_any_iterable_of_stops_will_do(stops: list[str]) -> None:
    assert run(stops, ["ba"]) == ("b", "a")


def test_the_work_per_character_does_not_grow_with_the_stop_sequence() -> None:
    matcher = StopMatcher(["a" * 60_000 + "b"])
    shown = sum(len(matcher.push("a" * 1_000)) for _ in range(61))
    assert shown == 1_000
    assert matcher.push("b") == ""
    assert matcher.matched is not None
