"""SHA-256 of large files, read once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from llamad_trio.core.errors import ModelLoadError
from llamad_trio.hub.manifest import models_dir
from llamad_trio.system.host import replace_text

CHUNK_BYTES = 4 << 20
MAX_ENTRIES = 1000
"""Files remembered; beyond that the cache starts anew."""


def file_sha256(path: Path, *, between_chunks: Callable[[], object] = lambda: None) -> str:
    """SHA-256 (hex) of a file, remembered by its path, size and time of change.

    Args:
        path: the file.
        between_chunks: called after every few megabytes; what it raises ends the reading.

    The memory is a file in the models' directory; where that cannot be written, each
    process reads the file again.

    Raises:
        OSError: the file cannot be read.
    """
    stat = path.stat()
    key = json.dumps([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    store = _store()
    known = _read(store)
    if key in known:
        return known[key]
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            between_chunks()
    _write(store, {**_read(store), key: digest.hexdigest()})
    return digest.hexdigest()


def _store() -> Path | None:
    try:
        return models_dir() / "digests.json"
    except ModelLoadError:  # a user without a home
        return None


def _read(store: Path | None) -> dict[str, str]:
    if store is None:
        return {}
    try:
        known = json.loads(store.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, str)}


def _write(store: Path | None, known: dict[str, str]) -> None:
    if store is None:
        return
    if len(known) > MAX_ENTRIES:
        known = dict([*known.items()][-1:])
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        replace_text(store, json.dumps(known))
    except OSError:
        return  # only a convenience: the next process reads the model again
