"""What the tests of the engine share."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
import trio

import llamad_trio
from llamad_trio import EngineConfig
from llamad_trio.llama.llama_runtime import LlamaRuntime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator
    from types import FrameType

    from llamad_trio import Engine, TokenStream
    from llamad_trio.scheduling.plan import StepPlan, StepResult

T = TypeVar("T")

# OpenMP's threads wait for each other at every graph node: with a second one, whatever else
# the machine computes slows the tests down by a hundred times.
ONE_THREAD = EngineConfig(n_threads=1, n_threads_batch=1)

# With these, how a tiny model's prompt is cut and who is beside it move a logit by 0.00001; with
# the defaults by 0.01, which is enough to change what is drawn now and then.
EXACT = EngineConfig(n_threads=1, n_threads_batch=1, type_k="f32", type_v="f32", flash_attn=False)

ENDLESS = 1_000_000
"""A `max_tokens` that only the pool ends."""


# What SmolLM2 is sure to say after these does not hang on how its steps are cut: over 24 tokens
# the likeliest is ahead by more than 1 in logits, cuts and neighbours move them by a tenth of that.
SURE_PROMPTS = (
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "11, 12, 13, 14, 15, 16, 17, 18,",
    "I am here. I am here. I am here. I am here. I am here. I am",
    "Row, row, row your boat, row, row, row your boat, row, row, row your boat,",
)


def must_not_run(what: str) -> None:
    """Fail the test: this line ought not to be reached.

    Unlike `pytest.fail`, type checkers believe that what follows can be reached.
    """
    pytest.fail(f"{what}, which ought not to happen")


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a thread will bring about.  A vain wait ends with its test."""
    while not condition():  # noqa: ASYNC110  (there is no event to wait for)
        await trio.sleep(0.001)


async def until_idle(engine: Engine) -> None:
    """Wait until no request holds a slot or any of the pool, or waits for one."""

    def is_idle() -> bool:
        stats = engine.stats()
        return (
            stats.slots["free"] == engine.config.n_slots
            and stats.queued == 0
            and stats.kv_used_tokens == 0
        )

    await until(is_idle)


async def until_queued(engine: Engine, n: int) -> None:
    """Wait until `n` requests wait for a slot."""
    await until(lambda: engine.stats().queued == n)


async def side_by_side(calls: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """Call all at once; their results, in the order of the calls."""
    results: dict[int, T] = {}

    async def run(n: int, call: Callable[[], Awaitable[T]]) -> None:
        results[n] = await call()

    async with trio.open_nursery() as nursery:
        for n, call in enumerate(calls):
            nursery.start_soon(run, n, call)
    return [results[n] for n in range(len(results))]


async def read_all(stream: TokenStream) -> list[str]:
    """The pieces that are left."""
    return [piece async for piece in stream]


async def count_pieces(stream: TokenStream, n: int) -> None:
    """Receive `n` pieces."""
    for _ in range(n):
        await stream.receive()


class HeldSteps:
    """Steps that begin, and then wait on their thread until they are let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self._go = threading.Event()

    def let_go(self) -> None:
        """From now on steps run as they come."""
        self._go.set()

    def hold(self) -> None:
        """On the lane's thread."""
        self.begun.set()
        self._go.wait()


def before_steps(patch: pytest.MonkeyPatch, call: Callable[[StepPlan], object]) -> None:
    """Have `call` called with the plan of each step before it runs, on the lane's thread."""
    run_step = LlamaRuntime.step

    def step(runtime: LlamaRuntime, plan: StepPlan) -> StepResult:
        call(plan)
        return run_step(runtime, plan)

    patch.setattr(LlamaRuntime, "step", step)


@contextmanager
def held_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldSteps]:
    """Make every step inside the block wait for `let_go`; the end of the block lets go."""
    steps = HeldSteps()
    with monkeypatch.context() as patch:
        before_steps(patch, lambda _: steps.hold())
        try:
            yield steps
        finally:
            steps.let_go()


def threads_of_ours() -> list[str]:
    """Names of the threads, other than this one, that are running code of the package."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    here = threading.get_ident()
    return [
        names.get(ident, str(ident))
        for ident, frame in sys._current_frames().items()
        if ident != here and _runs_package_code(frame)
    ]


def _runs_package_code(frame: FrameType | None) -> bool:
    package = Path(llamad_trio.__file__).parent
    while frame is not None:
        if package in Path(frame.f_code.co_filename).parents:
            return True
        frame = frame.f_back
    return False
