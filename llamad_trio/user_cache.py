"""Where a user's cache is, if there is one."""

from __future__ import annotations

from pathlib import Path

__all__ = ["user_cache"]


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
