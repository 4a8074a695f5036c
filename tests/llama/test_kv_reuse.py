"""What is taken over from others is what would have been computed, and the books are true."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.llama.conversations import N_CTX, Driver, cold_logits, opened_runtime, talk
from tests.models import DECODER_KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.models import Kind, TinyModels

# A sliding window gives away cells sooner that one sequence has than those that several share.  In
# other cells llama.cpp rounds otherwise, and these models are sharp: that alone moves a logit by
# up to 0.002.  A token that is missing moves it by 0.05 and more.
ROUNDING = 0.01

N_COMPARED = 10


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


@pytest.mark.parametrize(
    ("seeds", "alone"),
    [
        ([0], True),
        ([100], False),
        pytest.param(range(100), True, marks=pytest.mark.slow),
        pytest.param(range(100), False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", DECODER_KINDS)
def test_random_conversations_are_computed_as_if_nothing_were_reused(
    tiny_model: TinyModels, kind: Kind, seeds: Sequence[int], alone: bool
) -> None:
    # llama.cpp cuts a batch of several sequences that have a state by the shortest of them.
    exact = kind != "sliding-window" if alone else kind == "attention"
    for seed in seeds:
        check_conversations(tiny_model, kind, seed, alone=alone, exact=exact)
