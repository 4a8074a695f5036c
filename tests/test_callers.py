"""Contexts of callers are kept as long as they may be asked for, and no longer."""

from __future__ import annotations

from contextvars import ContextVar

from llamad_trio.callers import MOST_CALLERS, Callers

who: ContextVar[int] = ContextVar("who")


def noted(callers: Callers, number: int) -> str:
    who.set(number)
    call_id = callers.note()
    assert call_id is not None
    return call_id


def test_each_call_has_the_context_it_was_made_in() -> None:
    callers = Callers()
    with callers.remembered():
        ids = [noted(callers, number) for number in range(3)]
        contexts = [callers.context_of(call_id) for call_id in ids]
    assert [context and context[who] for context in contexts] == [0, 1, 2]


def test_nothing_is_kept_while_nobody_reads() -> None:
    callers = Callers()
    assert callers.note() is None
    with callers.remembered():
        with callers.remembered():
            call_id = noted(callers, 0)
        assert callers.context_of(call_id) is not None
    assert callers.context_of(call_id) is None
    assert callers.note() is None


def test_of_many_calls_the_latest_are_kept() -> None:
    callers = Callers()
    with callers.remembered():
        ids = [noted(callers, number) for number in range(MOST_CALLERS + 3)]
        known = [callers.context_of(call_id) is not None for call_id in ids]
    assert known == [False] * 3 + [True] * MOST_CALLERS


def test_calls_of_others_are_nobodys() -> None:
    ours, theirs = Callers(), Callers()
    with ours.remembered(), theirs.remembered():
        noted(ours, 0)
        assert ours.context_of(noted(theirs, 0)) is None
        anything: tuple[object, ...] = (None, 0, [], {}, "x")
        assert all(ours.context_of(other) is None for other in anything)
