"""What only code without an event loop has: timeouts, Ctrl-C in any line, threads that are left,
and forks."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from functools import partial
from math import inf, nan
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from llamad_trio import EngineClosed, ProtocolError, blocking
from tests.facades import ENDLESS, THREAD_STARTS, engine_threads, scripted, telling
from tests.facades.test_both import check_fails_alike, in_threads
from tests.serving.support import wait_for
from tests.support import ONE_THREAD

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llamad_trio.blocking import BlockingEngine
    from tests.facades import RunScript


def test_a_timeout_cancels_its_own_request_only() -> None:
    with blocking.open_with(scripted(decode_s=0.001)) as eng, eng.stream(ENDLESS) as other:
        next(other)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"0\.1 s"):
            eng.complete(ENDLESS, timeout=0.1)
        pieces = eng.stream(ENDLESS, timeout=0.5)
        check_fails_alike(pieces, TimeoutError)
        assert time.monotonic() - began >= 0.6
        assert pieces.text
        assert eng.stats().requests == {"completed": 0, "failed": 0, "cancelled": 2}
        assert next(other)
        assert eng.complete_text("the cat", timeout=60) == "42"


TIMED: dict[str, Callable[[BlockingEngine, Any], object]] = {
    "complete": lambda eng, timeout: eng.complete("the cat", timeout=timeout),
    "complete_text": lambda eng, timeout: eng.complete_text("the cat", timeout=timeout),
    "stream": lambda eng, timeout: eng.stream("the cat", timeout=timeout).result(),
    "stream_events": lambda eng, timeout: eng.stream_events("the cat", timeout=timeout).result(),
    "score": lambda eng, timeout: eng.score("the cat", ["a"], timeout=timeout),
    "choose": lambda eng, timeout: eng.choose("the cat", ["a", "b"], timeout=timeout),
    "render": lambda eng, timeout: eng.render("the cat", timeout=timeout),
    "count_tokens": lambda eng, timeout: eng.count_tokens("the cat", timeout=timeout),
    "tokenize": lambda eng, timeout: eng.tokenize("the cat", timeout=timeout),
    "detokenize": lambda eng, timeout: eng.detokenize([1, 2], timeout=timeout),
}


def test_a_timeout_that_has_passed_already_is_a_timeout() -> None:
    with blocking.open_with(scripted()) as eng:
        for ask in TIMED.values():
            for timeout in (0, -0.001, -inf):
                with pytest.raises(TimeoutError, match="not complete after 0 s"):
                    ask(eng, timeout)


def test_a_timeout_that_is_no_number_is_refused_before_anything_is_submitted() -> None:
    with blocking.open_with(scripted()) as eng:
        for ask in TIMED.values():
            for timeout in (nan, "3", True, [1]):
                with pytest.raises(ProtocolError, match="timeout must be a number"):
                    ask(eng, timeout)
        with pytest.raises(ProtocolError, match="timeout must be a number"):
            eng.stream("the cat", timeout=nan)  # not only when it is read
        assert sum(eng.stats().requests.values()) == 0
        for unlimited in (None, inf, 10**400):
            assert eng.complete_text("the cat", timeout=unlimited) == "42"


def test_ctrl_c_cancels_the_callers_request_and_no_other(run_script: RunScript) -> None:
    script = """
    most = dict(max_tokens=1_000_000)
    def complete():
        eng.complete("endless", **most)
    def read():
        eng.stream("endless", **most).result()
    def loop():
        for piece in eng.stream("endless", **most): pass
    other = []
    def read_beside():
        for piece in eng.stream("endless", **most):
            other.append(piece)
            if len(other) >= 200 and is_done.is_set():
                return
    def interrupt():
        wait_for(lambda: eng.stats().slots["free"] == 2)
        os.kill(os.getpid(), signal.SIGINT)
    with blocking.open_with(scripted()) as eng:
        is_done = threading.Event()
        beside = threading.Thread(target=read_beside)
        beside.start()
        for use in complete, read, loop:
            wait_for(lambda: eng.stats().slots["free"] == 3)
            interrupter = threading.Thread(target=interrupt)
            interrupter.start()
            try:
                use()
            except KeyboardInterrupt:
                interrupter.join()
                print("interrupted", eng.stats().requests["cancelled"])
        is_done.set()
        beside.join()
        print(eng.complete_text("the cat"))
        wait_for(lambda: eng.stats().slots["free"] == 4)
    print(threading.active_count())
    """
    status, lines, errors = run_script(script)
    assert (status, errors) == (0, "")
    assert lines == ["interrupted 1", "interrupted 2", "interrupted 3", "42", "1"]


def test_ctrl_c_ends_a_program_that_computes(run_script: RunScript, tiny_path: Path) -> None:
    script = """
    with blocking.open_engine(sys.argv[1], n_threads=1, n_threads_batch=1, n_ctx=65536) as eng:
        threading.Timer(0.3, lambda: (print("exits"), os.kill(os.getpid(), signal.SIGINT))).start()
        eng.complete("the cat", max_tokens=1_000_000)
    """
    status, _, errors = run_script(script, str(tiny_path))
    assert status in (-2, 130)  # as a program ends that does not catch it
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_stops_a_load(run_script: RunScript) -> None:
    script = """
    from contextlib import asynccontextmanager
    import trio
    @asynccontextmanager
    async def never():
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await trio.sleep_forever()
        finally:
            print("stopped")
        yield
    try:
        blocking.open_with(never)
    except KeyboardInterrupt:
        print("interrupted", [t.name for t in threading.enumerate() if "llamad" in t.name])
    """
    assert run_script(script) == (0, ["stopped", "interrupted []"], "")


@pytest.mark.parametrize("start", THREAD_STARTS.values(), ids=THREAD_STARTS)
def test_a_thread_that_does_not_start_properly_leaves_no_engine_behind(start: Any) -> None:
    with pytest.raises((KeyboardInterrupt, RuntimeError), match=r"^$|no more threads"), start():
        blocking.open_with(scripted())
    wait_for(lambda: engine_threads() == [])
    with blocking.open_with(scripted()) as eng:
        assert eng.complete_text("the cat") == "42"


def test_it_can_be_called_inside_other_event_loops() -> None:
    def use() -> str:
        with blocking.open_with(scripted()) as eng:
            return eng.complete_text("the cat") + "".join(eng.stream("the cat"))

    async def in_task() -> str:
        return use()

    assert trio.run(in_task) == asyncio.run(in_task()) == "4242"


def test_the_background_thread_cannot_wait_for_itself() -> None:
    tokens: list[trio.lowlevel.TrioToken] = []
    with blocking.open_with(telling(tokens)) as eng:
        with eng.stream("the cat") as pieces:
            for call in (eng.stats, partial(eng.complete, "the cat"), eng.close, pieces.close):
                with pytest.raises(RuntimeError, match="its own background thread"):
                    trio.from_thread.run_sync(call, trio_token=tokens[0])
            assert pieces.result().text == "42"
        with eng.stream(ENDLESS) as pieces:
            # More than can wait for a reader: at some time it has to wait itself.
            with pytest.raises(RuntimeError, match="its own background thread"):
                trio.from_thread.run_sync(list, pieces, trio_token=tokens[0])
            assert next(pieces)
        assert eng.complete_text("the cat") == "42"


def test_a_validator_cannot_close_the_engine_that_waits_for_it() -> None:
    def close(_self: object, _field: object, _value: bool) -> None:
        with pytest.raises(RuntimeError, match="its own background thread"):
            eng.close()

    @attrs.frozen
    class Closing:
        answer: bool = attrs.field(validator=close)

    with blocking.open_with(scripted('{"answer": true}')) as eng:
        assert isinstance(eng.complete("the cat", into=Closing).value, Closing)
        assert eng.is_open


# -- the end --------------------------------------------------------------------------------


def test_any_number_of_threads_can_close_an_engine(tiny_path: Path) -> None:
    eng = blocking.open_engine(tiny_path, ONE_THREAD, n_ctx=65536)

    def use(n: int) -> object:
        if n == 0:
            return eng.complete("the cat", max_tokens=1_000_000)
        wait_for(lambda: not eng.is_open or eng.stats().slots["free"] < 4)
        eng.close()
        return None

    ended, *closed = in_threads(4, use)
    assert isinstance(ended, EngineClosed)
    assert closed == [None] * 3
    eng.close()


def test_an_engine_that_nobody_has_any_more_closes_itself() -> None:
    eng = blocking.open_with(scripted())
    pieces = eng.stream("the cat")
    gone = weakref.ref(eng)
    del eng
    assert "".join(pieces) == "42"  # whoever reads has it
    with pytest.warns(ResourceWarning, match="unclosed"):  # noqa: PT031
        del pieces
        gc.collect()
    assert gone() is None
    wait_for(lambda: engine_threads() == [])


STREAM = """
pieces = eng.stream("endless", max_tokens=1_000_000)
next(pieces)
"""
LOOP = """
for piece in eng.stream("endless", max_tokens=1_000_000):
    print("exits")
    sys.exit()
"""
DAEMON_THREAD = """
threading.Thread(
    target=eng.complete, args=("endless",), kwargs={"max_tokens": 1_000_000}, daemon=True
).start()
wait_for(lambda: eng.stats().slots["free"] < 4)
"""
THREAD = """
def ask():
    try:
        eng.complete("endless", max_tokens=1_000_000)
    except EngineClosed as error:
        print(error)
    try:
        blocking.open_with(scripted())
    except RuntimeError as error:
        print(error)
threading.Thread(target=ask).start()
wait_for(lambda: eng.stats().slots["free"] < 4)
"""
POOL = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor()
pool.submit(eng.complete, "endless", max_tokens=1_000_000)
wait_for(lambda: eng.stats().slots["free"] < 4)
"""


@pytest.mark.parametrize(
    ("left", "says"),
    [
        ("", []),
        (STREAM, []),
        (LOOP, []),
        (DAEMON_THREAD, []),
        (
            THREAD,
            ["the engine is closed", "an engine cannot be opened while the interpreter exits"],
        ),
        (POOL, []),
    ],
    ids=["idle", "stream", "loop", "daemon thread", "thread", "pool"],
)
def test_the_interpreter_exits_with_an_engine_left_open(
    run_script: RunScript, left: str, says: list[str]
) -> None:
    script = f"eng = blocking.open_with(scripted())\n{left}\nprint('exits')"
    status, lines, errors = run_script(script)
    assert (status, errors) == (0, "")
    assert lines == ["exits", *says]


def test_the_interpreter_exits_with_a_model_that_computes(
    run_script: RunScript, tiny_path: Path
) -> None:
    opened = (
        "eng = blocking.open_engine(sys.argv[1], n_threads=1, n_threads_batch=1, n_ctx=65536)\n"
    )
    script = opened + STREAM + DAEMON_THREAD + "print('exits')"
    status, lines, errors = run_script(script, str(tiny_path))
    assert (status, lines, errors) == (0, ["exits"], "")


def test_a_forked_child_is_refused_instead_of_hanging(run_script: RunScript) -> None:
    script = """
    warnings.simplefilter("ignore", DeprecationWarning)
    with blocking.open_with(scripted()) as eng:
        pid = os.fork()
        try:
            print(eng.complete_text("the cat"))
        except EngineClosed:
            eng.close()
            print("closed")
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    status, lines, errors = run_script(script)
    assert (status, sorted(lines), errors) == (0, ["42", "7", "closed"], "")


def test_a_stream_begun_before_a_fork_hangs_nobody_in_the_child(run_script: RunScript) -> None:
    script = """
    def begun():
        pieces = eng.stream("endless", max_tokens=1_000_000)
        next(pieces)
        return pieces

    def left():
        with entered: pass

    with blocking.open_with(scripted()) as eng, eng.stream("endless", max_tokens=99) as entered:
        read, lost = begun(), [begun()]
        for use in (lambda: list(read), read.result, read.close, left, lost.clear, eng.stats):
            in_child(use)
        print(len(entered.result().text), next(read) != "", eng.complete_text("the cat"))
    """
    status, lines, errors = run_script(script)
    assert (status, errors) == (0, "")
    *children, parent = lines
    assert children == ["closed", "closed", "returns", "returns", "returns", "returns"]
    assert parent.endswith("True 42")


def test_a_child_can_have_an_engine_of_its_own(run_script: RunScript) -> None:
    script = """
    def open_another():
        with blocking.open_with(scripted()) as another:
            print(another.complete_text("the cat"))

    with blocking.open_with(scripted()) as eng:
        in_child(open_another)
    """
    assert run_script(script) == (0, ["42", "returns"], "")
