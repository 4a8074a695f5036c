"""What one rendering of a chat template may use: time, and a budget of characters.

What a template makes is counted in characters, and never given back: that bounds its
memory, and most of its time.  A call into C cannot be interrupted, so what it would make,
and the steps it would take, must fit into what is left of the budget before it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import NoReturn

import attrs
import jinja2
from jinja2.runtime import LoopContext

from llamad_trio.core.errors import ProtocolError

NODE_CHARS = 16
"""What an item of a list, and a step of a loop, counts for: its 64 bytes, at four a character."""

MAX_INT_BITS = 1024
"""Largest integer.  Templates count messages: 64 bits would do."""

SCALARS = frozenset({type(None), bool, int, float, str})
"""Types whose values are as long as they look."""

_MAX_DEPTH = 100
"""Deepest data, and deepest recursion of macros and loops.  Both use the C stack: the hash
of a tuple does not watch it, and the program may have raised Python's own limit."""


@attrs.frozen
class RenderLimits:
    """What a rendering may use: seconds, and characters.

    All texts that it makes count, and `NODE_CHARS` for each item of its lists and dicts,
    and for each step of its loops.
    """

    time_s: float
    n_chars: int


FULL = RenderLimits(2.0, 64 * 1024 * 1024)
"""For a thread.  Known templates make up to five times a long conversation's size, and a
million tokens are some four million characters.  In memory it is 256 MiB at most."""

QUICK = RenderLimits(0.003, 128 * 1024)
"""For a first attempt on the event loop, where no call may take much of a millisecond."""


class TooLarge(jinja2.TemplateRuntimeError):
    """More than a template may make."""


@attrs.define(auto_exc=True, str=False)
class TemplateTimeout(ProtocolError):
    """The chat template needed more than it was given; with `FULL` it may succeed."""


class _Stream(list[object]):
    """What an iterator has yielded.  Like that, and unlike a list, always true."""

    def __bool__(self) -> bool:
        return True


class Meter:
    """Counts what one rendering uses.  For one thread."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._deadline = monotonic() + limits.time_s
        self._left = limits.n_chars
        self._depth = 0

    def tick(self) -> None:
        """Stop a rendering that has run out of time."""
        if monotonic() > self._deadline:
            raise TemplateTimeout(f"the chat template took longer than {self._limits.time_s:g} s")

    def step(self) -> None:
        """Count a step of a loop."""
        self.spend(NODE_CHARS)
        self.tick()

    def enter(self, n_arguments: int) -> None:
        """Begin a call.  What is called may keep its arguments."""
        self.spend(NODE_CHARS * n_arguments)
        self.step()
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise RecursionError(f"calls nest deeper than {_MAX_DEPTH} levels")

    def leave(self) -> None:
        """End a call."""
        self._depth -= 1

    def spend(self, n_chars: int) -> None:
        """Count what is made."""
        self._left -= n_chars
        if self._left < 0:
            self._refuse()

    def check(self, n_chars: int) -> None:
        """Refuse a call that could make `n_chars`, or take as many steps."""
        if n_chars > self._left:
            self._refuse()

    def _refuse(self) -> NoReturn:
        n_chars = self._limits.n_chars
        if n_chars < FULL.n_chars:
            raise TemplateTimeout(f"the chat template needs more than {n_chars} characters")
        raise TooLarge(f"the values are too large: more than {n_chars} characters")

    def count_made(self, value: object) -> object:
        """Count `value` and return it, an iterator as a list."""
        match value:
            case str():
                self.spend(len(value))
            case list() | tuple():
                self.spend(NODE_CHARS * (1 + len(value)))
            case dict():
                self.spend(2 * NODE_CHARS * (1 + len(value)))
            case int() if value.bit_length() > MAX_INT_BITS:
                raise TooLarge("a number is too large")
            case Iterator() if not isinstance(value, LoopContext):
                items = _Stream()
                for item in value:
                    self.step()
                    items.append(item)
                return items
        return value

    def text(self, value: object) -> str:
        """`value` as the template writes it."""
        if type(value) is str:
            return value
        self.check(4 * self.weigh(value))  # a control character is written as `\x00`
        text = str(value)
        self.spend(len(text))
        return text

    def join(self, texts: Iterable[str]) -> str:
        """`texts`, as one."""
        texts = list(texts)
        self.spend(sum(map(len, texts)))
        return "".join(texts)

    def allow_comparing(self, value: object) -> object:
        """Return `value`, which may now be compared or hashed in one call."""
        if type(value) not in SCALARS:
            self.weigh(value)
        return value

    def weigh(self, *values: object) -> int:
        """The characters it takes to write `values` out; no more than are left.

        Counts what is reached twice twice, as whoever writes it out will: `[x, x]`
        of `[y, y]` of … is small in memory and endless on paper.
        """
        total = 0
        level: list[object] = list(values)
        for _ in range(_MAX_DEPTH):
            below: list[object] = []
            parts: Collection[object]
            for item in level:
                match item:
                    case str():
                        total += len(item)
                        continue
                    case dict():
                        parts = [*item.keys(), *item.values()]
                    case list() | tuple() | range():
                        parts = item
                    case LoopContext():
                        raise TooLarge("a loop is too large to be data")
                    case _:
                        total += NODE_CHARS
                        continue
                self.tick()
                total += NODE_CHARS * len(parts)
                self.check(total)
                below += parts
            if not below:
                self.check(total)
                return total
            level = below
        raise TooLarge(f"data is too large: nested deeper than {_MAX_DEPTH} levels")


_CURRENT: ContextVar[Meter] = ContextVar("_CURRENT")

current_meter: Callable[[], Meter] = _CURRENT.get
"""The meter of the rendering that this code is part of."""


@contextmanager
def metering(limits: RenderLimits) -> Iterator[Meter]:
    """Give this thread's code a meter, from now on."""
    meter = Meter(limits)
    token = _CURRENT.set(meter)
    try:
        yield meter
    finally:
        _CURRENT.reset(token)
