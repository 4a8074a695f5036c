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


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (-1, True), (0.0001, False)])
def test_no_temperature_is_greedy(temperature: float, greedy: bool) -> None:
    assert resolved(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(("last_n", "window"), [(-1, 1000), (0, 0), (5, 5), (10**9, 1000)])
def test_the_penalties_look_back_on_the_context_at_most(last_n: int, window: int) -> None:
    assert resolved(repeat_last_n=last_n).penalty_window == window


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


@pytest.mark.parametrize("seed", [0, 1, RANDOM_SEED - 1])
def test_a_seed_is_kept(seed: int) -> None:
    assert resolved(seed=seed).seed == seed


def test_the_seed_that_llama_cpp_would_redraw_is_never_used() -> None:
    assert resolved(seed=RANDOM_SEED).seed == RANDOM_SEED - 1
    fresh = resolve_sampling(Request("x"), n_ctx=10, fresh_seed=RANDOM_SEED)
    assert fresh.seed == RANDOM_SEED - 1


def test_without_a_seed_the_fresh_one_is_used() -> None:
    assert resolved().seed == 42
