"""A prompt's tokens: one BOS where the model wants it, and no trace of a sentinel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given, strategies as st

from llamad_trio.scheduling.runtime import tokens_of_prompt, without_sentinel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llamad_trio.scheduling.runtime import Runtime

S = "\ufdd0"
BYTES = S.encode()
AS_IT_BEGINS = [b"\xef", b"\xb7", b"\x91", b"\xef"]


class Pieces:
    """A vocabulary whose tokens are whatever a test makes of them."""

    def __init__(self, pieces: Sequence[bytes] = (), bos_text: str = "") -> None:
        self.of_token = pieces
        self.facts = SimpleNamespace(bos_text=bos_text)

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """By number."""
        return [self.of_token[token] for token in tokens]

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """A token for each character, after -1 for a BOS that was added."""
        assert parse_special
        return [-1] * (add_special and bool(self.facts.bos_text)) + [ord(char) for char in text]


def kept(pieces: Sequence[bytes], count: int) -> list[bytes] | None:
    """What is left of tokens, as the bytes they stand for."""
    runtime = cast("Runtime", Pieces(pieces))
    tokens = without_sentinel(runtime, range(len(pieces)), S, count)
    return None if tokens is None else [pieces[token] for token in tokens]


WAYS = ([BYTES], [BYTES[:1], BYTES[1:]], [BYTES[:2], BYTES[2:]], [bytes([b]) for b in BYTES])
others = st.sampled_from([b"", b"a", b"<", b"im_start", b" the", b"\xef", b"\xef\xb7", b"\xb7\x91"])


@given(
    st.lists(
        st.sampled_from(WAYS).map(lambda way: (True, way)) | others.map(lambda p: (False, [p]))
    )
)
def test_a_sentinel_goes_however_many_tokens_it_takes(
    parts: list[tuple[bool, list[bytes]]],
) -> None:
    pieces = [piece for _, way in parts for piece in way]
    text = b"".join(pieces)
    wanted = [piece for is_sentinel, way in parts if not is_sentinel for piece in way]
    count = sum(is_sentinel for is_sentinel, _ in parts)
    found = kept(pieces, count)
    if text.count(BYTES) != count:
        return  # pieces of no text at all, which happen to make one more
    assert found is not None
    assert b"".join(found) == b"".join(wanted)
    assert found == wanted or b"" in wanted


@pytest.mark.parametrize(
    ("pieces", "count"),
    [
        ([b"<" + BYTES, b"s>"], 1),
        ([b"<", BYTES + b"s>"], 1),
        ([b"<", BYTES[:2], BYTES[2:] + b"s>"], 1),
        ([b"<" + BYTES[:1], BYTES[1:], b"s>"], 1),
        ([b"<", b"[UNK]", b"s>"], 1),
        ([b"<", b"s>"], 1),
        ([b"<", BYTES[:1], b"", BYTES[1:], b"s>"], 1),
        ([BYTES, b"a", BYTES + b"b"], 2),  # one of several is enough
    ],
)
def test_a_token_that_joins_it_to_its_neighbour_is_noticed(pieces: list[bytes], count: int) -> None:
    assert kept(pieces, count) is None


@pytest.mark.parametrize(
    ("pieces", "count", "left"),
    [
        ([BYTES, b"a", BYTES], 2, [b"a"]),
        ([b"", BYTES, b"", b"a"], 1, [b"", b"", b"a"]),  # what has no bytes
        # What begins as the sentinel does.
        ([*AS_IT_BEGINS, b"\xef", b"\xb7", b"\x90", b"\xef"], 1, [*AS_IT_BEGINS, b"\xef"]),
    ],
)
def test_all_else_stays_where_it_is(pieces: list[bytes], count: int, left: list[bytes]) -> None:
    assert kept(pieces, count) == left


@pytest.mark.parametrize(
    ("bos", "text", "n"), [("<s>", "cat", 1), ("<s>", "<s>cat", 0), ("", "cat", 0), ("<s>", "", 1)]
)
def test_a_prompt_has_one_bos_where_the_model_wants_it(bos: str, text: str, n: int) -> None:
    tokens = tokens_of_prompt(cast("Runtime", Pieces(bos_text=bos)), text)
    assert tokens == [-1] * n + [ord(char) for char in text]
