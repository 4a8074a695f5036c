"""A nursery whose errors come out as themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import outcome
import trio

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

ends_in_order = trio.lowlevel.enable_ki_protection
"""For the tasks of an engine, and for what opens and closes it: Ctrl-C strikes the program's own
task where it waits, which then ends them, and not one of them in the middle of its books."""


@asynccontextmanager
@ends_in_order  # or the tasks would go on, and be waited for
async def open_plain_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery for background tasks that end with the block.

    Leaving the block cancels the tasks and waits for them.  An exception of the block
    comes out as itself, never in an `ExceptionGroup`; so does the exception of a task
    that crashed, which cancels the block.
    """
    body_error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            except BaseException as error:
                body_error = error
                raise
            finally:
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if body_error is not None and (
            body_error in group.exceptions or not holds_cancelled(body_error)
        ):
            raise body_error from body_error.__cause__
        if len(group.exceptions) == 1:
            # Cancelled was filtered out of the group: what is left is a crashed task.
            raise group.exceptions[0] from group.exceptions[0].__cause__
        raise


async def run_all(functions: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Run async functions side by side.

    A checkpoint.  The first that fails cancels the others, and its error comes out as
    itself.
    """
    errors: list[BaseException] = []
    try:
        async with trio.open_nursery() as nursery:

            async def run(function: Callable[[], Awaitable[object]]) -> None:
                try:
                    await function()
                except (Exception, KeyboardInterrupt, SystemExit) as error:
                    errors.append(error)
                    nursery.cancel_scope.cancel()

            for function in functions:
                nursery.start_soon(run, function)
        await trio.lowlevel.checkpoint()
    except BaseExceptionGroup as group:
        # Ctrl-C, where the program's own task waits for the others here.
        if isinstance(interrupt := group.exceptions[0], KeyboardInterrupt):
            raise interrupt from None
        raise
    if errors:
        raise errors[0]


class TaskStatus(Protocol[T_contra]):
    """What `nursery.start` passes: trio-typing's stubs have no name for it."""

    def started(self, value: T_contra) -> None: ...


def new_shield() -> trio.CancelScope:
    """A scope that no cancel from outside reaches: for what must be waited for."""
    # The ignores are for trio-typing's stubs, where CancelScope cannot be made.
    return trio.CancelScope(shield=True)  # pyright: ignore[reportCallIssue]


@ends_in_order
async def run_uninterrupted(function: Callable[[], Awaitable[T]]) -> T:
    """Run an async function to its end and return what it returns or raise what it raises.

    Neither a cancel from outside nor Ctrl-C reaches it, not even when this is called in the
    program's own task.  A `KeyboardInterrupt` that came meanwhile is raised afterwards, instead
    of what the function returns or raises; a `Cancelled` is not: this is no checkpoint.
    """
    result: outcome.Outcome[T] | None = None
    interrupt: BaseException | None = None

    @ends_in_order
    async def run() -> None:
        nonlocal result
        with new_shield():
            result = await outcome.acapture(function)

    try:
        # Trio raises KeyboardInterrupt in the program's own task only: this one goes on, and
        # a nursery's block is not left before its tasks have ended, whatever comes.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
    except BaseExceptionGroup as group:
        interrupt = group.exceptions[0]
    if interrupt is not None:
        raise interrupt
    assert result is not None
    return result.unwrap()


def new_scope() -> trio.CancelScope:
    """A scope that ends when somebody cancels it."""
    return trio.CancelScope()  # pyright: ignore[reportCallIssue]


def holds_cancelled(error: BaseException) -> bool:
    """Whether it is Trio's `Cancelled`, or a group with one in it."""
    # Trio takes its Cancelled out of a group by making another one of what is left: only a
    # group without any can be raised again as itself.
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(trio.Cancelled) is not None
    return isinstance(error, trio.Cancelled)
