"""The engine outside of Trio: what the tests of both ways share."""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

import trio

from llamad_trio import EngineSpec, Request, serve_unix
from llamad_trio.aio import AsyncEngine
from llamad_trio.testing import ScriptedModel, open_scripted_engine, open_scripted_models

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator
    from contextlib import AbstractContextManager

    from llamad_trio import EngineLike, EngineStats
    from llamad_trio.background_run import Opener

HANG_S = 120
"""Far more than any test takes: what still runs then hangs."""

ENDLESS = Request("endless", max_tokens=1_000_000)


def scripted(
    replies: Any = None, *, decode_s: float = 0.0, model: ScriptedModel | None = None, **config: Any
) -> Opener:
    """Opens a scripted engine: "endless" is answered for a minute or two, anything else by 42."""
    if model is None:
        replies = replies or {"endless": "la " * 30_000, "": "42"}
        model = ScriptedModel(replies, decode_s=decode_s, n_ctx_train=100_000)
    return partial(open_scripted_engine, model, **{"n_ctx": 100_000, **config})


def telling(tokens: list[trio.lowlevel.TrioToken]) -> Opener:
    """Opens a scripted engine, and tells the token of the Trio run that it is in."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[EngineLike]:
        tokens.append(trio.lowlevel.current_trio_token())
        async with scripted()() as engine:
            yield engine

    return opened


@asynccontextmanager
async def lazy() -> AsyncIterator[EngineLike]:
    """One model of several, which is loaded when it is asked."""
    specs = {"lazy": EngineSpec("lazy", load="lazy")}
    async with open_scripted_models({"lazy": "42"}, specs) as models:
        yield models["lazy"]


def served(opener: Opener, path: Path) -> Opener:
    """Opens the same, and a daemon for it."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[EngineLike]:
        async with opener() as engine, trio.open_nursery() as nursery:
            await nursery.start(serve_unix, engine, path)
            yield engine
            nursery.cancel_scope.cancel()

    return opened


def engine_threads() -> list[str]:
    """Names of the threads that run an engine."""
    return [t.name for t in threading.enumerate() if t.name.startswith("llamad_trio")]


def is_idle(stats: EngineStats) -> bool:
    """Whether no request holds a slot, waits for one, or has any of the pool."""
    return stats.slots["free"] > 0 == stats.queued == stats.kv_used_tokens and not any(
        n for state, n in stats.slots.items() if state != "free"
    )


class InLoop:
    """What is in `aio`, to be used as its like in `blocking`.

    Each coroutine that it gives is a task of one loop, which is waited for, in any thread.

    Args:
        inner: the module, or one of its functions, blocks, engines and streams.
        run: runs a coroutine in the loop.
    """

    def __init__(self, inner: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.inner = inner
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return self._as_blocking(getattr(self.inner, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_blocking(self.inner(*args, **kwargs))

    def _as_blocking(self, value: Any) -> Any:
        if inspect.iscoroutine(value):
            value = self._run(value)
        kinds = (AsyncEngine, AbstractAsyncContextManager)  # streams and blocks are the latter
        if isinstance(value, kinds) or inspect.isroutine(value):
            return InLoop(value, self._run)
        return value

    def __enter__(self) -> Any:
        return self._as_blocking(self.inner.__aenter__())

    def __exit__(self, *exc_info: object) -> Any:
        return self._run(self.inner.__aexit__(*exc_info))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return self._run(self.inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        self._run(self.inner.aclose())


@contextmanager
def loop_in_a_thread() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """A function that runs coroutines of any thread in one asyncio loop, and waits for them."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


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
from tests import facades
from tests.serving.support import wait_for

scripted = partial(facades.scripted, decode_s=0.001)

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


RunScript = Callable[..., tuple[int, list[str], str]]
"""Runs a program that begins with `PRELUDE`, with the arguments given behind it.

Returns its exit status, what it wrote, line by line, and to stderr.
"""

_FORKS = f"""
import json
while line := sys.stdin.readline():
    script, args, *outputs = json.loads(line)
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        continue
    signal.alarm({HANG_S // 2})
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY), fd)
    sys.argv[1:] = args
    exec(compile(script, "<script>", "exec"))
    break
"""


@contextmanager
def running_scripts(folder: Path) -> Iterator[RunScript]:
    """Programs are forks of one process that has done `PRELUDE`: its imports take a second.

    Each of them is alone in its process, whose main thread it has, and ends as the interpreter
    does.

    Args:
        folder: where to write what they print.
    """
    with subprocess.Popen(
        [sys.executable, "-u", "-c", PRELUDE + _FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        out, err = folder / "out", folder / "err"

        def run_script(script: str, *args: str) -> tuple[int, list[str], str]:
            assert process.stdin is not None
            assert process.stdout is not None
            out.write_text("")
            err.write_text("")
            asked = (textwrap.dedent(script), args, str(out), str(err))
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            status = int(process.stdout.readline())
            return status, out.read_text().splitlines(), err.read_text()

        yield run_script
