"""llama.cpp's process-wide state: start-up, the log, and the heap.

What a model took must go back to the system when it is freed.  It is loaded and freed on whichever
thread is at hand; glibc has a heap for several threads each, keeps there what is freed, and puts
blocks of up to 32 MiB there as soon as one of that size has been freed.  A program that opens one
model again and again grows by tens of megabytes.  Where malloc is not glibc's, nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import llama_cpp.llama_cpp as lib

logger: logging.Logger = logging.getLogger("llamad_trio.llama_cpp")

# ggml.h: enum ggml_log_level, which begins with DEBUG and INFO.  llama.cpp tells the story of a
# load at INFO, in hundreds of lines, which is DEBUG to the application around it.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
_CONT = 5

# What llama.cpp reports of an abort, which here is how a request is cancelled.
_EXPECTED = (
    "failed to decode, ret = 2",
    "failed with error 1",  # GGML_STATUS_ABORTED
    "compute status: 1",
    "removing memory module entries",
)

# ggml-backend.h: enum ggml_backend_dev_type
_DEVICE_KINDS = {0: "CPU", 1: "GPU", 2: "integrated GPU", 3: "accelerator"}


class _ThreadLog(threading.local):
    """The line a thread is writing, and where its errors are collected."""

    level: int = logging.DEBUG
    line: str = ""
    errors: list[str] | None = None


_thread_log = _ThreadLog()


@lib.llama_log_callback
def _on_log(level: int, text: bytes, _user_data: object) -> None:
    log = _thread_log
    if level != _CONT:
        log.level = _LEVELS.get(level, logging.DEBUG)
    log.line += text.decode(errors="replace")
    if not log.line.endswith("\n"):
        return
    line, log.line = log.line.strip(), ""
    if not line:
        return
    if any(phrase in line for phrase in _EXPECTED):
        logger.debug("%s", line)
        return
    if log.level >= logging.ERROR and log.errors is not None:
        log.errors.append(line)
    logger.log(log.level, "%s", line)


@contextlib.contextmanager
def captured_errors() -> Iterator[list[str]]:
    """Collect the error lines llama.cpp logs on this thread inside the block."""
    outer, _thread_log.errors = _thread_log.errors, []
    try:
        yield _thread_log.errors
    finally:
        _thread_log.errors = outer


_lock = threading.Lock()
_started = False


def start() -> None:
    """Start llama.cpp's backends and take over its log.  Once per process; thread-safe."""
    global _started
    with _lock:
        if not _started:
            lib.llama_log_set(_on_log, None)
            lib.llama_backend_init()
            _started = True


def version() -> str:
    """llama.cpp's own."""
    return str(lib.llama_version().decode(errors="replace"))


def system_info() -> str:
    """What llama.cpp was compiled for, such as `CPU : AVX2 = 1 | AVX512 = 1 |`."""
    return str(lib.llama_print_system_info().decode(errors="replace"))


def devices() -> list[dict[str, str]]:
    """What llama.cpp can compute on: `name`, `description` and `kind`.  After `start`."""
    count = bind_ggml("ggml_backend_dev_count", ctypes.c_size_t)
    get = bind_ggml("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    name_of = bind_ggml("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    describe = bind_ggml("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    kind_of = bind_ggml("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    return [
        {
            "name": name_of(device).decode(errors="replace"),
            "description": describe(device).decode(errors="replace"),
            "kind": _DEVICE_KINDS.get(kind_of(device), "other"),
        }
        for device in map(get, range(count()))
    ]


def bind_ggml(name: str, result: type | None, *arguments: type) -> Callable[..., Any]:
    """A function of ggml, which the Python package loads but does not bind."""
    function: Callable[..., Any] = ctypes.CFUNCTYPE(result, *arguments)((name, lib._lib))
    return function


# -- the heap ------------------------------------------------------------------------------

# malloc.h
M_MMAP_THRESHOLD = -3

APART_BYTES = 1 << 20
"""Pools, compute buffers and tables are larger, and there are few of them."""

LARGEST_THRESHOLD_BYTES = 32 << 20
"""What glibc itself comes to when blocks of all sizes have been freed."""

_libc = ctypes.CDLL(None)
_n_inside = 0


@contextlib.contextmanager
def large_blocks_apart() -> Iterator[None]:
    """What is allocated inside the block, and is large, goes back as soon as it is freed.

    Of all threads: the setting is the process's.  From then on it is what glibc would make of
    it in time, where blocks of all sizes come and go.  Thread-safe.
    """
    _count_inside(1)
    try:
        yield
    finally:
        _count_inside(-1)


def _count_inside(change: int) -> None:
    global _n_inside
    if not hasattr(_libc, "mallopt"):
        return
    with _lock:
        _n_inside += change
        size = APART_BYTES if _n_inside else LARGEST_THRESHOLD_BYTES
        _libc.mallopt(M_MMAP_THRESHOLD, size)


def give_back_memory() -> None:
    """Give back to the system what was freed.  Takes some milliseconds, without the GIL."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
