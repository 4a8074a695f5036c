"""Bytes of tokens become text, wherever the tokens cut them."""

from __future__ import annotations

from hypothesis import example, given, strategies as st

from llamad_trio.scheduling.utf8 import Utf8Assembler
from tests.scheduling.oracles import decoded

SOME_BYTES = st.binary(max_size=12) | st.text(max_size=6).map(lambda text: text.encode())
PIECES = st.lists(SOME_BYTES, max_size=8)


def joined(pieces: list[bytes]) -> str:
    assembler = Utf8Assembler()
    return "".join([assembler.push(piece) for piece in pieces]) + assembler.flush()


@given(PIECES)
@example([b"\xf0\x9f", b"\x99\x82"])
@example([b"\xf0\x9f", b"a"])
@example([b"\xed\xa0", b"\x80"])  # a surrogate
@example([b"\xc0", b"\x80"])  # NUL in disguise
def test_any_bytes_cut_anywhere_give_the_text_of_the_whole(pieces: list[bytes]) -> None:
    assert joined(pieces) == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(max_size=8))
def test_every_cut_of_a_text_gives_the_text(text: str) -> None:
    raw = text.encode()
    assert joined([raw[i : i + 1] for i in range(len(raw))]) == text
    for at in range(len(raw) + 1):
        assert joined([raw[:at], raw[at:]]) == text


@given(PIECES)
def test_a_character_is_shown_as_soon_as_it_is_complete(pieces: list[bytes]) -> None:
    assembler = Utf8Assembler()
    raw, shown = b"", ""
    for piece in pieces:
        raw += piece
        shown += assembler.push(piece)
        assert shown == decoded(raw, final=False)


def test_half_a_character_at_the_end_becomes_one_replacement_character() -> None:
    assembler = Utf8Assembler()
    assert assembler.push("a🙂".encode()[:-1]) == "a"
    assert assembler.flush() == "\ufffd"
    assert assembler.flush() == ""
