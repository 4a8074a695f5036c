"""How to start a module of this package in a process of its own, wherever it was imported from."""

from __future__ import annotations

import os
import sys


def has_interpreter() -> bool:
    """Whether there is a Python to start: a frozen program would start itself again."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def python_command(module: str) -> list[str]:
    """The command that runs a module.

    Not from the working directory, unless this program imports from there, too.
    """
    return [sys.executable, "-P", "-m", module]


def python_environment() -> dict[str, str]:
    """This program's environment, with what it imports from."""
    return {**os.environ, "PYTHONPATH": _import_path()}


def _import_path() -> str:
    """Where this program imports from, for a process that is started elsewhere."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was removed: nothing is imported from there either
        return os.pathsep.join(filter(os.path.isabs, sys.path))
    return os.pathsep.join(os.path.join(here, path) for path in sys.path)
