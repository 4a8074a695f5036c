"""The heap of this process: what a model took must go back to the system when it is freed.

A model is loaded and freed on whichever thread is at hand.  glibc has a heap for several threads
each, keeps there what is freed, and puts blocks of up to 32 MiB there as soon as one of that
size has been freed.  A program that opens one model again and again grows by tens of megabytes.
Knows nothing of models.  Where malloc is not glibc's, nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

# malloc.h
M_MMAP_THRESHOLD = -3

APART_BYTES = 1 << 20
"""Pools, compute buffers and tables are larger, and there are few of them."""

LARGEST_THRESHOLD_BYTES = 32 << 20
"""What glibc itself comes to when blocks of all sizes have been freed."""

_libc = ctypes.CDLL(None)
_lock = threading.Lock()
_n_inside = 0


@contextlib.contextmanager
def large_blocks_apart() -> Iterator[None]:
    """What is allocated inside the block, and is large, goes back as soon as it is freed.

    Of all threads: the setting is the process's.  From then on it is what glibc would make of
    it in time, where blocks of all sizes come and go.  Thread-safe.
    """
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _n_inside
    if not hasattr(_libc, "mallopt"):
        return
    with _lock:
        _n_inside += change
        size = APART_BYTES if _n_inside else LARGEST_THRESHOLD_BYTES
        _libc.mallopt(M_MMAP_THRESHOLD, size)


def give_back() -> None:
    """Give back to the system what was freed.  Takes some milliseconds, without the GIL."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
