"""The yardstick: llama.cpp in a plain loop, nothing around it.

One thread, one context, greedy, no scheduler, no streams, no text.  What an engine
loses against this is what it costs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs

from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import InferenceError
from llamad_trio.llama.context import Context
from llamad_trio.llama.llama_runtime import LlamaRuntime


@attrs.frozen
class Speed:
    """Seconds for the whole prompts, and for the steps after them."""

    prefill_s: float
    decode_s: float
    n_decoded: int

    @property
    def decode_tps(self) -> float:
        """Tokens a second after the prompts."""
        return self.n_decoded / self.decode_s


class RawLoop:
    """A second context on the weights of a runtime, made alike by its resolved config."""

    def __init__(self, runtime: LlamaRuntime, config: EngineConfig) -> None:
        self._n_batch = config.n_batch
        self._model = runtime.model
        self._context = Context(runtime.model, config, config.n_slots)
        self._aborted = False

    def run(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> Speed:
        """Prefill each prompt, then decode all of them together for `n_tokens` steps.

        Blocks.  Only on the thread that computes for the model.  Raises `InferenceError` if
        llama.cpp could not compute a batch, or was told to abort.
        """
        context, batch = self._context, self._context.batch
        context.clear()
        start = time.perf_counter()
        newest = [self._prefill(seq, prompt) for seq, prompt in enumerate(prompts)]
        prefilled = time.perf_counter()
        for step in range(n_tokens):
            batch.clear()
            for seq, token in enumerate(newest):
                batch.add([token], pos=len(prompts[seq]) + step, seq=seq, n_outputs=1)
            self._decode()
            newest = [int(row.argmax()) for row in context.logits(len(prompts))]
            for token in newest:
                self._model.piece(token)
        end = time.perf_counter()
        return Speed(prefilled - start, end - prefilled, n_tokens * len(prompts))

    def request_abort(self) -> None:
        """End `run` at the next graph node, and all later ones at once.  From any thread.

        For good: a `run` that took it back as it began would lose the abort that came just
        before.
        """
        self._aborted = True
        self._context.request_abort()

    def close(self) -> None:
        self._context.close()

    def _prefill(self, seq: int, prompt: Sequence[int]) -> int:
        context, batch = self._context, self._context.batch
        for pos in range(0, len(prompt), self._n_batch):
            chunk = prompt[pos : pos + self._n_batch]
            batch.clear()
            batch.add(chunk, pos=pos, seq=seq, n_outputs=int(pos + len(chunk) == len(prompt)))
            self._decode()
        return int(context.logits(1)[0].argmax())

    def _decode(self) -> None:
        if self._aborted:  # a GPU looks at no flag
            raise InferenceError("aborted")
        code = self._context.batch.decode(self._context.pointer)
        if code != 0:
            raise InferenceError(f"llama_decode returned {code}")
