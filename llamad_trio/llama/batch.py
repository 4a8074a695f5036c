"""A reusable `llama_batch` whose arrays are filled through numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np


class Batch:
    """Room for `n_batch` tokens, each of exactly one sequence.

    Args:
        n_batch: most tokens in a step.
    """

    def __init__(self, n_batch: int) -> None:
        # The arrays are ours, and live as long as the batch: llama_batch only points at them.
        self._token = np.zeros(n_batch, dtype=np.int32)
        self._pos = np.zeros(n_batch, dtype=np.int32)
        self._seq = np.zeros(n_batch, dtype=np.int32)
        self._n_seq = np.ones(n_batch, dtype=np.int32)
        self._output = np.zeros(n_batch, dtype=np.int8)
        # llama.cpp takes a pointer to each token's list of sequences: here, of one id.
        self._seq_lists = self._seq.ctypes.data + self._seq.itemsize * np.arange(
            n_batch, dtype=np.uintp
        )
        self._batch = lib.llama_batch(
            token=_pointer(self._token, ctypes.c_int32),
            pos=_pointer(self._pos, ctypes.c_int32),
            n_seq_id=_pointer(self._n_seq, ctypes.c_int32),
            seq_id=_pointer(self._seq_lists, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._output, ctypes.c_int8),
        )

        self.n_outputs = 0

    def clear(self) -> None:
        """Start a new batch."""
        self._batch.n_tokens = 0
        self.n_outputs = 0

    def add(self, tokens: Sequence[int], *, pos: int, seq: int, n_outputs: int) -> None:
        """Append tokens of one sequence.

        Args:
            tokens: their ids.
            pos: position of the first.
            seq: the sequence they belong to.
            n_outputs: for how many of the last to compute logits.
        """
        start: int = self._batch.n_tokens
        end = start + len(tokens)
        self._token[start:end] = tokens
        self._pos[start:end] = range(pos, pos + len(tokens))
        self._seq[start:end] = seq
        self._output[start:end] = 0
        self._output[end - n_outputs : end] = 1
        self._batch.n_tokens = end
        self.n_outputs += n_outputs

    def decode(self, context: lib.llama_context_p) -> int:
        """Run `llama_decode`; return its code (0 done, 1 no room, 2 aborted, < 0 failed)."""
        return int(lib.llama_decode(context, self._batch))


def _pointer(array: np.ndarray[Any, Any], item: type[Any]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(item))
