"""The configuration file of the daemon.  Reads it whole or says what is wrong and where.

Knows the tables and keys; ranges and types belong to `EngineConfig` and `Limits`.  Touches
no model file: a model that is not there is found when it is loaded.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import attrs

from llamad_trio.core.config import EngineConfig, Limits
from llamad_trio.core.engine_spec import EngineSpec
from llamad_trio.core.errors import ConfigError, LlamadError, ProtocolError
from llamad_trio.core.fields import text, unknown_names
from llamad_trio.hub.manifest import known_model

DEFAULT_SOCKET = "/tmp/llamad.sock"
"""Where the daemon listens, and a client connects, when nothing else is said."""

_MODEL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")

Fields = TypeVar("Fields", EngineConfig, EngineSpec, Limits)


@attrs.frozen(kw_only=True)
class DaemonConfig:
    """What a daemon serves, and how."""

    socket: str  # absolute
    default: str  # a key of `models`
    limits: Limits
    models: Mapping[str, EngineSpec]  # in the file's order


def load_daemon_config(
    path: str | os.PathLike[str], base: EngineConfig | None = None
) -> DaemonConfig:
    """Read the daemon's configuration from a TOML file.

    The file holds one optional table `[daemon]` (`socket`, `default_model` and the fields
    of `Limits`) and one table `[models.NAME]` for each model: either `path` (a GGUF file)
    or `model` (a name of the manifest), any field of `EngineConfig`,
    and `load`, `unload_after_s` and `isolation` as for `EngineSpec`.  NAME is 1 to 64
    of the letters a-z and A-Z, digits, `_`, `.` and `-`.  Without `default_model` the
    first model is the default.

    In `socket`, `path` and `prompt_cache_dir` a leading `~` and `$VAR` or `${VAR}` are
    expanded.  One that is relative is taken from the folder the file is in, not from the
    folder the daemon was started in.

    Where the file says nothing, engines get `base`; `None` is `EngineConfig.from_env()`.
    Blocks for as long as it takes to read the file; not for the Trio loop.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or holds something it may not.
    """
    file = os.fspath(path)
    try:
        with open(file, "rb") as source:
            root = _Table(file, (), tomllib.load(source))
    except OSError as error:
        raise ConfigError(file, "", f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(file, "", f"not valid TOML: {error}") from error
    root.check_keys(("daemon", "models"), "table")

    daemon = root.table("daemon")
    daemon.check_keys(("socket", "default_model", *attrs.fields_dict(Limits)))

    models_table = root.table("models")
    engine = EngineConfig.from_env() if base is None else base
    models = {name: _read_model(models_table, name, engine) for name in models_table.values}
    if not models:
        raise root.error("models", "no model: add a table [models.NAME]")

    default = daemon.text("default_model", next(iter(models)))
    if default not in models:
        raise daemon.error("default_model", f"no model {unknown_names([default], models, repr)}")
    return DaemonConfig(
        socket=daemon.location("socket", DEFAULT_SOCKET),
        default=default,
        limits=daemon.fill(Limits()),
        models=MappingProxyType(models),
    )


def _read_model(models: _Table, name: str, base: EngineConfig) -> EngineSpec:
    if not _MODEL_NAME.fullmatch(name):
        raise models.error(name, "a model's name is 1-64 letters, digits, '_', '.' or '-'")
    table = models.table(name)
    spec_keys = ("path", "model", "load", "unload_after_s", "isolation")
    table.check_keys((*spec_keys, *attrs.fields_dict(EngineConfig)))
    if ("path" in table.values) == ("model" in table.values):
        problem = "both `path` and `model`" if "path" in table.values else "no model"
        raise models.error(name, f"{problem}: give either `path` or `model`")
    if "path" in table.values:
        model = table.location("path")
    else:
        model = table.text("model")
        try:
            known_model(model)
        except LlamadError as error:
            raise table.error("model", str(error)) from error
    return table.fill(EngineSpec(model, table.fill(base)))


@attrs.frozen
class _Table:
    """A table that knows where in which file it stands, so that its errors can say so."""

    file: str
    place: tuple[str, ...]
    values: Mapping[str, object]

    def error(self, key: str, reason: str) -> ConfigError:
        keys = [part if _BARE_KEY.fullmatch(part) else repr(part) for part in (*self.place, key)]
        return ConfigError(self.file, ".".join(keys), reason)

    def check_keys(self, known: Collection[str], kind: str = "key") -> None:
        for key in self.values:
            if key not in known:
                raise self.error(key, f"unknown {kind} {unknown_names([key], known, repr)}")

    def table(self, key: str) -> _Table:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, f"{key} must be a table, not {type(value).__name__}")
        return _Table(self.file, (*self.place, key), value)

    def text(self, key: str, default: str = "") -> str:
        try:
            return text(self.values.get(key, default), key)
        except ProtocolError as error:
            raise self.error(key, error.reason) from error

    def location(self, key: str, default: str = "") -> str:
        """The absolute path that a value stands for."""

        def variable(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            if name not in os.environ:
                raise self.error(key, f"the environment variable {name} is not set")
            return os.environ[name]

        expanded = os.path.expanduser(_VARIABLE.sub(variable, self.text(key, default)))
        if not expanded:
            raise self.error(key, f"{key} must not be empty")
        if expanded.startswith("~"):
            raise self.error(key, f"no home directory is known for {expanded!r}")
        return str(Path(self.file).absolute().parent / expanded)

    def fill(self, fields: Fields) -> Fields:
        """`fields` with what the table gives of them: one by one, to tell which is wrong."""
        for key in [key for key in self.values if key in attrs.fields_dict(type(fields))]:
            value: Any = self.location(key) if key == "prompt_cache_dir" else self.values[key]
            try:
                fields = attrs.evolve(fields, **{key: value})
            except ProtocolError as error:
                raise self.error(key, error.reason) from error
            except (ValueError, RecursionError) as error:  # too large or too deep to be printed
                raise self.error(key, f"{key} cannot be such {type(value).__name__}") from error
        return fields
