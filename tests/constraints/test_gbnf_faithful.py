"""A converted grammar allows, at every step, exactly the tokens that llama.cpp's own allows.

llama.cpp's grammar sampler is the oracle: it is slow, and may end the process, but for a
grammar that we accept it says what the grammar means.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import tarfile
import time
import urllib.request
from importlib import metadata
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import gguf
import llama_cpp.llama_cpp as lib
import pytest
from hypothesis import event, given, note, settings, strategies as st
from llguidance import LLMatcher, LLTokenizer
from llguidance.llamacpp import lltokenizer_from_vocab

from llamad_trio.constraints.gbnf import parse_gbnf
from llamad_trio.constraints.gbnf_lark import gbnf_to_lark
from llamad_trio.core.errors import ProtocolError
from llamad_trio.hub.manifest import models_dir
from llamad_trio.llama import backend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# llguidance asks llama_cpp for attributes by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:llama_token_get_attr:DeprecationWarning")

CHARACTERS = "éèßΩ€…\u2028\u0085ぁんアヿ、一鿿🙂\U0010ffff"
PIECES = ["ab", "ba", "abc", "aa", "tr", "true", '":', '{"', "}}", ", ", "  ", "12", "1.", "é🙂"]

GRAMMARS = {
    "calculator": r"""
        root ::= (sum "=" blank term "\n")+
        sum  ::= term ([-+*/] term)*
        term ::= word | int | "(" blank sum ")" blank
        word ::= [a-z] [a-z0-9_]* blank
        int  ::= [0-9]+ blank
        blank ::= [ \t\n]*
    """,
    "json": r"""
        root   ::= value
        value  ::= (map | list | text | number | "true" | "false" | "null") blank
        map    ::= "{" blank (text blank ":" blank value ("," blank text blank ":" blank value)*)? "}"
        list   ::= "[" blank (value ("," blank value)*)? "]"
        text   ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
        number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})?
        blank  ::= | " " | "\n" [ \t]{0,20}
    """,
    "right recursion": r"""
        root  ::= item rest
        rest  ::= "," blank item rest | ""
        item  ::= [a-c] item | "(" rest2 ")" | "1"
        rest2 ::= item ";" rest2 | item
        blank ::= ([ \t] blank)?
    """,
    "chess": r"""
        root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
        move ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])? [+#]? | "O-O" "-O"?
    """,
    "japanese": r"""
        root ::= sign+ ([ \t\n] sign+)*
        sign ::= [ぁ-ゟ] | [ァ-ヿ] | [、-〾] | [一-鿿]
    """,
    "list": r"""
        root ::= ("- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n")+
    """,
    "program": r"""
        root  ::= (type name "(" ")" "{" line* "}")*
        type  ::= "int" blank | "if" blank | "i" blank
        line  ::= type name blank "=" value ";" | name blank "=" value ";" | "if" "(" value ")" "{" line* "}"
                | "//" [^\n]* "\n" | "/*" ([^*] | "*" [^/])* "*/"
        value ::= name | [0-9]+ | "-" value | "(" value ")" | name "(" value ("," blank value)* ")"
        name  ::= [a-z_] [a-z0-9_]*
        blank ::= [ \n]+
    """.replace("\n                |", " |"),
    "run on": r"""
        root ::= "x" root? [ab]+ root? "ab" | "x" root "c" | "xa" root "é" | "xab" root "è"
    """,
    "live together": r"""
        root ::= "<" (root | [a-c]+ | "ab" tail | "abc" [0-9] | "é" | "è" tail)+ ">" | ("abc" root? | [a-z]) "abd"
        tail ::= "!" | "c" tail tail | "\""
    """,
    "any": r"""
        root ::= "[" (. root | .){0,3} "]" | "\"" . "\U0001F642"?
    """,
    "empty": r"""
        root ::= () [] "" a? ("b"? | a)*
        a    ::= "(" a? ")" | ("a" {2 , 3}){2}
    """,
    "counted": r"""
        root ::= "a"{2} [ab]{1,} "c"{0} "(" root{1,2} ")" | [0-9]{2}{2} ("1" "2")+ | "x"{1,5000}
    """,
}


MOST_S = 0.002
"""In an ambiguous grammar the oracle's work can double with each character, and nothing stops
it.  It usually takes some microseconds."""


class Oracle:
    """A vocabulary, with what each of the two makes of a grammar over it."""

    def __init__(self, path: Path) -> None:
        write_vocabulary(path)
        backend.start()
        params = lib.llama_model_default_params()
        params.vocab_only = True
        self.model = lib.llama_model_load_from_file(os.fsencode(path), params)
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.tokenizer: LLTokenizer = lltokenizer_from_vocab(self.vocab)
        self.eos: int = lib.llama_vocab_eos(self.vocab)
        count = lib.llama_vocab_n_tokens(self.vocab)
        # Tokens that are text, whole characters of it: where characters are cut llama.cpp is
        # inexact, and it takes control tokens for their names.
        pieces = {token: self.tokenizer.decode_bytes([token]) for token in range(3, count)}
        self.pieces = {
            token: piece
            for token, piece in pieces.items()
            if piece and piece.decode(errors="ignore").encode() == piece
        }
        self.logits = (lib.llama_token_data * count)()
        self.array = lib.llama_token_data_array(data=self.logits, size=count)

    def close(self) -> None:
        lib.llama_model_free(self.model)

    def sampler(self, source: str, root: str = "root") -> lib.llama_sampler_p | None:
        with backend.captured_errors():
            return lib.llama_sampler_init_grammar(self.vocab, source.encode(), root.encode())

    def accepts(self, source: str) -> bool:
        """Whether llama.cpp takes it for a grammar."""
        sampler = self.sampler(source)
        if sampler:
            lib.llama_sampler_free(sampler)
        return bool(sampler)

    def matcher(self, source: str) -> LLMatcher:
        # A forced token would hide that others are allowed.
        lark = '%llguidance {"no_forcing": true}\n' + gbnf_to_lark(source)
        matcher = LLMatcher(self.tokenizer, lark, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def allowed_by_sampler(self, sampler: lib.llama_sampler_p) -> set[int]:
        for token in range(len(self.logits)):
            self.logits[token].id = token
            self.logits[token].logit = 1.0
        lib.llama_sampler_apply(sampler, self.array)
        found = {data.id for data in self.logits if data.logit > 0}
        return found & (self.pieces.keys() | {self.eos})

    def allowed_by_matcher(self, matcher: LLMatcher) -> set[int]:
        if matcher.is_stopped():
            assert not matcher.is_error(), matcher.get_error()
            return {self.eos}
        found = {token for token, bias in enumerate(matcher.compute_logit_bias()) if bias}
        assert not matcher.is_error(), matcher.get_error()
        return found & (self.pieces.keys() | {self.eos})

    def walk(self, source: str, chance: random.Random, most: int) -> str:
        """Say allowed tokens at random, and compare before each.  Returns the text."""
        sampler, matcher = self.sampler(source), self.matcher(source)
        assert sampler, "llama.cpp refuses it"
        said: list[int] = []
        try:
            while len(said) < most:
                expected = self.allowed_by_sampler(sampler)
                allowed = self.allowed_by_matcher(matcher)
                text = self.text(said)
                assert self.shown(allowed - expected) == [], f"not allowed after {text!r}"
                assert self.shown(expected - allowed) == [], f"allowed after {text!r}"
                token = self.choose(sorted(allowed), chance)
                if token == self.eos:
                    break
                said.append(token)
                began = time.perf_counter()
                lib.llama_sampler_accept(sampler, token)
                if time.perf_counter() - began > MOST_S:
                    break
                matcher.consume_token(token)
        finally:
            lib.llama_sampler_free(sampler)
        return self.text(said)

    def choose(self, tokens: list[int], chance: random.Random) -> int:
        if self.eos in tokens and chance.random() < 0.2:
            return self.eos
        # What closes something, so that what is open does not only grow.
        closing = [t for t in tokens if self.pieces.get(t) in {b")", b"]", b"}", b'"', b">"}]
        return chance.choice(closing if closing and chance.random() < 0.3 else tokens)

    def text(self, tokens: list[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode()

    def shown(self, tokens: set[int]) -> list[str]:
        return sorted(self.pieces.get(token, b"end").decode() for token in tokens)


def write_vocabulary(path: Path) -> None:
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    more = [*CHARACTERS, *(piece.replace(" ", "▁") for piece in PIECES)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts + more)
    writer.add_token_scores([0.0] * len(texts + more))
    writer.add_token_types(types + [gguf.TokenType.NORMAL] * len(more))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    oracle = Oracle(tmp_path_factory.mktemp("vocabulary") / "vocabulary.gguf")
    yield oracle
    oracle.close()


@pytest.fixture(scope="module")
def shipped() -> dict[str, str]:
    """The grammars in the source package of llama_cpp: fetched once, kept with the models."""
    version = metadata.version("llama-cpp-python")
    kept = models_dir() / f"llama-cpp-python-{version}-grammars.json"
    if not kept.exists():
        try:
            grammars = fetch_grammars(version)
        except (OSError, tarfile.TarError, ValueError, StopIteration) as error:
            if os.environ.get("LLAMAD_REQUIRE_MODELS") == "1":
                pytest.fail(f"no source package: {error}")
            pytest.skip(f"no source package: {error}")
        part = kept.with_suffix(f".{os.getpid()}")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(grammars))
        part.replace(kept)
    found: dict[str, str] = json.loads(kept.read_text())
    return found


def fetch_grammars(version: str) -> dict[str, str]:
    request = urllib.request.Request(
        "https://pypi.org/simple/llama-cpp-python/",
        headers={"Accept": "application/vnd.pypi.simple.v1+json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    name = f"llama_cpp_python-{version}.tar.gz"
    file = next(file for file in files if file["filename"] == name)
    with urllib.request.urlopen(file["url"], timeout=60) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != file["hashes"]["sha256"]:
        raise ValueError("the download is damaged")
    grammars = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if path.suffix == ".gbnf" and (text := archive.extractfile(member)) is not None:
                grammars[path.stem] = text.read().decode()
    return grammars


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_same_tokens_are_allowed_at_every_step(oracle: Oracle, name: str) -> None:
    chance = random.Random(name)
    for _ in range(20):
        oracle.walk(GRAMMARS[name], chance, most=40)


def test_the_grammars_that_llama_cpp_ships(oracle: Oracle, shipped: dict[str, str]) -> None:
    assert {"json", "json_arr", "arithmetic", "c", "chess", "english", "list"} <= shipped.keys()
    for name, source in shipped.items():
        chance = random.Random(name)
        for _ in range(8):
            oracle.walk(source, chance, most=40)


LETTERS = st.sampled_from(["a", "b", "c", "é"])
LITERALS = st.lists(LETTERS, min_size=1, max_size=3).map(lambda s: f'"{"".join(s)}"')
CLASSES = st.sampled_from(["[ab]", "[bcé]", "[^aè]", "[a-c]", "."])
# Mostly after a character, since what begins with itself is refused.
NAMES = st.sampled_from(["r1", "r2", '("a" root)', '("b" r1)', "([bc] r2)"])
REPEATS = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,3}", "{2,}", "{0}"])


def grown(items: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    sequences = st.lists(items, max_size=3).map(" ".join)
    groups = st.lists(sequences, min_size=1, max_size=3).map(lambda s: f"({' | '.join(s)})")
    return groups | st.tuples(items, REPEATS).map("".join)


ITEMS = st.recursive(LITERALS | CLASSES | NAMES, grown, max_leaves=5)
BODIES = st.lists(
    st.lists(ITEMS, max_size=3).map(lambda items: " ".join(items) or '""'), min_size=1, max_size=3
).map(" | ".join)
SOURCES = st.tuples(BODIES, BODIES, BODIES).map(
    lambda bodies: "".join(
        f"{name} ::= {body}\n" for name, body in zip(["root", "r1", "r2"], bodies, strict=True)
    )
)


@pytest.mark.parametrize("n", [30, pytest.param(1_000, marks=pytest.mark.slow)])
def test_any_grammar_allows_what_llama_cpp_allows(oracle: Oracle, n: int) -> None:
    @settings(max_examples=n, deadline=None)
    @given(source=SOURCES, seed=st.integers(0, 1000))
    def check(source: str, seed: int) -> None:
        try:
            parse_gbnf(source, "root")
        except ProtocolError as error:
            # What we refuse is not given to llama.cpp: it might never come back.
            event(str(error).split(": ", 2)[-1][:14])
            return
        event("accepted")
        chance = random.Random(seed)
        for _ in range(3):
            note(oracle.walk(source, chance, most=10))

    check()


@pytest.mark.parametrize(
    "source",
    [
        *("root ::= [z-", 'root ::= "a" | bad', "root ::= root", "root ::= root? [a]", 'root ::= "a'),
        *('root ::= "\\q"', r'root ::= "\x1"', 'root ::= ("a"', 'root ::= "a")', "root ::= *"),
        *('root ::= ""+', "root ::= []+", 'root ::= "a"{0}+', 'root ::= "a"{,2}', 'root ::= "a"{2'),
        *('root ::= "a"{2;3}', 'root ::= "a"{2001}', 'root ::= "a"{0,99999999999999999999}'),
        *('root ::= "a"{2}{1001}', 'root ::= ("a" ("b" | "c")){1001}', 'root ::= "a"{0,5}{500}'),
        *('root ::= ("a" | )*', 'root ::= ("a" | ){2,}', 'root ::= "a"?*'),
        *('root ::= ws* "a"\nws ::= | " "', 'root ::= ws{2}+ "a"\nws ::= | " "', 'root = "a"'),
        *('root ::= "a"\n | "b"', 'root_1 ::= "a"', 'start ::= "a"'),
    ],
)  # fmt: skip
def test_what_llama_cpp_refuses_is_refused(oracle: Oracle, source: str) -> None:
    assert not oracle.accepts(source)
    with pytest.raises(ProtocolError, match="grammar"):
        gbnf_to_lark(source)


@pytest.mark.parametrize(
    "source",
    [
        *('root ::= "a"{0,5000}', 'root ::= "a"{00002}', 'root ::= "a"{2000}'),
        *('root ::= "a"{2}{1000}', 'root ::= ("a" ("b" | "c")){1000}', 'root ::= ("a"?)*'),
        *('root ::= ws? "a"\nws ::= | " "', 'root ::= "a"{ 2 ,  3 }'),
        *('root ::= ( "a"{ 2 , # two\n 3 }\n\n| # or\n"b" )', 'root ::= "a\nb" [\n]'),
        *('root ::= # nothing yet\n "a" |\n "b" # done\r\n\r\n', r"root ::= [--\]a-] [-a] [a\-z] [\]\[\"]"),
        *('root ::= "a"\nroot ::= "b"', 'root ::= bad\nroot ::= "b"\nbad ::= "c"'),
        *('\n\t root\t::="a"b\nb::="c"', 'root ::= 1 -a\n1 ::= "a"\n-a ::= "b"'),
        *('root ::= () [] [^] ""', 'root ::= "a" |'),
    ],
)  # fmt: skip
def test_what_llama_cpp_accepts_is_accepted(oracle: Oracle, source: str) -> None:
    assert oracle.accepts(source)
    oracle.walk(source, random.Random(1), most=20)
