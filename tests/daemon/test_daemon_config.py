"""What the daemon's configuration file promises: read whole, or an error that says where."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from llamad_trio.core.config import EngineConfig, Limits
from llamad_trio.core.engine_spec import EngineSpec
from llamad_trio.core.errors import ConfigError
from llamad_trio.daemon.config import DEFAULT_SOCKET, DaemonConfig, load_daemon_config
from llamad_trio.hub.manifest import load_manifest

SAMPLE = Path(__file__).parents[2] / "examples" / "daemon.toml"
SMALL = '[models.small]\nmodel = "smollm2-135m"\n'
ENGINE_FIELDS = tuple(attrs.fields_dict(EngineConfig))
LIMIT_FIELDS = tuple(attrs.fields_dict(Limits))

TOO_DEEP = 2_000 if sys.version_info < (3, 13) else 20_000
"""More than Python writes out.  To read a key of so many parts takes the square of it."""

Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENGINE_FIELDS:
        monkeypatch.delenv(f"LLAMAD_{name.upper()}", raising=False)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(content: str) -> Path:
        path = tmp_path / "daemon.toml"
        path.write_text(content, encoding="utf-8")
        return path

    return write_file


def daemon(line: str) -> str:
    return f"[daemon]\n{line}\n{SMALL}"


def refused(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_daemon_config(path)
    assert caught.value.path == str(path)
    return caught.value


# What a good file gives


def test_a_file_with_everything_is_read_in_full(write: Write, tmp_path: Path) -> None:
    path = write(
        """
        [daemon]
        socket = "/run/llamad/socket"
        default_model = "notes"
        max_request_bytes = 2048
        request_timeout_s = 5
        stream_timeout_s = 7.5
        max_connections = 3

        [models.small]
        model = "smollm2-135m"

        [models.notes]
        path = "/models/notes.gguf"
        n_slots = 2
        lane = "own"
        tensor_split = [1, 2.5]
        type_k = "q8_0"
        flash_attn = true
        """
    )
    assert load_daemon_config(path) == DaemonConfig(
        socket="/run/llamad/socket",
        default="notes",
        limits=Limits(
            max_request_bytes=2048, request_timeout_s=5.0, stream_timeout_s=7.5, max_connections=3
        ),
        models={
            "small": EngineSpec("smollm2-135m", EngineConfig()),
            "notes": EngineSpec(
                "/models/notes.gguf",
                EngineConfig(
                    n_slots=2, lane="own", tensor_split=(1.0, 2.5), type_k="q8_0", flash_attn=True
                ),
            ),
        },
    )


def test_what_is_not_said_has_the_defaults(write: Write) -> None:
    config = load_daemon_config(str(write(SMALL)))
    assert (config.socket, config.default, config.limits) == (DEFAULT_SOCKET, "small", Limits())
    assert config.models["small"].config == EngineConfig()


def test_the_first_model_in_the_file_is_the_default(write: Write) -> None:
    names = ["m", "z", "a"]
    tables = [f'[models.{name}]\nmodel = "smollm2-135m"\n' for name in names]
    config = load_daemon_config(write("".join(tables)))
    assert config.default == "m"
    assert list(config.models) == names


@pytest.mark.parametrize("name", ["a", "Qwen3-0.6B_q4", "x" * 64, ".", "7"])
def test_a_name_of_letters_digits_and_three_signs_is_good(write: Write, name: str) -> None:
    path = write(f'[models."{name}"]\nmodel = "smollm2-135m"\n')
    assert list(load_daemon_config(path).models) == [name]


@pytest.mark.parametrize("name", list(load_manifest()))
def test_every_known_model_can_be_named(write: Write, name: str) -> None:
    assert load_daemon_config(write(f'[models.m]\nmodel = "{name}"')).models["m"].model == name


def test_the_environment_or_a_base_gives_what_the_file_leaves_out(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAD_N_CTX", "1024")
    monkeypatch.setenv("LLAMAD_N_SLOTS", "9")
    path = write(SMALL + "n_slots = 2")
    config = load_daemon_config(path).models["small"].config
    assert config == EngineConfig(n_ctx=1024, n_slots=2)
    base = EngineConfig(n_batch=64, n_slots=9)
    loaded = load_daemon_config(path, base).models["small"].config
    assert loaded == attrs.evolve(base, n_slots=2)


# Limits

RANGES: list[tuple[str, float, float, float]] = [
    ("max_request_bytes", 1024 * 1024, 64, 1024**3),
    ("request_timeout_s", 30.0, 0.001, 86_400.0),
    ("stream_timeout_s", 60.0, 0.001, 86_400.0),
    ("max_connections", 256, 1, 65_536),
]


@pytest.mark.parametrize(("name", "default", "low", "high"), RANGES)
def test_a_limit_has_a_default_and_is_clamped(
    write: Write, name: str, default: float, low: float, high: float
) -> None:
    def read(value: float) -> object:
        return getattr(load_daemon_config(write(daemon(f"{name} = {value}"))).limits, name)

    assert getattr(Limits(), name) == default
    assert (read(-1), read(2**70)) == (low, high)
    if isinstance(default, float):
        assert (read(math.nan), read(math.inf)) == (default, high)


# Paths

Place = tuple[str, Callable[[DaemonConfig], str | None], str]

PLACES: list[Place] = [
    ('[daemon]\nsocket = "{}"\n' + SMALL, lambda c: c.socket, "daemon.socket"),
    ('[models.small]\npath = "{}"', lambda c: str(c.models["small"].model), "models.small.path"),
    (
        SMALL + 'prompt_cache_dir = "{}"',
        lambda c: c.models["small"].config.prompt_cache_dir,
        "models.small.prompt_cache_dir",
    ),
]


@pytest.fixture(params=PLACES, ids=[place[2] for place in PLACES])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A file with a place for a path, what reads that, and what errors call it."""
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("PLACE", "/a place")
    monkeypatch.setenv("SUB", "$PLACE")  # what a variable holds is not expanded again
    monkeypatch.setenv("EMPTY", "")
    place: Place = request.param
    return place


@pytest.mark.parametrize(
    ("written", "expanded"),
    [
        ("/absolute/file", "/absolute/file"),
        ("~/file", "/home/someone/file"),
        ("~", "/home/someone"),
        ("$PLACE/file", "/a place/file"),
        ("${PLACE}s/file", "/a places/file"),
        ("$PLACE/$SUB/${SUB}", "/a place/$PLACE/$PLACE"),
        ("/with/$", "/with/$"),
        ("/with/~/$1/${}", "/with/~/$1/${}"),
    ],
)
def test_home_and_variables_are_expanded(
    write: Write, place: Place, written: str, expanded: str
) -> None:
    content, read, _ = place
    assert read(load_daemon_config(write(content.format(written)))) == expanded


@pytest.mark.parametrize("relative", ["sub/file", "file", "smollm2-135m"])
def test_a_relative_path_starts_from_the_folder_of_the_file(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Place, relative: str
) -> None:
    content, read, _ = place
    write(content.format(relative))
    monkeypatch.chdir(tmp_path)
    config = load_daemon_config("daemon.toml")
    monkeypatch.chdir("/")
    assert read(config) == str(tmp_path / relative)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        *((text, "NOT_SET_HERE is not set") for text in ("$NOT_SET_HERE/x", "~/${NOT_SET_HERE}")),
        ("", "must not be empty"),
        ("$EMPTY", "must not be empty"),
        ("~no-such-user/x", "no home directory is known for '~no-such-user/x'"),
        ("a\\u0000b", "contains a NUL byte"),
    ],
)
def test_what_can_be_no_path_is_refused(
    write: Write, place: Place, written: str, reason: str
) -> None:
    content, _, where = place
    error = refused(write(content.replace("{}", written)))
    assert error.where == where
    assert reason in error.reason


# What is refused


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    missing = refused(tmp_path / "none.toml")
    assert (missing.where, missing.reason) == ("", "cannot be read: No such file or directory")
    assert refused(tmp_path).reason == "cannot be read: Is a directory"
    path = tmp_path / "daemon.toml"
    path.write_bytes(b'[daemon]\nsocket = "\xff"')
    assert "utf-8" in refused(path).reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[daemon]\nsocket = /tmp/x", r"line 2, column 10"),
        ("[models.a]\nn_ctx = 1\nn_ctx = 2", r"at end of document"),
        ("[models.a]\n[models.a]", r"line 2, column 10"),
        ("x = " + "[" * 5000, r"recursion"),
        ("x = " + "9" * 5000, r"4300 digits"),
    ],
)
def test_what_is_no_toml_is_refused_with_its_place(write: Write, content: str, reason: str) -> None:
    error = refused(write(content))
    assert error.where == ""
    assert error.reason.startswith("not valid TOML: ")
    assert re.search(reason, error.reason)


@pytest.mark.parametrize(
    ("content", "where", "reason"),
    [
        ("[modles.a]", "modles", "unknown table 'modles' (did you mean 'models'?)"),
        ("[server]", "server", "unknown table 'server'"),
        ('socket = "/x"', "socket", "unknown table 'socket'"),
        ("daemon = 3", "daemon", "daemon must be a table, not int"),
        ('models = "a"', "models", "models must be a table, not str"),
        ("[[models]]", "models", "models must be a table, not list"),
        ("[models]\nsmall = 1", "models.small", "small must be a table, not int"),
        (daemon("sokcet = 1"), "daemon.sokcet", "unknown key 'sokcet' (did you mean 'socket'?)"),
        (daemon("PORT = 1"), "daemon.PORT", "unknown key 'PORT'"),
        (daemon("SOCKET = 1"), "daemon.SOCKET", "unknown key 'SOCKET' (did you mean 'socket'?)"),
        (SMALL + "n_slot = 1", "models.small.n_slot", "'n_slot' (did you mean 'n_slots'?)"),
        (SMALL + "qqq = 1", "models.small.qqq", "unknown key 'qqq'"),
        (SMALL + '"\\n" = 1', r"models.small.'\n'", r"unknown key '\n'"),
        ('[models.qwen3.0]\nmodel = "qwen3-0.6b"', "models.qwen3.0", "unknown key '0'"),
        (
            '[models."q.3"]\npath = "x"\nn_ctx = ""',
            "models.'q.3'.n_ctx",
            "n_ctx must be an integer",
        ),
        ("", "models", "no model: add a table [models.NAME]"),
        ("[models]", "models", "no model: add a table [models.NAME]"),
        ("[models.a]\nn_ctx = 5", "models.a", "no model: give either `path` or `model`"),
        (SMALL + 'path = "x.gguf"', "models.small", "both `path` and `model`: give either"),
        ('[models.a]\nmodel = "smollm2-135n"', "models.a.model", "did you mean smollm2-135m?"),
        ('[models.a]\nmodel = "./file.gguf"', "models.a.model", "known are smollm2-135m, "),
        ("[models.a]\nmodel = 135", "models.a.model", "model must be text, not int"),
        ("[models.a]\npath = true", "models.a.path", "path must be text, not bool"),
        (
            daemon('default_model = "smal"'),
            "daemon.default_model",
            "no model 'smal' (did you mean 'small'?)",
        ),
        (daemon("default_model = 1"), "daemon.default_model", "default_model must be text"),
        (daemon("socket = 1"), "daemon.socket", "socket must be text, not int"),
        (SMALL + 'lane = "other"', "models.small.lane", 'lane must be a Lane, "own" or None'),
        (SMALL + "type_k = 0x" + "f" * 9000, "models.small.type_k", "cannot be such int"),
        (f"{SMALL}type_k{'.a' * TOO_DEEP} = 1", "models.small.type_k", "cannot be such dict"),
    ],
)
def test_an_error_says_where_and_what(write: Write, content: str, where: str, reason: str) -> None:
    path = write(content)
    error = refused(path)
    assert error.where == where
    assert reason in error.reason
    assert str(error).startswith(f"{path}: {where}: ")


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "x" * 65, "a\\n", "a$"])
def test_a_name_with_anything_else_in_it_is_refused(write: Write, name: str) -> None:
    error = refused(write(f'[models."{name}"]\nmodel = "smollm2-135m"\n'))
    assert error.where.startswith("models.")
    assert "1-64 letters" in error.reason


DATES = ("2024-05-01", "2024-05-01T10:00:00Z", "10:00:00")
WRONG: dict[tuple[str, ...], tuple[str, ...]] = {
    (
        *("n_slots", "n_ctx", "n_threads", "n_threads_batch", "n_batch", "max_queue", "weight"),
        *("prompt_cache_ram_bytes", "prompt_cache_disk_bytes", "n_gpu_layers", "main_gpu"),
        *("max_request_bytes", "max_connections"),
    ): ("true", '"5"', "1.0", "[]", "{}"),
    (
        *("step_target_s", "rope_freq_base", "rope_freq_scale"),
        *("request_timeout_s", "stream_timeout_s"),
    ): ("true", '"5"', "[]", "{}"),
    (
        *("adaptive_threads", "kv_cache", "preflight", "use_extra_bufts", "use_mmap"),
        *("use_mlock", "flash_attn"),
    ): ("1", '"on"', "[]", "{}"),
    ("split_mode", "type_k", "type_v", "lane"): ("1", "true", '"other"', "[]", "{}"),
    ("tensor_split",): ('"1"', "1", "[true]", '["1"]', "{}"),
    ("prompt_cache_dir",): ("1", "true", "[]", "{}"),
}
CASES = [
    (key, written)
    for keys, values in WRONG.items()
    for key in keys
    for written in (*values, *DATES)
]


def test_every_field_is_covered_here() -> None:
    assert sorted(key for keys in WRONG for key in keys) == sorted(ENGINE_FIELDS + LIMIT_FIELDS)


@pytest.mark.parametrize(("key", "written"), CASES)
def test_a_wrong_type_is_refused_with_table_and_key(write: Write, key: str, written: str) -> None:
    limit = key in LIMIT_FIELDS
    table = daemon(f"{key} = {written}") if limit else f"{SMALL}{key} = {written}"
    error = refused(write(table))
    assert error.where == (f"daemon.{key}" if limit else f"models.small.{key}")
    assert error.reason.startswith(f"{key} ")


def test_the_wrong_key_is_found_among_good_ones(write: Write) -> None:
    keys = "n_slots = 2\nn_ctx = 4096\nn_batch = '8'\nkv_cache = true"
    assert refused(write(SMALL + keys)).where == "models.small.n_batch"


# Whatever is written

SCALARS = (
    st.booleans()
    | st.integers()
    | st.integers(1, 100)
    | st.floats()
    | st.dates()
    | st.datetimes()
    | st.times()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from(["own", "smollm2-135m", "f16", "small", "a.gguf", "~/x", "$HOME", "$NOT_SET"])
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)


GOOD_MODELS = st.sampled_from([{"model": "smollm2-135m"}, {"path": "a.gguf"}])
NEAR_MISSES = st.fixed_dictionaries(
    {
        "models": st.dictionaries(
            st.sampled_from(["small", "b"]),
            st.builds(
                lambda model, more: {**more, **model},
                GOOD_MODELS,
                st.dictionaries(st.sampled_from(ENGINE_FIELDS), VALUES, max_size=2),
            ),
            min_size=1,
        )
    },
    optional={
        "daemon": st.dictionaries(
            st.sampled_from(["socket", "default_model", *LIMIT_FIELDS]), VALUES, max_size=2
        )
    },
)
NAMES = KEYS | st.sampled_from(["daemon", "models", "path", "model", "socket", *ENGINE_FIELDS])
ANYTHING = st.dictionaries(
    NAMES, st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=3) | VALUES) | VALUES
)


def toml(value: object) -> str:
    """A value as TOML writes it, tables inline."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")
        case dt.date() | dt.time():
            return value.isoformat()
        case list():
            return f"[{', '.join(map(toml, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{toml(key)} = {toml(item)}' for key, item in value.items())}}}"
        case _:
            return repr(value)


def loads_or_is_refused(content: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(content)
        file.flush()
        with contextlib.suppress(ConfigError):
            config = load_daemon_config(file.name)
            assert Path(config.socket).is_absolute()
            assert config.default in config.models
            for spec in config.models.values():
                assert Path(spec.model).is_absolute() or spec.model in load_manifest()


@given(NEAR_MISSES | ANYTHING)
def test_whatever_the_tables_hold_is_loaded_or_refused(data: dict[str, Any]) -> None:
    content = "\n".join(f"{toml(key)} = {toml(value)}" for key, value in data.items())
    loads_or_is_refused(content.encode())


@given(st.binary(max_size=64) | st.text(max_size=64).map(lambda t: t.encode(errors="replace")))
def test_whatever_the_bytes_are_is_loaded_or_refused(content: bytes) -> None:
    loads_or_is_refused(content)
    loads_or_is_refused(SMALL.encode() + content)


def test_the_sample_loads() -> None:
    config = load_daemon_config(SAMPLE)
    assert list(config.models) == ["small", "notes"]
    assert config.default == "small"
    assert config.limits == Limits()
    assert config.models["notes"].model == str(SAMPLE.parent / "models" / "notes.gguf")


def test_reading_it_loads_neither_trio_nor_llama_cpp() -> None:
    code = (
        "import sys; from llamad_trio.daemon.config import load_daemon_config\n"
        f"load_daemon_config({str(SAMPLE)!r})\n"
        "print([m for m in ('trio', 'llama_cpp') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stdout.strip() == b"[]"
