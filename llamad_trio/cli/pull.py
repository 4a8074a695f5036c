"""`pull` and `models`: fetch known models with a progress bar, and list them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from llamad_trio.hub.manifest import (
    DEFAULT_MODEL,
    KnownModel,
    converter,
    installed_path,
    known_digest,
    known_model,
    load_manifest,
    resolve_model,
)
from llamad_trio.hub.pull import PullProgress, pull

if TYPE_CHECKING:
    from pathlib import Path

_PHASES = {"wait": "waiting for another pull", "download": "downloading", "verify": "verifying"}


def ensure_model(name_or_path: str) -> Path:
    """The file a command line's model argument stands for.

    A known model is pulled on first use, with a note and a progress bar on
    stderr. Anything else is a path, returned as it is when it exists or looks like one.
    Raises `PullError` when the pull fails, and `ModelLoadError` for a bare word that
    is neither a known model nor a file.
    """
    if name_or_path not in load_manifest():
        path = resolve_model(name_or_path)
        looks_like_a_path = os.sep in name_or_path or path.suffix == ".gguf"
        if not looks_like_a_path and not path.exists():
            known_model(name_or_path)
        return path
    model = known_model(name_or_path)
    installed = installed_path(model)
    if installed is not None:
        return installed
    click.echo(f"{model.name} is not here yet: pulling it once", err=True)
    return _pull_with_bar(model, verify=False)


@click.command("pull")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--verify", is_flag=True, help="Read installed models too, and repair damaged ones.")
def pull_command(names: tuple[str, ...], verify: bool) -> None:
    """Fetch known models (the default one when none is named) and check their SHA-256.

    Prints the path of each on stdout.
    """
    for model in [known_model(name) for name in names or (DEFAULT_MODEL,)]:
        click.echo(_pull_with_bar(model, verify=verify))


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array instead of a table.")
def models_command(as_json: bool) -> None:
    """List the known models, and which of them are installed."""
    models = load_manifest().values()
    if as_json:
        click.echo(json.dumps([_plain(model) for model in models], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("NAME", no_wrap=True)
    table.add_column("SIZE", no_wrap=True, justify="right")
    table.add_column("LICENCE", no_wrap=True)
    table.add_column("INSTALLED", no_wrap=True)
    table.add_column("DESCRIPTION")
    for model in models:
        digest = known_digest(model)
        table.add_row(
            model.name,
            decimal(digest.size_bytes) if digest else "?",
            model.licence,
            "yes" if installed_path(model) else "no",
            model.description,
        )
    Console().print(table)


def _plain(model: KnownModel) -> dict[str, object]:
    path, digest = installed_path(model), known_digest(model)
    return {
        **converter.unstructure(model),
        "size_bytes": digest.size_bytes if digest else None,
        "sha256": digest.sha256 if digest else None,
        "installed": str(path) if path else None,
    }


def _pull_with_bar(model: KnownModel, *, verify: bool) -> Path:
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as display:
        return pull(model, verify=verify, progress=_Bar(display))


class _Bar:
    """One line of progress from the first report on; without a terminal, one line a phase."""

    def __init__(self, display: Progress) -> None:
        self._display = display
        self._phase: str | None = None
        self._task: TaskID | None = None

    def __call__(self, progress: PullProgress) -> None:
        if self._task is None or progress.phase != self._phase:
            self._phase = progress.phase
            title = f"{progress.model}: {_PHASES[progress.phase]}"
            if self._display.disable:
                click.echo(title, err=True)
            if self._task is not None:
                self._display.remove_task(self._task)
            self._task = self._display.add_task(title, total=None)
        self._display.update(self._task, completed=progress.done_bytes, total=progress.total_bytes)
