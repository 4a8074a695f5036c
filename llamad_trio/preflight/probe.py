"""The process in which llama.cpp is tried: `python -m llamad_trio.preflight.probe ORDER`.

ORDER is JSON: the settings to try it with.  What was found goes to stdout as lines of JSON, so
that whatever this process dies of, its parent knows how far it came.  Dies quietly: no core
file, no crash report, and by itself if it hangs after its parent has gone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamad_trio.llama.context import Context

DEADLY = (signal.SIGILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)

PROMPT_TOKENS, N_CTX, N_BATCH = 33, 128, 64
"""More than a row of tiles, and one more, so that what is left over is computed, too."""

ALIKE = 0.95
"""Cosine of two results below which one of them is wrong: rounding leaves 0.999 and more."""

SPEED_S = 0.5


def main() -> None:
    order = json.loads(sys.argv[1])
    _die_quietly(order["deadline_s"])
    from llamad_trio.preflight.probe_model import PROBE, ProbeShape, probe_gguf

    with _file(order["path"], probe_gguf(PROBE)) as path:
        # Only now: loading the library may be what kills.
        from llamad_trio.llama import backend

        backend.start()
        version, system = backend.version(), backend.system_info()
        _tell(loaded={"version": version, "system": system, "devices": backend.devices()})
        reference: list[Any] = []
        for use_extra_bufts in order["extra"]:
            _tell(trying=use_extra_bufts)
            _tell(outcome=_outcome(path, order["settings"], use_extra_bufts, reference))
    if order["measure"] is not None:
        shape = ProbeShape(1024, 2816, 6, 4096, wide=("Q4_0",), narrow=("Q4_0",))
        with _file(order["path"], probe_gguf(shape)) as path:
            _tell(speeds=_speeds(path, order["settings"], order["measure"]))


def _die_quietly(deadline_s: float) -> None:
    """At the signals that bad code causes, leave at once, with the signal's number."""
    # The handlers are C's `_exit`: Python's own would not be called before the code goes on.
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    leave = ctypes.cast(libc._exit, ctypes.c_void_p)
    for number in DEADLY:
        libc.signal(number, leave)
    signal.alarm(int(deadline_s) + 1)  # its default ends the process, wherever it hangs


@contextmanager
def _file(path: str | None, data: bytes) -> Iterator[Path]:
    """A file of these bytes: in memory, unless there is a path for it."""
    if path is not None:
        Path(path).write_bytes(data)
        yield Path(path)
        return
    fd = os.memfd_create("llamad_trio")
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(data)
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _tell(**said: object) -> None:
    os.write(1, json.dumps(said).encode() + b"\n")


def _outcome(
    path: Path, settings: dict[str, Any], use_extra_bufts: bool, reference: list[Any]
) -> dict[str, object]:
    """A prompt and a token after it, with 1 and with all threads: what came of it.

    The results are compared with the reference, or become one if it is empty.
    """
    import numpy as np

    from llamad_trio.core.errors import LlamadError

    try:
        with _loaded(path, settings, use_extra_bufts) as (context, n_threads):
            rows = [*_logits(context, 1), *_logits(context, n_threads)]
    except LlamadError as error:  # what llama.cpp refuses in order, an engine is refused, too
        return {"refused": str(error)}
    if not reference:
        reference += [*rows[:2], *rows[:2]]
    wrong = [
        not np.isfinite(row).all() or row @ other < ALIKE * np.sqrt(row @ row * (other @ other))
        for row, other in zip(rows, reference, strict=True)
    ]
    return {"wrong": any(map(bool, wrong))}


@contextmanager
def _loaded(
    path: Path, settings: dict[str, Any], use_extra_bufts: bool
) -> Iterator[tuple[Context, int]]:
    """A context for the model, and how many threads an engine would have."""
    from llamad_trio.core.config import EngineConfig
    from llamad_trio.llama.context import Context
    from llamad_trio.llama.model import load_model

    config = EngineConfig(
        **settings, n_ctx=N_CTX, n_batch=N_BATCH, n_slots=1, use_extra_bufts=use_extra_bufts
    )
    model = load_model(path, config, lambda _: True)
    context = Context(model, config, 1)
    yield context, max(config.n_threads or 1, config.n_threads_batch or 1)
    context.close()
    model.close()


def _logits(context: Context, n_threads: int) -> list[Any]:
    """What follows a prompt, and a token after it."""
    context.use_threads(n_threads)
    context.clear()
    _decode(context, range(PROMPT_TOKENS), 0)
    after_prompt = context.logits(1)[0].astype("float64")
    _decode(context, [5], PROMPT_TOKENS)
    return [after_prompt, context.logits(1)[0].astype("float64")]


def _decode(context: Context, tokens: Sequence[int], pos: int) -> None:
    from llamad_trio.core.errors import InferenceError

    # The vocabulary has 32 tokens.
    context.batch.clear()
    context.batch.add([token % 32 for token in tokens], pos=pos, seq=0, n_outputs=1)
    code = context.batch.decode(context.pointer)
    if code != 0:
        raise InferenceError(f"llama_decode returned {code}")


def _speeds(path: Path, settings: dict[str, Any], use_extra_bufts: bool) -> dict[str, float]:
    """Tokens a second that decode, with 1 and with all threads."""
    speeds = {}
    with _loaded(path, settings, use_extra_bufts) as (context, n_threads):
        for n in (1, n_threads):
            context.use_threads(n)
            context.clear()
            _decode(context, [5], 0)
            began, n_tokens = time.perf_counter(), 0
            while (elapsed_s := time.perf_counter() - began) < SPEED_S and n_tokens < N_CTX - 2:
                n_tokens += 1
                _decode(context, [5], n_tokens)
            speeds[str(n)] = n_tokens / elapsed_s
    return speeds


if __name__ == "__main__":
    main()
