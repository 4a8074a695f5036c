"""The engine for code without an event loop: calls that block, from any number of threads.

    with blocking.open_engine("model.gguf") as eng:
        print(eng.complete("Tell me a joke").text)
        with eng.stream("Count to ten") as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)

Decides how a thread waits, and what Ctrl-C and a timeout do to it.  What is computed, and how,
is the engine's affair, which runs in a background thread: see `background_run`.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, Unpack, overload

from llamad_trio.background_run import (
    Answer,
    BackgroundRun,
    EngineCall,
    EngineHandle,
    Opener,
    StreamCall,
    StreamHandle,
    is_exiting,
    stats_or_error,
)
from llamad_trio.core.completion import Choice, Completion, StreamEvent
from llamad_trio.core.config import ConfigFields, EngineConfig
from llamad_trio.core.errors import EngineClosed, LlamadError
from llamad_trio.core.info import EngineStats
from llamad_trio.core.request import Request, RequestFields
from llamad_trio.engine.engine_like import EngineLike
from llamad_trio.opening import open_engine as open_in_trio
from llamad_trio.remote.remote import connect as connect_in_trio
from llamad_trio.typed.asking import as_request

__all__ = [
    "BlockingEngine",
    "BlockingStream",
    "BlockingTextStream",
    "connect",
    "open_engine",
    "open_with",
]

T = TypeVar("T")
PartT = TypeVar("PartT")


def open_engine(
    model: str | PathLike[str],
    config: EngineConfig | None = None,
    *,
    isolation: Literal["process"] | None = None,
    on_load: Callable[[float], object] | None = None,
    **overrides: Unpack[ConfigFields],
) -> BlockingEngine:
    """Load a model, and run its engine in a background thread until it is closed.

    Arguments and errors are those of `llamad_trio.open_engine`; `on_load` is called in the
    background thread, and a `Lane` in `config` must be this engine's alone.

    Ctrl-C stops the load.
    """
    return open_with(
        partial(open_in_trio, model, config, isolation=isolation, on_load=on_load, **overrides)
    )


def connect(path: str | PathLike[str], *, model: str | None = None) -> BlockingEngine:
    """Use a daemon's engine until it is closed.  Arguments and errors as
    `llamad_trio.connect`."""
    return open_with(partial(connect_in_trio, path, model=model))


def open_with(opener: Opener) -> BlockingEngine:
    """Run any engine in a background thread until it is closed.

    Args:
        opener: makes the async context manager that gives the engine; it is called, entered
            and left in a Trio run in that thread.

    Raises what entering it raises.
    """
    run = BackgroundRun(opener)
    try:
        run.start()
        _wait(run.opened, lambda: run.opened.is_here)
        return BlockingEngine(run)
    except BaseException:
        run.end_soon()
        run.join()
        raise


class BlockingEngine(EngineHandle):
    """One engine, for any number of threads.  Made by `open_engine` and its kin.

    A context manager that closes itself.  Methods are as `Engine` describes them and raise
    what `Engine`'s do, except that they block the calling thread, and may be given a `timeout`
    in seconds: then the request is cancelled and `TimeoutError` raised, as it is for a negative
    one.  Ctrl-C, or whatever else a signal handler raises, cancels it, too, and no other with it.
    """

    # -- requests ---------------------------------------------------------------------------

    @overload
    def complete(
        self,
        request: Request | str,
        *,
        into: type[T],
        describe: bool = False,
        timeout: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> Completion[T]: ...

    @overload
    def complete(
        self,
        request: Request | str,
        *,
        into: object = None,
        describe: bool = False,
        timeout: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> Completion: ...

    def complete(
        self,
        request: Request | str,
        *,
        into: Any = None,
        describe: bool = False,
        timeout: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> Completion[Any]:
        """Compute a whole completion."""
        return self._ask(
            lambda engine: engine.complete(request, into=into, describe=describe, **fields), timeout
        )

    def complete_text(
        self,
        request: Request | str,
        *,
        timeout: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> str:
        """`complete`, but only its text."""
        return self._ask(lambda engine: engine.complete_text(request, **fields), timeout)

    def stream(
        self,
        request: Request | str,
        *,
        timeout: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> BlockingTextStream:
        """Compute a completion and receive its text as it comes.

        Nothing is submitted before the stream is entered or first read.  The timeout is for
        the whole of the request, its reader's delays included.
        """
        asked = as_request(request, fields)
        return BlockingTextStream(
            self, StreamCall(self._run, lambda engine: engine.stream(asked), timeout)
        )

    def stream_events(
        self,
        request: Request | str,
        *,
        timeout: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> BlockingStream[StreamEvent]:
        """As `stream`, with reasoning and tool calls: typed events, the last one `Done`."""
        asked = as_request(request, fields)
        return BlockingStream(
            self, StreamCall(self._run, lambda engine: engine.stream_events(asked), timeout)
        )

    def score(
        self,
        request: Request | str,
        continuations: Sequence[str],
        *,
        timeout: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> list[float]:
        """How likely each of several texts is to follow the prompt."""
        return self._ask(lambda engine: engine.score(request, continuations, **fields), timeout)

    def choose(
        self,
        request: Request | str,
        options: Sequence[str],
        *,
        timeout: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> Choice:
        """Which of several texts is likeliest to follow the prompt."""
        return self._ask(lambda engine: engine.choose(request, options, **fields), timeout)

    # -- text and tokens --------------------------------------------------------------------

    def render(
        self,
        request: Request | str,
        *,
        timeout: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> str:
        """The prompt text a request comes to, its chat template applied."""
        return self._ask(lambda engine: engine.render(request, **fields), timeout)

    def count_tokens(
        self,
        request: Request | str,
        *,
        timeout: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> int:
        """Length of the prompt a request comes to, in tokens."""
        return self._ask(lambda engine: engine.count_tokens(request, **fields), timeout)

    def tokenize(
        self, text: str, *, special: bool = False, timeout: float | None = None
    ) -> list[int]:
        """Text to token ids, without BOS or EOS."""
        return self._ask(lambda engine: engine.tokenize(text, special=special), timeout)

    def detokenize(self, tokens: Sequence[int], *, timeout: float | None = None) -> str:
        """Token ids to text, control tokens written out."""
        return self._ask(lambda engine: engine.detokenize(tokens), timeout)

    # -- looking around ---------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of slots, queue, pool and counts; of a closed engine, the last one.

        An engine in another process is asked for it, and if it does not answer within a second,
        it is what it told last.

        Raises:
            EngineClosed: there is none: the model is not loaded.
            LlamadError: nor could it be.
        """
        try:
            stats = self._ask(stats_or_error)
        except LlamadError:
            self._run.join()  # now nobody writes what is read here
            return self._engine.stats()
        if isinstance(stats, LlamadError):
            raise stats
        return stats

    # -- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Stop what is running, free everything, and wait until that is done.

        Waits for at most one graph node of the model.  From any thread but the engine's own,
        any number of times.  Calls under way in other threads, and all later ones, raise
        `EngineClosed`.

        Raises:
            RuntimeError: this is the engine's background thread, as in a validator of a type
                given as `into`.  The engine stays open.
        """
        self._run.check_thread()
        self._run.end_soon()
        self._run.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
        if error is None:
            self._run.ended.get()  # the engine's own death comes out of its block

    def _ask(self, work: Callable[[EngineLike], Awaitable[T]], timeout: float | None = None) -> T:
        call = EngineCall(self._run, work, timeout)
        _submit_and_wait(self._run, call, lambda: call.is_here)
        return _result_or_exit(call)


class BlockingStream(StreamHandle[PartT], Generic[PartT]):
    """The parts of one reply, as they come: an iterator and a context manager.

    For one reader at a time.  Leaving its block or closing it cancels the request, if it is
    not complete, and so does losing the last reference to it.  A reader that falls behind
    pauses its own slot and no other.
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PartT:
        """Wait for the next part.

        Raises:
            StopIteration: the request is complete and everything was received.
            LlamadError: the request failed.
            TimeoutError: it took longer than it was given.
            ValueError: the stream was closed.
        """
        call = self._call
        if not call.has_news:
            _submit_and_wait(self._engine._run, call, lambda: call.has_news)
        try:
            return call.take()
        except IndexError:
            pass
        _result_or_exit(call)
        raise StopIteration

    def result(self) -> Completion:
        """Receive the rest and return the `Completion`.  Raises as reading does."""
        if not self._call.is_here or self._call.value is None:
            for _ in self:
                pass
        return _result_or_exit(self._call)

    def close(self) -> None:
        """Stop reading; a request that is still running is cancelled.

        From any thread but the engine's own: there, it is a `RuntimeError`.
        """
        self._engine._run.check_thread()
        _stop(self._call)
        self._call.drop_parts()

    def __enter__(self) -> Self:
        if not self._call.is_submitted:
            self._engine._run.submit(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BlockingTextStream(BlockingStream[str]):
    """The text of one request, piece by piece.

    A piece is the text of one or more tokens: whole characters, never empty, nothing of a
    stop sequence, of reasoning or of a tool call.
    """

    def __init__(self, engine: BlockingEngine, call: StreamCall[str]) -> None:
        super().__init__(engine, call)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything received so far."""
        return "".join(self._pieces)

    def __next__(self) -> str:
        piece = super().__next__()
        self._pieces.append(piece)
        return piece


def _submit_and_wait(run: BackgroundRun, call: EngineCall[T], ready: Callable[[], bool]) -> None:
    """Submit a call, if that was not done, and wait; whatever interrupts it cancels the call."""
    run.check_thread()
    try:
        if not call.is_submitted and not call.is_here:
            run.submit(call)
        _wait(call, ready)
    except BaseException:
        _stop(call)
        raise


def _stop(call: EngineCall[T]) -> None:
    """Cancel a call, and wait until it is out of the engine."""
    call.cancel()
    if call.is_submitted:
        _wait(call, lambda: call.is_here)


def _wait(answer: Answer[T], ready: Callable[[], bool]) -> None:
    """Sleep until `ready`, which `answer` has news of."""
    while not ready():
        # Of all ways to wait for another thread, the cheapest one that a signal interrupts.
        gate = threading.Lock()
        gate.acquire()
        answer.on_news(gate.release)
        if not ready():
            gate.acquire()


def _result_or_exit(call: EngineCall[T]) -> T:
    try:
        return call.get()
    except EngineClosed:
        # The interpreter ends daemon threads without a word, and is about to.
        if is_exiting() and threading.current_thread().daemon:
            raise SystemExit from None
        raise
