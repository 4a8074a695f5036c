from tests.models import gemma3_path, smollm2_path, tiny_model

__all__ = ["gemma3_path", "smollm2_path", "tiny_model"]
