"""What decides whether a KV cache computed once means the same again."""

from __future__ import annotations

import hashlib
import json

import attrs


@attrs.frozen(kw_only=True)
class KVIdentity:
    """Everything that decides what the cells of a KV cache mean.

    Two engines may exchange KV only when all of this is the same.

    Attributes:
        model_sha256: SHA-256 of the model file.
        llama_build: version of llama.cpp, and of the bindings it was built for.
        template_sha256: SHA-256 of the chat template, empty without one.
        context: settings of the context that change its cells: KV types, flash
            attention, RoPE, kind of context.
        adapters: digests of the adapters in force, in order.
        adds_bos: whether prompts begin with BOS by themselves.
    """

    model_sha256: str
    llama_build: str
    template_sha256: str
    context: tuple[tuple[str, str], ...]
    adapters: tuple[str, ...] = ()
    adds_bos: bool

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over all of it, the same in every process."""
        canonical = json.dumps(attrs.asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
