"""Sessions: what is computed when is up to the caller, and what they tell of it is true."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import attrs
import pytest

from llamad_trio import ContextOverflow, Message, ProtocolError, Request, SuffixStatus, open_engine
from tests.engine.sessions import PREFIX, SUFFIX, cold, opened, raw, said, tokens_of
from tests.models import DECODER_KINDS
from tests.support import EXACT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from llamad_trio import Engine, Session
    from tests.models import TinyModels

kinds = pytest.mark.parametrize("kind", DECODER_KINDS)


def parts(error: ContextOverflow) -> tuple[str, int, int, int]:
    return error.stage, error.resident_tokens, error.additional_tokens, error.n_ctx


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def token_hash(tokens: Sequence[int]) -> str:
    return sha256(struct.pack(f"<{len(tokens)}i", *tokens))


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
async def test_decoding_computes_one_token_of_the_prompt_and_no_more(path: Path) -> None:
    async with opened(path) as engine, engine.session() as session:
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
async def test_every_kind_of_memory_says_what_it_says_cold(path: Path) -> None:
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
