"""A snapshot comes back from its file as it was, or not at all."""

from __future__ import annotations

import hashlib
import random
import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st

from llamad_trio.scheduling.shelf import Snapshot
from llamad_trio.scheduling.snapshot_file import (
    HEADER_BYTES,
    BadSnapshotError,
    Header,
    decode,
    encode,
    pack_tokens,
    unpack_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MANIFEST = "a1" * 32
TOKENS = (1, 2, 2**31 - 1, 0, 77)
STATE = random.Random(0).randbytes(10_000)

INT32 = st.integers(-(2**31), 2**31 - 1)


def file_of(snapshot: Snapshot, manifest: str = MANIFEST) -> bytes:
    return b"".join(encode(snapshot, manifest=manifest))


FILE = file_of(Snapshot(TOKENS, STATE))


def refuses(data: bytes, manifest: str = MANIFEST) -> bool:
    """Whether the bytes are refused; that they are read at all costs no other error."""
    try:
        decode(data, manifest=manifest)
    except BadSnapshotError:
        return True
    return False


def test_a_file_is_as_its_description_has_it() -> None:
    assert HEADER_BYTES == 8 + 4 + 32 + 8 + 8 + 32
    assert FILE[:8] == b"LLAMADKV"
    assert FILE[8:12] == (1).to_bytes(4, "little")
    assert FILE[12:44] == bytes.fromhex(MANIFEST)
    assert FILE[44:52] == len(TOKENS).to_bytes(8, "little")
    assert FILE[52:60] == len(STATE).to_bytes(8, "little")
    assert FILE[HEADER_BYTES : HEADER_BYTES + 20] == struct.pack("<5i", *TOKENS)
    assert FILE[HEADER_BYTES + 20 :] == STATE


@given(st.lists(INT32, min_size=1, max_size=20), st.binary(max_size=200))
def test_a_snapshot_comes_back_as_it_was(tokens: list[int], state: bytes) -> None:
    back = decode(file_of(Snapshot(tuple(tokens), state)), manifest=MANIFEST)
    assert (back.tokens, back.state) == (tuple(tokens), state)


@given(st.lists(INT32, max_size=20))
def test_tokens_are_32_bits_little_endian(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert packed == struct.pack(f"<{len(tokens)}i", *tokens)
    assert unpack_tokens(packed) == tuple(tokens)


def test_the_header_alone_says_how_long_the_rest_is() -> None:
    header = Header.parse(FILE[:HEADER_BYTES], manifest=MANIFEST, n_file=len(FILE))
    assert (header.n_tokens, header.n_state) == (len(TOKENS), len(STATE))
    assert header.checksum == FILE[HEADER_BYTES - 32 : HEADER_BYTES]


# -- every way it can be bad ----------------------------------------------------------------


def resealed(data: bytes) -> bytes:
    """The file with the checksum that its other bytes ask for: forged, not corrupt."""
    rest = data[: HEADER_BYTES - 32] + data[HEADER_BYTES:]
    checksum = hashlib.blake2b(rest, digest_size=32).digest()
    return data[: HEADER_BYTES - 32] + checksum + data[HEADER_BYTES:]


def test_resealing_is_what_encoding_does() -> None:
    assert resealed(FILE) == FILE


FIELDS: dict[str, tuple[slice, bytes]] = {
    "magic": (slice(0, 8), b"LLAMADKW"),
    "version 0": (slice(8, 12), (0).to_bytes(4, "little")),
    "version 2": (slice(8, 12), (2).to_bytes(4, "little")),
    "manifest": (slice(12, 44), bytes(32)),
    "no tokens": (slice(44, 52), bytes(8)),
    "fewer tokens": (slice(44, 52), (4).to_bytes(8, "little")),
    "more tokens": (slice(44, 52), (6).to_bytes(8, "little")),
    "tokens beyond all memory": (slice(44, 52), b"\xff" * 8),
    "no state": (slice(52, 60), bytes(8)),
    "less state": (slice(52, 60), (len(STATE) - 1).to_bytes(8, "little")),
    "more state": (slice(52, 60), (len(STATE) + 1).to_bytes(8, "little")),
    "state beyond all memory": (slice(52, 60), b"\xff" * 8),
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("seal", [bytes, resealed])
def test_a_changed_field_is_refused_even_with_a_fitting_checksum(
    name: str, seal: Callable[[bytes], bytes]
) -> None:
    where, value = FIELDS[name]
    data = bytearray(FILE)
    data[where] = value
    assert refuses(seal(bytes(data)))


def test_a_changed_checksum_is_refused() -> None:
    assert refuses(FILE[: HEADER_BYTES - 32] + bytes(32) + FILE[HEADER_BYTES:])


def test_a_boundary_that_moves_between_tokens_and_state_is_refused() -> None:
    data = bytearray(FILE)
    data[44:52] = (len(TOKENS) - 1).to_bytes(8, "little")
    data[52:60] = (len(STATE) + 4).to_bytes(8, "little")
    assert refuses(bytes(data))


def test_a_snapshot_of_no_tokens_is_refused_however_it_is_made() -> None:
    assert refuses(file_of(Snapshot((), STATE)))


def test_a_file_cut_off_anywhere_in_its_header_is_refused() -> None:
    assert all(refuses(FILE[:n]) for n in range(HEADER_BYTES + 1))


def test_a_file_cut_off_at_any_kilobyte_is_refused() -> None:
    cuts = [*range(HEADER_BYTES, len(FILE), 1024), len(FILE) - 1]
    assert len(cuts) > 10
    assert all(refuses(FILE[:n]) for n in cuts)


@pytest.mark.parametrize("more", [b"\0", b"x" * 1024, FILE], ids=["a byte", "a kilobyte", "twice"])
def test_a_file_that_goes_on_is_refused(more: bytes) -> None:
    assert refuses(FILE + more)


def positions() -> Iterator[int]:
    """All of the header and the tokens, and some of the state: its ends, and by chance."""
    yield from range(HEADER_BYTES + 4 * len(TOKENS) + 8)
    yield from random.Random(1).sample(range(len(FILE)), 500)
    yield len(FILE) - 1


def test_one_flipped_bit_is_refused_wherever_it_is() -> None:
    data = bytearray(FILE)
    for at in positions():
        for bit in range(8):
            data[at] ^= 1 << bit
            assert refuses(bytes(data)), (at, bit)
            data[at] ^= 1 << bit
    assert not refuses(bytes(data))


@given(st.binary(max_size=3 * HEADER_BYTES))
def test_other_files_are_refused(data: bytes) -> None:
    assert refuses(data)
    assert refuses(FILE[:8] + data)
    assert refuses(FILE[:44] + data)


def test_swapped_parts_are_refused() -> None:
    other = file_of(Snapshot(TOKENS, STATE[::-1]))
    assert refuses(FILE[:HEADER_BYTES] + other[HEADER_BYTES:])


@pytest.mark.parametrize("manifest", ["a1" * 31 + "a2", "b1" + "a1" * 31, "00" * 32])
def test_another_model_or_other_settings_are_refused(manifest: str) -> None:
    assert refuses(FILE, manifest)
    assert not refuses(file_of(Snapshot(TOKENS, STATE), manifest), manifest)


def test_a_refusal_says_why() -> None:
    with pytest.raises(BadSnapshotError, match="version 2"):
        decode(FILE[:8] + b"\2\0\0\0" + FILE[12:], manifest=MANIFEST)
    with pytest.raises(BadSnapshotError, match="another model or other settings"):
        decode(FILE, manifest="00" * 32)
    with pytest.raises(BadSnapshotError, match="truncated"):
        decode(FILE[:-1], manifest=MANIFEST)
    with pytest.raises(BadSnapshotError, match="corrupt"):
        decode(FILE[:-1] + bytes([FILE[-1] ^ 1]), manifest=MANIFEST)
    with pytest.raises(BadSnapshotError, match="no snapshot"):
        decode(b"GGUF" + FILE[4:], manifest=MANIFEST)
