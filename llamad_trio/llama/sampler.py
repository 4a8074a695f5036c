"""From logits to one token.

Greedy requests take the likeliest token straight from the logits.  Others apply the
penalties here, to the few tokens they concern, and leave the rest to a llama.cpp
sampler chain: llama.cpp's own penalty sampler looks up every token of the vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from llamad_trio.core.sampling import SamplingParams

__all__ = ["Sampler"]


class _Penalties:
    """Repeat, presence and frequency penalties over the last tokens of the context.

    The formula is llama.cpp's (`llama_sampler_init_penalties`): a repeated token's
    logit is divided by the repeat penalty, or multiplied when it is negative, and
    lowered by `count * frequency + presence`.
    """

    def __init__(self, params: SamplingParams, n_vocab: int, seen: Sequence[int]) -> None:
        self._params = params
        self._counts = np.zeros(n_vocab, dtype=np.int32)
        self._window: deque[int] = deque()
        # The tokens in the window, each once: kept so that a step costs what is in it.
        self._unique: dict[int, None] = {}
        for token in seen[-params.penalty_window :]:
            self.accept(token)

    def accept(self, token: int) -> None:
        self._window.append(token)
        self._counts[token] += 1
        self._unique[token] = None
        if len(self._window) > self._params.penalty_window:
            old = self._window.popleft()
            self._counts[old] -= 1
            if self._counts[old] == 0:
                del self._unique[old]

    def apply(self, logits: NDArray[np.float32]) -> None:
        ids = np.fromiter(self._unique, dtype=np.int64, count=len(self._unique))
        values = logits[ids]
        repeat = np.float32(self._params.repeat_penalty)
        values = np.where(values <= 0, values * repeat, values / repeat)
        values -= self._counts[ids] * np.float32(self._params.frequency_penalty)
        values -= np.float32(self._params.presence_penalty)
        logits[ids] = values


class Sampler:
    """One request's sampling state.

    Args:
        params: the resolved numbers.
        n_vocab: size of the vocabulary.
        seen: the prompt's tokens, which the penalties count too.
    """

    def __init__(self, params: SamplingParams, n_vocab: int, seen: Sequence[int]) -> None:
        self._chain = None
        self._penalties = None
        if params.greedy:
            return
        if params.has_penalties:
            self._penalties = _Penalties(params, n_vocab, seen)
        self._chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if params.top_k > 0:
            self._add(lib.llama_sampler_init_top_k(params.top_k))
        if params.top_p < 1.0:
            self._add(lib.llama_sampler_init_top_p(params.top_p, 1))
        if params.min_p > 0.0:
            self._add(lib.llama_sampler_init_min_p(params.min_p, 1))
        self._add(lib.llama_sampler_init_temp(params.temperature))
        self._add(lib.llama_sampler_init_dist(params.seed))

    def sample(self, context: lib.llama_context_p, row: int, logits: NDArray[np.float32]) -> int:
        """Draw a token and remember it.

        Args:
            context: where the logits lie.
            row: the batch row they belong to.
            logits: the same logits as an array of shape (n_vocab,); changed in place.
        """
        if self._chain is None:
            return int(logits.argmax())
        if self._penalties is not None:
            self._penalties.apply(logits)
        token = int(lib.llama_sampler_sample(self._chain, context, row))
        if self._penalties is not None:
            self._penalties.accept(token)
        return token

    def close(self) -> None:
        """Free the chain.  The sampler must not be used again."""
        if self._chain is not None:
            lib.llama_sampler_free(self._chain)
            self._chain = None

    def _add(self, sampler: lib.llama_sampler_p) -> None:
        lib.llama_sampler_chain_add(self._chain, sampler)
