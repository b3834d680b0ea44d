"""Forms that the golden files of the further families do not have, against llama.cpp's logits."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from engine.batch import Span
from engine.gguf.file import GgufFile
from engine.memory.hybrid import HybridMemory
from engine.model.loader import load_model
from tests.support.family_variants import TOKENS, VARIANTS
from tests.support.golden_files import DATA, golden_file
from tests.support.rewrite_gguf import rewrite


@cache
def expected() -> dict[str, np.ndarray]:
    with np.load(DATA / "family-variants.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits(name, tmp_path):
    variant = VARIANTS[name]
    base = golden_file(f"{variant.base}.gguf")
    if not base.exists():
        pytest.skip(f"{base.name} is not here")
    path = rewrite(base, tmp_path / "variant.gguf", variant.keys, variant.edit)
    with GgufFile.open(path) as file:
        model = load_model(file)
    memory = HybridMemory.for_model(model.config, 1, 64, model.device, policy="ring", n_rs_seq=2)
    parts, pos = [], 0
    for width in (1, 5, 10, 8):
        span = Span(0, pos, TOKENS[pos : pos + width], list(range(width)))
        (ubatch,) = memory.split([span], 64, "seq")
        parts.append(model.forward(ubatch, memory).logits.clone())
        pos += width
    worst = np.abs(torch.cat(parts).numpy() - expected()[name]).max(1)
    assert worst.max() <= 1e-3
    assert np.median(worst) <= 1e-4
