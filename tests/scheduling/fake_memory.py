"""A model of llama.cpp for the scheduler: a unified KV pool, samplers, and a text to generate.

It executes step plans exactly, and refuses every plan that the real thing would choke on.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Protocol

import attrs

from llamad_trio.core.completion import FinishReason, TokenLogprob
from llamad_trio.scheduling.plan import (
    Copy,
    Drop,
    MemoryOp,
    Prepared,
    Sampled,
    StepPlan,
    StepResult,
    StepStatus,
    Work,
)
from llamad_trio.scheduling.run import Finished
from tests.scheduling.oracles import decoded, first_stop

END = 0
"""The token that ends a generation."""

_E_ACUTE = "é".encode()
_SMILE = "🙂".encode()

PIECES = [
    b"</s>",
    b"a",
    b"b",
    b"ab",
    b"st",
    b"op",
    b"\n",
    _E_ACUTE[:1],
    _E_ACUTE[1:],
    _SMILE[:2],
    _SMILE[2:],
    b"",
    b"\xff",
]
"""Bytes of each token: whole words, halves of characters, none, and no UTF-8 at all."""

_OTHER_HALF = {7: 8, 9: 10}


class FakeModel(Protocol):
    """The next token, and what is forced by it, as a pure function of everything that may
    decide it."""

    def next(self, history: Sequence[int], *, seed: int, n_drawn: int) -> Sampled:
        """The token after `history` from a sampler that has drawn `n_drawn` before."""


class HashModel:
    """Pseudo-random text that depends on every token, the seed and the sampler's state."""

    def next(self, history: Sequence[int], *, seed: int, n_drawn: int) -> Sampled:
        digest = zlib.crc32(bytes(history), seed) ^ (n_drawn * 0x9E3779B1 & 0xFFFFFFFF)
        choice = digest * 2654435761 >> 9
        if history[-1] in _OTHER_HALF and choice % 4:
            token = _OTHER_HALF[history[-1]]
        else:
            token = END if choice % 41 == 0 else 1 + choice // 41 % (len(PIECES) - 1)
        return Sampled(token, PIECES[token], token == END)


class EndlessModel:
    """Never ends of its own accord; its text tells the position, so a slip shows."""

    def next(self, history: Sequence[int], *, seed: int, n_drawn: int) -> Sampled:
        token = 1 + (sum(history) + len(history) + seed + n_drawn) % 3
        return Sampled(token, PIECES[token], ends=False)


def forcing(piece: bytes, *forced: bytes, is_complete: bool = False) -> Sampled:
    """`piece` is sampled, and `forced` follow from it, as tokens 2, 3, ..."""
    tokens = tuple(enumerate(forced, 2))
    return Sampled(1, piece, ends=False, forced=tokens, is_complete=is_complete)


@attrs.frozen
class ScriptModel:
    """Says `pieces`, one a token, then ends."""

    pieces: Sequence[bytes | Sampled]

    def next(self, history: Sequence[int], *, seed: int, n_drawn: int) -> Sampled:
        if n_drawn == len(self.pieces):
            return Sampled(END, PIECES[END], ends=True)
        said = self.pieces[n_drawn]
        return Sampled(1, said, ends=False) if isinstance(said, bytes) else said


@attrs.frozen
class ForcingModel:
    """Says what `model` says, under a constraint that forces some of it, and may be complete."""

    model: FakeModel

    def next(self, history: Sequence[int], *, seed: int, n_drawn: int) -> Sampled:
        sampled = self.model.next(history, seed=seed, n_drawn=n_drawn)
        if sampled.ends:
            return sampled
        lot = zlib.crc32(bytes(history), seed + 1) ^ (n_drawn * 0x85EBCA6B & 0xFFFFFFFF)
        choice = lot * 2654435761 >> 9
        n_forced = choice // 3 % 21 if choice % 3 == 0 else 0
        tokens = [1 + (choice + i * i) % (len(PIECES) - 1) for i in range(n_forced)]
        return attrs.evolve(
            sampled,
            forced=tuple((token, PIECES[token]) for token in tokens),
            is_complete=choice // 63 % 23 == 0,
        )


@attrs.frozen
class ForcingOnceModel:
    """Never ends; what the sampler of seed 0 draws first forces `n_forced` more."""

    n_forced: int

    def next(self, history: Sequence[int], *, seed: int, n_drawn: int) -> Sampled:
        sampled = EndlessModel().next(history, seed=seed, n_drawn=n_drawn)
        if (seed, n_drawn) != (0, 0):
            return sampled
        tokens = [4 + i % 3 for i in range(self.n_forced)]
        return attrs.evolve(sampled, forced=tuple((token, PIECES[token]) for token in tokens))


def draw(model: FakeModel, history: Sequence[int], prepared: Prepared, n_drawn: int) -> Sampled:
    """What a sampler draws; where probabilities are told, nothing is forced."""
    sampled = model.next(history, seed=prepared.sampling.seed, n_drawn=n_drawn)
    if prepared.n_logprobs is None:
        return sampled
    told = TokenLogprob(sampled.token, sampled.piece, score(history, sampled.token))
    is_complete = sampled.is_complete and not sampled.forced
    return attrs.evolve(sampled, forced=(), is_complete=is_complete, logprobs=told)


def score(context: Sequence[int], target: int) -> float:
    """The logarithmic probability of `target` after `context`, each of which decides it."""
    return -zlib.crc32(bytes(context), target) / 2**28


def score_all(context: Sequence[int], targets: Sequence[int]) -> tuple[float, ...]:
    """The scores of `targets`, one after each of the last tokens of `context`."""
    first = len(context) - len(targets) + 1
    return tuple(score(context[:n], target) for n, target in enumerate(targets, first))


def lone_run(prepared: Prepared, model: FakeModel) -> Finished:
    """How a request ends that has the whole engine to itself, without slots, batches and caches."""

    def finished(text: str, n: int, reason: FinishReason, stop: str | None = None) -> Finished:
        return Finished(
            id=prepared.id,
            text=text,
            prompt_tokens=len(prepared.tokens),
            generated_tokens=n,
            finish_reason=reason,
            stop_sequence=stop,
            cached_tokens=0,
            logprobs=tuple(logprobs),
            scores=score_all(prepared.tokens, prepared.targets),
        )

    logprobs: list[TokenLogprob] = []
    if prepared.max_tokens == 0:
        return finished("", 0, "length")
    history, raw = list(prepared.tokens), b""
    for n_drawn in count():
        sampled = draw(model, history, prepared, n_drawn)
        logprobs += [sampled.logprobs] if sampled.logprobs else []
        said = [(sampled.token, b"" if sampled.ends else sampled.piece), *sampled.forced]
        for n_left, (token, piece) in zip(range(len(said))[::-1], said, strict=True):
            history.append(token)
            raw += piece
            n = len(history) - len(prepared.tokens)
            is_complete = n_left == 0 and (sampled.ends or sampled.is_complete)
            over = is_complete or n == prepared.max_tokens
            text = decoded(raw, final=over)
            if stop := first_stop(text, prepared.stop):
                return finished(text[: stop[0]], n, "stop", stop[1])
            if over:
                return finished(text, n, "stop" if is_complete else "length")
    raise AssertionError("unreachable")


@attrs.define
class _Sampler:
    """`n_due` is the length of what has to be computed before it is asked again."""

    prepared: Prepared
    n_due: int
    n_drawn: int = 0


Cell = tuple[int, int]
"""A cell of the pool: its number, unlike that of any other ever used, and its token."""


def n_cells(held: Iterable[Iterable[Cell]]) -> int:
    """Cells that sequences hold together, a shared one counted once."""
    return len({cell for cells in held for cell in cells})


@attrs.define(kw_only=True)
class FakeMemory:
    """The KV pool of one context, and the samplers beside it.

    Args:
        n_seqs: sequences there are.
        n_ctx: what the scheduler was told.
        n_cells: what is really there.
        can_rewind: whether a sequence can be cut; if not, it is kept and shared whole.
    """

    model: FakeModel
    n_seqs: int
    n_ctx: int
    n_cells: int
    n_batch: int
    can_rewind: bool
    sequences: dict[int, list[Cell]] = attrs.field(factory=dict)
    samplers: dict[int, _Sampler] = attrs.field(factory=dict)
    closed_samplers: set[int] = attrs.field(factory=set)
    numbers: count[int] = attrs.field(factory=count)

    def __attrs_post_init__(self) -> None:
        self.sequences = {seq: [] for seq in range(self.n_seqs)}

    @property
    def used(self) -> int:
        """Cells in use."""
        return n_cells(self.sequences.values())

    def run(
        self,
        plan: StepPlan,
        *,
        status: StepStatus = StepStatus.DONE,
        failing: Collection[int] = (),
        failing_copies: Collection[int] = (),
        elapsed_s: float = 0.01,
    ) -> StepResult:
        """Execute `plan`, which ends with `status`, or with `NO_ROOM` when cells are short.

        The requests in `failing` get no token; nothing can be copied to the sequences in
        `failing_copies`.
        """
        self._switch_samplers(plan)
        self.sequences, lost = self._arranged(plan.memory, failing_copies)
        if lost:
            return StepResult(status=StepStatus.ABORTED, cleared=lost)
        self._check(plan)
        if self.used + plan.n_tokens > self.n_cells:
            status = StepStatus.NO_ROOM
        match status:
            case StepStatus.DONE:
                return self._compute(plan, failing, elapsed_s)
            case StepStatus.FAILED:
                for work in plan.work:
                    self.sequences[work.seq] = []
                return StepResult(status=status, reason="the backend failed")
            case _:
                return StepResult(status=status, cleared=self._roll_back(plan))

    def after(self, operations: Iterable[MemoryOp]) -> Mapping[int, Sequence[Cell]]:
        """What the sequences hold once `operations` have been made."""
        return self._arranged(operations, ())[0]

    def _arranged(
        self, operations: Iterable[MemoryOp], failing_copies: Collection[int]
    ) -> tuple[dict[int, list[Cell]], frozenset[int]]:
        """The sequences after `operations`, and which of them could not be copied to."""
        sequences = {seq: list(cells) for seq, cells in self.sequences.items()}
        lost: set[int] = set()
        for operation in operations:
            match operation:
                case Drop(seq=seq):
                    sequences[seq] = []
                    lost.discard(seq)
                case Copy(src=src, dst=dst, n=n):
                    assert not sequences[dst], "copied onto something"
                    if src in lost or dst in failing_copies:
                        lost.add(dst)
                        continue
                    assert 0 < n <= len(sequences[src]), "more than there is"
                    assert self.can_rewind or n == len(sequences[src]), "cut"
                    sequences[dst] = sequences[src][:n]
                case _:
                    raise AssertionError("there is no shelf")
        return sequences, frozenset(lost)

    def _switch_samplers(self, plan: StepPlan) -> None:
        for request_id in plan.old_samplers:
            del self.samplers[request_id]  # a KeyError when it is not open
            self.closed_samplers.add(request_id)
        for prepared in plan.new_samplers:
            assert prepared.id not in self.samplers, "opened twice"
            assert prepared.id not in self.closed_samplers, "opened again"
            self.samplers[prepared.id] = _Sampler(prepared, n_due=len(prepared.tokens))

    def _check(self, plan: StepPlan) -> None:
        assert plan.work, "an empty batch"
        assert plan.n_tokens <= self.n_batch, "more than a batch holds"
        assert self.used + plan.n_tokens <= self.n_ctx, "more than the pool holds"
        assert len({work.seq for work in plan.work}) == len(plan.work), "a sequence twice"
        assert sum(work.n_outputs for work in plan.work) <= self.n_seqs, (
            "more rows of logits than there are"
        )
        for work in plan.work:
            assert work.tokens, "no tokens"
            assert len(work.targets) <= len(work.tokens), "nothing to score them after"
            assert not (work.sample and work.targets), "both at once"
            assert work.pos == len(self.sequences[work.seq]), "a gap or an overlap"

    def _compute(self, plan: StepPlan, failing: Collection[int], elapsed_s: float) -> StepResult:
        sampled: dict[int, Sampled] = {}
        scores: dict[int, Sequence[float]] = {}
        failures: dict[int, str] = {}
        for work in plan.work:
            self.sequences[work.seq] += zip(self.numbers, work.tokens, strict=False)
            if (work.sample or work.targets) and work.request_id in failing:
                failures[work.request_id] = "not a number"
            elif work.sample:
                sampled[work.request_id] = self._sample(work)
            elif work.targets:
                scores[work.request_id] = score_all(self._history(work), work.targets)
        return StepResult(
            status=StepStatus.DONE,
            sampled=sampled,
            scores=scores,
            failures=failures,
            elapsed_s=elapsed_s,
        )

    def _history(self, work: Work) -> list[int]:
        return [token for _, token in self.sequences[work.seq]]

    def _sample(self, work: Work) -> Sampled:
        sampler = self.samplers[work.request_id]
        history = self._history(work)
        assert len(history) == sampler.n_due, "a token missing or too many since the last time"
        sampled = draw(self.model, history, sampler.prepared, sampler.n_drawn)
        sampler.n_drawn += 1
        sampler.n_due += 1 + len(sampled.forced)
        return sampled

    def _roll_back(self, plan: StepPlan) -> frozenset[int]:
        """Undo the batch; return the sequences that lost everything by it."""
        if self.can_rewind:
            return frozenset()
        lost = frozenset(work.seq for work in plan.work if work.pos > 0)
        for seq in lost:
            self.sequences[seq] = []
        return lost
