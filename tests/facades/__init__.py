"""The engine outside of Trio: what the tests of both ways share."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from llamad_trio.testing import ScriptedModel, open_scripted_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from llamad_trio import EngineStats
    from llamad_trio.background_run import Opener

__all__ = [
    "PRELUDE",
    "THREAD_STARTS",
    "dying_of_a_hang",
    "engine_threads",
    "is_idle",
    "run_script",
    "scripted",
    "until",
]

HANG_S = 120
"""Far more than any test takes: what still runs then hangs."""


def scripted(
    replies: Any = None, *, decode_s: float = 0.0, model: ScriptedModel | None = None, **config: Any
) -> Opener:
    """Opens a scripted engine: "endless" is answered for a minute or two, anything else by 42."""
    if model is None:
        replies = replies or {"endless": "la " * 30_000, "": "42"}
        model = ScriptedModel(replies, decode_s=decode_s, n_ctx_train=100_000)
    return partial(open_scripted_engine, model, **{"n_ctx": 100_000, **config})


def engine_threads() -> list[str]:
    """Names of the threads that run an engine."""
    return [t.name for t in threading.enumerate() if t.name.startswith("llamad_trio")]


def is_idle(stats: EngineStats) -> bool:
    """Whether no request holds a slot, waits for one, or has any of the pool."""
    return stats.slots["free"] > 0 == stats.queued == stats.kv_used_tokens and not any(
        n for state, n in stats.slots.items() if state != "free"
    )


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread will bring about."""
    gives_up_at = time.monotonic() + HANG_S / 2
    while not condition():
        assert time.monotonic() < gives_up_at, "it does not come about"
        time.sleep(0.001)


def _interrupted(*, is_begun: bool) -> AbstractContextManager[object]:
    wait = threading.Event.wait
    is_first = True

    def wait_for_the_thread(event: threading.Event, timeout: float | None = None) -> bool:
        nonlocal is_first
        if not is_first:
            return wait(event, timeout)
        is_first = False
        if is_begun:
            wait(event)
        raise KeyboardInterrupt

    return patch.object(threading.Event, "wait", wait_for_the_thread)


def _no_more() -> AbstractContextManager[object]:
    return patch.object(threading.Thread, "start", side_effect=RuntimeError("no more threads"))


THREAD_STARTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "interrupted after the thread began": partial(_interrupted, is_begun=True),
    "interrupted before": partial(_interrupted, is_begun=False),
    "impossible": _no_more,
}
"""How the start of a thread can go wrong, inside a block."""


@contextmanager
def dying_of_a_hang() -> Iterator[None]:
    """End the process, with all stacks, if the block hangs: no exception would get through."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


PRELUDE = """
import os, signal, sys, threading, time, warnings
from functools import partial
from llamad_trio import EngineClosed, LlamadError, blocking
from llamad_trio.testing import ScriptedModel, open_scripted_engine

def scripted(decode_s=0.001, **config):
    model = ScriptedModel({"endless": "la " * 30_000, "": "42"}, decode_s=decode_s, n_ctx_train=100_000)
    return partial(open_scripted_engine, model, n_ctx=100_000, **config)

def until(condition):
    while not condition():
        time.sleep(0.001)

def in_child(use):
    warnings.simplefilter("ignore", DeprecationWarning)
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    signal.alarm(20)  # ends the child if it hangs
    try:
        use()
        print("returns")
    except EngineClosed:
        print("closed")
    finally:
        os._exit(0)
"""


def run_script(script: str, *args: str) -> tuple[int, list[str], str]:
    """Run a program that begins with `PRELUDE`.

    Returns:
        Its exit status, what it wrote, line by line, and to stderr.
    """
    with subprocess.Popen(
        [sys.executable, "-u", "-c", PRELUDE + textwrap.dedent(script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        killer = threading.Timer(HANG_S / 2, process.kill)
        killer.start()
        lines = [line.rstrip("\n") for line in process.stdout]
        status = process.wait()
        killer.cancel()
        return status, lines, process.stderr.read()
