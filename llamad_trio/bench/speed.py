"""How fast an engine is, against llama.cpp in a plain loop on the same model.

Both run in one process, in turns, on the same thread: machines are shared and noisy,
and only a ratio from within one run means anything.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from os import PathLike
from statistics import median
from typing import TYPE_CHECKING

import attrs
import trio

from llamad_trio.bench import TEXT
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.request import Request
from llamad_trio.engine.assembly import run_engine
from llamad_trio.engine.engine import Engine
from llamad_trio.engine.lane import Lane
from llamad_trio.engine.loading import loaded_model
from llamad_trio.preflight.prove import proven_config

if TYPE_CHECKING:
    from llamad_trio.llama.raw_loop import RawLoop, Speed


@attrs.frozen(kw_only=True)
class BenchRow:
    """Medians at one number of concurrent requests; the ratios are medians of pairs.

    Attributes:
        decode_tps, raw_decode_tps: generated tokens per second, all requests together.
        prefill_tps, raw_prefill_tps: prompt tokens per second until the last first token.
        decode_ratio, prefill_ratio: the engine's against the plain loop's.
        ttft_s, raw_ttft_s: seconds until every request has its first token.
    """

    concurrency: int
    decode_tps: float
    raw_decode_tps: float
    decode_ratio: float
    prefill_tps: float
    raw_prefill_tps: float
    prefill_ratio: float
    ttft_s: float
    raw_ttft_s: float


@attrs.frozen(kw_only=True)
class BenchReport:
    """What was measured, on what.  `pairs` is the number of measurements behind a median."""

    model: str
    description: str
    n_threads: int
    prompt_tokens: int
    n_tokens: int
    pairs: int
    rows: tuple[BenchRow, ...]


async def run_bench(
    model: str | PathLike[str],
    *,
    concurrency: Sequence[int] = (1, 4, 8),
    prompt_tokens: int = 128,
    n_tokens: int = 96,
    pairs: int = 5,
    on_progress: Callable[[str], object] = lambda _: None,
    **overrides: object,
) -> BenchReport:
    """Measure an engine and a plain loop in turns, for each number of requests at once.

    Every request generates `n_tokens`.  The medians of so many `pairs` of measurements are
    reported; `on_progress` is told what is being measured.  The overrides are `EngineConfig` fields.

    A checkpoint; cancelled, it leaves nothing behind.

    Raises:
        ModelLoadError: as `open_engine` does.
        InferenceError: the plain loop could not compute a batch.
    """
    most = max(concurrency)
    n_ctx = most * (prompt_tokens + n_tokens + 32)
    fields = {"n_slots": most, "n_ctx": n_ctx, "kv_cache": False, **overrides}
    config = EngineConfig.merge(None, fields)
    async with open_beside_loop(model, config, Lane()) as both:
        eng = both.engine
        prompts = await _prompts(eng, most, prompt_tokens)
        rows = []
        for n in concurrency:
            on_progress(f"{n} at once")
            rows.append(await _row(both, prompts[:n], n_tokens, pairs))
        return BenchReport(
            model=str(model),
            description=eng.info.description,
            n_threads=eng.config.n_threads or 0,
            prompt_tokens=prompt_tokens,
            n_tokens=n_tokens,
            pairs=pairs,
            rows=tuple(rows),
        )


@attrs.frozen
class BesideLoop:
    """An engine, and a plain loop on the same model, threads and lane."""

    engine: Engine
    loop: RawLoop
    lane: Lane

    async def run_loop(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> Speed:
        """As `RawLoop.run`, on the lane.  A checkpoint; cancelled, the loop is of no more use."""
        job = partial(self.loop.run, prompts, n_tokens)
        return await self.lane.run(job, abort=self.loop.request_abort)


@asynccontextmanager
async def open_beside_loop(
    model: str | PathLike[str], config: EngineConfig, lane: Lane
) -> AsyncIterator[BesideLoop]:
    """Both, on one copy of the weights, which is why this does not go through `open_engine`."""
    config = await proven_config(config, model)
    async with lane.hosted(), loaded_model(model, config, lane, None) as loaded:
        from llamad_trio.llama.raw_loop import RawLoop

        runtime = loaded.runtime
        with closing(RawLoop(runtime, runtime.config)) as loop:
            async with run_engine(runtime, loaded.template, runtime.config, lane) as eng:
                yield BesideLoop(eng, loop, lane)


async def _prompts(eng: Engine, n: int, prompt_tokens: int) -> list[list[int]]:
    """Texts that go on for long, each beginning elsewhere, cut to the same length."""
    words = TEXT.split()
    prompts = []
    for i in range(n):
        text = " ".join((words[i:] + words[:i]) * (prompt_tokens // 4))
        prompts.append((await eng.tokenize(text))[:prompt_tokens])
    return prompts


async def _row(
    both: BesideLoop, prompts: Sequence[Sequence[int]], n_tokens: int, pairs: int
) -> BenchRow:
    async def measure_pair() -> tuple[Speed, Speed]:
        raw = await both.run_loop(prompts, n_tokens)
        return raw, await _run_engine(both.engine, prompts, n_tokens)

    n_prompt = sum(map(len, prompts))
    await measure_pair()  # until all is warm
    measured = [await measure_pair() for _ in range(pairs)]
    raw, engine = zip(*measured, strict=True)
    raw_ttft_s, ttft_s = (median(s.prefill_s for s in speeds) for speeds in (raw, engine))
    return BenchRow(
        concurrency=len(prompts),
        decode_tps=median(s.decode_tps for s in engine),
        raw_decode_tps=median(s.decode_tps for s in raw),
        decode_ratio=median(e.decode_tps / r.decode_tps for r, e in measured),
        prefill_tps=n_prompt / ttft_s,
        raw_prefill_tps=n_prompt / raw_ttft_s,
        prefill_ratio=median(r.prefill_s / e.prefill_s for r, e in measured),
        ttft_s=ttft_s,
        raw_ttft_s=raw_ttft_s,
    )


async def _run_engine(eng: Engine, prompts: Sequence[Sequence[int]], n_tokens: int) -> Speed:
    """Stream all prompts at once; count what is decoded while all of them run."""
    from llamad_trio.llama.raw_loop import Speed

    start = trio.current_time()
    marks: list[tuple[float, int]] = []
    begun = 0

    def mark() -> None:
        marks.append((trio.current_time(), eng.stats().decode_tokens))

    async def read(prompt: Sequence[int]) -> None:
        nonlocal begun
        request = Request(prompt, temperature=0, max_tokens=n_tokens)
        async with eng.stream(request) as pieces:
            await pieces.receive()
            begun += 1
            if begun == len(prompts):
                mark()
            async for _ in pieces:
                pass
        if begun == len(prompts) and len(marks) == 1:
            mark()

    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(read, prompt)
    (first_s, before), (last_s, after) = marks
    return Speed(first_s - start, last_s - first_s, after - before)
