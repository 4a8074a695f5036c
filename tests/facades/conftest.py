from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.facades import running_scripts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.facades import RunScript


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunScript]:
    """Runs a program in a process of its own."""
    with running_scripts(tmp_path_factory.mktemp("scripts")) as run:
        yield run
