"""What a model needs in memory, and whether it fits.

Pure arithmetic: knows neither files, nor machines, nor what is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from llamad_trio.core.errors import InsufficientMemory


@attrs.frozen(kw_only=True)
class MemoryEstimate:
    """What an engine will have resident once it is loaded and its pool is full, in bytes.

    Attributes:
        weights_bytes: the tensors.  With `use_mmap`, the default, they are pages of the file:
            they count, as they become resident, though the system can take them back and
            read them again.  Matrices that llama.cpp rearranges for the processor are a copy
            beside the file's pages, and count twice.
        kv_bytes: the KV pool, and the states of recurrent layers.  llama.cpp writes all of it
            when the engine opens, so it is resident before a token is.
        compute_bytes: buffers for one step's intermediate results and its logits.
        overhead_bytes: what the process needs beside: the vocabulary, the bookkeeping of the
            pool, its requests, and the whole of `prompt_cache_ram_bytes`.
    """

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    overhead_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.overhead_bytes


def check_budget(required: int, budget: int, held: Mapping[str, int]) -> None:
    """Raise `InsufficientMemory` if `required` does not fit beside what is held.

    Args:
        required: bytes that are asked for.
        budget: bytes there are for all.
        held: bytes by who holds them.
    """
    available = max(0, budget - sum(held.values()))
    if required > available:
        raise InsufficientMemory(required, available, held)
