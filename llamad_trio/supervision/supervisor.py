"""The supervisor of one model: opens its engine, opens it again when it fails, closes it.

Decides when an engine is there and who waits for it; what an engine is, it does not know.
"""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from typing import TYPE_CHECKING, Literal

import attrs
import trio

from llamad_trio.core.engine_events import EngineFailed, EngineRestarted
from llamad_trio.core.engine_spec import EngineSpec
from llamad_trio.core.errors import EngineClosed, InferenceError, LlamadError, RestartsExhausted
from llamad_trio.core.restarts import RestartBook, RestartPolicy
from llamad_trio.system.nursery import new_scope
from llamad_trio.watch.broadcast import Broadcast

if TYPE_CHECKING:
    from llamad_trio.engine.engine_like import EngineLike

logger = logging.getLogger("llamad_trio")

ModelState = Literal["unloaded", "loading", "ready", "backing off", "failed"]
"""`unloaded`: will be loaded when it is asked.  `failed`: could not be loaded; is not tried
again before it is told to."""


@attrs.define(eq=False)
class Supervisor:
    """One model of several.

    `reserve` is entered before it is loaded, and left when it is given up: what it holds is
    kept while the engine is opened again and again.
    """

    name: str
    spec: EngineSpec
    _reserve: Callable[[], AbstractAsyncContextManager[None]]
    _open_engine: Callable[[], AbstractAsyncContextManager[EngineLike]]
    _policy: RestartPolicy
    broadcast: Broadcast

    state: ModelState = attrs.field(default="unloaded", init=False)
    _book: RestartBook = attrs.field(init=False)
    _engine: EngineLike | None = attrs.field(default=None, init=False)
    _error: LlamadError | None = attrs.field(default=None, init=False)  # why it failed to load
    _end: LlamadError | None = attrs.field(default=None, init=False)  # why nobody supervises it
    _is_wanted: bool = attrs.field(init=False)
    # Again, when that failed before: those that are lazy, or were ready at some time.
    _loads_on_request: bool = attrs.field(init=False)
    _ended: trio.Event = attrs.field(factory=trio.Event, init=False)  # of this life, or the last
    _changed: trio.Event = attrs.field(factory=trio.Event, init=False)
    _n_uses: int = attrs.field(default=0, init=False)
    # From the load to the end of the engine; and while it is ready, with the deadline
    # that idleness sets.
    _life: trio.CancelScope = attrs.field(factory=new_scope, init=False)
    _ready: trio.CancelScope = attrs.field(factory=new_scope, init=False)

    def __attrs_post_init__(self) -> None:
        self._book = RestartBook(self._policy, random.random)
        self._is_wanted = self.spec.load == "eager"
        self._loads_on_request = self.spec.load == "lazy"
        self._ended.set()

    # -- for those who use it ----------------------------------------------------------------

    @property
    def engine(self) -> EngineLike:
        """The engine, if it is ready.

        Raises:
            EngineClosed: it is not.
            RestartsExhausted: it was given up.
            LlamadError: it could not be loaded.
        """
        if (reason := self._end or self._error) is not None:
            raise copy.copy(reason)
        if self._engine is None:
            raise EngineClosed
        return self._engine

    @property
    def is_ready(self) -> bool:
        """Whether requests can be made: no longer when it is about to close, or broke down."""
        return self._engine is not None and self._engine.is_open and not self._ready.cancel_called

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[EngineLike]:
        """The engine inside the block, waited for if need be.  A checkpoint where it waits.

        Raises:
            LlamadError: it could not be loaded.
            EngineClosed: the model was removed.
            RestartsExhausted: it was given up; told to those whom that does not cancel.
        """
        if self._loads_on_request and self._ended.is_set():
            self._error = None
        with self._count_use():
            await self.wait_ready(want=True)
            yield self.engine

    async def wait_ready(self, *, want: bool) -> None:
        """Wait until the engine is ready; `want` has it loaded if it is not.

        A checkpoint where it waits.  Raises as `in_use`.
        """
        with self._count_use():
            while not self.is_ready:
                if self._end is not None:
                    # What ended it may end the block of models: who is in there is cancelled
                    # now, so that the block ends with the cause and not with this.
                    await trio.lowlevel.checkpoint()
                if (reason := self._end or self._error) is not None:
                    raise copy.copy(reason)
                if want and not self._is_wanted:
                    self._is_wanted = True
                    self._notify()
                await self._changed.wait()

    async def load(self) -> None:
        """Have it loaded, also if that failed before, and wait.  Raises as `in_use`."""
        self._error = None
        await self.wait_ready(want=True)

    async def unload(self) -> None:
        """Close the engine, or stop its load, and wait until that is done.

        Requests that are under way get `EngineClosed`; the next one has it loaded again.
        """
        self._is_wanted = False
        self._notify()  # whoever waits for the load wants it again
        self._life.cancel()
        await self._ended.wait()

    # -- the actor --------------------------------------------------------------------------

    async def run(self) -> None:
        """Supervise until cancelled.

        Raises:
            RestartsExhausted: it failed more often than its policy allows.
        """
        try:
            while True:
                while not self._is_wanted:
                    await self._changed.wait()
                self._ended = trio.Event()
                with new_scope() as self._life:
                    await self._live()
                self._is_wanted = False
                self._ended.set()
                self._become("unloaded" if self._error is None else "failed")
                logger.info("%s is closed", self.name)
        except RestartsExhausted as error:
            self._end = error
            raise
        finally:
            self._end = self._end or EngineClosed()
            self._ended.set()
            self._become("unloaded")

    async def _live(self) -> None:
        """One life, its restarts included: until it is idle, unloaded or cannot be loaded."""
        self._become("loading")
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._reserve())
            except LlamadError as error:
                self._tell_failed(error)
                self._refuse(error)
            else:
                await self._open_and_reopen()

    async def _open_and_reopen(self) -> None:
        failed_at: float | None = None
        was_ready = False
        while True:
            self._become("loading")
            try:
                async with self._open_engine() as engine:
                    was_ready = self._loads_on_request = True
                    if failed_at is not None:
                        self._tell_restarted(failed_at)
                    await self._serve(engine)
            except Exception as error:
                self._tell_failed(error)
                if not was_ready:
                    self._refuse(error)
                    return
                failed_at = trio.current_time()
                delay_s = self._book.note_failure(failed_at, error)
                if delay_s is None:
                    raise RestartsExhausted(self.name, self._book.failures) from error
                logger.warning("%s failed: %s; again in %.1f s", self.name, error, delay_s)
            else:
                return
            self._become("backing off")
            await trio.sleep(delay_s)

    def _refuse(self, error: Exception) -> None:
        """It could not be loaded: that is what those are told who ask for it."""
        if not isinstance(error, LlamadError):
            raise error
        logger.warning("%s cannot be loaded: %s", self.name, error)
        self._error = error

    def _tell_failed(self, error: Exception) -> None:
        if not self.broadcast.has_readers:
            return
        # A copy: readers are not to keep the traceback alive.
        known = copy.copy(error) if isinstance(error, LlamadError) else InferenceError(repr(error))
        now = trio.current_time()
        self.broadcast.publish(EngineFailed(time=now, engine=self.name, error=known))

    def _tell_restarted(self, failed_at: float) -> None:
        if not self.broadcast.has_readers:
            return
        now, attempt = trio.current_time(), len(self._book.failures)
        self.broadcast.publish(
            EngineRestarted(time=now, engine=self.name, attempt=attempt, after_s=now - failed_at)
        )

    async def _serve(self, engine: EngineLike) -> None:
        with new_scope() as self._ready:
            self._engine = engine
            self._set_deadline()
            logger.info("%s is ready", self.name)
            self._become("ready")
            try:
                await trio.sleep_forever()
            finally:
                self._engine = None
                # One that broke is shut before this ends; one that is closed, afterwards.
                self._become("unloaded" if engine.is_open else "backing off")

    @contextmanager
    def _count_use(self) -> Iterator[None]:
        """Inside the block it is not idle: whoever waits for it uses it already."""
        self._n_uses += 1
        self._set_deadline()
        try:
            yield
        finally:
            self._n_uses -= 1
            self._set_deadline()

    def _set_deadline(self) -> None:
        most_s = math.inf if self.spec.unload_after_s is None else self.spec.unload_after_s
        self._ready.deadline = math.inf if self._n_uses else trio.current_time() + most_s

    def _become(self, state: ModelState) -> None:
        self.state = state
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
