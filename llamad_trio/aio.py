"""The engine for asyncio: the same as for Trio, with `await` in the same places.

    async with aio.open_engine("model.gguf") as eng:
        print((await eng.complete("Tell me a joke")).text)
        with suppress(TimeoutError):
            async with asyncio.timeout(2), eng.stream("Count to a million") as pieces:
                async for piece in pieces:
                    print(piece, end="", flush=True)

Decides how an asyncio task waits, and what its cancellation does.  What is computed, and how,
is the engine's affair, which runs in a background thread: see `background_run`.

Trio could run as a guest of the asyncio loop instead, without a thread.  But a guest lives and
dies with its one loop: a loop that is closed leaves it hanging in the middle, with a thread
that computes; other loops cannot call it; it wants to handle Ctrl-C where asyncio does; and
each of its steps, several a token, waits for its turn in the loop.  Of a loop, what is here
needs `create_future` and `call_soon_threadsafe`, which every one has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from os import PathLike
from typing import Any, Generic, Literal, Self, TypeVar, Unpack, overload

from llamad_trio.background_run import (
    Answer,
    BackgroundRun,
    EngineCall,
    EngineHandle,
    Opener,
    StreamCall,
    StreamHandle,
    stats_or_error,
)
from llamad_trio.core.completion import Choice, Completion, StreamEvent
from llamad_trio.core.config import ConfigFields, EngineConfig
from llamad_trio.core.errors import LlamadError
from llamad_trio.core.info import EngineStats
from llamad_trio.core.request import Request, RequestFields
from llamad_trio.engine.engine_like import EngineLike
from llamad_trio.opening import open_engine as open_in_trio
from llamad_trio.remote.remote import connect as connect_in_trio
from llamad_trio.typed.asking import as_request

__all__ = ["AsyncEngine", "AsyncStream", "AsyncTextStream", "connect", "open_engine", "open_with"]

T = TypeVar("T")
PartT = TypeVar("PartT")


def open_engine(
    model: str | PathLike[str],
    config: EngineConfig | None = None,
    *,
    isolation: Literal["process"] | None = None,
    on_load: Callable[[float], object] | None = None,
    **overrides: Unpack[ConfigFields],
) -> AbstractAsyncContextManager[AsyncEngine]:
    """Load a model, and run its engine in a background thread inside the block.

    Arguments and errors are those of `llamad_trio.open_engine`; `on_load` is called in the
    background thread, and a `Lane` in `config` must be this engine's alone.

    Leaving the block stops what is running, waits for at most one graph node, and frees
    everything.  Cancelling the load stops it.
    """
    return open_with(
        partial(open_in_trio, model, config, isolation=isolation, on_load=on_load, **overrides)
    )


def connect(
    path: str | PathLike[str], *, model: str | None = None
) -> AbstractAsyncContextManager[AsyncEngine]:
    """Use a daemon's engine inside the block.  Arguments and errors as
    `llamad_trio.connect`."""
    return open_with(partial(connect_in_trio, path, model=model))


@asynccontextmanager
async def open_with(opener: Opener) -> AsyncIterator[AsyncEngine]:
    """Run any engine in a background thread inside the block.

    Args:
        opener: makes the async context manager that gives the engine; it is called, entered
            and left in a Trio run in that thread.

    Exceptions of the body come out as themselves; a crash of the engine comes out of a block
    that has none.  Cancelled while it waits for the engine's end, it leaves that to itself.

    Raises what entering it raises, and `RuntimeError` if no asyncio loop is running.
    """
    _loop()
    run = BackgroundRun(opener)
    try:
        run.start()
        await _wait(run.opened, lambda: run.opened.is_here, run.end_soon)
        engine = AsyncEngine(run)  # kept here: it closes itself when nobody has it
        yield engine
    except GeneratorExit:  # the task is thrown away, and has no loop to wait with
        run.end_soon()
        raise
    except BaseException:
        await _end(run)
        raise
    await _end(run)
    run.ended.get()


class AsyncEngine(EngineHandle):
    """One engine, for any number of tasks of any number of loops.  Made by `open_engine` and
    its kin.

    Methods are as `Engine` describes them and raise what `Engine`'s do.  Cancelling the task
    cancels the request, and no other, and waits until it is out of the engine, which takes no
    longer than the event loop of the background thread needs to come to it.
    """

    # -- requests ---------------------------------------------------------------------------

    @overload
    async def complete(
        self,
        request: Request | str,
        *,
        into: type[T],
        describe: bool = False,
        **fields: Unpack[RequestFields],
    ) -> Completion[T]: ...

    @overload
    async def complete(
        self,
        request: Request | str,
        *,
        into: object = None,
        describe: bool = False,
        **fields: Unpack[RequestFields],
    ) -> Completion: ...

    async def complete(
        self,
        request: Request | str,
        *,
        into: Any = None,
        describe: bool = False,
        **fields: Unpack[RequestFields],
    ) -> Completion[Any]:
        """Compute a whole completion."""
        return await self._ask(
            lambda engine: engine.complete(request, into=into, describe=describe, **fields)
        )

    async def complete_text(self, request: Request | str, **fields: Unpack[RequestFields]) -> str:
        """`complete`, but only its text."""
        return await self._ask(lambda engine: engine.complete_text(request, **fields))

    def stream(self, request: Request | str, **fields: Unpack[RequestFields]) -> AsyncTextStream:
        """Compute a completion and receive its text as it comes.

        Nothing is submitted before the stream is entered or first read.
        """
        asked = as_request(request, fields)
        return AsyncTextStream(self, StreamCall(self._run, lambda engine: engine.stream(asked)))

    def stream_events(
        self, request: Request | str, **fields: Unpack[RequestFields]
    ) -> AsyncStream[StreamEvent]:
        """As `stream`, with reasoning and tool calls: typed events, the last one `Done`."""
        asked = as_request(request, fields)
        return AsyncStream(self, StreamCall(self._run, lambda engine: engine.stream_events(asked)))

    async def score(
        self, request: Request | str, continuations: Sequence[str], **fields: Unpack[RequestFields]
    ) -> list[float]:
        """How likely each of several texts is to follow the prompt."""
        return await self._ask(lambda engine: engine.score(request, continuations, **fields))

    async def choose(
        self, request: Request | str, options: Sequence[str], **fields: Unpack[RequestFields]
    ) -> Choice:
        """Which of several texts is likeliest to follow the prompt."""
        return await self._ask(lambda engine: engine.choose(request, options, **fields))

    # -- text and tokens --------------------------------------------------------------------

    async def render(self, request: Request | str, **fields: Unpack[RequestFields]) -> str:
        """The prompt text a request comes to, its chat template applied."""
        return await self._ask(lambda engine: engine.render(request, **fields))

    async def count_tokens(self, request: Request | str, **fields: Unpack[RequestFields]) -> int:
        """Length of the prompt a request comes to, in tokens."""
        return await self._ask(lambda engine: engine.count_tokens(request, **fields))

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Text to token ids, without BOS or EOS."""
        return await self._ask(lambda engine: engine.tokenize(text, special=special))

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Token ids to text, control tokens written out."""
        return await self._ask(lambda engine: engine.detokenize(tokens))

    # -- looking around ---------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        """A snapshot of slots, queue, pool and counts; of a closed engine, the last one.

        An engine in another process is asked for it, and if it does not answer within a second,
        it is what it told last.

        Raises:
            EngineClosed: there is none: the model is not loaded.
            LlamadError: nor could it be.
        """
        try:
            stats = await self._ask(stats_or_error)
        except LlamadError:
            ended = self._run.ended
            await _wait(ended, lambda: ended.is_here, self._run.end_soon)
            return self._engine.stats()  # nobody writes any more what is read here
        if isinstance(stats, LlamadError):
            raise stats
        return stats

    async def _ask(self, work: Callable[[EngineLike], Awaitable[T]]) -> T:
        call = EngineCall(self._run, work)
        await _submit_and_wait(self._run, call, lambda: call.is_here)
        return call.get()


class AsyncStream(StreamHandle[PartT], Generic[PartT]):
    """The parts of one reply, as they come: an async iterator and an async context manager.

    For one reader at a time.  Leaving its block or closing it cancels the request, if it is
    not complete, and so does losing the last reference to it.  A reader that falls behind
    pauses its own slot and no other.
    """

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PartT:
        """Wait for the next part.  Cancelled, it cancels the request.

        Raises:
            StopAsyncIteration: the request is complete and everything was received.
            LlamadError: the request failed.
            ValueError: the stream was closed.
        """
        call = self._call
        if not call.has_news:
            await _submit_and_wait(self._engine._run, call, lambda: call.has_news)
        try:
            return call.take()
        except IndexError:
            pass
        call.get()
        raise StopAsyncIteration

    async def result(self) -> Completion:
        """Receive the rest and return the `Completion`.  Cancelled, it cancels the request.
        Raises as reading does."""
        if not self._call.is_here or self._call.value is None:
            async for _ in self:
                pass
        return self._call.get()

    async def aclose(self) -> None:
        """Stop reading; a request that is still running is cancelled."""
        self._engine._run.check_thread()
        await _stop(self._call)
        self._call.drop_parts()

    async def __aenter__(self) -> Self:
        if not self._call.is_submitted:
            self._engine._run.submit(self._call)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is GeneratorExit:  # the task is thrown away, and has no loop to wait with
            self._call.cancel()
        else:
            await self.aclose()


class AsyncTextStream(AsyncStream[str]):
    """The text of one request, piece by piece.

    A piece is the text of one or more tokens: whole characters, never empty, nothing of a
    stop sequence, of reasoning or of a tool call.
    """

    def __init__(self, engine: AsyncEngine, call: StreamCall[str]) -> None:
        super().__init__(engine, call)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything received so far."""
        return "".join(self._pieces)

    async def __anext__(self) -> str:
        piece = await super().__anext__()
        self._pieces.append(piece)
        return piece


async def _end(run: BackgroundRun) -> None:
    run.end_soon()
    await _wait(run.ended, lambda: run.ended.is_here, run.end_soon)
    run.join()  # it has said its last word


async def _submit_and_wait(
    run: BackgroundRun, call: EngineCall[T], ready: Callable[[], bool]
) -> None:
    """Submit a call, if that was not done, and wait; a cancel of the task cancels the call."""
    run.check_thread()
    try:
        if not call.is_submitted and not call.is_here:
            run.submit(call)
        await _wait(call, ready, call.cancel)
    except asyncio.CancelledError:
        await _stop(call)
        raise
    except BaseException:  # such as of a coroutine that is thrown away
        call.cancel()
        raise


async def _stop(call: EngineCall[T]) -> None:
    """Cancel a call, and wait until it is out of the engine."""
    call.cancel()
    if call.is_submitted:
        await _wait(call, lambda: call.is_here, call.cancel)


async def _wait(
    answer: Answer[T], ready: Callable[[], bool], give_up: Callable[[], object]
) -> None:
    """Sleep until `ready`, which `answer` has news of; `give_up` if the loop is closed by then."""
    loop = _loop()
    while not ready():
        woken = loop.create_future()
        answer.on_news(partial(_wake, loop, woken, give_up))
        if not ready():
            await woken


def _loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "no asyncio loop is running, and llamad_trio.aio is for asyncio; "
            "a Trio program uses llamad_trio.open_engine"
        ) from None


def _wake(
    loop: asyncio.AbstractEventLoop, woken: asyncio.Future[None], give_up: Callable[[], object]
) -> None:
    """In the background thread."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_Wake(woken, give_up))


class _Wake:
    """Wakes who waits for a future; or gives up, if the loop is closed before it does so."""

    _woken: asyncio.Future[None] | None = None

    def __init__(self, woken: asyncio.Future[None], give_up: Callable[[], object]) -> None:
        self._give_up = give_up
        self._woken = woken

    def __call__(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
        self._woken = None

    def __del__(self) -> None:
        if self._woken is not None:
            self._give_up()
