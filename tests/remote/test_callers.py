"""Contexts of callers are kept as long as they may be asked for, and no longer."""

from __future__ import annotations

from contextvars import Context, ContextVar

from llamad_trio.remote.reply import MOST_ENDED, Callers

who: ContextVar[int] = ContextVar("who")


def called(callers: Callers, number: int) -> str:
    """Make a call that ends at once.  Returns its id."""
    who.set(number)
    with callers.register_call() as call_id:
        return call_id


def asked_by(callers: Callers, call_id: object) -> int | None:
    context = callers.context_of(call_id)
    return None if context is None else context[who]


def test_who_waits_is_known_whether_or_not_somebody_reads() -> None:
    callers = Callers()
    who.set(1)
    with callers.register_call() as one:
        who.set(2)
        with callers.register_call() as two:
            with callers.remember_ended():
                pass  # a reader comes and goes
            assert (asked_by(callers, one), asked_by(callers, two)) == (1, 2)
    assert (asked_by(callers, one), asked_by(callers, two)) == (None, None)


def test_who_has_asked_is_known_as_long_as_somebody_reads() -> None:
    callers = Callers()
    with callers.remember_ended():
        with callers.remember_ended():
            ids = [called(callers, number) for number in range(3)]
        assert [asked_by(callers, call_id) for call_id in ids] == [0, 1, 2]
    assert [asked_by(callers, call_id) for call_id in ids] == [None] * 3


def test_of_many_that_have_asked_the_latest_are_known_and_all_that_wait() -> None:
    callers = Callers()
    with callers.remember_ended(), callers.register_call() as first:
        ids = [called(callers, number) for number in range(MOST_ENDED + 3)]
        known = [asked_by(callers, call_id) is not None for call_id in ids]
        assert callers.context_of(first) is not None
    assert known == [False] * 3 + [True] * MOST_ENDED


def test_calls_of_others_are_nobodys() -> None:
    ours, theirs = Callers(), Callers()
    with ours.remember_ended(), theirs.remember_ended():
        called(ours, 0)
        assert ours.context_of(called(theirs, 0)) is None
        anything: tuple[object, ...] = (None, 0, [], {}, "x")
        assert all(ours.context_of(other) is None for other in anything)


def test_who_has_set_no_variable_is_known_too() -> None:
    callers = Callers()

    def call() -> None:
        with callers.register_call() as call_id:
            assert callers.context_of(call_id) is not None
        assert callers.context_of(call_id) is not None

    with callers.remember_ended():
        Context().run(call)
