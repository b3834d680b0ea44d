"""The description of a file, and that it costs no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from engine.errors import UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.memory.policies import memory_sizes
from engine.model.info import ModelInfo, describe


def _describe(path) -> ModelInfo:
    with GgufFile.open(path) as file:
        return describe(file)


def test_a_quantised_hybrid_with_mtp(golden_path):
    info = _describe(golden_path("qwen35-h-v2x-mtp-q8_0"))
    assert (info.architecture, info.n_ctx_train, info.n_vocab) == ("qwen35", 4096, 384)
    assert [layer.kind for layer in info.layers] == [*["delta net"] * 3, "attention", "mtp"]
    assert [layer.index for layer in info.layers] == [0, 1, 2, 3, 4]
    assert {layer.quant for layer in info.layers} == {"Q8_0"}
    assert list(info.quant_mix) == ["Q8_0", "F32"]
    assert sum(info.quant_mix.values()) == info.weight_bytes
    # embedding and head, 384 x 128 in blocks of 34 bytes, and the final norm
    outside = 2 * 384 * 128 * 34 // 32 + 4 * 128
    assert sum(layer.n_bytes for layer in info.layers) == info.weight_bytes - outside
    # 3 layers of 4 heads of 32 x 32, and windows of 3 rows of 2 * 64 + 128 channels
    assert info.state_bytes == 4 * 3 * (4 * 32 * 32 + 3 * 256)
    assert info.kv_bytes_per_token == info.mtp_kv_bytes_per_token == 4 * 2 * 2 * 32
    assert info.rollback == (
        "partial seq_rm over snapshot planes (3 recurrent layers, 57 KiB a snapshot)"
    )


def test_memory(golden_path):
    info = _describe(golden_path("qwen35-h-v2x-mtp-q8_0"))
    memory = memory_sizes(info, 2, 3, 1000, "planes")
    assert memory["weights"] == info.weight_bytes
    assert memory["kv"] == 2 * 1000 * (512 + 512)
    assert memory["state"] == 2 * info.state_bytes
    assert (memory["snapshots"], memory["checkpoint"]) == (6 * info.state_bytes, 0)
    assert memory["total"] == sum(v for key, v in memory.items() if key != "total")
    saved = memory_sizes(info, 2, 3, 1000, "checkpoint")
    assert (saved["snapshots"], saved["checkpoint"]) == (0, 2 * info.state_bytes)
    replay = memory_sizes(info, 2, 3, 1000, "replay")
    # 3 recurrent layers, 2 key heads and 4 value heads of 32, a column of 256 channels
    assert replay["snapshots"] == 2 * 4 * 4 * 3 * (2 * 32 + 4 * 32 + 4 + 256)


def test_mixed_types_are_named_by_size(golden_path):
    info = _describe(golden_path("qwen35-g-v2x-q4_k_m"))
    assert [layer.quant for layer in info.layers] == ["Q4_K", "Q4_K", "Q4_K+Q6_K"]
    assert list(info.quant_mix) == ["Q4_K", "Q6_K", "F32"]


def test_parameters_of_an_f32_file(golden_path):
    info = _describe(golden_path("qwen35-b-v2x-tied-f32"))
    assert 4 * info.n_params == info.weight_bytes
    assert {layer.quant for layer in info.layers} == {"F32"}


def test_attention_only(golden_path):
    info = _describe(golden_path("qwen3-f-f32"))
    assert info.rollback == "attention only: any tail can be removed"
    assert info.state_bytes == 0
    assert memory_sizes(info, 1, 3, 10, "planes")["snapshots"] == 0


def test_one_recurrent_layer(variant):
    def edit(tensors):
        for name in [name for name in tensors if name.startswith(("blk.1.", "blk.2.", "blk.3."))]:
            del tensors[name]

    keys = {"{arch}.block_count": 1, "{arch}.attention.recurrent_layers": [True]}
    info = _describe(variant("qwen35-a-f32", keys, edit))
    assert "(1 recurrent layer, 6.25 KiB a snapshot)" in info.rollback
    assert info.kv_bytes_per_token == 0


def test_to_dict_is_plain(golden_path):
    info = _describe(golden_path("qwen35moe-d-v2x-mtp-f32"))
    again = json.loads(json.dumps(info.to_dict()))
    assert again["layers"][4] == {
        "index": 4,
        "kind": "mtp",
        "quant": "F32",
        "n_bytes": info.layers[4].n_bytes,
    }
    assert again["quant_mix"] == {"F32": info.weight_bytes}


def test_refuses_what_loading_refuses(variant):
    path = variant("qwen3-f-f32", {"general.architecture": "llama"})
    with pytest.raises(UnsupportedModelError, match="llama"):
        _describe(path)


def test_needs_no_torch(golden_path):
    code = (
        "import sys; from engine.gguf.file import GgufFile; from engine.model.info import describe;"
        f"f = GgufFile.open({str(golden_path('qwen35-a-f32'))!r}); describe(f); f.close();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
