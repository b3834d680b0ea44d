"""Factors that the angles of rope are divided by, which a file may bring as a tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import Span
from engine.errors import ModelFileError
from engine.gguf.file import GgufFile
from engine.memory.hybrid import HybridMemory
from engine.model.families import read_config
from engine.model.layers import RopeTables
from engine.model.loader import load_model
from engine.model.rope import RopeConfig
from tests.support.golden_files import golden_file
from tests.support.rewrite_gguf import rewrite

BASE = golden_file("granitehybrid-a-f32.gguf")
ROPE = {"{arch}.rope.scaling.finetuned": True}
TOKENS = list(range(40, 60))


def test_every_pair_has_its_own():
    factors = 1.0, 0.5, 4.0, 3.0
    config = RopeConfig(8, 100.0, scaling="linear", factor=2.0, factors=factors)
    tables = RopeTables(config)
    tables.reach(9)
    cos, sin = tables.at(torch.tensor([[9]]))
    angles = 9 / 2 * np.array([1.0, 10**-0.5 / 0.5, 0.1 / 4, 10**-1.5 / 3])
    assert cos.numpy() == pytest.approx(np.cos(angles)[None, None], abs=1e-6)
    assert sin.numpy() == pytest.approx(np.sin(angles)[None, None], abs=1e-6)


def logits(path: Path) -> torch.Tensor:
    with GgufFile.open(path) as file:
        model = load_model(file)
    memory = HybridMemory.for_model(model.config, 1, 32, model.device)
    (ubatch,) = memory.split([Span(0, 0, TOKENS, list(range(len(TOKENS))))], 32, "equal")
    return model.forward(ubatch, memory).logits.clone()


def with_factors(path: Path, *factors: float) -> Path:
    def edit(tensors):
        tensors["rope_freqs.weight"] = np.array(factors, np.float32)

    return rewrite(BASE, path, ROPE, edit)


@pytest.mark.skipif(not BASE.exists(), reason="the golden model is not here")
def test_equal_ones_are_linear_scaling(tmp_path):
    scaled = {**ROPE, "{arch}.rope.scaling.factor": 4.0}
    wanted = logits(rewrite(BASE, tmp_path / "scaled.gguf", scaled))
    assert torch.equal(logits(with_factors(tmp_path / "factors.gguf", *[4.0] * 8)), wanted)
    ones = logits(with_factors(tmp_path / "ones.gguf", *[1.0] * 8))
    assert (ones - wanted).abs().max() > 1e-3


@pytest.mark.skipif(not BASE.exists(), reason="the golden model is not here")
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_no_angle_can_be_divided_by(bad, tmp_path):
    path = with_factors(tmp_path / "bad.gguf", *[1.0] * 7, bad)
    with GgufFile.open(path) as file, pytest.raises(ModelFileError, match="tensor rope_freqs"):
        read_config(file)


@pytest.mark.skipif(not BASE.exists(), reason="the golden model is not here")
def test_they_are_one_for_each_pair(tmp_path):
    path = with_factors(tmp_path / "short.gguf", *[1.0] * 7)
    with GgufFile.open(path) as file, pytest.raises(ModelFileError, match="tensor rope_freqs"):
        read_config(file)


@pytest.mark.parametrize("base", ["falcon-h1-a-f32", "granitehybrid-a-f32"])
def test_where_llama_cpp_loads_them_and_turns_nothing_by_them(base, tmp_path):
    """falcon-h1.cpp gives its rope no factors; the rope of this granitehybrid file is off."""
    source = golden_file(f"{base}.gguf")
    if not source.exists():
        pytest.skip(f"{source.name} is not here")

    def edit(tensors):
        tensors["rope_freqs.weight"] = np.full(8, 3, np.float32)

    assert torch.equal(logits(rewrite(source, tmp_path / "with.gguf", None, edit)), logits(source))
