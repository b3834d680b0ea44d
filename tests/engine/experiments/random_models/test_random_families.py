"""Random models of the further families: files say what was asked for, numbers are sane."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.experiments.random_models.random_families import RANDOM_FAMILIES
from engine.experiments.random_models.random_model import write_random_model
from engine.gguf.file import GgufFile
from engine.model.families import read_config
from engine.model.loader import load_model
from tests.support.golden_files import golden_file
from tests.support.naive_memory import NaiveMemory, ubatch_of

GOLDEN = {
    "nemotron_h": "nemotron_h-a-f32",
    "nemotron_h_moe": "nemotron_h_moe-b-mtp-f32",
    "granitehybrid": "granitehybrid-a-f32",
    "falcon-h1": "falcon-h1-a-f32",
    "lfm2": "lfm2-a-tied-f32",
    "lfm2moe": "lfm2moe-b-f32",
}
MAMBA = (*GOLDEN, "mamba", "mamba2", "jamba", "plamo2")


def written(folder: Path, arch: str, quant: str) -> Path:
    path = folder / f"{arch}.gguf"
    write_random_model(path, arch=arch, size="tiny", quant=quant)
    return path


def n_dims(path: Path) -> dict[str, int]:
    """Dimensions of every tensor, whatever the number of its block."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        name = tensor.name.split(".", 2)[2] if tensor.name.startswith("blk.") else tensor.name
        found[name] = len(tensor.shape)
    return found


@pytest.mark.parametrize("arch", MAMBA)
def test_it_is_read_as_it_was_meant(arch, tmp_path):
    with GgufFile.open(written(tmp_path, arch, "q8_0")) as file:
        config = read_config(file)
    assert replace(config, name="") == RANDOM_FAMILIES[arch]["tiny"].config()


@pytest.mark.parametrize("arch", GOLDEN)
def test_it_has_the_tensors_of_a_converted_model(arch, tmp_path):
    """Shapes have as many dimensions, too: llama.cpp takes no others."""
    golden = golden_file(f"{GOLDEN[arch]}.gguf")
    if not golden.exists():
        pytest.skip(f"{golden.name} is not here")
    own, other = (n_dims(path) for path in (written(tmp_path, arch, "f32"), golden))
    # tied; the head of the MTP block is the trunk's
    assert own.keys() == other.keys() - {"output.weight"}
    assert all(other[name] == n for name, n in own.items())


@pytest.mark.parametrize("quant", ["q8_0", "q4_k_m"])
@pytest.mark.parametrize("arch", MAMBA)
@pytest.mark.thinned(12)
def test_logits_are_finite_and_of_a_sane_size(arch, quant, tmp_path):
    path = written(tmp_path, arch, quant)
    for tensor in gguf.GGUFReader(path).tensors:
        words = ("norm", "conv1d", "shortconv.conv", "ffn_gate_inp", "ssm_a", "ssm_d.")
        unrounded = tensor.tensor_type.name == "F32"
        is_kept = any(word in f"{tensor.name}." for word in words)
        assert unrounded == (tensor.shape.size == 1 or is_kept)
    with GgufFile.open(path) as file:
        model = load_model(file)
    tokens = np.random.default_rng(1).integers(0, 512, 48).tolist()
    out = model.forward(ubatch_of(tokens), NaiveMemory.for_model(model.config))
    assert out.logits.isfinite().all()
    assert 1.5 < float(out.logits.std()) < 2.5
    assert out.logits.argmax(1).unique().numel() > 24  # no token that always wins
