"""What the sampling fields of a request come to."""

from __future__ import annotations

from typing import Any

import pytest

from llamad_trio.core.request import Request
from llamad_trio.scheduling.plan import RANDOM_SEED, SamplingParams, resolve_sampling


def resolved(**fields: Any) -> SamplingParams:
    return resolve_sampling(Request("x", **fields), n_ctx=1000, fresh_seed=42)


def test_the_numbers_come_from_the_request() -> None:
    assert resolved(
        temperature=0.7,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        repeat_penalty=1.2,
        repeat_last_n=64,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        seed=7,
    ) == SamplingParams(
        greedy=False,
        temperature=0.7,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        repeat_penalty=1.2,
        penalty_window=64,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        seed=7,
    )


@pytest.mark.parametrize(
    ("field", "value", "number", "expected"),
    [
        ("temperature", 0, "greedy", True),
        ("temperature", -1, "greedy", True),
        ("temperature", 0.0001, "greedy", False),
        # The penalties look back on the context at most.
        ("repeat_last_n", -1, "penalty_window", 1000),
        ("repeat_last_n", 0, "penalty_window", 0),
        ("repeat_last_n", 5, "penalty_window", 5),
        ("repeat_last_n", 10**9, "penalty_window", 1000),
        # A seed is kept, but for the one that llama.cpp would redraw.
        ("seed", 0, "seed", 0),
        ("seed", 1, "seed", 1),
        ("seed", RANDOM_SEED - 1, "seed", RANDOM_SEED - 1),
        ("seed", RANDOM_SEED, "seed", RANDOM_SEED - 1),
        ("seed", None, "seed", 42),
    ],
)
def test_each_field_comes_to_a_number(
    field: str, value: float | None, number: str, expected: float
) -> None:
    assert getattr(resolved(**{field: value}), number) == expected


@pytest.mark.parametrize(
    ("fields", "on"),
    [
        ({}, False),
        ({"repeat_penalty": 1.1}, True),
        ({"repeat_penalty": 0.9}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repeat_penalty": 1.1, "presence_penalty": 1, "repeat_last_n": 0}, False),
    ],
)
def test_penalties_that_change_nothing_are_off(fields: dict[str, float], on: bool) -> None:
    assert resolved(**{"repeat_penalty": 1.0, **fields}).has_penalties is on


def test_the_repeat_penalty_never_divides_by_zero() -> None:
    assert resolved(repeat_penalty=0).repeat_penalty > 0


def test_a_fresh_seed_is_never_the_one_that_llama_cpp_would_redraw() -> None:
    fresh = resolve_sampling(Request("x"), n_ctx=10, fresh_seed=RANDOM_SEED)
    assert fresh.seed == RANDOM_SEED - 1
