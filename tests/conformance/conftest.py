from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from llamad_trio import EngineConfig
from tests.conformance.engines import Opener
from tests.support import EXACT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.conformance.engines import Pair
    from tests.models import TinyModels

KINDS = ("scripted", "scripted-remote", "tiny", "tiny-remote")


@pytest.fixture(params=KINDS)
def opener(
    request: pytest.FixtureRequest,
    tiny_model: TinyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Opener:
    """Opens each of the engines whose models say nothing sensible, but at once."""
    is_scripted = request.param.startswith("scripted")

    def model_path(chat_template: str | None) -> Path:
        return tiny_model("attention", n_ctx_train=100_000, chat_template=chat_template)

    return Opener(
        is_remote=request.param.endswith("remote"),
        model_path=None if is_scripted else model_path,
        config=EngineConfig() if is_scripted else EXACT,
        socket_path=tmp_path / "d.sock",
        monkeypatch=monkeypatch,
    )


@pytest.fixture
async def pair(opener: Opener) -> AsyncIterator[Pair]:
    """One of these engines, and the one behind it."""
    async with opener() as pair:
        yield pair
