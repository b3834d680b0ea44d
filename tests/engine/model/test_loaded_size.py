"""The size of loaded weights, from the directory, against that of loading them."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType

from engine.experiments.random_models.random_model import write_random_model
from engine.gguf.file import GgufFile
from engine.gguf.reader import TensorReader
from engine.memory.policies import memory_sizes
from engine.model.info import describe
from engine.model.loaded_size import MODES, note_on_type
from engine.model.loader import load_model
from kernels.linear import linear, pack
from kernels.linear.integer_blocks import GPU_TYPES, TYPES
from kernels.linear.integers import has_vnni
from kernels.linear.with_torch import has_bf16
from tests.support.golden_files import DATA

FILES = sorted(DATA.glob("*.gguf"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.thinned(6)
def test_it_is_what_loading_counts(path, mode):
    hold(path, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("arch", "quant"),
    [
        *(("mamba", "q8_0"), ("mamba2", "q8_0"), ("jamba", "q8_0"), ("plamo2", "q8_0")),
        ("qwen35", "iq3_s"),
    ],
)
def test_so_it_is_of_random_models(arch, quant, mode, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_random_model(path, arch=arch, size="tiny", quant=quant)
    hold(path, mode)


@pytest.mark.parametrize("mode", ["f32", "q8", "blocks"])
@pytest.mark.parametrize(
    ("arch", "quant"),
    [("qwen35", "iq3_s"), ("qwen35", "f16"), ("mamba2", "q8_0"), ("lfm2", "mxfp4")],
)
def test_so_it_is_where_there_is_no_product_of_a_processor(arch, quant, mode, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_random_model(path, arch=arch, size="tiny", quant=quant)
    with GgufFile.open(path) as file:
        loaded = load_model(file, compute=mode, device=torch.device("meta"))
        assert loaded.weight_bytes == describe(file, "cuda").loaded_bytes[mode]


@pytest.mark.parametrize("type", ["BF16", "F16"])
@pytest.mark.parametrize("mode", MODES)
def test_a_table_of_16_bits_stays_so_and_is_the_head_where_it_can(mode, type, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_random_model(path, size="tiny", quant=type.lower())
    hold(path, mode)
    tokens = torch.tensor([[3, 1, 4]])
    with GgufFile.open(path) as file:
        model, table = load_model(file, compute=mode), file.tensors["token_embd.weight"]
        numbers = TensorReader(file).take("token_embd.weight", table.shape)
    embedding, packed = model.embedding, model.projection.packed
    assert embedding.rows.type == type and len(embedding) == len(numbers)
    assert torch.equal(embedding(tokens), numbers[tokens])
    is_stored = mode in ("f32", "q8", "blocks") or (mode, type) == ("bf16", "F16")
    own = pack(numbers, "f32" if is_stored else mode)
    x = torch.randn(3, numbers.shape[1])
    assert torch.equal(linear(x, packed), linear(x, own))
    if is_stored:
        assert packed.data.bytes.data_ptr() == embedding.rows.data.data_ptr()
    elif mode == "bf16" and has_bf16():
        place = torch.ops.mkldnn.data_ptr(packed.data)
        assert embedding.rows.data.data_ptr() == int(place), "read where it is packed"


def hold(path, mode):
    with GgufFile.open(path) as file:
        told = describe(file).loaded_bytes[mode]
        loaded = load_model(file, compute=mode).weight_bytes
    if mode.startswith("int8") and has_vnni():  # panels of sixteens, of matrices of other sizes too
        assert told <= loaded <= 1.1 * told
    else:
        assert loaded == told


def test_memory_counts_the_mode(golden_path):
    with GgufFile.open(golden_path("qwen35moe-d-v2x-mtp-f32")) as file:
        info = describe(file)
    stored, loaded = (memory_sizes(info, 1, 0, 10, "planes", mode) for mode in ("", "int8"))
    assert stored["weights"] == info.weight_bytes == info.loaded_bytes["f32"]
    assert loaded["weights"] == info.loaded_bytes["int8"] < info.weight_bytes / 2
    assert stored["total"] - loaded["total"] == stored["weights"] - loaded["weights"]


def test_types_without_products_of_integers_are_told():
    names = {type.name for type in GGMLQuantizationType}
    notes = {
        "": {*GPU_TYPES, "F32", "F16", "BF16", "I32"},
        "bf16 on a GPU": {*TYPES} - {*GPU_TYPES},
    }
    for start, some in notes.items():
        assert {name for name in names if note_on_type(name).split(" in mode")[0] == start} == some
