"""Stop sequences: the same end for every way of cutting the text, and nothing withheld too long."""

from __future__ import annotations

import pytest
from hypothesis import example, given, strategies as st

from llamad_trio.scheduling.run import StopMatcher
from tests.scheduling.oracles import first_stop, undecided

LETTERS = st.sampled_from("ab🙂")
STOPS = st.lists(st.text(LETTERS, max_size=5), max_size=4)
CHUNKS = st.lists(st.text(LETTERS, max_size=6), max_size=12)


@given(stops=STOPS, chunks=CHUNKS)
@example(stops=["aab"], chunks=["aa", "aab"])  # the match begins inside a failed one
@example(stops=["aabaaac"], chunks=["aabaaabaaac"])  # and inside of that, another one failed
@example(stops=["ab", "b"], chunks=["a", "b"])  # two end at once: the longer
@example(stops=["abbb", "bb"], chunks=["abb", "b"])  # the first to end, not to begin
@example(stops=["END"], chunks=["text END more", "END"])  # nothing is shown after a match
@example(stops=["END"], chunks=["the EN"])
@example(stops=[""], chunks=["a", "b"])
def test_the_text_ends_where_a_search_says_and_only_what_may_become_a_stop_is_withheld(
    stops: list[str], chunks: list[str]
) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for chunk in chunks:
        text += chunk
        shown += matcher.push(chunk)
        end = first_stop(text, stops)
        assert matcher.matched == (end[1] if end else None)
        assert shown == text[: end[0] if end else len(text) - undecided(text, stops)]
    rest = matcher.flush()
    assert shown + rest == text or (matcher.matched is not None and not rest)
    assert matcher.flush() == "", "what was withheld is released once"


@pytest.mark.parametrize("stops", [["a"], ["a", "a"], iter(["", "a"]), {"a"}])
def test_any_iterable_of_stops_will_do(stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert (matcher.push("ba"), matcher.matched) == ("b", "a")


def test_the_work_per_character_does_not_grow_with_the_stop_sequence() -> None:
    matcher = StopMatcher(["a" * 60_000 + "b"])
    shown = sum(len(matcher.push("a" * 1_000)) for _ in range(61))
    assert shown == 1_000
    assert matcher.push("b") == ""
    assert matcher.matched is not None
