"""The tiny models are what they claim to be, seen without an engine.

Whatever other tests conclude from a tiny model rests on this: each kind loads and speaks.  What
its memory can do is in `test_runtime`.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np
import pytest

from llamad_trio.core.config import EngineConfig
from llamad_trio.llama.model import load_model
from tests.llama.test_runtime import opened
from tests.models import DECODER_KINDS, KINDS, SLIDING_WINDOW_TOKENS, Kind, write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from llamad_trio.llama.model import LlamaModel
    from tests.models import TinyModels

PROMPT = "the cat and the rat ran in the rain, then they rested"


def open_model(path: Path) -> closing[LlamaModel]:
    """The model at `path`, freed at the end of the block."""
    return closing(load_model(path, EngineConfig(n_gpu_layers=0), lambda _: True))


def tokenize(model: LlamaModel, text: str, *, special: bool = False) -> list[int]:
    """The tokens of `text`, without a beginning-of-sequence token."""
    return model.tokenize(text, add_special=False, parse_special=special)


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
    with open_model(tiny_model(kind, n_ctx_train=512)) as model:
        assert model.metadata("general.architecture") == architecture
        assert llama_cpp.llama_model_is_recurrent(model.pointer) == is_recurrent
        assert llama_cpp.llama_model_is_hybrid(model.pointer) == is_hybrid
        assert llama_cpp.llama_model_n_swa(model.pointer) == n_swa
        assert llama_cpp.llama_model_n_ctx_train(model.pointer) == 512


@pytest.mark.parametrize("kind", DECODER_KINDS)
def test_a_decoder_says_something_varied_that_depends_on_the_prompt(
    tiny_model: TinyModels, kind: Kind
) -> None:
    with opened(tiny_model(kind)) as books:
        model = books.runtime.model
        logits = books.logits(0, tokenize(model, PROMPT))
        other = books.logits(1, tokenize(model, "quite another prompt"))
        assert np.isfinite(logits).all()
        assert 1 < logits.std() < 5
        assert not np.allclose(logits, other, atol=0.1)

        said = []
        for _ in range(32):
            said.append(int(logits.argmax()))
            logits = books.logits(0, said[-1:])
        assert np.isfinite(logits).all()
        assert not any(map(model.ends_generation, said))
        assert len(set(said)) > 5


@pytest.mark.parametrize("kind", DECODER_KINDS)
def test_only_a_model_that_can_end_ends_soon_when_sampled(
    tiny_model: TinyModels, kind: Kind
) -> None:
    def chance_of_ending(path: Path) -> float:
        with opened(path) as books:
            model = books.runtime.model
            logits = books.logits(0, tokenize(model, PROMPT))
            weights = np.exp(logits - logits.max())
            ends = [2, *tokenize(model, "<|im_end|>", special=True)]
            return float(weights[ends].sum() / weights.sum())

    endless = [chance_of_ending(tiny_model(kind, seed=seed)) for seed in range(8)]
    can_end = [chance_of_ending(tiny_model(kind, seed=seed, can_end=True)) for seed in range(8)]
    assert max(endless) < 1e-3
    assert 0.01 < np.mean(can_end) < 0.5
