"""What decides whether a KV cache computed once means the same again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

__all__ = ["identity_digest"]


def identity_digest(parts: Mapping[str, str | int | float | bool | None]) -> str:
    """A stable SHA-256 (hex) of named facts, whatever their order."""
    canonical = json.dumps(dict(parts), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
