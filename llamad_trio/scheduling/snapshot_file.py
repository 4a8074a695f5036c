"""The format of a snapshot on disk, and to whom it means anything.  Bytes in, bytes out; no files.

    magic       8 bytes   b"LLAMADKV"
    version     u32       1
    manifest   32 bytes   digest of the identity the KV belongs to
    n_tokens    u64
    n_state     u64       length of the state in bytes
    checksum   32 bytes   BLAKE2b of everything else, in this order
    tokens      i32 * n_tokens
    state       n_state bytes

All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence

import attrs

from llamad_trio.scheduling.shelf import Snapshot


@attrs.frozen(kw_only=True)
class KVIdentity:
    """Everything that decides what the cells of a KV cache mean.

    Two engines may exchange KV only when all of this is the same.

    Attributes:
        llama_build: version of llama.cpp, and of the bindings it was built for.
        template_sha256: of the chat template, empty without one.
        context: settings of the context that change its cells: KV types, flash
            attention, RoPE, kind of context.
        adapters: digests of the adapters in force, in order.
    """

    model_sha256: str
    llama_build: str
    template_sha256: str
    context: tuple[tuple[str, str], ...]
    adapters: tuple[str, ...] = ()
    adds_bos: bool

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over all of it, the same in every process."""
        canonical = json.dumps(attrs.asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


_MAGIC = b"LLAMADKV"
_VERSION = 1
_FIELDS = struct.Struct("<8sI32sQQ")
_CHECKSUM_BYTES = 32

HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES


class BadSnapshotError(ValueError):
    """The bytes are no snapshot of this identity; the message says why."""


@attrs.frozen
class Header:
    """What a snapshot says of itself before it is read."""

    n_tokens: int
    n_state: int
    checksum: bytes

    @classmethod
    def parse(cls, data: bytes, *, manifest: str, n_file: int) -> Header:
        """Read and check a header: the first `HEADER_BYTES`, or more, of a file of `n_file` bytes.

        Raises `BadSnapshotError` if it is too short, foreign, of another version or identity than
        `manifest` (hex), or truncated.
        """
        if len(data) < HEADER_BYTES:
            raise BadSnapshotError("shorter than its header")
        magic, version, owner, n_tokens, n_state = _FIELDS.unpack_from(data)
        if magic != _MAGIC:
            raise BadSnapshotError("no snapshot")
        if version != _VERSION:
            raise BadSnapshotError(f"of version {version}, not {_VERSION}")
        if owner.hex() != manifest:
            raise BadSnapshotError("of another model or other settings")
        if n_tokens == 0:
            raise BadSnapshotError("of no tokens")
        if n_file != HEADER_BYTES + 4 * n_tokens + n_state:
            raise BadSnapshotError("truncated, or longer than it says")
        return cls(n_tokens, n_state, data[_FIELDS.size : HEADER_BYTES])


def encode(snapshot: Snapshot, *, manifest: str) -> tuple[bytes, bytes, bytes]:
    """A snapshot as the parts of a file: header, tokens, state."""
    tokens = pack_tokens(snapshot.tokens)
    fields = _FIELDS.pack(
        _MAGIC, _VERSION, bytes.fromhex(manifest), len(snapshot.tokens), len(snapshot.state)
    )
    return fields + _checksum(fields, tokens, snapshot.state), tokens, snapshot.state


def decode(data: bytes, *, manifest: str) -> Snapshot:
    """The snapshot in the bytes of a whole file.

    Raises `BadSnapshotError` as `Header.parse`, and if the checksum does not match.
    """
    header = Header.parse(data, manifest=manifest, n_file=len(data))
    end = HEADER_BYTES + 4 * header.n_tokens
    tokens, state = data[HEADER_BYTES:end], data[end:]
    if _checksum(data[: _FIELDS.size], tokens, state) != header.checksum:
        raise BadSnapshotError("corrupt: its checksum does not match")
    return Snapshot(unpack_tokens(tokens), state)


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Token ids from their bytes."""
    return struct.unpack(f"<{len(data) // 4}i", data)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes: little-endian, 32 bits each."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def _checksum(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
