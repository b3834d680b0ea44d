"""Metadata of any kind gives a sound configuration or a named error."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families import read_config
from engine.model.parts.attention import AttentionPart
from engine.model.parts.feed_forward import DensePart
from engine.model.parts.recurrent import DeltaNetPart
from engine.model.tensors import check_tensors
from tests.support.rewrite_gguf import DROP

HYBRID = "qwen35-a-f32"
MOE = "qwen35moe-d-v2x-mtp-f32"
DENSE = "qwen3-f-f32"


def _check(path) -> ModelConfig:
    with GgufFile.open(path) as file:
        config = read_config(file)
        check_tensors(file, config)
        return config


def test_a_hybrid(golden_path):
    config = _check(golden_path("qwen35-h-v2x-mtp-q8_0"))
    assert (config.architecture, config.name) == ("qwen35", "qwen35-h-v2x-mtp-q8_0")
    assert (config.n_layer, config.n_mtp) == (4, 1)
    assert (config.n_embd, config.n_vocab) == (128, 384)
    assert config.recurrent_layers == (True, True, True, False)
    assert config.n_recurrent == 3
    assert config.blocks[0].mixers == (
        DeltaNetPart(d_conv=4, d_state=32, n_k_heads=2, n_v_heads=4),
    )
    assert config.blocks[3].mixers == (AttentionPart(4, 2, 32, gated=True),)
    assert {block.ffn for block in config.all_blocks} == {DensePart(128)}
    assert config.rope.n_rot == 8


def test_derived_sizes():
    part = DeltaNetPart(d_conv=4, d_state=128, n_k_heads=16, n_v_heads=32)
    assert (part.key_dim, part.value_dim, part.conv_dim) == (2048, 4096, 8192)
    assert part.states()["state"].n_bytes == 2 * 2**20
    assert part.states()["window"].n_bytes == 96 * 2**10


def test_grouping_belongs_to_qwen3next(golden_path):
    assert _check(golden_path("qwen3next-e-v2x-f32")).blocks[0].mixers[0].grouped
    assert not _check(golden_path(MOE)).blocks[0].mixers[0].grouped


def test_dense_has_no_recurrent_part(golden_path):
    config = _check(golden_path(DENSE))
    assert config.recurrent_layers == (False,) * 4
    assert set(config.cells()) == {0, 1, 2, 3}
    assert config.rope.sections is None
    assert config.rope.n_rot == config.cells()[0].k_dim == 32


BAD = {
    "block_count": [0, -1, 2**31, 2**62],
    "embedding_length": [0, -64, 63, 2**40],
    "context_length": [0, -1, 2**31],
    "feed_forward_length": [0, -1, 97, 2**31],
    "attention.head_count": [0, -4, 3, 2**31, [4, 4]],
    "attention.head_count_kv": [0, 3, 2**31, [0, 0, 0, 0], [0, 0, 0, -2]],
    "attention.key_length": [0, -32, 2**31],
    "attention.layer_norm_rms_epsilon": [0.0, -1e-6, 2.0],
    "attention.recurrent_layers": [[True] * 3, [True] * 5, ["yes"] * 4, "recurrent", 7],
    "full_attention_interval": [0, -4],
    "rope.dimension_count": [0, 7, 34, -8, 2**31],
    "rope.dimension_sections": [[0, 0, 0, 0], [-1, 2, 1, 0], [2, 1, 1], [30, 2, 1, 0], DROP],
    "rope.freq_base": [0.0, 1.0, -1e4],
    "rope.scaling.factor": [0.0, -2.0],
    "rope.scaling.original_context_length": [0, -1],
    "ssm.conv_kernel": [0, 1, 5, 2**31, DROP],
    "ssm.state_size": [0, -16, 8, 2**31, DROP],
    "ssm.group_count": [0, 3, 8, 2**31, DROP],
    "ssm.time_step_rank": [0, 6, 2**31, DROP],
    "ssm.inner_size": [0, 63, 2**31, DROP],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in BAD.items() for value in values]
)
def test_bad_metadata(key, value, variant):
    keys = {f"{{arch}}.{key}": value}
    if key == "full_attention_interval":
        keys["{arch}.attention.recurrent_layers"] = DROP
    with pytest.raises(ModelFileError) as caught:
        _check(variant(HYBRID, keys))
    assert caught.value.place.startswith(("key qwen35.", "tensor "))
    assert caught.value.message.endswith(".")
    assert caught.value.remedy.endswith(".")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 0),
        ("expert_count", 5),
        ("expert_count", 2**31),
        ("expert_used_count", 0),
        ("expert_used_count", 7),
        ("expert_feed_forward_length", 15),
        ("expert_shared_feed_forward_length", 0),
        ("expert_shared_feed_forward_length", DROP),
        ("nextn_predict_layers", -1),
    ],
)
def test_bad_mixture_metadata(key, value, variant):
    with pytest.raises(ModelFileError, match=r"key qwen35moe\.|tensor "):
        _check(variant(MOE, {f"{{arch}}.{key}": value}))


def test_key_value_lengths_must_agree(variant):
    with pytest.raises(UnsupportedModelError, match="differ in length"):
        _check(variant(HYBRID, {"{arch}.attention.value_length": 16}))


@pytest.mark.parametrize("key", ["feed_forward_length", "attention.head_count"])
def test_sizes_that_differ_between_layers(key, variant):
    with pytest.raises(UnsupportedModelError, match="differs between layers"):
        _check(variant(DENSE, {f"{{arch}}.{key}": [4, 4, 4, 8]}))


def test_partial_rope_is_not_qwen3(variant):
    with pytest.raises(ModelFileError, match="dimension_count"):
        _check(variant(DENSE, {"{arch}.rope.dimension_count": 16}))


def test_mtp_block_of_a_dense_model(variant):
    with pytest.raises(ModelFileError, match="nextn_predict_layers"):
        _check(variant(DENSE, {"{arch}.nextn_predict_layers": 1}))


def test_more_mtp_blocks_than_blocks(variant):
    keys = {
        "{arch}.block_count": 1,
        "{arch}.nextn_predict_layers": 1,
        "{arch}.attention.recurrent_layers": DROP,
    }
    with pytest.raises(ModelFileError, match="no trunk layer"):
        _check(variant(HYBRID, keys))


def test_unknown_rope_scaling(variant):
    with pytest.raises(UnsupportedModelError, match="longrope"):
        _check(variant(DENSE, {"{arch}.rope.scaling.type": "longrope"}))


@pytest.mark.parametrize("name", ["llama", "qwen2", ""])
def test_unknown_architecture(name, variant):
    path = variant(DENSE, {"general.architecture": name})
    with pytest.raises(UnsupportedModelError) as caught:
        _check(path)
    assert repr(name or "(none)") in caught.value.message
    for known in ("qwen35", "qwen35moe", "qwen3next", "qwen3"):
        assert known in caught.value.remedy


@pytest.mark.parametrize(
    "name",
    [
        "token_embd.weight",
        "output_norm.weight",
        "blk.0.attn_norm.weight",
        "blk.1.ssm_a",
        "blk.2.ssm_conv1d.weight",
        "blk.2.attn_gate.weight",
        "blk.3.attn_k.weight",
        "blk.3.ffn_down.weight",
    ],
)
def test_missing_tensor(name, variant):
    with pytest.raises(ModelFileError) as caught:
        _check(variant(HYBRID, edit=lambda tensors: tensors.pop(name)))
    assert caught.value.place == f"tensor {name}"
    assert "missing" in caught.value.message


@pytest.mark.parametrize(
    "name", ["blk.0.ssm_out.weight", "blk.0.ssm_dt.bias", "blk.3.attn_q_norm.weight"]
)
def test_misshaped_tensor(name, variant):
    def edit(tensors):
        tensors[name] = np.ascontiguousarray(tensors[name][..., :-1])

    with pytest.raises(ModelFileError) as caught:
        _check(variant(HYBRID, edit=edit))
    assert caught.value.place == f"tensor {name}"


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.ssm_out.scales",
        "blk.0.ssm_a.scale",
        "blk.3.attn_output.bias",
        "blk.1.attn_q.weight",
        "blk.9.x",
    ],
)
def test_a_tensor_that_would_be_ignored(name, variant):
    def edit(tensors):
        tensors[name] = np.zeros(64, np.float32)

    with pytest.raises(UnsupportedModelError, match=name):
        _check(variant(HYBRID, edit=edit))


def test_vocabulary_of_another_length(variant):
    with pytest.raises(ModelFileError, match="384 rows for 2 vocabulary entries"):
        _check(variant(HYBRID, {"tokenizer.ggml.tokens": ["a", "b"]}))
