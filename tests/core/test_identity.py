"""The digest that decides whether a KV cache may be used again."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from llamad_trio.core.identity import identity_digest

FACTS = st.dictionaries(
    st.text(max_size=4),
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    max_size=5,
)


@given(FACTS, st.randoms(use_true_random=False))
def test_the_order_of_the_facts_does_not_matter(
    facts: dict[str, str | int | float | None], random: Random
) -> None:
    items = list(facts.items())
    random.shuffle(items)
    assert identity_digest(dict(items)) == identity_digest(facts)


def test_every_fact_and_every_name_counts() -> None:
    facts: list[dict[str, str | int | float | None]] = [
        {},
        {"model": "a"},
        {"model": "b"},
        {"template": "a"},
        {"model": "a", "template": "a"},
        {"model": None},
        {"model": "None"},
        {"model": ""},
        {"model": 1},
        {"model": 1.0},
        {"model": True},
        {"model": "1"},
        {"model": 'a","template":"a'},
    ]
    assert len({identity_digest(parts) for parts in facts}) == len(facts)


def test_it_is_the_same_in_every_process() -> None:
    # Written down, because it may lie on a disk: a change here makes every saved cache useless.
    assert identity_digest({"model": "é", "n": 1, "x": None}) == (
        "15f0c1b63ff6313f169270b671ad646f7badca537fb3973bd421d746e963572c"
    )
