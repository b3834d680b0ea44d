"""Random models of further families: complete beside files that llama.cpp opens, and usable."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from engine.errors import OptionError
from engine.experiments.random_models.quant_mixes import tensor_type
from engine.experiments.random_models.random_families import RANDOM_FAMILIES
from engine.experiments.random_models.random_kda import KDA_SIZES
from engine.experiments.random_models.random_model import write_random_model
from engine.gguf.file import GgufFile
from engine.model.families import FAMILIES
from engine.model.loader import load_model
from tests.support.golden_files import golden_file, second_set
from tests.support.naive_memory import NaiveMemory, ubatch_of

OPTIONAL = {"attention.q_lora_rank", "attention.value_length"}


@pytest.mark.parametrize(
    "name", [name for name in second_set() if "kimi" in name or "bail" in name]
)
def test_keys_and_tensors_are_those_of_another_file(name, tmp_path):
    arch = name.split("-a-")[0]
    path = tmp_path / "tiny.gguf"
    write_random_model(path, arch=arch, size="tiny", quant="f32")
    own, other = (gguf.GGUFReader(one) for one in (path, golden_file(f"{name}.gguf")))
    kinds = [
        {
            key.removeprefix(f"{arch}."): field.types
            for key, field in file.fields.items()
            if key.startswith(f"{arch}.")
        }
        for file in (own, other)
    ]
    assert kinds[0].keys() ^ kinds[1].keys() <= OPTIONAL
    assert all(kinds[1][key] == kinds[0][key] for key in kinds[0].keys() & kinds[1].keys())
    names = [
        {tensor.name.split(".", 2)[-1] for tensor in file.tensors if "attn_q" not in tensor.name}
        for file in (own, other)
    ]
    assert names[0] ^ names[1] <= {"weight", "output.weight"}


@pytest.mark.parametrize("arch", KDA_SIZES)
def test_logits_are_finite_and_of_a_sane_size(arch, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_random_model(path, arch=arch, size="tiny", quant="q8_0")
    with GgufFile.open(path) as file:
        model = load_model(file)
    tokens = np.random.default_rng(1).integers(0, 512, 48).tolist()
    logits = model.forward(ubatch_of(tokens), NaiveMemory.for_model(model.config)).logits
    assert logits.isfinite().all()
    assert 0.5 < float(logits.std()) < 5
    assert logits.argmax(1).unique().numel() > 12


@pytest.mark.parametrize("arch", RANDOM_FAMILIES)
def test_every_size_is_of_a_family_that_opens(arch):
    for config in RANDOM_FAMILIES[arch].sizes.values():
        assert config.architecture in FAMILIES


def test_rows_that_are_no_whole_blocks_have_shorter_ones():
    config = KDA_SIZES["kimi-linear"]["0.7b"]
    kinds = [
        tensor_type("blk.3.attn_k_b.weight", (8, 512, n_in), config, mix).name
        for mix in ("q4_k_m", "q5_k_m", "iq4_xs", "q8_0")
        for n_in in (128, 256)
    ]
    assert kinds == ["Q5_0", "Q4_K", "Q5_1", "Q5_K", "IQ4_NL", "IQ4_XS", "Q8_0", "Q8_0"]


@pytest.mark.parametrize("words", [{"arch": "llama"}, {"arch": "kimi-k3", "size": "0.65b"}])
def test_what_is_not_there_is_refused(tmp_path, words):
    with pytest.raises(OptionError, match="is unknown"):
        write_random_model(tmp_path / "x.gguf", **words)
