from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llamad_trio import aio, blocking
from tests.facades import InLoop, dying_of_a_hang, engine_threads, loop_in_a_thread, running_scripts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.facades import RunScript


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunScript]:
    """Runs a program in a process of its own."""
    with running_scripts(tmp_path_factory.mktemp("scripts")) as run:
        yield run


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    with dying_of_a_hang():
        yield
    assert engine_threads() == []


@pytest.fixture(params=["blocking", "aio"])
def facade(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Either module, both to be used as `blocking` is."""
    if request.param == "blocking":
        yield blocking
        return
    with loop_in_a_thread() as run:
        yield InLoop(aio, run)
