"""What type checkers say of the public surface: nothing here is run.

mypy (strict) and pyright read this file.  Both complain of a comment that lets an error pass
where there is none: so each such line proves that the mistake is found.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import assert_type

from llamad_trio import (
    Completion,
    EngineConfig,
    EngineLike,
    EngineSpec,
    Models,
    RemoteEngine,
    Request,
    Session,
    estimate_memory,
    open_engine,
    run_tools,
)
from llamad_trio.aio import AsyncEngine
from llamad_trio.blocking import BlockingEngine
from llamad_trio.testing import open_scripted_engine


async def values(
    eng: EngineLike, remote: RemoteEngine, models: Models, there: AsyncEngine, here: BlockingEngine
) -> None:
    """The type that is asked for is the type of the value."""
    assert_type((await eng.complete("x", into=list[int])).value, list[int])
    assert_type(await remote.complete("x", into=int), Completion[int])
    assert_type(await models.complete("x", into=int, model="m"), Completion[int])
    assert_type(await there.complete("x", into=int), Completion[int])
    assert_type(here.complete("x", into=int, timeout=1), Completion[int])
    assert_type((await eng.complete("x", max_tokens=3, stop=["."])).text, str)


async def fields(eng: EngineLike, models: Models, session: Session) -> None:
    """A field that does not exist, or has another type, is an error wherever fields are taken."""
    Request("x", max_token=3)  # type: ignore[call-arg]
    Request("x", top_k="all")  # type: ignore[arg-type]
    await eng.complete("x", max_token=3)  # type: ignore[call-overload]
    await eng.complete("x", temperature="hot")  # type: ignore[call-overload]
    await models.complete_text("x", seed=1.5)  # type: ignore[arg-type]
    eng.stream("x", stop=5)  # type: ignore[arg-type]
    eng.stream_events("x", tool=[])  # type: ignore[call-arg]
    session.decode(max_token=3)  # type: ignore[call-arg]
    await run_tools(eng, "x", tool=[])  # type: ignore[call-arg]


def fields_of_facades(there: AsyncEngine, here: BlockingEngine) -> None:
    """The same for those without Trio."""
    there.stream("x", max_token=3)  # type: ignore[call-arg]
    here.stream("x", top_p="all")  # type: ignore[arg-type]
    here.choose("x", ["a"], top=3)  # type: ignore[call-arg]


async def settings() -> None:
    """The same of settings."""
    EngineConfig(n_slot=3)  # type: ignore[call-arg]
    EngineSpec("m", n_ctx="all")  # type: ignore[arg-type]
    open_engine("m", n_slot=3)  # type: ignore[call-overload]
    open_engine("m", type_k="q9")  # type: ignore[call-overload]
    open_scripted_engine("a", n_slot=3)  # type: ignore[call-arg]
    await estimate_memory("m", n_ctx="1")  # type: ignore[arg-type]
