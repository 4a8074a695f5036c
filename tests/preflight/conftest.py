"""Broken libraries, and a user's cache that is empty."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llamad_trio.preflight import prove
from tests.isolation.conftest import children

if TYPE_CHECKING:
    from collections.abc import Callable

    Break = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`stubs.c`, compiled."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler, which whoever compiled llama.cpp has")
    library = tmp_path_factory.mktemp("stubs") / "libstubs.so"
    source = Path(__file__).with_name("stubs.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, without verdicts; nothing is known in this process either."""
    for variable in ("LD_PRELOAD", "LLAMA_CPP_LIB_PATH", "LLAMAD_USE_EXTRA_BUFTS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(prove, "_known", {})
    monkeypatch.setattr(prove, "_told", set())
    return tmp_path / "cache" / "llamad-trio" / "preflight"


def break_library(
    stubs: Path, library: Path, variable: str, patch: pytest.MonkeyPatch, where: str, how: str
) -> Path:
    """Have the library loaded, as a variable says, that goes wrong somewhere; where it is."""
    shutil.copy(stubs, library)
    place = library if variable == "LD_PRELOAD" else library.parent
    for name, value in ((variable, str(place)), ("BREAKS", where), ("HOW", how)):
        patch.setenv(name, value)
    return place


@pytest.fixture
def broken(stubs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Break:
    """Call it to have the real library go wrong in every process that is started from now on."""

    return partial(break_library, stubs, tmp_path / "libbroken.so", "LD_PRELOAD", monkeypatch)


@pytest.fixture
def library_instead(stubs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Break:
    """Call it to have something else loaded in place of llama.cpp's library."""

    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib" / "libllama.so"
    return partial(break_library, stubs, library, "LLAMA_CPP_LIB_PATH", monkeypatch)


_of_others: set[int] = set()


@pytest.fixture(autouse=True)
def children_of_earlier_tests() -> None:
    """Such as the process in which `multiprocessing` keeps its books."""
    _of_others.clear()
    _of_others.update(children())


def processes_of_ours() -> set[int]:
    """The children that this process has since the test began."""
    return children() - _of_others
