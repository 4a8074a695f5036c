"""Where a user's cache is, if there is one, and how a file in it is replaced."""

from __future__ import annotations

import os
import tempfile
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
    """Write a small file whole: whoever reads it meanwhile sees all of it, or the one before.

    Raises:
        OSError: it cannot be written; what was there stays, and nothing else is left.
    """
    fd, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
