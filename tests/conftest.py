from hypothesis import settings

from tests.models import gemma3_path, smollm2_path, tiny_model

__all__ = ["gemma3_path", "smollm2_path", "tiny_model"]

# For the tests that name no number themselves.
settings.register_profile("default run", max_examples=25, deadline=None)
settings.load_profile("default run")
