"""What is taken over from others is what would have been computed, and the books are true."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.llama.conversations import N_CTX, Driver, cold_logits, opened_runtime, talk
from tests.models import DECODER_KINDS

if TYPE_CHECKING:
    from tests.models import Kind, TinyModels

# A sliding window gives away cells sooner that one sequence has than those that several share.  In
# other cells llama.cpp rounds otherwise, and these models are sharp: that alone moves a logit by
# up to 0.002.  A token that is missing moves it by 0.05 and more.
ROUNDING = 0.01

N_COMPARED = 10

kinds = pytest.mark.parametrize("kind", DECODER_KINDS)


def check_conversations(
    tiny_model: TinyModels, kind: Kind, seed: int, *, alone: bool, exact: bool
) -> None:
    with opened_runtime(tiny_model(kind)) as runtime:
        driver = Driver(runtime)
        talk(driver, seed, n_turns=24, alone=alone)
        warm = [sample for sample in driver.samples if sample.is_warm]
        assert warm
        assert driver.scheduler.stats().cached_tokens > 0
        for sample in warm[:: 1 + len(warm) // N_COMPARED]:
            cold = cold_logits(runtime, driver.steps, sample)
            if exact:
                np.testing.assert_array_equal(sample.logits, cold)
            else:
                np.testing.assert_allclose(sample.logits, cold, atol=ROUNDING)
        # Not a cell has been lost: all of them together hold one sequence.
        driver.submit([270] * (N_CTX - 1), 1)
        driver.run()


@kinds
def test_random_conversations_are_computed_as_if_nothing_were_reused(
    tiny_model: TinyModels, kind: Kind
) -> None:
    check_conversations(tiny_model, kind, 0, alone=True, exact=kind != "sliding-window")


@kinds
def test_random_conversations_side_by_side_are_computed_as_if_nothing_were_reused(
    tiny_model: TinyModels, kind: Kind
) -> None:
    # llama.cpp cuts a batch of several sequences that have a state by the shortest of them.
    check_conversations(tiny_model, kind, 100, alone=False, exact=kind == "attention")


@pytest.mark.slow
@kinds
def test_many_random_conversations(tiny_model: TinyModels, kind: Kind) -> None:
    for seed in range(100):
        check_conversations(tiny_model, kind, seed, alone=True, exact=kind != "sliding-window")
        check_conversations(tiny_model, kind, seed, alone=False, exact=kind == "attention")
