"""From logits to the next token, and those a constraint forces after it.

Greedy requests take the likeliest token straight from the logits.  Others apply the
penalties here, to the few tokens they concern, and leave the rest to a llama.cpp
sampler chain: llama.cpp's own penalty sampler looks up every token of the vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from llamad_trio.constraints.compiler import Matcher
from llamad_trio.core.completion import TokenLogprob
from llamad_trio.llama.model import LlamaModel
from llamad_trio.scheduling.plan import Prepared, Sampled, SamplingParams


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


MAX_TOGETHER = 128
"""Forced tokens taken in one step.  A text that goes on by force without end gives hundreds of
thousands, of which few will be wanted; and llguidance, holding Python's lock, takes 3 ns times
the length of the text so far for each: 30 s for 100,000 at once."""


class ConstraintFailure(Exception):
    """A constraint cannot go on: no token may come next, or it would take too long to tell."""


class Sampler:
    """One request's sampling state.  The penalties count the tokens of its prompt, too."""

    def __init__(self, request: Prepared, model: LlamaModel) -> None:
        assert request.constraint is None or isinstance(request.constraint, Matcher)
        self._matcher = request.constraint
        self._visible = request.visible
        self._n_logprobs = request.n_logprobs
        self._model = model
        # What is forced next, last token first.
        self._forced: list[int] = []
        self._chain = None
        self._penalties = None
        params = request.sampling
        if params.greedy:
            return
        if params.has_penalties:
            self._penalties = _Penalties(params, model.n_vocab, request.tokens)
        self._chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        add = partial(lib.llama_sampler_chain_add, self._chain)
        if params.top_k > 0:
            add(lib.llama_sampler_init_top_k(params.top_k))
        if params.top_p < 1.0:
            add(lib.llama_sampler_init_top_p(params.top_p, 1))
        if params.min_p > 0.0:
            add(lib.llama_sampler_init_min_p(params.min_p, 1))
        add(lib.llama_sampler_init_temp(params.temperature))
        add(lib.llama_sampler_init_dist(params.seed))

    def sample(
        self, context: lib.llama_context_p, row: int, logits: NDArray[np.float32]
    ) -> Sampled:
        """Draw a token, and take with it those that the constraint then forces.

        `logits` are those of the batch's row, shape (n_vocab,), and are changed in place.  Raises
        `ConstraintFailure` if the constraint cannot go on.
        """
        # Before the logits are changed, and the forced ones one by one: each has its own.
        logprobs = None if self._n_logprobs is None else log_softmax(logits)
        tokens = self._next(context, row, logits)
        if self._penalties is not None:
            for token in tokens:
                self._penalties.accept(token)
        ends = self._model.ends_generation(tokens[0])
        return Sampled(
            tokens[0],
            b"" if ends else self._piece(tokens[0]),
            ends,
            forced=[(token, self._piece(token)) for token in tokens[1:]],
            is_complete=self._matcher is not None and self._matcher.is_complete,
            logprobs=None if logprobs is None else self._token_logprob(tokens[0], logprobs),
        )

    def close(self) -> None:
        """Free the chain.  The sampler must not be used again."""
        if self._chain is not None:
            lib.llama_sampler_free(self._chain)
            self._chain = None

    def _next(
        self, context: lib.llama_context_p, row: int, logits: NDArray[np.float32]
    ) -> list[int]:
        matcher = self._matcher
        if matcher is None:
            return [self._draw(context, row, logits)]
        one_by_one = self._n_logprobs is not None
        if not self._forced:
            self._forced = matcher.forced_tokens()[::-1]
        tokens: list[int] = []
        # What is forced is not drawn, so that no random number is used up: the text is the
        # same whether or not it is taken together.
        if not self._forced:
            tokens = [self._draw(context, row, logits)]
            if self._model.ends_generation(tokens[0]):
                return tokens
            matcher.accept(tokens)
            self._forced = [] if one_by_one else matcher.forced_tokens()[::-1]
        together = self._forced[-(1 if one_by_one else MAX_TOGETHER) :][::-1]
        del self._forced[len(self._forced) - len(together) :]
        matcher.accept(together)
        tokens += together
        if matcher.error is not None:
            raise ConstraintFailure(matcher.error)
        return tokens

    def _draw(self, context: lib.llama_context_p, row: int, logits: NDArray[np.float32]) -> int:
        if self._chain is None:
            token = int(logits.argmax())
            if self._matcher is None or self._matcher.allows(token):
                return token  # the likeliest of all is the likeliest of those allowed
        if self._matcher is not None and not self._matcher.apply(logits):
            raise ConstraintFailure(self._matcher.error or "no token may come next")
        if self._chain is None:
            return int(logits.argmax())
        if self._penalties is not None:
            self._penalties.apply(logits)
        return int(lib.llama_sampler_sample(self._chain, context, row))

    def _piece(self, token: int) -> bytes:
        return self._model.piece(token, special=token in self._visible)

    def _token_logprob(self, token: int, logprobs: NDArray[np.float32]) -> TokenLogprob:
        def logprob(token: int, top: Sequence[TokenLogprob] = ()) -> TokenLogprob:
            piece = self._model.piece(token, special=True)
            return TokenLogprob(token, piece, float(logprobs[token]), tuple(top))

        n = min(self._n_logprobs or 0, len(logprobs))
        likeliest = np.argpartition(logprobs, -n)[-n:] if n else np.empty(0, dtype=np.int64)
        order = likeliest[np.argsort(-logprobs[likeliest], kind="stable")]
        return logprob(token, [logprob(int(t)) for t in order])


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Logarithms of the probabilities that logits stand for, along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
