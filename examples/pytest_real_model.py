"""Testing an application twice: with a scripted model, and with a real one.

    pytest examples/pytest_real_model.py

The first test needs no GGUF and no time.  The second is skipped where the model has not been
pulled (`python -m llamad_trio pull smollm2-135m`).
"""

from __future__ import annotations

import pytest
import trio
import trio.testing

from llamad_trio import EngineLike, ModelLoadError, open_engine
from llamad_trio.testing import ScriptedModel, open_scripted_engine


async def summary(eng: EngineLike, text: str, *, within_s: float) -> str:
    """The application: a summary, or the text's beginning when that takes too long."""
    result = ""
    with trio.move_on_after(within_s) as limit:
        result = await eng.complete_text(f"Summarize in one sentence: {text}", max_tokens=40)
    return text[:40] if limit.cancelled_caught else result


async def test_a_summary_that_takes_too_long_is_done_without(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_scripted_engine(ScriptedModel("A cat sat.", decode_s=1.0)) as eng:
        assert await summary(eng, "The cat sat on the mat.", within_s=60) == "A cat sat."
        assert (
            await summary(eng, "The cat sat on the mat.", within_s=5) == "The cat sat on the mat."
        )


async def test_a_real_model_says_something() -> None:
    try:
        async with open_engine("smollm2-135m", n_threads=1, n_ctx=512) as eng:
            assert await summary(eng, "The cat sat on the mat.", within_s=60)
    except ModelLoadError as error:
        pytest.skip(str(error))
