"""What reuse is worth: time to the first token with a prefix cold, warm, and restored."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable
from os import PathLike
from statistics import median

import attrs

from llamad_trio.bench import TEXT
from llamad_trio.core.completion import Completion
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.request import Request
from llamad_trio.engine.engine import Engine
from llamad_trio.opening import open_engine

_SUFFIX_TOKENS = 20


@attrs.frozen(kw_only=True)
class PrefixRow:
    """One way for a prefix to be there, and the median seconds to the first token.

    `ratio` is the median of it against the cold prompt measured just before, and `cached_tokens`
    what was reused of the prompt in the last measurement.
    """

    case: str
    ttft_s: float
    ratio: float
    cached_tokens: int


@attrs.frozen(kw_only=True)
class PrefixReport:
    """What was measured, on what; `rounds` measurements are behind each median."""

    model: str
    prefix_tokens: int
    suffix_tokens: int
    rounds: int
    rows: tuple[PrefixRow, ...]


Pair = tuple[Completion, Completion]
"""What came of a cold prompt, and of one whose prefix was there."""


async def run_prefix_bench(
    model: str | PathLike[str],
    *,
    prefix_tokens: int = 1000,
    rounds: int = 3,
    on_progress: Callable[[str], object] = lambda _: None,
    **overrides: object,
) -> PrefixReport:
    """Measure the time to the first token of a prompt with a long prefix.

    Cold; again in the place it was in; beside a request that is still generating from it;
    with another suffix; brought back from RAM; and after a restart, from disk.  The medians of so
    many `rounds` are reported; `on_progress` is told what is being measured.  The overrides are
    `EngineConfig` fields.

    A checkpoint; cancelled, it leaves nothing behind.  Snapshots go to a temporary directory.
    Raises `ModelLoadError` as `open_engine` does.
    """
    whole = prefix_tokens + _SUFFIX_TOKENS
    base = EngineConfig.merge(None, {"n_ctx": 2 * whole + 512, "kv_cache": True, **overrides})
    small = attrs.evolve(base, n_ctx=whole + 64, prompt_cache_ram_bytes=1 << 32)
    measured: dict[str, list[Pair]] = defaultdict(list)
    async with open_engine(model, base) as eng:
        tokens = await eng.tokenize(TEXT * ((prefix_tokens + 4 * rounds) // 8 + 8))

        def prompt(round_: int, suffix: int) -> list[int]:
            prefix = tokens[3 * round_ : 3 * round_ + prefix_tokens]
            return prefix + tokens[suffix : suffix + _SUFFIX_TOKENS]

        for i in range(rounds):
            on_progress(f"in the pool, round {i + 1} of {rounds}")
            warm = await _measure_warm(eng, prompt(i, 1), prompt(i, 2))
            for case, pair in warm.items():
                measured[case].append(pair)
    async with open_engine(model, small) as eng:
        for i in range(rounds):
            on_progress(f"RAM, round {i + 1} of {rounds}")
            cold = await _measure(eng, prompt(i, 1))
            await _measure(eng, prompt(i + rounds, 1)[::-1])  # pushes the first out
            measured["restored from RAM"].append((cold, await _measure(eng, prompt(i, 1))))
    for i in range(rounds):
        on_progress(f"disk, round {i + 1} of {rounds}")
        measured["restored from disk"].append(await _measure_restarted(model, base, prompt(i, 1)))

    all_cold = [(cold, cold) for pairs in measured.values() for cold, _ in pairs]
    return PrefixReport(
        model=str(model),
        prefix_tokens=prefix_tokens,
        suffix_tokens=_SUFFIX_TOKENS,
        rounds=rounds,
        rows=tuple(_row(case, pairs) for case, pairs in {"cold": all_cold, **measured}.items()),
    )


async def _measure(eng: Engine, prompt: list[int]) -> Completion:
    return await eng.complete(Request(prompt, temperature=0, max_tokens=1))


async def _measure_warm(eng: Engine, same: list[int], other: list[int]) -> dict[str, Pair]:
    """A prompt, and another with its prefix."""
    cold, again = await _measure(eng, same), await _measure(eng, same)
    changed = await _measure(eng, other)
    async with eng.stream(Request(same, temperature=0, max_tokens=400)) as pieces:
        await pieces.receive()  # from here on, another request generates from the same prefix
        beside = await _measure(eng, same)
    return {
        "warm, same prompt": (cold, again),
        "warm, changed suffix": (cold, changed),
        "warm, beside the first": (cold, beside),
    }


async def _measure_restarted(
    model: str | PathLike[str], config: EngineConfig, prompt: list[int]
) -> Pair:
    with tempfile.TemporaryDirectory() as directory:
        disk = attrs.evolve(config, prompt_cache_dir=directory, prompt_cache_disk_bytes=1 << 32)
        async with open_engine(model, disk) as eng:
            cold = await _measure(eng, prompt)
        async with open_engine(model, disk) as eng:
            return cold, await _measure(eng, prompt)


def _row(case: str, pairs: list[Pair]) -> PrefixRow:
    return PrefixRow(
        case=case,
        ttft_s=median(warm.ttft_s for _, warm in pairs),
        ratio=median(warm.ttft_s / cold.ttft_s for cold, warm in pairs),
        cached_tokens=pairs[-1][1].cached_tokens,
    )
