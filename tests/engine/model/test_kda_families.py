"""kimi-linear, bailingmoe3, kimi-k3: what is read of a file, forms of it, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.errors import DraftscopeError, ModelFileError, UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families import read_config
from engine.model.loader import load_model
from engine.model.parts.attention import LatentAttentionPart
from engine.model.parts.feed_forward import DensePart, MixturePart, RouterPart
from engine.model.parts.recurrent import KdaPart
from engine.model.parts.trunks import CrossLayerResidual
from engine.model.tensors import check_tensors
from tests.support.golden_files import golden_file
from tests.support.naive_memory import NaiveMemory, ubatch_of
from tests.support.rewrite_gguf import DROP

LING, LINEAR, K3 = "bailingmoe3-a-mtp-f32", "kimi-linear-a-f32", "kimi-k3-a-f32"
BESIDE = [
    pytest.param(
        name, marks=pytest.mark.skipif(not golden_file(f"{name}.gguf").exists(), reason="no file")
    )
    for name in (LINEAR, K3)
]
TOKENS = list(range(5, 25))


def check(path) -> ModelConfig:
    with GgufFile.open(path) as file:
        config = read_config(file)
        check_tensors(file, config)
        return config


def logits(path) -> torch.Tensor:
    with GgufFile.open(path) as file:
        model = load_model(file)
    return model.forward(ubatch_of(TOKENS), NaiveMemory.for_model(model.config)).logits


def test_what_a_file_says(golden_path):
    config = check(golden_path(LING))
    assert config.recurrent_layers == (True, True, True, False)
    assert config.blocks[0].mixers == (
        KdaPart(4, 16, 4, ("ssm_f_a.weight",), ("ssm_g_a.weight",), positive_a=True, bound=-5.0),
    )
    attention = LatentAttentionPart(4, 32, 16, 8, 16, 24, pairs="neighbours", gate="heads")
    assert config.blocks[3].mixers == (attention,)
    # one row of latent and key, and nothing next to it
    assert config.cells()[3].n_bytes == 4 * (32 + 8)
    assert config.blocks[0].ffn == DensePart(96)
    scale = pytest.approx(2.446)
    router = RouterPart(scale=scale, n_groups=4, n_groups_used=2)
    assert config.blocks[1].ffn == MixturePart(8, 2, 16, 32, shared_gate=False, router=router)
    assert config.mtp.block == config.blocks[3]
    states = config.blocks[0].states()
    assert states["state"].n_bytes == 4 * 4 * 16 * 16
    assert states["window"].n_bytes == 4 * 3 * 192
    assert states["state"].entry_bytes == 4 * 3 * 64


@pytest.mark.parametrize("name", BESIDE)
def test_what_the_others_say(name, golden_path):
    config = check(golden_path(name))
    assert config.rope is None and config.mtp is None
    kda, attention = config.blocks[0].mixers[0], config.blocks[3].mixers[0]
    assert kda.decay == ("ssm_f_a.weight", "ssm_f_b.weight")
    assert kda.bound == (-5.0 if name == K3 else None)
    assert attention.gate == ("numbers" if name == K3 else None)
    assert (config.trunk == CrossLayerResidual(2)) == (name == K3)


def test_queries_keys_and_values_in_one_tensor(golden_path, variant):
    def fuse(tensors):
        for i in range(3):
            parts = [tensors.pop(f"blk.{i}.attn_{one}.weight") for one in "qkv"]
            tensors[f"blk.{i}.attn_qkv.weight"] = np.concatenate(parts)

    assert torch.equal(logits(variant(LING, edit=fuse)), logits(golden_path(LING)))


def test_ones_around_a_shape_are_left_out(golden_path, variant):
    def squeeze(tensors):
        for i in range(3):
            tensors[f"blk.{i}.ssm_a"] = tensors[f"blk.{i}.ssm_a"].reshape(-1)
            for one in "qkv":
                name = f"blk.{i}.ssm_conv1d_{one}.weight"
                tensors[name] = tensors[name].reshape(64, 1, 4)

    assert torch.equal(logits(variant(LING, edit=squeeze)), logits(golden_path(LING)))


def test_sections_make_pairs_of_halves(golden_path, variant):
    """With rows rearranged to match, which is what files with sections hold."""

    def halves(tensors):
        for i in (3, 4):
            kv = tensors[f"blk.{i}.attn_kv_a_mqa.weight"]
            kv[32:] = np.concatenate((kv[32::2], kv[33::2]))
            q = tensors[f"blk.{i}.attn_q_b.weight"].reshape(4, 24, -1)
            q[:, 16:] = np.concatenate((q[:, 16::2], q[:, 17::2]), 1)

    keys = {"{arch}.rope.dimension_sections": [2, 1, 1, 0]}
    told = logits(variant(LING, keys, halves))
    torch.testing.assert_close(told, logits(golden_path(LING)), rtol=0, atol=1e-5)
    assert not torch.allclose(logits(variant(LING, keys)), told, rtol=0, atol=1e-3)


def test_limits_of_swiglu(golden_path, variant):
    plain = logits(golden_path(LING))

    def within(name: str, limits: list[float]) -> torch.Tensor:
        return logits(variant(LING, {f"{{arch}}.swiglu_clamp_{name}": limits}))

    for name in ("exp", "shexp"):
        # beyond all activations, and off
        assert torch.equal(within(name, [1e9, 1e9, 0.0, 1e9, 1e9]), plain)
        assert not torch.allclose(within(name, [0.0, 1e-3, 0.0, 0.0, 0.0]), plain, atol=1e-3)
    # the first block is dense: no limit of experts holds it, that of shared experts does
    assert torch.equal(within("exp", [1e-3, 0.0, 0.0, 0.0, 0.0]), plain)
    assert not torch.allclose(within("shexp", [1e-3, 0.0, 0.0, 0.0, 0.0]), plain, atol=1e-3)
    config = check(variant(LING, {"{arch}.swiglu_clamp_shexp": [0.5, 0.0, 0.0, 0.0, 0.0]}))
    assert config.blocks[0].ffn == DensePart(96, ("swiglu", (0.5,)))


@pytest.mark.parametrize("name", BESIDE[1:])
def test_no_residuals_across_layers(name, variant):
    def drop(tensors):
        for tensor in [one for one in tensors if "res_score" in one]:
            del tensors[tensor]

    assert logits(variant(name, {"{arch}.attn_res.block_size": 0}, drop)).isfinite().all()
    with pytest.raises(UnsupportedModelError, match="res_score"):
        check(variant(name, {"{arch}.attn_res.block_size": 0}))


BAD = {
    "attention.head_count": [0, -4, 3, 2**31],
    "attention.head_count_kv": [[0, 0, 0], [0, 0, 0, -1, 1], "none", 2**31],
    "attention.kv_lora_rank": [0, -1, 31, 2**31, DROP],
    "attention.q_lora_rank": [-1, 23, 2**31],
    "attention.key_length_mla": [0, 8, 25, 2**31, DROP],
    "attention.value_length_mla": [0, 17, 2**31, DROP],
    "rope.dimension_count": [0, 7, 10, 2**31, DROP],
    "rope.freq_base": [0.0, -1.0],
    "kda.head_dim": [0, 15, 2**31, DROP],
    "kda.gate_lower_bound": [0.0, 5.0, float("nan"), DROP],
    "kda.safe_gate": [False],
    "ssm.conv_kernel": [0, 1, 5, 2**31, DROP],
    "expert_count": [0, 7, 2**31, DROP],
    "expert_used_count": [0, 5, 2**31, DROP],
    "expert_group_count": [3, 8, -1],
    "expert_group_used_count": [0, 5, DROP],
    "expert_feed_forward_length": [0, 15, 2**31, DROP],
    "expert_shared_feed_forward_length": [-1, 33],
    "expert_gating_func": [0, 3, DROP],
    "expert_weights_scale": [-1.0, float("inf")],
    "leading_dense_block_count": [-1, 0, 3, 2**31],
    "swiglu_clamp_exp": [[1.0], [-1.0] * 5, [float("nan")] * 5, "off"],
    "nextn_predict_layers": [-1, 0, 2, 5],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in BAD.items() for value in values]
)
def test_bad_metadata(key, value, variant):
    with pytest.raises(DraftscopeError) as caught:
        check(variant(LING, {f"{{arch}}.{key}": value}))
    assert isinstance(caught.value, ModelFileError | UnsupportedModelError)
    for sentence in (caught.value.message, caught.value.remedy):
        assert sentence.endswith(".") and len(sentence) < 400


def test_keys_and_values_in_one_matrix_are_refused(variant):
    def fuse(tensors):
        tensors["blk.3.attn_kv_b.weight"] = np.zeros((4 * 32, 32), np.float32)

    with pytest.raises(UnsupportedModelError, match="attn_kv_b"):
        check(variant(LING, edit=fuse))


@pytest.mark.parametrize("name", BESIDE)
def test_an_output_matrix_is_needed(name, variant):
    with pytest.raises(UnsupportedModelError, match=r"output\.weight is missing"):
        check(variant(name, edit=lambda tensors: tensors.pop("output.weight")))
