"""What constraints cost and save, each figure a ratio within one run.  See `promises`."""

from __future__ import annotations

import ctypes
import statistics
import time
from functools import partial
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
import trio

from llamad_trio import Completion, Engine, Request, open_engine
from llamad_trio.constraints.compiler import Compiler
from llamad_trio.constraints.constraint import Constraint
from llamad_trio.core.config import EngineConfig
from llamad_trio.core.tools import JsonObject
from llamad_trio.hub.manifest import resolve_model
from llamad_trio.llama.model import LlamaVocabulary, load_model
from tests.support import side_by_side

PROMPT = "People and what they like, as JSON:\n"
PERSON: JsonObject = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PEOPLE: JsonObject = {"type": "array", "items": PERSON, "minItems": 100}
KEYS = [
    "identifier",
    "temperature",
    "humidity",
    "pressure",
    "wind_speed",
    "wind_direction",
    "is_raining",
    "visibility",
    "cloud_cover",
    "station_number",
]
RECORD: JsonObject = {
    "type": "object",
    "properties": {key: {"type": "integer", "minimum": 0, "maximum": 99} for key in KEYS},
    "required": KEYS,
    "additionalProperties": False,
}
GBNF = r"""
root ::= "[" person ("," " " person)* "]"
person ::= "{\"name\": " string ", \"age\": " integer ", \"tags\": " tags "}"
tags ::= "[" (string (", " string)*)? "]"
integer ::= "-"? ("0" | [1-9] [0-9]{0,15})
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
"""
N_TOKENS = 96
PAIRS = 5


def rate(completions: list[Completion]) -> float:
    """Tokens a second of requests that ran at the same time, without their prompts."""
    seconds = max(c.duration_s for c in completions) - max(c.ttft_s for c in completions)
    return sum(c.generated_tokens - 1 for c in completions) / seconds


async def together(
    eng: Engine, n: int, max_tokens: int = N_TOKENS, **fields: Any
) -> list[Completion]:
    requests = [
        Request(f"{i}. {PROMPT}", raw=True, temperature=0.8, seed=i, max_tokens=max_tokens)
        for i in range(n)
    ]
    return await side_by_side(partial(eng.complete, request, **fields) for request in requests)


async def in_turns(eng: Engine, n: int, schema: JsonObject) -> float:
    """Median ratio of tokens/s under a schema to those of free text of the same length."""
    await together(eng, n, 8, json_schema=schema)  # the tokenizer, and the prompts
    ratios = []
    for _ in range(PAIRS):
        constrained = await together(eng, n, json_schema=schema)
        free = await together(eng, n)
        ratios.append(rate(constrained) / rate(free))
    return statistics.median(ratios)


async def schema_ratio(model: str) -> dict[str, float]:
    """Tokens/s under a schema against free text, sampled."""
    async with open_engine(model, n_slots=1) as eng:
        return {"ratio": await in_turns(eng, 1, PEOPLE)}


async def constrained_streams(model: str) -> dict[str, float]:
    """8 constrained requests against 8 free ones, all tokens together."""
    async with open_engine(model, n_slots=8) as eng:
        return {"ratio": await in_turns(eng, 8, PEOPLE)}


async def fixed_keys(model: str) -> dict[str, float]:
    """Seconds for as many free tokens, against those for a record of ten fixed keys."""
    ratios = []
    async with open_engine(model, n_slots=1) as eng:
        await together(eng, 1, 8, json_schema=RECORD)
        for _ in range(PAIRS):
            (record,) = await together(eng, 1, 400, json_schema=RECORD)
            (free,) = await together(eng, 1, record.generated_tokens)
            per_token = free.duration_s / free.generated_tokens
            ratios.append(per_token * record.generated_tokens / record.duration_s)
    return {"free / record": statistics.median(ratios), "tokens": record.generated_tokens}


async def gbnf_factor(model: str) -> dict[str, float]:
    """Cost of a token's constraint in llama.cpp's grammar sampler, against a mask here."""
    async with open_engine(model, n_slots=1) as eng:
        (done,) = await together(eng, 1, json_schema=PEOPLE)
        tokens = await eng.tokenize(done.text)
        decode_s = 1 / rate(await together(eng, 1))
    return await trio.to_thread.run_sync(partial(_gbnf_factor, model, tokens, decode_s))


def _gbnf_factor(model: str, tokens: list[int], decode_s: float) -> dict[str, float]:
    loaded = load_model(resolve_model(model), EngineConfig(), lambda _: True)
    try:
        masks = Compiler(LlamaVocabulary(loaded)).compile(Constraint("json_schema", PEOPLE))
        logits = np.zeros(loaded.n_vocab, dtype=np.float32)
        ours = []
        for token in tokens:
            start = time.perf_counter()
            masks.apply(logits)
            masks.accept([token])
            ours.append(time.perf_counter() - start)
        sampler = lib.llama_sampler_init_grammar(loaded.vocab, GBNF.encode(), b"root")
        theirs = []
        for token in tokens:
            data = (lib.llama_token_data * loaded.n_vocab)()
            for i in range(loaded.n_vocab):
                data[i].id = i
            candidates = lib.llama_token_data_array(data, loaded.n_vocab, -1, False)
            start = time.perf_counter()
            lib.llama_sampler_apply(sampler, ctypes.byref(candidates))
            lib.llama_sampler_accept(sampler, token)
            theirs.append(time.perf_counter() - start)
        lib.llama_sampler_free(sampler)
    finally:
        loaded.close()
    cost, their_cost = statistics.mean(ours), statistics.mean(theirs)
    return {
        "constraint": their_cost / cost,
        "token": (decode_s + their_cost) / (decode_s + cost),
        "ours_ms": 1e3 * cost,
        "theirs_ms": 1e3 * their_cost,
    }
