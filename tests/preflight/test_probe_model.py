"""The model that llama.cpp is tried with: small, the same each time, and of every kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from llamad_trio.preflight.probe_model import PROBE, ProbeShape, probe_gguf

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def reader(tmp_path: Path) -> gguf.GGUFReader:
    path = tmp_path / "probe.gguf"
    path.write_bytes(probe_gguf(PROBE))
    return gguf.GGUFReader(path)


def test_it_is_under_100_kb_and_always_the_same() -> None:
    data = probe_gguf(PROBE)
    assert len(data) <= 100_000
    assert data == probe_gguf(PROBE)


def test_it_has_a_matrix_of_every_kind(reader: gguf.GGUFReader) -> None:
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) == 2}
    old = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16"}
    assert kinds == {*old, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"}


def test_what_amx_and_repacked_kernels_can_take_is_there(reader: gguf.GGUFReader) -> None:
    """Rows of 256 weights, and outputs by the 32: else plain kernels are used unnoticed."""
    fit = {
        tensor.tensor_type.name
        for tensor in reader.tensors
        if len(tensor.shape) == 2 and tensor.shape[0] % 256 == 0 and tensor.shape[1] % 32 == 0
    }
    assert fit >= {"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q2_K", "IQ4_NL"}


def test_its_weights_are_numbers_of_a_sensible_size(reader: gguf.GGUFReader) -> None:
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(weights).all()
        assert 0.01 < np.abs(weights).mean() <= 1.0, tensor.name


def test_a_larger_one_is_made_the_same_way(tmp_path: Path) -> None:
    path = tmp_path / "larger.gguf"
    path.write_bytes(probe_gguf(ProbeShape(512, 256, 3, 64, wide=("Q4_0",), narrow=("Q8_0",))))
    kinds = [tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors]
    assert kinds.count("Q4_0") == 1 + 1 + 3 * 5
    assert kinds.count("Q8_0") == 3 * 2
