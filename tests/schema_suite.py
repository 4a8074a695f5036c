"""The public JSON-Schema-Test-Suite, of draft 2020-12.

The source distribution of `jsonschema` carries it.  It is fetched from the package index that
pip would use, once, and kept in the models directory; nothing of it is committed.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from llamad_trio.hub.manifest import models_dir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ARCHIVE = "jsonschema-4.26.0.tar.gz"
SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
FOLDER = "json/tests/draft2020-12/"

_LINK = re.compile(rf'href="([^"]*/{re.escape(ARCHIVE)}[^"]*)"')


@attrs.frozen
class Group:
    """A schema, with values that are of it and values that are not."""

    name: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]

    def __str__(self) -> str:
        return self.name


def read_schema_suite() -> list[Group]:
    """All groups of the suite.

    Where they cannot be had the test is skipped, or fails if LLAMAD_REQUIRE_MODELS=1.
    """
    try:
        return list(_read(_fetch()))
    except (OSError, ValueError) as error:
        reason = f"the JSON-Schema-Test-Suite is not there: {error}"
    if os.environ.get("LLAMAD_REQUIRE_MODELS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def _fetch() -> Path:
    path = models_dir() / ARCHIVE
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256:
        return path
    # `pip download` would build the package, to read what it depends on.
    project = f"{_index().rstrip('/')}/jsonschema/"
    request = urllib.request.Request(project, headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = _LINK.search(answer.read().decode())
        base = answer.url
    if found is None:
        raise ValueError(f"{project} has no {ARCHIVE}")
    url = urllib.parse.urljoin(base, html.unescape(found[1]))
    with urllib.request.urlopen(url, timeout=60) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise ValueError(f"{url} is not the file we know")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{ARCHIVE}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(path)
    return path


def _index() -> str:
    """The package index that pip is set to use."""
    for name in ("PIP_INDEX_URL", "UV_INDEX_URL"):
        if url := os.environ.get(name):
            return url
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    return said.stdout.strip() or "https://pypi.org/simple"


def _read(path: Path) -> Iterator[Group]:
    with tarfile.open(path) as archive:
        members = sorted((m for m in archive if FOLDER in m.name), key=lambda m: m.name)
        for member in members:
            stream = archive.extractfile(member) if member.name.endswith(".json") else None
            if stream is None:
                continue
            file = PurePosixPath(member.name.partition(FOLDER)[2]).with_suffix("")
            for group in json.load(stream):
                tests = group["tests"]
                yield Group(
                    f"{file}: {group['description']}",
                    group["schema"],
                    [test["data"] for test in tests if test["valid"]],
                    [test["data"] for test in tests if not test["valid"]],
                )
