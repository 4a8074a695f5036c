"""The identity that decides whether a KV cache may be used again."""

from __future__ import annotations

from itertools import combinations

import attrs

from llamad_trio.scheduling.snapshot_file import KVIdentity

BASE = KVIdentity(
    model_sha256="a" * 64,
    llama_build="1",
    template_sha256="",
    context=(("type_k", "f16"),),
    adapters=(),
    adds_bos=True,
)


def test_every_field_counts() -> None:
    others = [
        attrs.evolve(BASE, model_sha256="b" * 64),
        attrs.evolve(BASE, llama_build="2"),
        attrs.evolve(BASE, template_sha256="c" * 64),
        attrs.evolve(BASE, context=(("type_k", "q8_0"),)),
        attrs.evolve(BASE, context=(("type_v", "f16"),)),
        attrs.evolve(BASE, adapters=("d",)),
        attrs.evolve(BASE, adapters=("d", "e")),
        attrs.evolve(BASE, adapters=("e", "d")),
        attrs.evolve(BASE, adds_bos=False),
    ]
    changed = {
        field.name
        for other in others
        for field in attrs.fields(KVIdentity)
        if getattr(other, field.name) != getattr(BASE, field.name)
    }
    assert changed == {field.name for field in attrs.fields(KVIdentity)}
    for one, other in combinations([BASE, *others], 2):
        assert one.digest != other.digest


def test_the_digest_is_the_same_in_every_process() -> None:
    assert BASE.digest == "ca588112fdf9198ebd561b3d267167c5d9a4395811e30040b448a35aefd95af5"
