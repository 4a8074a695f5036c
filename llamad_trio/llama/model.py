"""A loaded model: weights, vocabulary, metadata."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import llama_cpp.llama_cpp as lib
import numpy as np

from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import ModelLoadError, UnsupportedFeature
from llamad_trio.llama import backend, gguf

if TYPE_CHECKING:
    import llguidance

T = TypeVar("T")

_SPLIT_MODES = {
    "none": lib.LLAMA_SPLIT_MODE_NONE,
    "layer": lib.LLAMA_SPLIT_MODE_LAYER,
    "row": lib.LLAMA_SPLIT_MODE_ROW,
}

# Vocabularies in which every token stands for at most its own bytes of the text.
_BOUNDED_VOCABULARIES = frozenset({lib.LLAMA_VOCAB_TYPE_SPM, lib.LLAMA_VOCAB_TYPE_BPE})


class LlamaModel:
    """A model in memory, made by `load_model`.

    Tokenising is thread-safe; everything else needs one thread at a time.
    """

    def __init__(self, path: Path, pointer: lib.llama_model_p) -> None:
        self.path = path
        self.pointer = pointer
        self.vocab = lib.llama_model_get_vocab(pointer)
        self.n_vocab: int = lib.llama_vocab_n_tokens(self.vocab)
        self._pieces: tuple[dict[int, bytes], dict[int, bytes]] = {}, {}
        self._ends: dict[int, bool] = {}

    def close(self) -> None:
        """Free the weights.  The model must not be used again."""
        lib.llama_model_free(self.pointer)

    # -- metadata -----------------------------------------------------------------------

    def require_generation(self) -> None:
        """Raise `UnsupportedFeature` for a model that cannot continue a text."""
        if lib.llama_model_has_encoder(self.pointer):
            raise UnsupportedFeature("generation", f"{self.path.name} is an encoder-decoder model")
        if lib.llama_model_is_diffusion(self.pointer):
            raise UnsupportedFeature("generation", f"{self.path.name} is a diffusion model")
        if not self.metadata("general.architecture") or lib.llama_vocab_type(self.vocab) == 0:
            raise UnsupportedFeature("generation", f"{self.path.name} has no vocabulary")

    def metadata(self, key: str) -> str | None:
        """A scalar of the GGUF's metadata as text, `None` where it is absent."""
        size = lib.llama_model_meta_val_str(self.pointer, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        lib.llama_model_meta_val_str(self.pointer, key.encode(), buffer, size + 1)
        return buffer.value.decode(errors="replace")

    @cached_property
    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    @cached_property
    def chat_template(self) -> str | None:
        """The model's own chat template (Jinja), if it has one."""
        template = lib.llama_model_chat_template(self.pointer, None)
        return template.decode(errors="replace") if template else None

    @property
    def n_ctx_train(self) -> int:
        return int(lib.llama_model_n_ctx_train(self.pointer))

    @property
    def has_state(self) -> bool:
        """Whether its memory is, or includes, a state that cannot go back a token."""
        return bool(
            lib.llama_model_is_recurrent(self.pointer) or lib.llama_model_is_hybrid(self.pointer)
        )

    # -- vocabulary ---------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Text without NUL to token ids.

        Args:
            add_special: add BOS and EOS where the model wants them.
            parse_special: turn the text of control tokens into those tokens.
        """
        data = text.encode()
        # No vocabulary yields more tokens than bytes, beside what add_special adds.
        size = len(data) + 8
        while True:
            tokens = (ctypes.c_int32 * size)()
            n = lib.llama_tokenize(
                self.vocab, data, len(data), tokens, size, add_special, parse_special
            )
            if n >= 0:
                return tokens[:n]
            size = -n

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Token ids to text, control tokens written out."""
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        size = 16 * len(tokens) + 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = lib.llama_detokenize(self.vocab, ids, len(ids), buffer, size, False, True)
            if n >= 0:
                return buffer.raw[:n].decode(errors="replace")
            size = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for; a control token is `b""`, or written out if `special`."""
        known = self._pieces[special]
        piece = known.get(token)
        if piece is None:
            piece = known[token] = self.read_piece(token, special=special)
        return piece

    def ends_generation(self, token: int) -> bool:
        """Whether the token means that the text is finished."""
        ends = self._ends.get(token)
        if ends is None:
            ends = self._ends[token] = bool(lib.llama_vocab_is_eog(self.vocab, token))
        return ends

    @cached_property
    def max_bytes_per_token(self) -> int | None:
        """Most bytes of text that one token can stand for; `None` if there is no bound."""
        if lib.llama_vocab_type(self.vocab) not in _BOUNDED_VOCABULARIES:
            return None
        return max(map(len, self._of_each_token(lib.llama_vocab_get_text)))

    @cached_property
    def special_tokens(self) -> tuple[dict[str, int], frozenset[str]]:
        """Control tokens, by how a template writes them, and the texts of those that were added
        to the vocabulary, and are found in any text.
        """
        control: dict[str, int] = {}
        added: set[str] = set()
        is_control = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
        is_added = lib.LLAMA_TOKEN_ATTR_USER_DEFINED
        attributes = np.fromiter(self._of_each_token(lib.llama_vocab_get_attr), np.int32)
        for token in np.flatnonzero(attributes & (is_control | is_added)).tolist():
            if text := self.special_text(token):
                if attributes[token] & is_control:
                    control[text] = token
                if attributes[token] & is_added:
                    added.add(text)
        return control, frozenset(added)

    def _of_each_token(self, ask: Callable[..., T]) -> Iterator[T]:
        """What llama.cpp says of each token, asked without a loop of ours: there are many."""
        return map(ask, repeat(self.vocab), range(self.n_vocab))

    def special_text(self, token: int) -> str:
        """How a template writes a token; empty for a negative number, which is none."""
        return "" if token < 0 else self.read_piece(token, special=True).decode(errors="replace")

    def read_piece(self, token: int, *, special: bool) -> bytes:
        """As `piece`, from llama.cpp itself, and not kept."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = lib.llama_token_to_piece(self.vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n


CONTROL = b"\xff"
"""llguidance takes a token that begins with this byte, which no UTF-8 has, for one that is
no text: only its number can be asked for."""


class LlamaVocabulary:
    """A model's vocabulary as llguidance wants to see it: a `constraints.compiler.Vocabulary`.

    Only what is a control token to llama.cpp is one here: what a user has added to a
    vocabulary, such as `<think>`, is text, and may be part of any.
    """

    def __init__(self, model: LlamaModel) -> None:
        self._model = model
        self._control_tokens, _ = model.special_tokens

    def pieces(self) -> Sequence[bytes]:
        """The bytes of each token; those of control tokens after `CONTROL`."""
        model = self._model
        pieces = [model.read_piece(token, special=True) for token in range(model.n_vocab)]
        for token in (*self._control_tokens.values(), *self._ends):
            if not pieces[token].startswith(CONTROL):
                pieces[token] = CONTROL + pieces[token]
        return pieces

    def tokenizer(self, pieces: Sequence[bytes]) -> llguidance.LLTokenizer:
        """llguidance's tokenizer, which asks llama.cpp for the tokens of forced text."""
        import llguidance

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
        return self._control_tokens.get(text)


def load_model(
    path: Path, config: EngineConfig, on_progress: Callable[[float], bool]
) -> LlamaModel:
    """Load a model with its weights.

    `on_progress` is called on this thread with 0..1; returning `False` stops the load.

    Raises:
        ModelLoadError: with llama.cpp's own reason, or `"cancelled"`.
    """
    check_file(path)
    gguf.refuse_deadly(path)
    params = model_params(config)
    params.load_mode = _load_mode(config)
    if config.split_mode is not None:
        params.split_mode = _SPLIT_MODES[config.split_mode]
    params.main_gpu = config.main_gpu
    if config.tensor_split:
        # llama.cpp reads one share per possible device.
        shares = (ctypes.c_float * lib.llama_max_devices())(*config.tensor_split)
        params.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
    stopped = False

    @lib.llama_progress_callback
    def report(fraction: float, _user_data: object) -> bool:
        nonlocal stopped
        stopped = stopped or not on_progress(fraction)
        return not stopped

    params.progress_callback = report
    try:
        return read_model(path, params)
    except ModelLoadError:
        if stopped:
            raise ModelLoadError(str(path), "cancelled") from None
        raise


def model_params(config: EngineConfig) -> lib.llama_model_params:
    """What decides where the tensors of a model go, with weights or without."""
    params = lib.llama_model_default_params()
    params.n_gpu_layers = config.n_gpu_layers
    params.use_extra_bufts = config.use_extra_bufts is not False  # as by llama.cpp's own default
    return params


def read_model(path: Path, params: lib.llama_model_params) -> LlamaModel:
    """Have llama.cpp read a file; raise `ModelLoadError` with its own reason."""
    backend.start()
    with backend.captured_errors() as errors:
        pointer = lib.llama_model_load_from_file(os.fsencode(path), params)
    if not pointer:
        # The first error is the cause; the later ones say where it was noticed.
        cause = errors[0] if errors else "llama.cpp could not load it"
        raise ModelLoadError(str(path), cause.partition(": ")[2] or cause)
    return LlamaModel(path, pointer)


def check_file(path: Path) -> None:
    """Give the plain reasons a file is no model, which llama.cpp's log tells only vaguely."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelLoadError(str(path), "is a directory")
        # Opening a pipe would wait for somebody to write to it.
        if not stat.S_ISREG(mode):
            raise ModelLoadError(str(path), "is not a regular file")
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise ModelLoadError(str(path), "no such file") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(str(path), getattr(error, "strerror", None) or str(error)) from None
    if not magic:
        raise ModelLoadError(str(path), "the file is empty")
    if magic != b"GGUF":
        raise ModelLoadError(str(path), "not a GGUF file")


def _load_mode(config: EngineConfig) -> int:
    if config.use_mlock:
        is_copied = config.use_mmap is False
        return int(lib.LLAMA_LOAD_MODE_MLOCK if is_copied else lib.LLAMA_LOAD_MODE_MMAP_MLOCK)
    if config.use_mmap is None:
        return int(lib.LLAMA_LOAD_MODE_AUTO)
    return int(lib.LLAMA_LOAD_MODE_MMAP if config.use_mmap else lib.LLAMA_LOAD_MODE_NONE)
