"""Who in this program has asked an engine elsewhere, for the events that tell of the answers.

Decides by what name a caller's context is known over there, and how long it is kept here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from itertools import count
from secrets import token_hex

MOST_ENDED = 16_384
"""Calls whose contexts are kept though they have ended, while somebody reads events: the end of
a request may be told later than its reply.  A context takes 0.1 KB, and keeps alive what its
variables hold."""


class Callers:
    """The contexts of those who wait for one engine, and of those who did so lately."""

    def __init__(self) -> None:
        self._name = token_hex(8)  # the engine has other clients, too
        self._numbers = count()
        self._waiting: dict[str, Context] = {}
        self._ended: dict[str, Context] = {}
        self._n_readers = 0

    @contextmanager
    def remember_ended(self) -> Iterator[None]:
        """Somebody reads events inside the block."""
        self._n_readers += 1
        try:
            yield
        finally:
            self._n_readers -= 1
            if not self._n_readers:
                self._ended.clear()

    @contextmanager
    def register_call(self) -> Iterator[str]:
        """This task waits for a call inside the block.  Gives the call's id."""
        call_id = f"{self._name}-{next(self._numbers)}"
        self._waiting[call_id] = copy_context()
        try:
            yield call_id
        finally:
            context = self._waiting.pop(call_id)
            if self._n_readers:
                self._ended[call_id] = context
            if len(self._ended) > MOST_ENDED:
                del self._ended[next(iter(self._ended))]

    def context_of(self, call_id: object) -> Context | None:
        """The context of the task that made a call; `None` if it is not known."""
        if not isinstance(call_id, str):
            return None
        # Not `or`: a context without variables is false.
        return self._waiting.get(call_id, self._ended.get(call_id))
