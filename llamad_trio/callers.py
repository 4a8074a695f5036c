"""Who in this program has asked an engine elsewhere, for the events that tell of the answers.

Decides by what name a caller's context is known over there, and how long it is kept here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from itertools import count
from secrets import token_hex

__all__ = ["Callers"]

MOST_CALLERS = 4096
"""Contexts that are kept while somebody reads events: how much later than its call the end of a
request may be told.  A context costs 0.1 KB, and what its variables keep alive."""


class Callers:
    """The contexts of the latest callers of one engine."""

    def __init__(self) -> None:
        self._name = token_hex(8)  # the engine has other clients, too
        self._numbers = count()
        self._contexts: dict[str, Context] = {}
        self._n_readers = 0

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Somebody reads events inside the block."""
        self._n_readers += 1
        try:
            yield
        finally:
            self._n_readers -= 1
            if not self._n_readers:
                self._contexts.clear()

    def note(self) -> str | None:
        """An id for a call of this task; `None` if nobody will ask for it."""
        if not self._n_readers:
            return None
        call_id = f"{self._name}-{next(self._numbers)}"
        self._contexts[call_id] = copy_context()
        if len(self._contexts) > MOST_CALLERS:
            del self._contexts[next(iter(self._contexts))]
        return call_id

    def context_of(self, call_id: object) -> Context | None:
        """The context of the task that made a call; `None` if it is not known."""
        return self._contexts.get(call_id) if isinstance(call_id, str) else None
