from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models directory, which does not exist yet."""
    folder = tmp_path / "deep" / "models"
    monkeypatch.setenv("LLAMAD_MODELS_DIR", str(folder))
    return folder
