"""Fixtures that open real engines, for the tests of every room."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from llamad_trio import open_engine
from llamad_trio.llama import llama_runtime as runtime_module
from llamad_trio.llama.model import LlamaModel, load_model
from tests.models import proven_here
from tests.support import EXACT, ONE_THREAD

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from llamad_trio import Engine, EngineConfig
    from tests.models import TinyModels


class KeptModel(LlamaModel):
    """A model that outlives its engines: whoever keeps it frees it."""

    def close(self) -> None:
        """Leave the weights."""

    def free(self) -> None:
        """Free the weights."""
        super().close()


@pytest.fixture(scope="session")
def kept_smollm2(smollm2_path: Path) -> Iterator[KeptModel]:
    """SmolLM2, which takes longer to load than most tests take to use it."""
    loaded = load_model(smollm2_path, proven_here(ONE_THREAD), lambda _: True)
    model = KeptModel(loaded.path, loaded.pointer)
    yield model
    model.free()


@pytest.fixture
def smollm2_is_kept(kept_smollm2: KeptModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of SmolLM2 share one model: each has its own context, and nothing to load."""

    def load(path: Path, config: EngineConfig, on_progress: Callable[[float], bool]) -> LlamaModel:
        return kept_smollm2 if path == kept_smollm2.path else load_model(path, config, on_progress)

    monkeypatch.setattr(runtime_module, "load_model", load)


@pytest.fixture
async def engine(smollm2_path: Path, smollm2_is_kept: None) -> AsyncIterator[Engine]:
    """SmolLM2, with the settings of nobody's environment."""
    async with open_engine(smollm2_path, ONE_THREAD, n_ctx=1024) as engine:
        yield engine


@pytest.fixture
def tiny_path(tiny_model: TinyModels) -> Path:
    """A tiny attention model, which never ends a text of itself and has much room."""
    return tiny_model("attention", n_ctx_train=100_000)


@pytest.fixture
async def tiny(tiny_path: Path) -> AsyncIterator[Engine]:
    """An engine of the tiny attention model, which says to each what it says to it alone."""
    async with open_engine(tiny_path, EXACT, n_ctx=8192) as engine:
        yield engine
