"""Sessions: what is computed when is up to the caller, and what they tell of it is true."""

from __future__ import annotations

import hashlib
import struct
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from llamad_trio import (
    ContextOverflow,
    EngineClosed,
    InferenceError,
    Message,
    PrefixStatus,
    ProtocolError,
    Request,
    SuffixStatus,
    UnsupportedFeature,
    open_engine,
)
from llamad_trio.llama.llama_runtime import LlamaRuntime
from llamad_trio.scheduling.plan import StepResult, StepStatus
from tests.models import DECODER_KINDS
from tests.support import EXACT, HeldSteps, before_steps, held_steps, until, until_idle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from llamad_trio import Engine, Session
    from llamad_trio.scheduling.plan import StepPlan
    from tests.models import Kind, TinyModels

# Longer than the sliding window.
PREFIX = "the cat and the rat ran in the rain,"
SUFFIX = "then they rested in a tent"

kinds = pytest.mark.parametrize("kind", DECODER_KINDS)


def opened(path: Path, n_ctx: int = 512, **settings: Any) -> AbstractAsyncContextManager[Engine]:
    return open_engine(path, EXACT, n_ctx=n_ctx, **settings)


@pytest.fixture
async def exact(tiny_path: Path) -> AsyncIterator[Engine]:
    async with opened(tiny_path) as engine:
        yield engine


@pytest.fixture
async def session(exact: Engine) -> AsyncIterator[Session]:
    async with exact.session() as session:
        yield session


def parts(error: ContextOverflow) -> tuple[str, int, int, int]:
    return error.stage, error.resident_tokens, error.additional_tokens, error.n_ctx


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def token_hash(tokens: Sequence[int]) -> str:
    return sha256(struct.pack(f"<{len(tokens)}i", *tokens))


async def tokens_of(engine: Engine, text: str) -> list[int]:
    """A text's tokens as a raw prompt: tiny models begin with BOS."""
    return [1, *await engine.tokenize(text, special=True)]


async def said(session: Session, n: int = 16) -> str:
    """What the session says, greedily."""
    async with session.decode(max_tokens=n, temperature=0) as tokens:
        return (await tokens.result()).text


async def cancel_in_a_step(
    monkeypatch: pytest.MonkeyPatch, prefill: Callable[[str], Awaitable[object]], text: str
) -> None:
    """Cancel it in the middle of its first step."""
    with held_steps(monkeypatch) as steps:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefill, text)
            await until(steps.begun.is_set)
            nursery.cancel_scope.cancel()
            steps.let_go()


async def raw(engine: Engine, text: str, n: int = 16) -> str:
    """What a plain request says."""
    return await engine.complete_text(text, raw=True, max_tokens=n, temperature=0)


async def cold(path: Path, text: str, n: int = 16) -> str:
    """What is said where nothing is reused."""
    async with opened(path, kv_cache=False) as engine:
        return await raw(engine, text, n)


# -- what statuses say ----------------------------------------------------------------------


async def test_a_prefix_is_told_of_exactly(exact: Engine, session: Session) -> None:
    n = len(await tokens_of(exact, PREFIX))
    common = {
        "resident": n,
        "available": 512 - n,
        "byte_hash": sha256(PREFIX.encode()),
        "token_hash": token_hash(await tokens_of(exact, PREFIX)),
        "manifest_digest": exact.info.identity,
    }
    status = await session.ensure_prefix(PREFIX)
    assert attrs.asdict(status) == {"reused": 0, "dropped": 0, "prefilled": n, **common}
    assert exact.stats().prefill_tokens == n
    again = await session.ensure_prefix(PREFIX)
    assert attrs.asdict(again) == {"reused": n, "dropped": 0, "prefilled": 0, **common}
    assert exact.stats().prefill_tokens == n


async def test_a_suffix_is_told_of_exactly(exact: Engine, session: Session) -> None:
    n_prefix = len(await tokens_of(exact, PREFIX))
    n = len(await tokens_of(exact, PREFIX + SUFFIX))
    await session.ensure_prefix(PREFIX)
    assert await session.prefill_suffix(SUFFIX) == SuffixStatus(
        suffix=n - n_prefix,
        prefix=n_prefix,
        resident=n,
        available=512 - n,
        manifest_digest=exact.info.identity,
    )
    assert exact.stats().prefill_tokens == n


async def test_another_prefix_keeps_what_begins_alike_and_drops_the_rest(
    exact: Engine, session: Session
) -> None:
    other = PREFIX + "and a hat"
    await session.ensure_prefix(PREFIX)
    n_prefix = len(await tokens_of(exact, PREFIX))
    n_whole = len(await tokens_of(exact, PREFIX + SUFFIX))
    await session.prefill_suffix(SUFFIX)
    status = await session.ensure_prefix(other)
    n_other = len(await tokens_of(exact, other))
    assert (status.reused, status.dropped) == (n_prefix, n_whole - n_prefix)
    assert (status.prefilled, status.resident) == (n_other - n_prefix, n_other)
    none = await session.ensure_prefix("")
    assert (none.reused, none.dropped, none.prefilled) == (1, n_other - 1, 0)  # BOS
    assert none.byte_hash == sha256(b"")


async def test_what_others_have_computed_is_reused(exact: Engine, session: Session) -> None:
    await raw(exact, PREFIX + SUFFIX, 1)
    before = exact.stats().prefill_tokens
    status = await session.ensure_prefix(PREFIX)
    assert (status.reused, status.prefilled) == (status.resident, 0)
    await session.prefill_suffix(SUFFIX)
    assert exact.stats().prefill_tokens == before


async def test_a_plain_request_reuses_what_a_session_has_computed(
    exact: Engine, session: Session
) -> None:
    status = await session.ensure_prefix(PREFIX)
    done = await exact.complete(PREFIX + SUFFIX, raw=True, max_tokens=1)
    assert done.cached_tokens == status.resident


@kinds
async def test_decoding_computes_one_token_of_the_prompt_and_no_more(
    tiny_model: TinyModels, kind: Kind
) -> None:
    async with opened(tiny_model(kind)) as engine, engine.session() as session:
        n_prefix = (await session.ensure_prefix(PREFIX)).resident
        for suffix in (SUFFIX, "and a hat", "or not"):
            before = engine.stats().prefill_tokens
            status = await session.prefill_suffix(suffix)
            assert engine.stats().prefill_tokens - before == status.resident - n_prefix
            for _ in range(3):
                async with session.decode(max_tokens=4) as tokens:
                    done = await tokens.result()
                assert done.prompt_tokens == status.prefix + status.suffix
                assert done.cached_tokens == done.prompt_tokens - 1
                assert done.generated_tokens == 4


# -- what explain says ----------------------------------------------------------------------


async def test_explain_covers_all_bytes_and_tokens_in_order(exact: Engine) -> None:
    text = PREFIX + SUFFIX
    tokens = await tokens_of(exact, text)
    async with exact.session() as session:
        empty = session.explain()
        assert (empty.state, empty.segments, empty.resident) == ("empty", (), 0)
        assert empty.manifest_digest == exact.info.identity
        status = await session.ensure_prefix(PREFIX)
        report = session.explain()
        assert (report.state, report.resident) == ("prefix", status.resident)
        assert [segment.kind for segment in report.segments] == ["prefix"]
        await session.prefill_suffix(SUFFIX)
        report = session.explain()
    assert (report.state, report.capacity) == ("suffix", 512)
    assert (report.resident, report.reused) == (len(tokens), status.resident)
    prefix, suffix = report.segments
    assert (prefix.kind, suffix.kind) == ("prefix", "suffix")
    assert (prefix.bytes, suffix.bytes) == ((0, len(PREFIX)), (len(PREFIX), len(text)))
    n = status.resident
    assert (prefix.tokens, suffix.tokens) == ((0, n), (n, len(tokens)))
    for segment in report.segments:
        assert segment.byte_hash == sha256(text.encode()[slice(*segment.bytes)])
        assert segment.token_hash == token_hash(tokens[slice(*segment.tokens)])


@pytest.mark.parametrize(("prefix", "suffix"), [("", SUFFIX), (PREFIX, ""), ("né", "é🙂")])
async def test_explain_leaves_no_gap_at_any_split(exact: Engine, prefix: str, suffix: str) -> None:
    async with exact.session() as session:
        await session.ensure_prefix(prefix)
        status = await session.prefill_suffix(suffix)
        report = session.explain()
    at = (0, 0)
    for segment in report.segments:
        assert (segment.bytes[0], segment.tokens[0]) == at
        at = (segment.bytes[1], segment.tokens[1])
    assert at == (len((prefix + suffix).encode()), status.resident)
    assert report.state == "suffix"


# -- where text meets text ------------------------------------------------------------------


async def test_a_split_inside_a_token_reads_as_the_whole(exact: Engine) -> None:
    whole = "a t" + "he cat"
    async with exact.session() as session:
        prefix = await session.ensure_prefix("a t")
        suffix = await session.prefill_suffix("he cat")
        assert suffix.prefix < prefix.resident  # " t" is "▁the" now
        assert suffix.resident == len(await tokens_of(exact, whole))
        text = await said(session)
        assert session.explain().segments[-1].bytes == (3, len(whole))
    assert text == await raw(exact, whole)


@pytest.mark.usefixtures("smollm2_is_kept")
async def test_without_a_bos_a_session_can_hold_nothing_and_all_of_a_prefix_can_be_read_anew(
    smollm2_path: Path,
) -> None:
    async with open_engine(smollm2_path, EXACT, n_ctx=256) as engine, engine.session() as session:
        with pytest.raises(ProtocolError):  # nothing to go on from
            await said(session)
        assert (await session.ensure_prefix("")).resident == 0
        assert session.explain().state == "empty"
        # Nothing at all of the prefix is left as a token: its bytes are told of all the same.
        await session.ensure_prefix("qui")
        status = await session.prefill_suffix("ck")
        assert (status.prefix, status.suffix) == (0, 1)
        segments = session.explain().segments
        assert [(s.kind, s.bytes, s.tokens) for s in segments] == [
            ("prefix", (0, 3), (0, 0)),
            ("suffix", (3, 5), (0, 1)),
        ]
        assert await said(session, 12) == await raw(engine, "quick", 12)


@kinds
async def test_every_kind_of_memory_says_what_it_says_cold(
    tiny_model: TinyModels, kind: Kind
) -> None:
    path = tiny_model(kind)
    async with opened(path) as engine, engine.session() as session:
        status = await session.ensure_prefix(PREFIX)
        n = len(await tokens_of(engine, PREFIX))
        assert status.resident == (n if engine.info.can_rewind else n - 1)
        assert (status.reused, status.prefilled) == (0, status.resident)
        assert await said(session) == await cold(path, PREFIX)
        for suffix in (SUFFIX, "and a hat", SUFFIX):
            await session.prefill_suffix(suffix)
            for _ in range(2):
                assert await said(session) == await cold(path, PREFIX + suffix)
        assert await session.ensure_prefix(PREFIX) == attrs.evolve(
            status,
            reused=status.resident,
            prefilled=0,
            dropped=len(await tokens_of(engine, PREFIX + SUFFIX)) - n,
        )
        assert session.explain().resident >= status.resident


# -- messages -------------------------------------------------------------------------------

SYSTEM = Message("system", "be a cat")
USER = Message("user", "the rat")


async def test_messages_go_through_the_template(exact: Engine) -> None:
    whole = await exact.render(Request(USER.content, system=SYSTEM.content))
    async with exact.session() as session:
        prefix = await session.ensure_prefix([SYSTEM])
        status = await session.prefill_suffix([USER])
        assert prefix.byte_hash == sha256(b"<|im_start|>system\nbe a cat<|im_end|>\n")
        assert status.prefix == prefix.resident
        assert session.explain().segments[-1].bytes[1] == len(whole)
        text = await said(session)
    asked = Request(USER.content, system=SYSTEM.content, max_tokens=16, temperature=0)
    assert text == await exact.complete_text(asked)


async def test_a_template_that_writes_the_last_message_differently_is_followed(
    tiny_model: TinyModels,
) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if loop.last %}!{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    path = tiny_model("attention", chat_template=template)
    whole = "<system>be a cat<user>the rat!>"
    async with opened(path) as engine, engine.session() as session:
        await session.ensure_prefix([SYSTEM])
        await session.prefill_suffix([USER])
        prefix, suffix = session.explain().segments
        assert prefix.bytes == (0, len("<system>be a cat"))
        assert suffix.bytes == (prefix.bytes[1], len(whole))
        assert prefix.byte_hash == sha256(b"<system>be a cat")
        assert await said(session) == await raw(engine, whole)


@pytest.mark.parametrize(("prefix", "suffix"), [([SYSTEM], "text"), ("text", [USER])])
async def test_text_and_messages_do_not_mix(
    session: Session, prefix: str | list[Message], suffix: str | list[Message]
) -> None:
    before = await session.ensure_prefix(prefix)
    with pytest.raises(ProtocolError):
        await session.prefill_suffix(suffix)
    report = session.explain()
    assert (report.state, report.resident) == ("prefix", before.resident)


async def test_bad_text_is_refused_and_changes_nothing(exact: Engine, session: Session) -> None:
    before = await session.ensure_prefix(PREFIX)
    for bad in ("a\0b", "\ud800", [7], b"bytes", None):
        with pytest.raises(ProtocolError):
            await session.ensure_prefix(bad)  # type: ignore[arg-type]
        with pytest.raises(ProtocolError):
            await session.prefill_suffix(bad)  # type: ignore[arg-type]
    assert session.explain().resident == before.resident
    assert await said(session) == await raw(exact, PREFIX)


# -- what does not fit ----------------------------------------------------------------------


async def test_a_prefix_beyond_the_pool_is_refused_with_its_numbers(tiny_path: Path) -> None:
    async with opened(tiny_path, 64) as engine, engine.session() as session:
        with pytest.raises(ContextOverflow) as error:
            await session.ensure_prefix("x" * 63)  # with BOS there is no room for a reply
        assert parts(error.value) == ("prefix", 0, 64, 64)
        status = await session.ensure_prefix("x" * 62)
        assert (status.resident, status.available) == (63, 1)
        async with session.decode() as tokens:
            assert (await tokens.result()).generated_tokens == 1
        with pytest.raises(ContextOverflow) as error:
            await session.ensure_prefix("x" * 10 + "y" * 60)
        assert parts(error.value) == ("prefix", 11, 60, 64)
        assert session.explain().resident == 63


async def test_a_suffix_beyond_the_pool_is_refused_with_its_numbers(tiny_path: Path) -> None:
    async with opened(tiny_path, 64) as engine, engine.session() as session:
        await session.ensure_prefix("x" * 30)
        await session.prefill_suffix("y" * 10)
        with pytest.raises(ContextOverflow) as error:
            await session.prefill_suffix("y" * 33)
        assert parts(error.value) == ("suffix", 31, 33, 64)
        report = session.explain()
        assert (report.state, report.resident) == ("prefix", 31)
        assert (await session.prefill_suffix("y" * 32)).available == 1


async def test_a_text_too_long_for_any_tokens_is_refused_unread(tiny_path: Path) -> None:
    async with opened(tiny_path, 64) as engine, engine.session() as session:
        await session.ensure_prefix("x" * 30)
        with pytest.raises(ContextOverflow) as prefix_error:
            await session.ensure_prefix("y" * 100_000)
        with pytest.raises(ContextOverflow) as suffix_error:
            await session.prefill_suffix("y" * 100_000)
        assert (prefix_error.value.stage, suffix_error.value.stage) == ("prefix", "suffix")
        assert suffix_error.value.resident_tokens == 31
        assert suffix_error.value.additional_tokens > 64
        assert session.explain().state == "prefix"


# -- what fails or is cancelled -------------------------------------------------------------


async def test_a_cancelled_suffix_leaves_the_prefix(
    exact: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = await session.ensure_prefix(PREFIX)
    await session.prefill_suffix("and a hat")
    await cancel_in_a_step(monkeypatch, session.prefill_suffix, SUFFIX)
    report = session.explain()
    assert (report.state, report.resident) == ("prefix", status.resident)
    assert await said(session) == await raw(exact, PREFIX)
    await session.prefill_suffix(SUFFIX)
    assert await said(session) == await raw(exact, PREFIX + SUFFIX)


async def test_a_cancelled_prefix_leaves_what_there_was(
    exact: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    await session.ensure_prefix(PREFIX)
    before = session.explain()
    await cancel_in_a_step(monkeypatch, session.ensure_prefix, "another one altogether")
    await until_idle(exact)
    assert session.explain() == before
    assert await said(session) == await raw(exact, PREFIX)


@kinds
async def test_a_failed_suffix_leaves_the_prefix(
    tiny_model: TinyModels, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runtime: LlamaRuntime, plan: StepPlan) -> StepResult:
        runtime._arrange(plan.memory)
        return runtime._roll_back(plan, -3)

    path = tiny_model(kind)
    async with opened(path) as engine, engine.session() as session:
        status = await session.ensure_prefix(PREFIX)
        with monkeypatch.context() as patch:
            patch.setattr(LlamaRuntime, "step", fail)
            with pytest.raises(InferenceError):
                await session.prefill_suffix(SUFFIX)
        report = session.explain()
        assert (report.state, report.resident) == ("prefix", status.resident)
        before = engine.stats().prefill_tokens
        again = await session.prefill_suffix(SUFFIX)
        assert engine.stats().prefill_tokens - before == again.resident - status.resident
        assert await said(session) == await cold(path, PREFIX + SUFFIX)


async def test_no_room_for_a_batch_is_no_end_of_a_session(
    exact: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    step = LlamaRuntime.step

    def no_room_once(runtime: LlamaRuntime, plan: StepPlan) -> StepResult:
        nonlocal calls
        calls += 1
        if calls > 1:
            return step(runtime, plan)
        runtime._arrange(plan.memory)
        return StepResult(status=StepStatus.NO_ROOM)

    await session.ensure_prefix(PREFIX)
    monkeypatch.setattr(LlamaRuntime, "step", no_room_once)
    await session.prefill_suffix(SUFFIX)
    assert calls > 1
    assert await said(session) == await raw(exact, PREFIX + SUFFIX)


# -- the end --------------------------------------------------------------------------------


USES: list[Callable[[Session], Awaitable[object]]] = [
    lambda session: session.ensure_prefix(PREFIX),
    lambda session: session.prefill_suffix(SUFFIX),
    lambda session: session.decode().__aenter__(),
    lambda session: session.fork().__aenter__(),
]


async def test_a_closed_session_takes_nothing_more(exact: Engine) -> None:
    async with exact.session() as session:
        await session.ensure_prefix(PREFIX)
    for use in USES:
        with pytest.raises(trio.ClosedResourceError):
            await use(session)
    assert exact.stats().kv_used_tokens == 0


async def test_a_session_outlives_its_engine_as_closed(tiny_path: Path) -> None:
    async with opened(tiny_path) as engine:
        manager = engine.session()
        session = await manager.__aenter__()
        await session.ensure_prefix(PREFIX)
    for use in USES:
        with pytest.raises(EngineClosed):
            await use(session)
    with pytest.raises(EngineClosed):
        engine.session()
    await manager.__aexit__(None, None, None)


async def test_an_engine_that_closes_meanwhile_ends_a_prefill(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[BaseException] = []

    async def prefill(session: Session) -> None:
        try:
            await session.ensure_prefix(PREFIX)
        except EngineClosed as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        with held_steps(monkeypatch) as steps:
            async with opened(tiny_path) as engine:
                manager = engine.session()
                nursery.start_soon(prefill, await manager.__aenter__())
                await until(steps.begun.is_set)
                steps.let_go()
    assert len(errors) == 1
    await manager.__aexit__(None, None, None)


async def test_without_the_kv_cache_there_are_no_sessions(tiny_path: Path) -> None:
    async with opened(tiny_path, kv_cache=False) as engine:
        with pytest.raises(UnsupportedFeature):
            engine.session()


async def test_a_session_closed_while_it_prefills_holds_nothing(
    exact: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[PrefixStatus] = []

    async def prefill(session: Session) -> None:
        statuses.append(await session.ensure_prefix(PREFIX))

    with held_steps(monkeypatch) as steps:
        async with trio.open_nursery() as nursery:
            async with exact.session() as session:
                nursery.start_soon(prefill, session)
                await until(steps.begun.is_set)
            steps.let_go()
    assert len(statuses) == 1
    assert exact._desk.decode.scheduler._pool._held == {}


async def test_a_prefill_cancelled_with_its_session_holds_nothing(
    exact: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = HeldSteps()

    async def prefill() -> None:
        async with exact.session() as session:
            await session.ensure_prefix(PREFIX)

    before_steps(monkeypatch, lambda plan: shared.hold() if len(plan.work) == 2 else None)
    async with exact.stream("the cat", max_tokens=200) as other:
        await other.receive()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefill)
            await until(shared.begun.is_set)
            nursery.cancel_scope.cancel()
        shared.let_go()  # the step is shared: it is not aborted, and completes the prefill
        await other.result()
    assert exact.stats().aborted_steps == 0
    assert exact._desk.decode.scheduler._pool._held == {}


# -- sessions beside each other -------------------------------------------------------------


async def test_two_tasks_in_one_session_wait_for_each_other(
    exact: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    async def prefill(session: Session, text: str) -> None:
        await session.ensure_prefix(text)
        order.append(text)
        assert session.explain().segments[0].bytes == (0, len(text))

    with held_steps(monkeypatch) as steps:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefill, session, PREFIX)
            await until(steps.begun.is_set)
            nursery.start_soon(prefill, session, "a hat")
            await trio.testing.wait_all_tasks_blocked()
            assert exact.stats().queued == 0
            assert exact.stats().slots["prefill"] == 1
            steps.let_go()
    assert order == [PREFIX, "a hat"]
    assert await said(session) == await raw(exact, "a hat")


async def test_a_fork_shares_the_cells_and_goes_its_own_way(
    exact: Engine, session: Session
) -> None:
    status = await session.ensure_prefix(PREFIX)
    cells = exact.stats().kv_retained_tokens
    computed = exact.stats().prefill_tokens
    async with session.fork() as fork:
        assert fork.explain().segments == session.explain().segments
        assert fork.explain().resident == status.resident
        await fork.prefill_suffix(SUFFIX)
        await session.prefill_suffix("and a hat")
        n_suffixes = sum(
            [
                len(await tokens_of(exact, PREFIX + suffix)) - status.resident
                for suffix in (SUFFIX, "and a hat")
            ]
        )
        stats = exact.stats()
        assert stats.kv_retained_tokens == cells + n_suffixes
        assert stats.prefill_tokens == computed + n_suffixes
        assert await said(fork) == await raw(exact, PREFIX + SUFFIX)
        assert await said(session) == await raw(exact, PREFIX + "and a hat")
        await session.ensure_prefix("a hat")
        assert await said(fork) == await raw(exact, PREFIX + SUFFIX)
    assert await said(session) == await raw(exact, "a hat")


async def test_a_fork_of_a_suffix_can_go_back_to_its_prefix(
    exact: Engine, session: Session
) -> None:
    await session.ensure_prefix(PREFIX)
    await session.prefill_suffix(SUFFIX)
    async with session.fork() as fork:
        assert fork.explain().state == "suffix"
        await fork.prefill_suffix("and a hat")
        assert await said(fork) == await raw(exact, PREFIX + "and a hat")
    assert session.explain().state == "suffix"
    assert await said(session) == await raw(exact, PREFIX + SUFFIX)


async def test_a_fork_outlives_what_it_came_from(exact: Engine) -> None:
    first = exact.session()
    session = await first.__aenter__()
    status = await session.ensure_prefix(PREFIX)
    async with session.fork() as fork:
        await first.__aexit__(None, None, None)
        assert fork.explain().resident == status.resident
        assert await said(fork) == await raw(exact, PREFIX)


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
async def test_more_sessions_than_sequences_all_work(tiny_model: TinyModels, kind: Kind) -> None:
    path, n = tiny_model(kind), 24
    suffixes = [f"{letter} hat" for letter in "abcdefghijklmnopqrstuvwxyz"[:n]]
    async with opened(path) as engine:
        async with AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(engine.session()) for _ in suffixes]
            for session, suffix in zip(sessions, suffixes, strict=True):
                await session.ensure_prefix(PREFIX)
                await session.prefill_suffix(suffix)
            texts = [await said(session, 6) for session in sessions]
        assert engine._desk.decode.scheduler._pool._held == {}
        stats = engine.stats()
        assert stats.kv_used_tokens == 0
        assert stats.kv_retained_tokens + stats.kv_free_tokens == 512
    assert texts == [await cold(path, PREFIX + suffix, 6) for suffix in suffixes]


# -- who gives way --------------------------------------------------------------------------


def crowd(n: int) -> list[Request]:
    """Requests of 60 tokens that have nothing in common."""
    return [Request([20 + i] * 60, max_tokens=1) for i in range(n)]


async def test_what_a_session_holds_outlives_others_and_failed_suffixes_that_went_on_from_it(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tiny_path, 256) as engine, engine.session() as session:
        status = await session.ensure_prefix(PREFIX)
        await raw(engine, PREFIX + "and a hat", 1)
        await cancel_in_a_step(monkeypatch, session.prefill_suffix, SUFFIX)
        for asked in crowd(12):
            await engine.complete(asked)
        assert session.explain().resident == status.resident
        before = engine.stats().prefill_tokens
        assert (await session.ensure_prefix(PREFIX)).prefilled == 0
        assert engine.stats().prefill_tokens == before


async def test_what_a_session_holds_gives_way_to_what_runs_and_is_computed_again(
    tiny_path: Path,
) -> None:
    async with opened(tiny_path, 256) as engine, engine.session() as session:
        status = await session.ensure_prefix(PREFIX)
        expected = await said(session)
        done = await engine.complete(Request([7] * 250, max_tokens=6))
        assert done.generated_tokens == 6
        assert engine.stats().preemptions == 0
        report = session.explain()
        assert report.resident <= 1
        assert report.segments[0].tokens == (0, status.resident)
        assert await said(session) == expected
        again = await session.ensure_prefix(PREFIX)
        assert again.resident == session.explain().resident == status.resident


async def test_what_a_closed_session_held_is_kept_like_all_else(tiny_path: Path) -> None:
    async with opened(tiny_path, 256) as engine:
        async with engine.session() as session:
            await session.ensure_prefix(PREFIX)
        done = await engine.complete(PREFIX, raw=True, max_tokens=1)
        assert done.cached_tokens == done.prompt_tokens - 1
        for asked in crowd(12):
            await engine.complete(asked)
        assert (await engine.complete(PREFIX, raw=True, max_tokens=1)).cached_tokens <= 1


async def test_requests_of_a_session_keep_their_prefix_in_preference(tiny_path: Path) -> None:
    async with opened(tiny_path, 256) as engine:
        mine = Request([285] * 60, max_tokens=1, session="mine")
        others = Request([286] * 60, max_tokens=1)
        for asked in (mine, others, *crowd(12)):
            await engine.complete(asked)
        assert (await engine.complete(others)).cached_tokens == 0
        assert (await engine.complete(mine)).cached_tokens == 59
