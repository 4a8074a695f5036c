"""The KV pool: who holds which cells, what ended requests leave behind, what gives way.

Decides which sequence a request gets, what it takes over from others, and which
retained prefix goes first.  Knows nothing of slots, steps and time.

What it wants done in llama.cpp's memory it writes down as operations, in order; the
next step plan carries them, and they are made before its batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, IntEnum, auto
from itertools import count

from llamad_trio.scheduling.plan import Copy, Drop, MemoryOp, Restore, Save, StepPlan
from llamad_trio.scheduling.prefix import Match, PrefixTree
from llamad_trio.scheduling.shelf import Shelf, Snapshot

MIN_CHECKPOINT_TOKENS = 16
"""Shorter prompts are computed about as fast as they are found again."""


class Reuse(Enum):
    """What of a sequence another one can go on from."""

    NOTHING = auto()
    """Reuse is off."""
    WHOLE = auto()
    """Only its end: the state of recurrent and hybrid models cannot go back."""
    PREFIX = auto()
    """Any of its prefixes."""


class _Rank(IntEnum):
    """What gives way first."""

    COMMON = auto()
    OF_SESSION = auto()
    HELD = auto()


class Pool:
    """The sequences of one context.  Sizes in tokens, which are cells.

    `reuse` is what the model's memory and the configuration allow; prefixes that leave the pool
    go to `shelf`.
    """

    def __init__(self, *, n_ctx: int, n_seqs: int, reuse: Reuse, shelf: Shelf) -> None:
        self.n_ctx = n_ctx
        self.reuse = reuse
        self._tree = PrefixTree()
        self._free = list(range(n_seqs))
        self._retained: dict[int, _Rank] = {}  # nobody runs on them; least recently used first
        self._held: dict[str, int] = {}
        # Copies that no step has built on yet, and what turned out not to be copied: layers
        # with a sliding window give away what has left it.
        self._unproven: dict[int, Match] = {}
        self._spoilt: dict[int, int] = {}
        self._ops: list[MemoryOp] = []
        self._shelf = shelf
        self._save_keys = count()
        self._saving: dict[int, tuple[int, ...]] = {}

    @property
    def free_cells(self) -> int:
        """Cells nobody holds."""
        return self.n_ctx - self._tree.size

    def length(self, seq: int) -> int:
        """Tokens a sequence holds."""
        return self._tree.length(seq)

    def n_cells(self, prefixes: Iterable[tuple[int, int]]) -> int:
        """Cells that the first `n` tokens of each `(seq, n)` hold together."""
        return self._tree.n_cells(prefixes)

    def n_held(self, seqs: Iterable[int]) -> int:
        """Cells the sequences hold together; every other one in use is retained."""
        return self._tree.n_cells((seq, self._tree.length(seq)) for seq in seqs)

    def find(self, tokens: Sequence[int], limit: int) -> Match:
        """The longest prefix to go on from, of `limit` tokens at most."""
        match = self._match(tokens, limit)
        if match.seq in self._retained:
            self._retain(match.seq, self._retained[match.seq])
        return match

    def n_resident(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens somebody holds, so that one can go on from there."""
        return self._match(tokens, len(tokens)).n

    def _match(self, tokens: Sequence[int], limit: int) -> Match:
        if self.reuse is Reuse.NOTHING:
            return Match()
        match = self._tree.match(tokens, limit, whole=self.reuse is Reuse.WHOLE)
        return match if match.n > self._spoilt.get(match.seq, 0) else Match()

    # -- a request's sequence -----------------------------------------------------------

    def open(self) -> int:
        """A sequence that holds nothing; the oldest retained prefix goes if there is none."""
        if not self._free:
            self._evict(min(self._retained, key=lambda seq: self._retained[seq]))
        return self._free.pop()

    def share(self, match: Match, seq: int) -> None:
        """Let `seq`, which holds nothing, go on from what was found."""
        self._copy(match, seq)
        self._unproven[seq] = match
        consumed = match.n == self._tree.length(match.seq) and self.reuse is Reuse.PREFIX
        if consumed and self._retained.get(match.seq, _Rank.HELD) is not _Rank.HELD:
            self._forget(match.seq)  # seq holds all of it, and gives any prefix of it

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        """The tokens have been computed."""
        self._unproven.pop(seq, None)
        self._tree.extend(seq, tokens)

    def prove(self, seqs: Iterable[int]) -> None:
        """What was copied to these sequences was there, whatever became of it since."""
        for seq in seqs:
            self._unproven.pop(seq, None)

    def lose(self, seq: int) -> None:
        """llama.cpp holds nothing of the sequence any more."""
        copied = self._unproven.pop(seq, None)
        if copied and self.reuse is Reuse.PREFIX:  # a state is whole, or was lost otherwise
            self._spoilt[copied.seq] = max(copied.n, self._spoilt.get(copied.seq, 0))
        self._tree.drop(seq)
        heirs = [op for op in self._ops if isinstance(op, Copy) and op.src == seq]
        self._ops = [op for op in self._ops if op not in heirs]
        for heir in heirs:
            self.lose(heir.dst)
        if seq in self._retained:
            self._forget(seq)

    def distrust(self, plan: StepPlan) -> None:
        """Nobody knows how much of a plan was done: give up all that it touched."""
        unsure = {work.seq for work in plan.work} | {_target(op) for op in plan.memory}
        for op in self._ops:
            if isinstance(op, Copy) and op.src in unsure:
                unsure.add(op.dst)
        sure = [op for op in self._ops if _target(op) not in unsure]
        self.prove(unsure)
        for seq in unsure:
            self.lose(seq)
        self._ops = [*map(Drop, sorted(unsure)), *sure]

    def clear(self, seq: int) -> None:
        """Let a sequence give up all it holds."""
        if self._tree.length(seq):
            self._ops.append(Drop(seq))
        self._tree.drop(seq)

    def close(self, seq: int, *, keep: bool = True, session: str | None = None) -> None:
        """A request ends: its sequence is retained, if that can be of use."""
        if keep and self._is_of_use(seq):
            self._retain(seq, _Rank.COMMON if session is None else _Rank.OF_SESSION)
        else:
            self._forget(seq)

    def hold(self, seq: int, holder: str) -> None:
        """A request ends, and `holder` holds on to its sequence instead of what it held."""
        if self.reuse is Reuse.NOTHING:
            self._forget(seq)
            return
        self._retain(seq, _Rank.HELD)
        self.let_go(holder)
        self._held[holder] = seq

    def hold_resident(self, holder: str, tokens: Sequence[int]) -> bool:
        """Let `holder` hold what somebody else has computed; false if that is not all there."""
        if self.n_resident(tokens) < len(tokens):
            return False
        seq = self.open()
        match = self._match(tokens, len(tokens))
        if match.n < len(tokens):  # it was what gave way
            self._free.append(seq)
            return False
        self._copy(match, seq)
        self.hold(seq, holder)
        return True

    def let_go(self, holder: str) -> None:
        """What `holder` holds, if anything, is retained like all else."""
        seq = self._held.pop(holder, None)
        if seq is None or seq not in self._retained:
            return
        if self._is_of_use(seq):
            self._retained[seq] = _Rank.COMMON
        else:
            self._forget(seq)

    def checkpoint(self, seq: int, session: str | None = None) -> None:
        """Retain where a sequence stands now, if it could not be come back to later."""
        length = self._tree.length(seq)
        if self.reuse is not Reuse.WHOLE or length < MIN_CHECKPOINT_TOKENS:
            return
        if not self._free and not self._retained:
            return
        copy = self.open()
        self.share(Match(seq, length), copy)
        self._retain(copy, _Rank.COMMON if session is None else _Rank.OF_SESSION)

    # -- making room --------------------------------------------------------------------

    def evict(self) -> bool:
        """Let the least wanted retained prefix go that frees a cell; false if none does."""
        groups = [self._tree.holders(seq) for seq in self._retained]
        # Those who hold the same cells free them only together.
        evictable = [group for group in groups if group <= self._retained.keys()]
        if not evictable:
            return False
        order = {seq: (rank, age) for age, (seq, rank) in enumerate(self._retained.items())}
        for seq in min(evictable, key=lambda g: (max(order[seq] for seq in g), len(g))):
            self._evict(seq)
        return True

    def evict_all(self) -> bool:
        """Let every retained prefix go; false if there is none."""
        retained = list(self._retained)
        for seq in retained:
            self._forget(seq)
        return bool(retained)

    def take_ops(self) -> tuple[MemoryOp, ...]:
        """What is to be done in llama.cpp's memory before the next batch."""
        ops = tuple(self._ops)
        self._ops.clear()
        return ops

    # -- the shelf ----------------------------------------------------------------------

    def restore(self, snapshot: Snapshot, n: int, seq: int) -> None:
        """Let `seq`, which holds nothing, go on from the first `n` tokens of a snapshot."""
        self._tree.extend(seq, snapshot.tokens[:n])
        self._ops.append(Restore(seq, snapshot.state, len(snapshot.tokens), n))

    def save_all(self) -> None:
        """Write out every retained prefix, as far as the shelf has no such."""
        for seq in self._retained:
            self._save(seq)

    def take_saved(self, states: Mapping[int, bytes]) -> None:
        """Put on the shelf what a step has saved."""
        for key, state in states.items():
            self._shelf.put(Snapshot(self._saving[key], state))
        # What was planned and is not among them could not be saved.
        to_come = {op.key for op in self._ops if isinstance(op, Save)}
        self._saving = {key: tokens for key, tokens in self._saving.items() if key in to_come}

    def _is_of_use(self, seq: int) -> bool:
        """Whether the sequence gives something to go on from that no other one gives."""
        if not self._tree.length(seq) or self.reuse is Reuse.NOTHING:
            return False
        return not self._tree.is_inside_another(seq, whole=self.reuse is Reuse.WHOLE)

    def _copy(self, match: Match, seq: int) -> None:
        self._tree.copy(match.seq, seq, match.n)
        self._ops.append(Copy(match.seq, seq, match.n))

    def _retain(self, seq: int, rank: _Rank) -> None:
        """Keep a sequence, used just now."""
        self._retained.pop(seq, None)
        self._retained[seq] = rank

    def _evict(self, seq: int) -> None:
        self._save(seq)
        self._forget(seq)

    def _save(self, seq: int) -> None:
        if self._tree.length(seq) < MIN_CHECKPOINT_TOKENS:
            return
        tokens = tuple(self._tree.tokens(seq))
        if self._shelf.wants(tokens):
            key = next(self._save_keys)
            self._saving[key] = tokens
            self._ops.append(Save(seq, key))

    def _forget(self, seq: int) -> None:
        self.clear(seq)
        self._retained.pop(seq, None)
        self._held = {holder: held for holder, held in self._held.items() if held != seq}
        self._spoilt.pop(seq, None)
        self._unproven.pop(seq, None)
        self._free.append(seq)


def _target(op: MemoryOp) -> int:
    return op.dst if isinstance(op, Copy) else op.seq
