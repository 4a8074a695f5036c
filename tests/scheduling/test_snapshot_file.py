"""Files of snapshots: what was written comes back, and nothing else is taken for it."""

from __future__ import annotations

import hashlib
import random

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

MANIFEST = "a1" * 32
TOKENS = (1, 2, 2**31 - 1, 0, 77)
STATE = random.Random(0).randbytes(10_000)


def little(number: int, n_bytes: int = 8) -> bytes:
    return number.to_bytes(n_bytes, "little", signed=True)


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
    header = b"LLAMADKV" + little(1, 4) + bytes.fromhex(MANIFEST)
    header += little(len(TOKENS)) + little(len(STATE))
    parts = [*(little(token, 4) for token in TOKENS), STATE]
    checksum = hashlib.blake2b(b"".join([header, *parts]), digest_size=32).digest()
    assert b"".join([header, checksum, *parts]) == FILE
    assert len(header) + 32 == HEADER_BYTES


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20), st.binary(max_size=200))
def test_a_snapshot_comes_back_as_it_was(tokens: list[int], state: bytes) -> None:
    back = decode(file_of(Snapshot(tuple(tokens), state)), manifest=MANIFEST)
    assert (back.tokens, back.state) == (tuple(tokens), state)
    packed = pack_tokens(tokens)
    assert packed == b"".join(little(token, 4) for token in tokens)
    assert unpack_tokens(packed) == tuple(tokens)


def test_the_header_alone_says_how_long_the_rest_is() -> None:
    header = Header.parse(FILE[:HEADER_BYTES], manifest=MANIFEST, n_file=len(FILE))
    assert (header.n_tokens, header.n_state) == (len(TOKENS), len(STATE))
    assert header.checksum == FILE[HEADER_BYTES - 32 : HEADER_BYTES]


# -- every way it can be bad ----------------------------------------------------------------


def changed(at: int, value: bytes, data: bytes = FILE) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def resealed(data: bytes) -> bytes:
    """The file with the checksum that its other bytes ask for: forged, not corrupt."""
    rest = data[: HEADER_BYTES - 32] + data[HEADER_BYTES:]
    return changed(HEADER_BYTES - 32, hashlib.blake2b(rest, digest_size=32).digest(), data)


FORGED = {
    "magic": changed(0, b"LLAMADKW"),
    "version 0": changed(8, little(0, 4)),
    "version 2": changed(8, little(2, 4)),
    "manifest": changed(12, bytes(32)),
    "no tokens": changed(44, bytes(8)),
    "fewer tokens": changed(44, little(4)),
    "more tokens": changed(44, little(6)),
    "tokens beyond all memory": changed(44, b"\xff" * 8),
    "no state": changed(52, bytes(8)),
    "less state": changed(52, little(len(STATE) - 1)),
    "more state": changed(52, little(len(STATE) + 1)),
    "state beyond all memory": changed(52, b"\xff" * 8),
    "snapshot of no tokens": file_of(Snapshot((), STATE)),
    "a byte more": FILE + b"\0",
    "a kilobyte more": FILE + b"x" * 1024,
    "twice": FILE + FILE,
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_file_is_refused_even_with_a_fitting_checksum(name: str) -> None:
    assert resealed(FILE) == FILE
    assert refuses(FORGED[name])
    assert refuses(resealed(FORGED[name]))


@pytest.mark.parametrize(
    "data",
    [
        changed(HEADER_BYTES - 32, bytes(32)),
        changed(44, little(len(TOKENS) - 1) + little(len(STATE) + 4)),
        changed(HEADER_BYTES, file_of(Snapshot(TOKENS, STATE[::-1]))[HEADER_BYTES:]),
    ],
    ids=["another checksum", "a boundary that moved", "parts of two files"],
)
def test_what_the_checksum_does_not_fit_is_refused(data: bytes) -> None:
    assert len(data) == len(FILE)
    assert refuses(data)


def test_a_file_cut_off_anywhere_is_refused() -> None:
    cuts = [*range(HEADER_BYTES + 1), *range(HEADER_BYTES, len(FILE), 1024), len(FILE) - 1]
    assert all(refuses(FILE[:n]) for n in cuts)


def test_one_flipped_bit_is_refused_wherever_it_is() -> None:
    header_and_tokens = range(HEADER_BYTES + 4 * len(TOKENS) + 8)
    some_of_the_state = random.Random(1).sample(range(len(FILE)), 500)
    for at in (*header_and_tokens, *some_of_the_state, len(FILE) - 1):
        for bit in range(8):
            assert refuses(changed(at, bytes([FILE[at] ^ 1 << bit]))), (at, bit)
    assert not refuses(FILE)


@given(st.binary(max_size=3 * HEADER_BYTES))
def test_other_files_are_refused(data: bytes) -> None:
    assert refuses(data)
    assert refuses(FILE[:8] + data)
    assert refuses(FILE[:44] + data)


@pytest.mark.parametrize("manifest", ["a1" * 31 + "a2", "b1" + "a1" * 31, "00" * 32])
def test_another_model_or_other_settings_are_refused(manifest: str) -> None:
    assert refuses(FILE, manifest)
    assert not refuses(file_of(Snapshot(TOKENS, STATE), manifest), manifest)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (FORGED["version 2"], "version 2"),
        (FORGED["manifest"], "another model or other settings"),
        (FILE[:-1], "truncated"),
        (changed(len(FILE) - 1, bytes([FILE[-1] ^ 1])), "corrupt"),
        (changed(0, b"GGUF"), "no snapshot"),
    ],
)
def test_a_refusal_says_why(data: bytes, why: str) -> None:
    with pytest.raises(BadSnapshotError, match=why):
        decode(data, manifest=MANIFEST)
