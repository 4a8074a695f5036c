"""Where a user's cache is, if there is one, and how a file in it is replaced."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def user_cache() -> Path | None:
    """The folder for this library in the user's cache; it may not exist yet.

    `None` for a user without a home, such as that of a container.
    """
    import platformdirs  # here: the import costs more than the modules that ask

    try:
        folder = Path(platformdirs.user_cache_dir("llamad-trio", appauthor=False))
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None  # older ones leave a "~" as it is


def replace_text(path: Path, text: str) -> None:
    """`replace_file`, for a small text; its draft is in the same folder."""
    replace_file(path, [text.encode()], draft=path.with_name(f"{path.name}.{secrets.token_hex(8)}"))


def replace_file(path: Path, parts: Iterable[bytes], *, draft: Path, mode: int = 0o600) -> None:
    """Write a file whole: whoever reads it meanwhile sees all of it, or the one before.

    It survives a power cut as soon as its folder does.

    Args:
        path: the file.
        parts: what is in it.
        draft: where it is written before it is moved: a path that nobody else has, in the same
            file system.
        mode: its permissions, as far as the umask has them.

    Raises:
        OSError: it cannot be written; what was there stays, and nothing else is left.
    """
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
