"""A model's vocabulary, as llguidance wants to see it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property

import llama_cpp.llama_cpp as lib
import llguidance

from llamad_trio.llama.model import LlamaModel

CONTROL = b"\xff"
"""llguidance takes a token that begins with this byte, which no UTF-8 has, for one that is
no text: only its number can be asked for."""


class LlamaVocabulary:
    """Implements `constraints.compiler.Vocabulary`.

    Only what is a control token to llama.cpp is one here: what a user has added to a
    vocabulary, such as `<think>`, is text, and may be part of any.
    """

    def __init__(self, model: LlamaModel) -> None:
        self._model = model

    def pieces(self) -> Sequence[bytes]:
        """The bytes of each token; those of control tokens after `CONTROL`."""
        model = self._model
        pieces = [model.read_piece(token, special=True) for token in range(model.n_vocab)]
        for token in (*model.special_tokens[0].values(), *self._ends):
            if not pieces[token].startswith(CONTROL):
                pieces[token] = CONTROL + pieces[token]
        return pieces

    def tokenizer(self, pieces: Sequence[bytes]) -> llguidance.LLTokenizer:
        """llguidance's tokenizer, which asks llama.cpp for the tokens of forced text."""
        # What llguidance.llamacpp calls, which would take more tokens for control tokens.
        tokenizer: llguidance.LLTokenizer = llguidance.LLTokenizer.from_llamacpp(  # type: ignore[attr-defined]
            tokens=pieces,
            vocab_ptr=self._model.vocab,
            tokenize_fptr=ctypes.cast(lib._lib.llama_tokenize, ctypes.c_void_p).value,
            eos_token=self._ends,
            slices=[],
        )
        return tokenizer

    @cached_property
    def _ends(self) -> list[int]:
        model = self._model
        return [t for t in range(model.n_vocab) if lib.llama_vocab_is_eog(model.vocab, t)]

    def control_token(self, text: str) -> int | None:
        """The control token that is written so, if one is."""
        return self._model.special_tokens[0].get(text)
