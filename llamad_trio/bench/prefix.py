"""What reuse is worth: time to the first token with a prefix cold, warm, and restored."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from os import PathLike
from statistics import median

import attrs

from llamad_trio.bench import TEXT
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.request import Request
from llamad_trio.engine.engine import Engine
from llamad_trio.opening import open_engine

_SUFFIX_TOKENS = 20


@attrs.frozen(kw_only=True)
class PrefixRow:
    """One way for a prefix to be there.

    Attributes:
        case: which.
        ttft_s: median seconds to the first token.
        ratio: median of it against the cold prompt measured just before.
        cached_tokens: prompt tokens that were reused, in the last measurement.
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


@attrs.frozen
class _Shot:
    ttft_s: float
    cached_tokens: int


@attrs.frozen
class _Prompts:
    """Prompts that share a prefix, a new one each round."""

    tokens: list[int]
    n_prefix: int

    def prompt(self, round_: int, suffix: int) -> list[int]:
        """The prefix of a round, and one of its suffixes."""
        start = 3 * round_
        prefix = self.tokens[start : start + self.n_prefix]
        return prefix + self.tokens[suffix : suffix + _SUFFIX_TOKENS]


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
    with another suffix; brought back from RAM; and after a restart, from disk.

    Args:
        model: a GGUF file or a known model.
        prefix_tokens: length of the prefix.
        rounds: measurements of each; their median is reported.
        on_progress: told what is being measured.
        overrides: `EngineConfig` fields.

    A checkpoint; cancelled, it leaves nothing behind.  Snapshots go to a temporary
    directory.

    Raises:
        ModelLoadError: as `open_engine` does.
    """
    whole = prefix_tokens + _SUFFIX_TOKENS
    base = EngineConfig.merge(None, {"n_ctx": 2 * whole + 512, "kv_cache": True, **overrides})
    small = attrs.evolve(base, n_ctx=whole + 64, prompt_cache_ram_bytes=1 << 32)
    shots: dict[str, list[tuple[_Shot, _Shot]]] = defaultdict(list)

    def note(found: dict[str, tuple[_Shot, _Shot]]) -> None:
        for case, pair in found.items():
            shots[case].append(pair)

    async with open_engine(model, base) as eng:
        text = TEXT * ((prefix_tokens + 4 * rounds) // 8 + 8)
        prompts = _Prompts(await eng.tokenize(text), prefix_tokens)
        for i in range(rounds):
            on_progress(f"in the pool, round {i + 1} of {rounds}")
            note(await _warm(eng, prompts, i))
    async with open_engine(model, small) as eng:
        for i in range(rounds):
            on_progress(f"RAM, round {i + 1} of {rounds}")
            cold = await _shot(eng, prompts.prompt(i, 1))
            await _shot(eng, prompts.prompt(i + rounds, 1)[::-1])  # pushes the first out
            note({"restored from RAM": (cold, await _shot(eng, prompts.prompt(i, 1)))})
    for i in range(rounds):
        on_progress(f"disk, round {i + 1} of {rounds}")
        note(await _restarted(model, base, prompts.prompt(i, 1)))

    return PrefixReport(
        model=str(model),
        prefix_tokens=prefix_tokens,
        suffix_tokens=_SUFFIX_TOKENS,
        rounds=rounds,
        rows=tuple(_rows(shots)),
    )


async def _warm(eng: Engine, prompts: _Prompts, round_: int) -> dict[str, tuple[_Shot, _Shot]]:
    same = prompts.prompt(round_, 1)
    cold = await _shot(eng, same)
    return {
        "warm, same prompt": (cold, await _shot(eng, same)),
        "warm, changed suffix": (cold, await _shot(eng, prompts.prompt(round_, 2))),
        "warm, beside the first": (cold, await _beside(eng, same)),
    }


async def _restarted(
    model: str | PathLike[str], config: EngineConfig, prompt: list[int]
) -> dict[str, tuple[_Shot, _Shot]]:
    with tempfile.TemporaryDirectory() as directory:
        disk = attrs.evolve(config, prompt_cache_dir=directory, prompt_cache_disk_bytes=1 << 32)
        async with open_engine(model, disk) as eng:
            cold = await _shot(eng, prompt)
        async with open_engine(model, disk) as eng:
            return {"restored from disk": (cold, await _shot(eng, prompt))}


async def _shot(eng: Engine, prompt: list[int]) -> _Shot:
    completion = await eng.complete(Request(prompt, temperature=0, max_tokens=1))
    return _Shot(completion.ttft_s, completion.cached_tokens)


async def _beside(eng: Engine, prompt: list[int]) -> _Shot:
    """A prompt measured while another request still generates from the same prefix."""
    endless = Request(prompt, temperature=0, max_tokens=400)
    async with eng.stream(endless) as pieces:
        await pieces.receive()
        return await _shot(eng, prompt)


def _rows(shots: dict[str, list[tuple[_Shot, _Shot]]]) -> Iterator[PrefixRow]:
    yield _row("cold", [(cold, cold) for pairs in shots.values() for cold, _ in pairs])
    for case, pairs in shots.items():
        yield _row(case, pairs)


def _row(case: str, pairs: list[tuple[_Shot, _Shot]]) -> PrefixRow:
    return PrefixRow(
        case=case,
        ttft_s=median(warm.ttft_s for _, warm in pairs),
        ratio=median(warm.ttft_s / cold.ttft_s for cold, warm in pairs),
        cached_tokens=pairs[-1][1].cached_tokens,
    )
