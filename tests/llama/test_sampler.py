"""Penalties are llama.cpp's own, at a fraction of their cost; the draw is the seed's."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import attrs
import llama_cpp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from llamad_trio.llama.sampler import Sampler
from llamad_trio.scheduling.plan import Prepared, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from llamad_trio.llama.model import LlamaModel

N_VOCAB = 40

PLAIN = SamplingParams(
    greedy=False,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repeat_penalty=1.0,
    penalty_window=64,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=1,
)

penalties = st.builds(
    lambda repeat, last_n, presence, frequency: attrs.evolve(
        PLAIN,
        repeat_penalty=repeat,
        penalty_window=last_n,
        presence_penalty=presence,
        frequency_penalty=frequency,
    ),
    repeat=st.floats(0.01, 2.0),
    last_n=st.integers(1, 20),
    presence=st.floats(-2.0, 2.0),
    frequency=st.floats(-2.0, 2.0),
).filter(lambda params: params.has_penalties)


def sampler_for(params: SamplingParams, prompt: Sequence[int]) -> Sampler:
    model = cast("LlamaModel", SimpleNamespace(n_vocab=N_VOCAB))
    return Sampler(Prepared(id=1, tokens=prompt, max_tokens=1, sampling=params), model)


tokens = st.lists(st.integers(0, N_VOCAB - 1), max_size=40)


@settings(max_examples=300, deadline=None)
@given(params=penalties, prompt=tokens, said=tokens, seed=st.integers(0, 2**32 - 1))
@example(
    params=attrs.evolve(PLAIN, repeat_penalty=1.5, penalty_window=1), prompt=[1], said=[2], seed=0
)
@example(params=attrs.evolve(PLAIN, frequency_penalty=1.0), prompt=[3] * 40, said=[], seed=0)
def test_penalties_are_those_of_llama_cpp(
    params: SamplingParams, prompt: list[int], said: list[int], seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 5, N_VOCAB).astype(np.float32)
    logits[seed % N_VOCAB] = 0.0
    expected = penalised_by_llama_cpp(params, [*prompt, *said], logits)

    sampler = sampler_for(params, prompt)
    try:
        assert sampler._penalties is not None
        for token in said:
            sampler._penalties.accept(token)
        sampler._penalties.apply(logits)
    finally:
        sampler.close()
    np.testing.assert_allclose(logits, expected, rtol=1e-6, atol=1e-6)


def penalised_by_llama_cpp(
    params: SamplingParams, seen: Sequence[int], logits: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    llama_cpp.llama_sampler_chain_add(
        chain,
        llama_cpp.llama_sampler_init_penalties(
            N_VOCAB,
            params.penalty_window,
            params.repeat_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        ),
    )
    data = (llama_cpp.llama_token_data * N_VOCAB)()
    for token, logit in enumerate(logits):
        data[token] = llama_cpp.llama_token_data(token, float(logit), 0.0)
    array = llama_cpp.llama_token_data_array(data, N_VOCAB, -1, False)
    try:
        for token in seen:
            llama_cpp.llama_sampler_accept(chain, token)
        llama_cpp.llama_sampler_apply(chain, ctypes.byref(array))
    finally:
        llama_cpp.llama_sampler_free(chain)
    by_id = {array.data[i].id: array.data[i].logit for i in range(array.size)}
    return np.array([by_id[token] for token in range(N_VOCAB)], dtype=np.float32)


@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        attrs.evolve(PLAIN, repeat_penalty=1.5, penalty_window=0),
        attrs.evolve(PLAIN, greedy=True, repeat_penalty=1.5),
    ],
)
def test_what_changes_no_logit_costs_nothing(params: SamplingParams) -> None:
    sampler = sampler_for(params, [1, 2, 3])
    assert sampler._penalties is None
    sampler.close()
    sampler.close()  # once is enough, twice does no harm
