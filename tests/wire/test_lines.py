"""Bytes to lines: however they are cut, and up to what length."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from llamad_trio.wire.lines import LineBuffer, LineTooLong, encode_line

# Newlines are as frequent as all the rest together.
raw = st.lists(st.one_of(st.just(b"\n"), st.binary(max_size=6))).map(b"".join)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in parts, some of them empty."""
    ends = sorted(place % (len(data) + 1) for place in places)
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


@given(data=raw, places=st.lists(st.integers(0, 1000)))
def test_lines_that_are_taken_late_are_the_same(data: bytes, places: list[int]) -> None:
    lines = LineBuffer(None)
    for part in cut(data, places):
        lines.push(part)
    assert [*iter(lines.pop, None), lines.pop_rest()] == data.split(b"\n")


def test_a_line_that_will_be_too_long_is_refused_before_its_end() -> None:
    lines = LineBuffer(8)
    lines.push(b"a" * 8)
    assert lines.pop() is None
    lines.push(b"a")
    with pytest.raises(LineTooLong):
        lines.pop()
    with pytest.raises(LineTooLong):
        lines.pop()


def test_the_limit_holds_for_what_the_end_of_the_input_ends() -> None:
    lines = LineBuffer(8)
    lines.push(b"a" * 8)
    assert lines.pop_rest() == b"a" * 8
    lines.push(b"a" * 9)
    with pytest.raises(LineTooLong):
        lines.pop_rest()


@given(data=raw, places=st.lists(st.integers(0, 1000)), limit=st.none() | st.integers(1, 8))
def test_any_cutting_gives_the_same_lines_up_to_the_limit(
    data: bytes, places: list[int], limit: int | None
) -> None:
    lines = LineBuffer(limit)
    found: list[bytes] = []
    expected = data.split(b"\n")
    too_long = [line for line in expected if limit is not None and len(line) > limit]
    try:
        for part in cut(data, places):
            lines.push(part)
            while (line := lines.pop()) is not None:
                found.append(line)
        assert lines.is_empty is (expected[-1] == b"")
        found.append(lines.pop_rest())
        assert lines.is_empty
        assert too_long == []
    except LineTooLong:
        expected = expected[: expected.index(too_long[0])]
    assert found == expected


def test_a_lone_surrogate_is_sent_as_a_question_mark() -> None:
    assert encode_line({"text": "\N{SNOWMAN}\ud800"}) == '{"text": "\N{SNOWMAN}?"}\n'.encode()
