"""deepseek4 files that are refused, and what is said of llama.cpp and of memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.batch import Span
from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.memory.hybrid import HybridMemory
from engine.model import layers
from engine.model.families import read_config
from engine.model.families.deepseek4 import deepseek4_notes
from engine.model.info import describe
from engine.model.loader import load_model

NAME, ARCH = "deepseek4-a-mtp-f32", "deepseek4"


@pytest.mark.parametrize(
    ("key", "value", "error", "says"),
    [
        ("attention.compress_ratios", [0, 4, 64, 0], UnsupportedModelError, "ratio 64"),
        ("attention.compress_ratios", [0, 4, 128, 4], UnsupportedModelError, "MTP block"),
        ("attention.compress_ratios", [0, 4], ModelFileError, "2 numbers for 4 blocks"),
        ("attention.output_group_count", 3, ModelFileError, "4 heads do not make 3 groups"),
        ("attention.indexer.key_length", 4, ModelFileError, "fewer than the 8"),
        ("expert_gating_func", 2, UnsupportedModelError, "does not have"),
        ("hyper_connection.count", 2, UnsupportedModelError, "streams"),
        ("attention.compress_rope_freq_base", 1.0, ModelFileError, "not above 1"),
    ],
)
def test_what_is_refused(key, value, error, says, variant):
    given = np.uint32(value) if isinstance(value, int) else value
    path = variant(NAME, {f"{ARCH}.{key}": given})
    with GgufFile.open(path) as file, pytest.raises(error, match=says):
        read_config(file)


def test_an_expert_that_is_not_there(variant):
    def edit(tensors):
        table = tensors["blk.0.ffn_gate_tid2eid.weight"].copy()
        table[7, 1] = 6
        tensors["blk.0.ffn_gate_tid2eid.weight"] = table

    path = variant(NAME, edit=edit)
    with GgufFile.open(path) as file, pytest.raises(ModelFileError, match=r"outside 0\.\.5"):
        load_model(file)


def test_what_is_said_of_llama_cpp_and_of_memory(golden_path):
    with GgufFile.open(golden_path(NAME)) as file:
        info, config = describe(file), read_config(file)
    assert "rows of the trunk that were overwritten" in info.llama_cpp
    assert "beyond the last ubatch" in info.llama_cpp
    # rings of 8 x 2 x 64, 8 x 2 x 128 and 128 x 2 x 32 numbers
    assert info.state_bytes == 4 * (1024 + 2048 + 8192)
    assert info.log_bytes_per_token == 4 * (128 + 256 + 64 + 3)
    # a row of each layer, of two of them with a block's, and an indexer's
    assert info.kv_bytes_per_token == 4 * (5 * 32 + 64)
    assert (info.window, info.block_rows) == (16, ((4, 32 + 64), (128, 32)))
    (part,) = config.blocks[2].mixers
    alike = [replace(block, mixers=(replace(part, index_dim=32),)) for block in config.blocks]
    said = " ".join(deepseek4_notes(replace(config, blocks=tuple(alike))))
    for trap in ("without a layer of ratio 4", "key length of 32"):
        assert trap in said


def test_passes_of_one_key_use_one_table(golden_path, monkeypatch):
    """Passes of one key may be recorded, with the address of the rotations of blocks, which grow
    after the trunk's where the head has made these longer."""
    monkeypatch.setattr(layers, "_LEAST", 16)
    with GgufFile.open(golden_path(NAME)) as file:
        model = load_model(file)
    cpu, run, used = torch.device("cpu"), HybridMemory.run, {}

    def noted(memory, key, *given, **how):
        used.setdefault(key, set()).add(model._block_rope.table.data_ptr())
        return run(memory, key, *given, **how)

    monkeypatch.setattr(HybridMemory, "run", noted)
    memory = HybridMemory.for_model(model.config, 1, 40, cpu)
    of_head = HybridMemory.for_layers(model.config.mtp_cells(), 1, 40, cpu)
    for position in range(24):
        (ubatch,) = memory.split([Span(0, position, [3 + position], [0])], 1, "seq")
        hidden = model.forward(ubatch, memory).hidden
        if position == 10:
            (ahead,) = of_head.split([Span(0, 20, [5], [0])], 1, "seq")
            model.head.forward(ahead, hidden, of_head)
    assert [len(tables) for tables in used.values()] == [1] * 4
