"""The rule of the library: out of range is clamped, NaN is the default, a wrong type is an error."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.fields import boolean, number, optional, text, unknown_names, whole_number
from tests.strategies import texts


def size(value: object) -> float:
    return number(0.5, -1.0, 2.0)(value, "size")


def count(value: object) -> int:
    return whole_number(-1, 10)(value, "count")


@given(st.integers() | st.floats(allow_nan=False))
def test_a_number_is_clamped_whatever_its_size(value: float) -> None:
    assert size(value) == max(-1.0, min(2.0, value))
    assert type(size(value)) is float


@pytest.mark.parametrize("value", [10**400, -(10**400), math.inf, -math.inf])
def test_what_no_float_can_hold_is_clamped_too(value: float) -> None:
    assert size(value) == (2.0 if value > 0 else -1.0)


def test_nan_is_the_default() -> None:
    assert size(math.nan) == 0.5
    assert size(-math.nan) == 0.5


@given(st.integers())
def test_a_whole_number_is_clamped(value: int) -> None:
    assert count(value) == max(-1, min(10, value))


@pytest.mark.parametrize("value", [True, False, None, "1", b"1", [1], 1j])
def test_what_is_no_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(ProtocolError, match="size must be a number"):
        size(value)
    with pytest.raises(ProtocolError, match="count must be an integer"):
        count(value)


@pytest.mark.parametrize("value", [1.0, math.nan, math.inf])
def test_a_whole_number_is_no_float(value: float) -> None:
    with pytest.raises(ProtocolError, match="count must be an integer, not float"):
        count(value)


@pytest.mark.parametrize("value", [0, 1, "true", None, 1.0])
def test_only_true_and_false_are_boolean(value: object) -> None:
    with pytest.raises(ProtocolError, match="flag must be true or false"):
        boolean(value, "flag")


def test_true_and_false_pass() -> None:
    assert boolean(True, "flag") is True
    assert boolean(False, "flag") is False


@given(texts)
def test_text_passes_unchanged(value: str) -> None:
    assert text(value, "prompt") == value


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("a\0b", "contains a NUL byte"),
        ("\ud83d", "contains a lone surrogate"),
        ("\udc80abc", "contains a lone surrogate"),
        (b"bytes", "must be text, not bytes"),
        (None, "must be text, not NoneType"),
        (3, "must be text, not int"),
    ],
)
def test_text_that_llama_cpp_could_not_take_is_refused(value: object, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=f"prompt {complaint}"):
        text(value, "prompt")


def test_optional_lets_none_pass_and_nothing_else() -> None:
    convert = optional(whole_number(-1, 10))
    assert convert(None, "count") is None
    assert convert(99, "count") == 10
    with pytest.raises(ProtocolError):
        convert("99", "count")


def test_an_unknown_name_is_told_with_the_known_one_it_is_most_like() -> None:
    known = ["top_k", "top_p", "max_tokens"]
    assert unknown_names({"max_token", "colour"}, known) == (
        "colour, max_token (did you mean max_tokens?)"
    )
    assert unknown_names(["TOP_K\n"], known, repr) == r"'TOP_K\n' (did you mean 'top_k'?)"
