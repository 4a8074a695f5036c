"""How likely texts are to follow a prompt: nothing is sampled, the prompt is computed once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import TypeAlias

import trio

from llamad_trio.core.completion import Choice
from llamad_trio.core.request import Request
from llamad_trio.engine.desk import Desk
from llamad_trio.scheduling.runtime import Scoring
from llamad_trio.system.nursery import run_all

_names = count(1)


async def score(desk: Desk, request: Request, texts: Sequence[str]) -> list[float]:
    """See `EngineLike.score`."""
    scoring = await desk.prepare_scoring(request, texts)
    wanted = list(map(tuple, scoring.targets))
    own = tuple(scoring.own)
    scores = await _scores(desk, scoring, [*wanted, own])
    return [scores[tokens] - _of_prompt(tokens, own, scores) for tokens in wanted]


async def choose(desk: Desk, request: Request, texts: Sequence[str]) -> Choice:
    """See `EngineLike.choose`."""
    scoring = await desk.prepare_scoring(request, texts)
    wanted = list(map(tuple, scoring.targets))
    of_tokens = await _scores(desk, scoring, wanted)
    scores = [of_tokens[tokens] for tokens in wanted]
    best = max(scores)
    weights = [math.exp(value - best) for value in scores]
    index = scores.index(best)
    total = sum(weights)
    return Choice(text=texts[index], index=index, probabilities=tuple(w / total for w in weights))


_Scores: TypeAlias = dict[tuple[int, ...], float]
"""By the tokens that follow the prompt."""


def _of_prompt(tokens: tuple[int, ...], own: tuple[int, ...], scores: _Scores) -> float:
    """How likely the rest of the prompt's text is: as the prompt's own tokens, and as the
    beginning of `tokens`, unless those are among the ways in which the former go on."""
    if tokens[: len(own)] == own:
        return scores[own]
    most = max(scores[own], scores[tokens])
    return most + math.log(math.exp(scores[own] - most) + math.exp(scores[tokens] - most))


async def _scores(desk: Desk, scoring: Scoring, wanted: Sequence[tuple[int, ...]]) -> _Scores:
    """The score of each after the prompt.  What is wanted twice is computed once."""
    scores: _Scores = dict.fromkeys(wanted, 0.0)
    # Others are to have their turn in between; and a queue that has an end would refuse most.
    in_turn = 2 if desk.config.max_queue is None else 1
    slots = trio.CapacityLimiter(in_turn * desk.config.n_slots)

    async def compute(tokens: tuple[int, ...]) -> None:
        async with slots:
            scores[tokens] = await desk.score_tokens(scoring.prompt, tokens)

    holder = f"scoring {next(_names)}"
    try:
        if desk.config.kv_cache:
            await desk.hold(holder, scoring.prompt[:-1])
        await run_all(partial(compute, tokens) for tokens in list(scores) if tokens)
    finally:
        desk.let_go(holder)
    return scores
