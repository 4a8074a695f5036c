"""The documents name all that is public, and what they say of names, fields and imports is so."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import attrs
import pytest

import llamad_trio
from llamad_trio import EngineConfig, EngineSpec, LlamadError, RestartPolicy, testing
from llamad_trio.supervision.supervisor import ModelState
from tests.test_examples import run

if TYPE_CHECKING:
    from tests.models import TinyModels

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "llamad_trio"
DOCS = sorted((ROOT / "docs").glob("*.md"))

WIDTH = 100


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def rows(name: str, heading: str = "") -> Iterator[list[str]]:
    """The cells of all table rows of a document, or of one of its sections; no headings."""
    text = text_of(name)
    if heading:
        text = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    text = re.sub(r"^\|.*\n\|---.*\n", "", text, flags=re.MULTILINE)
    for line in text.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def in_backticks(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def first_cells(name: str, heading: str = "") -> list[str]:
    """What the first column of the tables names."""
    return [found for cells in rows(name, heading) for found in in_backticks(cells[0])]


# -- names ------------------------------------------------------------------------------------


def test_every_public_name_is_in_the_list_of_names_once_and_nothing_else() -> None:
    public = [*dir(llamad_trio), *testing.__all__]
    assert sorted(first_cells("docs/api.md")) == sorted(public)


def test_the_fields_of_every_error_are_there() -> None:
    told = {
        name: in_backticks(cells[1])
        for cells in rows("docs/api.md", "Errors")
        for name in in_backticks(cells[0])
    }
    errors = {
        name: kind
        for name in dir(llamad_trio)
        if isinstance(kind := getattr(llamad_trio, name), type) and issubclass(kind, LlamadError)
    }
    assert told == {
        name: [field.name for field in attrs.fields(kind)] if attrs.has(kind) else []
        for name, kind in errors.items()
    }


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCS], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        document = (path.parent / file) if file else path
        assert document.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings]
            assert anchor in anchors, target


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCS], ids=lambda path: path.name)
def test_prose_is_not_too_wide(path: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    wide = [line for line in prose.splitlines() if len(line) > WIDTH and not line.startswith("|")]
    assert wide == []


# -- fields -----------------------------------------------------------------------------------


def names(kind: type[attrs.AttrsInstance]) -> list[str]:
    return [field.name for field in attrs.fields(kind)]


def test_every_setting_is_in_the_table_of_settings() -> None:
    assert set(names(EngineConfig)) <= set(first_cells("docs/configuration.md"))


def test_every_field_of_a_spec_is_there() -> None:
    assert first_cells("docs/models.md", "What a model is") == names(EngineSpec)


def test_every_field_of_a_restart_policy_is_there_with_its_default() -> None:
    told = {
        in_backticks(cells[0])[0]: float(cells[1])
        for cells in rows("docs/models.md", "When one breaks down")
    }
    assert told == attrs.asdict(RestartPolicy())


def test_every_state_is_there() -> None:
    told = [name for name in first_cells("docs/models.md", "States") if "(" not in name]
    assert sorted(told) == sorted(get_args(ModelState))


# -- rooms ------------------------------------------------------------------------------------


def test_the_table_of_rooms_has_the_floors_of_the_contract_from_the_top_down() -> None:
    contracts = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (floors,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    rooms = first_cells("docs/architecture.md", "Rooms")
    told = {room.removesuffix("/").removesuffix(".py"): n for n, room in enumerate(rooms)}
    floor_of = {room: n for n, floor in enumerate(floors) for room in floor.split(" | ")}
    assert told.keys() == floor_of.keys()
    assert sorted(told, key=lambda room: (floor_of[room], told[room])) == list(told)


NAMED_FILES = {
    path
    for document in ("docs/architecture.md", "docs/development.md")
    for path in re.findall(r"`([a-z_/]+/[a-z_]+\.py)`", text_of(document))
}


@pytest.mark.parametrize("path", sorted(NAMED_FILES))
def test_the_files_that_are_named_are_there(path: str) -> None:
    assert (PACKAGE / path).is_file() or (ROOT / path).is_file()


# -- the example ------------------------------------------------------------------------------


def test_the_example_of_several_models_runs(tiny_model: TinyModels, tmp_path: Path) -> None:
    (example,) = re.findall(
        r"^```python\n(.*?)^```$", text_of("docs/models.md"), re.MULTILINE | re.DOTALL
    )
    for name in ("router", "thinker"):
        (tmp_path / f"{name}.gguf").symlink_to(tiny_model("attention", can_end=True))
    output = run(sys.executable, "-c", example, cwd=tmp_path)
    states, choice, thinker, left = output.splitlines()
    assert states == "{'router': 'ready', 'thinker': 'unloaded'}"
    assert choice in ("easy", "hard")
    assert thinker == "ready"
    assert left == "['thinker', 'second'] thinker"
