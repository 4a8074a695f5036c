import os

import pytest
import trio
from hypothesis import settings

from llamad_trio import EngineConfig, ModelLoadError
from llamad_trio.preflight.prove import proven
from tests.models import gemma3_path, smollm2_path, tiny_model

__all__ = ["gemma3_path", "smollm2_path", "tiny_model"]

# For the tests that name no number themselves.
settings.register_profile("default run", max_examples=25, deadline=None)
settings.load_profile("default run")


def pytest_configure() -> None:
    """Have programs that tests start say nothing of special kernels that fail on this machine."""
    try:
        config = trio.run(proven, EngineConfig.from_env(), "tests")
    except ModelLoadError as error:
        pytest.exit(str(error), returncode=1)
    if config.use_extra_bufts is False:
        os.environ["LLAMAD_USE_EXTRA_BUFTS"] = "0"
