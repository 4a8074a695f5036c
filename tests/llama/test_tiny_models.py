"""The tiny models are what they claim to be, seen through llama.cpp alone.

Whatever other tests conclude from a tiny model rests on this: each kind loads, speaks, and its
memory can do what a real model's memory of that kind can.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from tests.models import (
    CHAT_TEMPLATE,
    DECODER_KINDS,
    KINDS,
    SLIDING_WINDOW_TOKENS,
    Kind,
    write_tiny_model,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from tests.models import TinyModels

PROMPT = "the cat and the rat ran in the rain, then they rested"
SUFFIX = ", and the end."


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """llama.cpp's log left out, which would bury what pytest says of a failure."""
    before, user_data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(before), ctypes.byref(user_data))
    discard = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
    llama_cpp.llama_log_set(discard, None)
    yield
    llama_cpp.llama_log_set(before, user_data)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_writes_the_same_small_file(tmp_path: Path, kind: Kind) -> None:
    paths = [tmp_path / f"{n}.gguf" for n in range(3)]
    for path, seed in zip(paths, (7, 7, 8), strict=True):
        write_tiny_model(path, kind, seed=seed)
    first, again, other = [path.read_bytes() for path in paths]
    assert first == again
    assert first != other
    assert len(first) < 1_000_000


@pytest.mark.parametrize(
    ("kind", "architecture", "is_recurrent", "is_hybrid", "n_swa"),
    [
        ("attention", "llama", False, False, 0),
        ("sliding-window", "gemma3", False, False, SLIDING_WINDOW_TOKENS),
        ("recurrent", "mamba", True, False, 0),
        ("hybrid", "lfm2", False, True, 0),
        ("encoder", "bert", False, False, 0),
    ],
)
def test_each_kind_loads_as_its_architecture(
    tiny_model: TinyModels,
    kind: Kind,
    architecture: str,
    is_recurrent: bool,
    is_hybrid: bool,
    n_swa: int,
) -> None:
    with loaded(tiny_model(kind, n_ctx_train=512)) as model:
        assert model.metadata("general.architecture") == architecture
        assert llama_cpp.llama_model_is_recurrent(model.handle) == is_recurrent
        assert llama_cpp.llama_model_is_hybrid(model.handle) == is_hybrid
        assert llama_cpp.llama_model_n_swa(model.handle) == n_swa
        assert llama_cpp.llama_model_n_ctx_train(model.handle) == 512


def test_the_chat_template_is_carried_or_left_out(tiny_model: TinyModels) -> None:
    with loaded(tiny_model("attention")) as model:
        assert model.metadata("tokenizer.chat_template") == CHAT_TEMPLATE
    with loaded(tiny_model("attention", chat_template=None)) as model:
        assert model.metadata("tokenizer.chat_template") is None


def test_the_vocabulary_ends_generation_with_two_tokens(tiny_model: TinyModels) -> None:
    with loaded(tiny_model("attention")) as model:
        ends = [
            token
            for token in range(model.n_vocab)
            if llama_cpp.llama_vocab_is_eog(model.vocab, token)
        ]
        markers = model.tokenize("</s><|im_end|>", special=True)
        assert ends == markers
        assert model.tokenize("<|im_end|>") != markers[1:]


@pytest.fixture(scope="module")
def attention_model(tiny_model: TinyModels) -> Iterator[Model]:
    with loaded(tiny_model("attention")) as model:
        yield model


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40))
@example(text="")
@example(text=" the  cat\n\tand\0 the hat ")
@example(text="naïve 猫 👩‍👩‍👧 <s></s><0x41>")
def test_any_text_survives_the_tokenizer(attention_model: Model, text: str) -> None:
    # SentencePiece writes a space as U+2581, so that one character cannot come back as itself.
    expected = text.replace("\u2581", " ")
    assert attention_model.detokenize(attention_model.tokenize(text)) == expected


@pytest.mark.parametrize("kind", DECODER_KINDS)
def test_a_decoder_says_something_varied_that_depends_on_the_prompt(
    tiny_model: TinyModels, kind: Kind
) -> None:
    with loaded(tiny_model(kind)) as model, model.context() as context:
        logits = context.decode(model.tokenize(PROMPT))
        other = context.decode(model.tokenize("quite another prompt"), seq=1)
        assert np.isfinite(logits).all()
        assert 1 < logits.std() < 5
        assert not np.allclose(logits, other, atol=0.1)

        said = []
        for _ in range(32):
            said.append(int(logits.argmax()))
            logits = context.decode(said[-1:])
        assert np.isfinite(logits).all()
        assert not any(llama_cpp.llama_vocab_is_eog(model.vocab, token) for token in said)
        assert len(set(said)) > 5


@pytest.mark.parametrize("kind", DECODER_KINDS)
def test_only_a_model_that_can_end_ends_soon_when_sampled(
    tiny_model: TinyModels, kind: Kind
) -> None:
    def chance_of_ending(path: Path) -> float:
        with loaded(path) as model, model.context() as context:
            logits = context.decode(model.tokenize(PROMPT))
            weights = np.exp(logits - logits.max())
            ends = [2, *model.tokenize("<|im_end|>", special=True)]
            return float(weights[ends].sum() / weights.sum())

    endless = [chance_of_ending(tiny_model(kind, seed=seed)) for seed in range(8)]
    can_end = [chance_of_ending(tiny_model(kind, seed=seed, can_end=True)) for seed in range(8)]
    assert max(endless) < 1e-3
    assert 0.01 < np.mean(can_end) < 0.5


def test_an_encoder_embeds_text_and_has_no_memory(tiny_model: TinyModels) -> None:
    with loaded(tiny_model("encoder")) as model, model.context(embeddings=True) as context:
        assert not llama_cpp.llama_get_memory(context.handle)
        one = context.embed(model.tokenize("the cat"))
        other = context.embed(model.tokenize("a dog, 42"))
        assert np.isfinite([one, other]).all()
        assert not np.allclose(one, other, atol=0.1)


@pytest.mark.parametrize(
    ("kind", "n_rs_seq", "can_remove"),
    [
        ("attention", 0, True),
        ("sliding-window", 0, True),
        ("recurrent", 0, False),
        ("recurrent", 4, False),
        ("hybrid", 0, False),
        ("hybrid", 4, True),
    ],
)
def test_a_tail_is_removed_exactly_or_not_at_all(
    tiny_model: TinyModels, kind: Kind, n_rs_seq: int, can_remove: bool
) -> None:
    with loaded(tiny_model(kind)) as model:
        prompt, tail, suffix = (model.tokenize(text) for text in (PROMPT, "rain", SUFFIX))
        with model.context(n_rs_seq=n_rs_seq) as context:
            context.decode(prompt)
            context.decode(tail)
            assert context.remove_from(len(prompt) + 1) == can_remove
            continued = context.decode(suffix)
        with model.context(n_rs_seq=n_rs_seq) as context:
            context.decode(prompt)
            context.decode(tail[:1] if can_remove else tail)
            np.testing.assert_array_equal(continued, context.decode(suffix))


def test_a_hybrid_is_silently_wrong_once_its_whole_last_batch_is_removed(
    tiny_model: TinyModels,
) -> None:
    # Snapshots of the recurrent state are taken per batch: the one before its first token is not
    # among them, yet llama.cpp says yes.  Should this ever fail, llama.cpp has been mended.
    with loaded(tiny_model("hybrid")) as model:
        prompt, tail, suffix = (model.tokenize(text) for text in (PROMPT, "rain", SUFFIX))
        with model.context(n_rs_seq=len(tail)) as context:
            context.decode(prompt)
            context.decode(tail)
            assert context.remove_from(len(prompt))
            continued = context.decode(suffix)
        with model.context(n_rs_seq=len(tail)) as context:
            context.decode(prompt)
            assert not np.allclose(continued, context.decode(suffix), atol=0.01)


@pytest.mark.parametrize("kind", DECODER_KINDS)
def test_a_copied_sequence_continues_exactly_and_apart(tiny_model: TinyModels, kind: Kind) -> None:
    with loaded(tiny_model(kind)) as model, model.context() as context:
        suffix = model.tokenize(SUFFIX)
        context.decode(model.tokenize(PROMPT))
        llama_cpp.llama_memory_seq_cp(context.memory, 0, 1, -1, -1)
        copy = context.decode(suffix, seq=1)
        original = context.decode(suffix, seq=0)
        np.testing.assert_array_equal(copy, original)


@pytest.mark.parametrize("kind", DECODER_KINDS)
def test_a_saved_state_continues_exactly_in_another_sequence(
    tiny_model: TinyModels, kind: Kind
) -> None:
    with loaded(tiny_model(kind)) as model, model.context() as context:
        suffix = model.tokenize(SUFFIX)
        context.decode(model.tokenize(PROMPT))
        context.load_state(context.save_state(seq=0), seq=1)
        restored = context.decode(suffix, seq=1)
        original = context.decode(suffix, seq=0)
        np.testing.assert_array_equal(restored, original)


class Model:
    """A loaded model, and its vocabulary."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.vocab = llama_cpp.llama_model_get_vocab(handle)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def metadata(self, key: str) -> str | None:
        value = ctypes.create_string_buffer(4096)
        size = llama_cpp.llama_model_meta_val_str(self.handle, key.encode(), value, len(value))
        return None if size < 0 else value.value.decode()

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of `text`, without a beginning-of-sequence token."""
        raw = text.encode()
        tokens = (llama_cpp.llama_token * (len(raw) + 1))()
        count = llama_cpp.llama_tokenize(
            self.vocab, raw, len(raw), tokens, len(tokens), False, special
        )
        assert count >= 0
        return list(tokens[:count])

    def detokenize(self, tokens: Sequence[int]) -> str:
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        text = ctypes.create_string_buffer(16 * len(tokens) + 1)
        size = llama_cpp.llama_detokenize(
            self.vocab, array, len(tokens), text, len(text), False, False
        )
        assert size >= 0
        return text.raw[:size].decode()

    @contextmanager
    def context(self, *, embeddings: bool = False, n_rs_seq: int = 0) -> Iterator[Context]:
        """A context of two sequences that share one pool of KV cells."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = 256
        params.n_seq_max = 2
        params.n_rs_seq = n_rs_seq
        params.kv_unified = True
        params.swa_full = True
        params.embeddings = embeddings
        params.n_threads = params.n_threads_batch = 1
        handle = llama_cpp.llama_init_from_model(self.handle, params)
        assert handle
        try:
            yield Context(handle, self)
        finally:
            llama_cpp.llama_free(handle)


class Context:
    """A context that remembers where each of its sequences ends."""

    def __init__(self, handle: Any, model: Model) -> None:
        self.handle = handle
        self.model = model
        self.memory = llama_cpp.llama_get_memory(handle)

    def decode(self, tokens: Sequence[int], *, seq: int = 0) -> npt.NDArray[np.float32]:
        """Append `tokens` to a sequence and return the logits after the last of them."""
        self._run(tokens, seq)
        row = llama_cpp.llama_get_logits_ith(self.handle, -1)
        return np.ctypeslib.as_array(row, (self.model.n_vocab,)).copy()

    def embed(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        self._run(tokens, 0)
        row = llama_cpp.llama_get_embeddings_seq(self.handle, 0)
        return np.ctypeslib.as_array(row, (llama_cpp.llama_model_n_embd(self.model.handle),)).copy()

    def remove_from(self, position: int) -> bool:
        removed: bool = llama_cpp.llama_memory_seq_rm(self.memory, 0, position, -1)
        return removed

    def save_state(self, *, seq: int) -> bytes:
        state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(self.handle, seq))()
        size = llama_cpp.llama_state_seq_get_data(self.handle, state, len(state), seq)
        assert size == len(state)
        return bytes(state)

    def load_state(self, state: bytes, *, seq: int) -> None:
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        assert llama_cpp.llama_state_seq_set_data(self.handle, data, len(data), seq) == len(data)

    def _run(self, tokens: Sequence[int], seq: int) -> None:
        start = llama_cpp.llama_memory_seq_pos_max(self.memory, seq) + 1 if self.memory else 0
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i] = token
                batch.pos[i] = start + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = seq
                batch.logits[i] = i == len(tokens) - 1
            assert llama_cpp.llama_decode(self.handle, batch) == 0
        finally:
            llama_cpp.llama_batch_free(batch)


@contextmanager
def loaded(path: Path) -> Iterator[Model]:
    """The model at `path`, freed at the end of the block."""
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    handle = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert handle, f"{path} does not load"
    try:
        yield Model(handle)
    finally:
        llama_cpp.llama_model_free(handle)
