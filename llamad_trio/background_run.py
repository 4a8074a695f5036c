"""One engine in a Trio run of its own, in a background thread, and the calls into it.

Decides how a request gets into that thread, how its parts and its end get out, and when the
thread ends.  Knows neither how a caller waits (`blocking` and `aio` do) nor what is asked.

The two sides share no lock.  What they share are flags, and deques of which each operation
is atomic, so that Ctrl-C may strike a caller between any two lines, and a finalizer may run in
any thread.  Into the Trio run leads `TrioToken.run_sync_soon`, which is made for that, too.

anyio's `BlockingPortal` offers the calls, and not the rest: an engine that was left open keeps
the interpreter from ending, and a piece of a stream costs twice as much (150 against 75 us).
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  (for the order of what runs at exit: see below)
import copy
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from math import inf, isnan, nan
from types import TracebackType
from typing import Generic, NoReturn, Protocol, TypeVar, TypeVarTuple, cast

import trio

from llamad_trio.core.completion import Completion
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import EngineClosed, LlamadError, ProtocolError
from llamad_trio.core.fields import number
from llamad_trio.core.info import EngineStats, ModelInfo
from llamad_trio.engine.engine_like import EngineLike
from llamad_trio.system.nursery import holds_cancelled, new_scope, open_plain_nursery
from llamad_trio.watch import refresh_if_possible

T = TypeVar("T")
PartT = TypeVar("PartT")
PartT_co = TypeVar("PartT_co", covariant=True)
Ts = TypeVarTuple("Ts")

Opener = Callable[[], AbstractAsyncContextManager[EngineLike]]
"""Opens an engine inside a Trio run."""

MOST_PARTS = 32
"""Parts of a reply that wait for a reader outside the Trio run; beyond that, its stream there
falls behind, which pauses the slot."""


class Answer(Generic[T]):
    """What somebody outside the Trio run waits for: in the end, one value or one error.

    Of several, the first counts.
    """

    def __init__(self) -> None:
        self.is_here = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._wakers: deque[Callable[[], object]] = deque()

    @property
    def value(self) -> T | None:
        """The value; `None` before it is here, and if it never will be."""
        return self._value if self.is_here else None

    def get(self) -> T:
        """The value, or raise the error.  For when it is here.

        However often: what raised it before has left no trace in it.
        """
        if self._error is not None:
            raise _another(self._error).with_traceback(self._traceback)
        return cast("T", self._value)

    def on_news(self, wake: Callable[[], object]) -> None:
        """Have `wake` called once, in the background thread, when something comes next.

        It must not block.  What came before this call is not told: look again after it.
        """
        self._wakers.append(wake)

    def give(self, value: T) -> None:
        """This is it."""
        if not self.is_here:
            self._value = value
            self._end()

    def fail(self, error: BaseException) -> None:
        """There will be none."""
        if not self.is_here:
            self._error = error
            self._traceback = error.__traceback__
            self._end()

    def drop_wakers(self) -> None:
        """Wake none of those who wait: in a forked child, where they are not."""
        self._wakers.clear()

    def _end(self) -> None:
        self.is_here = True
        self._wake_all()

    def _wake_all(self) -> None:
        while self._wakers:
            self._wakers.popleft()()


class EngineCall(Answer[T]):
    """One request, from outside the Trio run to its end.

    A negative `timeout_s` is over at once; one that is no number is a `ProtocolError`.
    """

    def __init__(
        self,
        run: BackgroundRun,
        work: Callable[[EngineLike], Awaitable[T]],
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self._is_submitted = False
        self._run = run
        self._work = work
        self._timeout_s = inf if timeout_s is None else _seconds(timeout_s)
        self._scope = new_scope()

    @property
    def is_submitted(self) -> bool:
        """Whether it has come to where it is answered."""
        return self._is_submitted and not self._run.is_lost

    def cancel(self) -> None:
        """Stop the work, if it has not ended.  From any thread; does not wait for it."""
        if not self.is_here:
            self._run.soon(self._scope.cancel)

    async def serve(self, engine: EngineLike) -> None:
        """Do the work and answer.

        A checkpoint.  Cancelled, it has no answer: whoever cancelled it knows why.
        """
        try:
            with self._scope, trio.fail_after(self._timeout_s):
                self.give(await self._work(engine))
        except trio.TooSlowError:
            self.fail(TimeoutError(f"the request was not complete after {self._timeout_s:g} s"))
        except BaseException as error:  # the caller's
            if holds_cancelled(error):
                raise
            self.fail(error)
        self.fail(ValueError("the request was cancelled"))  # unless it has an answer


class _Stream(Protocol[PartT_co]):
    """A `TokenStream` or an `EventStream`."""

    def __aiter__(self) -> AsyncIterator[PartT_co]: ...

    async def result(self) -> Completion: ...


class StreamCall(EngineCall[Completion], Generic[PartT]):
    """A request whose reply comes in parts.

    A reader that keeps up is woken once for all that is there.  For one that does not, parts
    gather up to `MOST_PARTS`, and then the stream inside is not read until half are taken.
    """

    def __init__(
        self,
        run: BackgroundRun,
        stream: Callable[[EngineLike], AbstractAsyncContextManager[_Stream[PartT]]],
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(run, self._hand_over, timeout_s)
        self._stream = stream
        self._parts: deque[PartT] = deque()
        self._room: trio.Event | None = None

    @property
    def has_news(self) -> bool:
        """Whether there is a part to take, or the end is here."""
        return bool(self._parts) or self.is_here

    def take(self) -> PartT:
        """The next part.  Raises `IndexError` when there is none."""
        part = self._parts.popleft()
        # Maybe told more than once, which does no harm; never forgotten, because whoever waits
        # for room says so before it counts the parts.
        if (room := self._room) is not None and len(self._parts) <= MOST_PARTS // 2:
            self._run.soon(room.set)
        return part

    def drop_parts(self) -> None:
        """Forget what was not taken."""
        self._parts.clear()

    async def _hand_over(self, engine: EngineLike) -> Completion:
        async with self._stream(engine) as stream:
            async for part in stream:
                self._parts.append(part)
                self._wake_all()
                if len(self._parts) >= MOST_PARTS:
                    await self._until_room()
            return await stream.result()

    async def _until_room(self) -> None:
        self._room = trio.Event()
        if len(self._parts) > MOST_PARTS // 2:
            await self._room.wait()
        self._room = None


class BackgroundRun:
    """A Trio run in a thread of its own, which does nothing but one engine's work.

    Attributes:
        opened: the engine, or why it could not be opened.
        ended: when the run is over; with the error it died of.
        is_ending: takes no calls any more.
        is_lost: was left behind in the process that this one was forked from.
    """

    def __init__(self, opener: Opener) -> None:
        self.opened: Answer[EngineLike] = Answer()
        self.ended: Answer[None] = Answer()
        self.is_ending = False
        self.is_lost = False
        self._opener = opener
        # Not a daemon: the interpreter would tear itself down around a computing llama.cpp.
        self._thread = threading.Thread(target=self._run, name="llamad_trio engine", daemon=False)
        self._has_begun = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = new_scope()  # around all of it; cancelled only to stop the opening
        self._nursery: trio.Nursery | None = None
        self._calls: set[EngineCall[object]] = set()
        self._crash: BaseException | None = None

    # -- from any thread ----------------------------------------------------------------------

    def start(self) -> None:
        """Begin to open the engine.  If this raises, or Ctrl-C does, call `end_soon`."""
        _runs.add(self)
        if is_exiting():
            raise RuntimeError("an engine cannot be opened while the interpreter exits")
        self._thread.start()

    def submit(self, call: EngineCall[T]) -> None:
        """Have a call served.  One that comes too late is answered at once.

        Raises:
            RuntimeError: this is the run's own thread, which would wait for itself.
        """
        self.check_thread()
        if not self.is_ending and self.soon(self._serve, cast("EngineCall[object]", call)):
            call._is_submitted = True
            return
        if self.is_lost:
            call.drop_wakers()
        elif not self.is_ending:
            self.join()  # it is dying: only then is it known of what
        call.fail(self._why_closed())

    def check_thread(self) -> None:
        """Raise `RuntimeError` in the run's own thread, which would wait for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("an engine was called from its own background thread")

    def soon(self, function: Callable[[*Ts], object], *args: *Ts) -> bool:
        """Have a function called in the Trio run.  False if the run is over, or not begun."""
        token = self._token
        if token is not None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(function, *args)
                return True
        return False

    def end_soon(self) -> None:
        """Take no call any more, fail those under way, close the engine.  Waits for nothing."""
        self.is_ending = True
        self.soon(self._end)
        if not self._has_begun:  # maybe it never will; if it does, it ends at once
            _runs.discard(self)
            self.ended.give(None)

    def join(self) -> None:
        """Wait for the thread's end, if it has begun."""
        if self._has_begun:
            self._thread.join()

    # -- in the background thread -------------------------------------------------------------

    def _run(self) -> None:
        self._has_begun = True
        try:
            trio.run(self._main)
        except BaseException as error:  # goes to whoever opens, calls or closes
            self._crash = error
        self.opened.fail(self._crash or EngineClosed())  # unless it was
        for call in self._calls:
            call.fail(self._why_closed())
        if self._crash is not None:
            self.ended.fail(self._crash)
        else:
            self.ended.give(None)
        _runs.discard(self)  # last, or a child forked meanwhile would wait for all this

    async def _main(self) -> None:
        with self._scope:
            self._token = trio.lowlevel.current_trio_token()
            if self.is_ending:
                self._scope.cancel()
            async with self._opener() as engine, open_plain_nursery() as nursery:
                self._nursery = nursery
                self.opened.give(engine)
                try:
                    await trio.sleep_forever()
                finally:
                    self._nursery = None

    def _end(self) -> None:
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()
        elif not self.opened.is_here:
            self._scope.cancel()

    def _serve(self, call: EngineCall[object]) -> None:
        if call in self._calls or call.is_here:
            return  # submitted again, by a caller that was interrupted in between
        self._calls.add(call)
        if self._nursery is not None:
            self._nursery.start_soon(self._answer, call)
        else:
            self._give_up(call)

    async def _answer(self, call: EngineCall[object]) -> None:
        try:
            await call.serve(self.opened.get())
        finally:
            self._give_up(call)

    def _give_up(self, call: EngineCall[object]) -> None:
        if self.is_ending:
            call.fail(EngineClosed())
        if call.is_here:
            self._calls.discard(call)
        # Else the engine has crashed, and the end of the run will tell of what.

    def _why_closed(self) -> LlamadError:
        if isinstance(self._crash, LlamadError):
            return copy.copy(self._crash)
        error = EngineClosed()
        error.__cause__ = self._crash
        return error

    def forget(self) -> None:
        """In a forked child, which has no such thread."""
        self.is_ending = self.is_lost = True
        self._token = None
        self.ended.drop_wakers()
        self.ended.give(None)


class _Handle:
    """What ends something when nobody has it any more: a second one would do so, too."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled")


class EngineHandle(_Handle):
    """What engines outside of their Trio run have in common."""

    def __init__(self, run: BackgroundRun) -> None:
        self._run = run
        self._engine = run.opened.get()

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: not when it is closed, nor after it broke down."""
        return not self._run.is_ending and self._engine.is_open

    @property
    def info(self) -> ModelInfo:
        """What is known of the model."""
        return self._engine.info

    @property
    def config(self) -> EngineConfig:
        """The settings in force: clamped, and completed from the model and the machine."""
        return self._engine.config

    def __del__(self) -> None:
        with suppress(AttributeError):  # Ctrl-C came before it had one
            if not self._run.is_ending:
                self._run.end_soon()
                warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)


class StreamHandle(_Handle, Generic[PartT]):
    """What streams outside of the Trio run have in common.

    The engine is kept, or it would close itself while the stream is read.
    """

    def __init__(self, engine: EngineHandle, call: StreamCall[PartT]) -> None:
        self._engine = engine
        self._call = call

    @property
    def completion(self) -> Completion | None:
        """The `Completion`, once the request is complete."""
        return self._call.value

    def __del__(self) -> None:
        with suppress(AttributeError):  # Ctrl-C came before it had one
            self._call.cancel()


async def stats_or_error(engine: EngineLike) -> EngineStats | LlamadError:
    """The engine's statistics; or, if it has none, why: raised, that would say the run is over.

    A checkpoint.
    """
    await refresh_if_possible(engine)
    try:
        return engine.stats()
    except LlamadError as error:
        return error


def is_exiting() -> bool:
    """Whether the interpreter is on its way out."""
    return _is_exiting


def _another(error: BaseException) -> BaseException:
    """The same error once more: a copy, if it is known that this says the same."""
    if not isinstance(error, LlamadError):
        return error
    twin = copy.copy(error)
    twin.__cause__, twin.__context__ = error.__cause__, error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    return twin


def _seconds(timeout: object) -> float:
    seconds = number(nan, 0.0, sys.float_info.max)(timeout, "timeout")
    if isnan(seconds):
        raise ProtocolError("timeout must be a number, not NaN")
    return seconds


_runs: set[BackgroundRun] = set()
_is_exiting = False


def _end_all() -> None:
    global _is_exiting
    _is_exiting = True
    for run in list(_runs):
        run.end_soon()


def _forget_all() -> None:
    for run in list(_runs):
        run.forget()
    _runs.clear()


# At exit the interpreter first calls what is registered so, last come first served, then joins
# the threads that are no daemons, ours among them, and only then calls what `atexit` knows:
# that would be too late for a thread that waits for an answer of ours.  `concurrent.futures`
# registers in the same way that it joins its workers, who may wait for us, too; it is imported
# above, so that ours comes before.  The name is private, but has been there, and used by the
# standard library, since 3.9.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
os.register_at_fork(after_in_child=_forget_all)
