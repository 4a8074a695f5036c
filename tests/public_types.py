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
    Request,
    RemoteEngine,
    Session,
    aio,
    blocking,
    connect,
    estimate_memory,
    open_engine,
    run_tools,
    testing,
)


async def of_engines(eng: EngineLike, remote: RemoteEngine, models: Models) -> None:
    assert_type((await eng.complete("x", into=list[int])).value, list[int])
    assert_type(await remote.complete("x", into=int), Completion[int])
    assert_type(await models.complete("x", into=int, model="m"), Completion[int])
    assert_type((await eng.complete("x", max_tokens=3, stop=["."])).text, str)
    await eng.complete("x", max_token=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
