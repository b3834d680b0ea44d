"""Every layout of the same model must give the logits of the golden file."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.gguf.file import GgufFile
from engine.model.loader import load_model
from tests.support.naive_memory import NaiveMemory, ubatch_of
from tests.support.rewrite_gguf import DROP, Tensors

HYBRID = "qwen35-a-f32"
TIED = "qwen35-b-v2x-tied-f32"
MOE = "qwen35moe-d-v2x-mtp-f32"
NEXT = "qwen3next-e-v2x-f32"
DENSE = "qwen3-f-f32"


def _fuse_qkv(tensors: Tensors) -> None:
    for block in range(5):
        names = [f"blk.{block}.attn_{x}.weight" for x in "qkv"]
        if names[0] in tensors:
            tensors[f"blk.{block}.attn_qkv.weight"] = np.concatenate(
                [tensors.pop(name) for name in names]
            )


def _fuse_experts(tensors: Tensors) -> None:
    for block in range(5):
        names = [f"blk.{block}.ffn_{x}_exps.weight" for x in ("gate", "up")]
        tensors[f"blk.{block}.ffn_gate_up_exps.weight"] = np.concatenate(
            [tensors.pop(name) for name in names], axis=1
        )


def _legacy_ssm_in(tensors: Tensors) -> None:
    """Rows of qkv and z regrouped by key head, one slice at a time: 2 key heads, 4 value heads."""
    key_heads, per_key, d = 2, 2, 16
    for block in range(3):
        qkv = tensors.pop(f"blk.{block}.attn_qkv.weight")
        z = tensors.pop(f"blk.{block}.attn_gate.weight")
        rows = []
        for head in range(key_heads):
            values = range(head * per_key, (head + 1) * per_key)
            rows.append(qkv[head * d : (head + 1) * d])
            rows.append(qkv[(key_heads + head) * d : (key_heads + head + 1) * d])
            rows += [qkv[(2 * key_heads + v) * d : (2 * key_heads + v + 1) * d] for v in values]
            rows += [z[v * d : (v + 1) * d] for v in values]
        tensors[f"blk.{block}.ssm_in.weight"] = np.concatenate(rows)


def _drop_ones(tensors: Tensors) -> None:
    for name in tensors:
        if name.endswith("ffn_gate_inp_shexp.weight"):
            assert tensors[name].shape == (1, 64)
            tensors[name] = tensors[name].reshape(64)


def _own_head(tensors: Tensors) -> None:
    tensors["output.weight"] = tensors["token_embd.weight"]


def _one_kv_head_per_head(tensors: Tensors) -> None:
    """Grouped attention written out: each query head gets a copy of its key-value head."""
    for block in range(4):
        for x in "kv":
            name = f"blk.{block}.attn_{x}.weight"
            heads = tensors[name].reshape(2, 32, 64)
            tensors[name] = np.repeat(heads, 2, axis=0).reshape(128, 64)


def _zero_biases(tensors: Tensors) -> None:
    for block in range(4):
        for x in "qkv":
            rows = tensors[f"blk.{block}.attn_{x}.weight"].shape[0]
            tensors[f"blk.{block}.attn_{x}.bias"] = np.zeros(rows, np.float32)


CASES = {
    "fused qkv, gated": (HYBRID, {}, _fuse_qkv),
    "fused qkv, plain": (DENSE, {}, _fuse_qkv),
    "fused experts": (MOE, {}, _fuse_experts),
    "fused qkv and experts": (MOE, {}, lambda t: (_fuse_qkv(t), _fuse_experts(t))),
    "legacy ssm_in": (NEXT, {}, _legacy_ssm_in),
    "shared gate without its 1": (MOE, {}, _drop_ones),
    "tied head written out": (TIED, {}, _own_head),
    "schedule from the interval": (HYBRID, {"{arch}.attention.recurrent_layers": DROP}, None),
    "schedule by default": (
        HYBRID,
        {"{arch}.attention.recurrent_layers": DROP, "{arch}.full_attention_interval": DROP},
        None,
    ),
    "schedule of integers": (HYBRID, {"{arch}.attention.recurrent_layers": [1, 1, 1, 0]}, None),
    "array beats interval": (HYBRID, {"{arch}.full_attention_interval": 2}, None),
    "array without interval": (HYBRID, {"{arch}.full_attention_interval": DROP}, None),
    "head length by default": (
        TIED,
        {"{arch}.attention.key_length": DROP, "{arch}.attention.value_length": DROP},
        None,
    ),
    "kv heads by default": (DENSE, {"{arch}.attention.head_count_kv": DROP}, _one_kv_head_per_head),
    "rotated dimensions given": (DENSE, {"{arch}.rope.dimension_count": 32}, None),
    "scaling switched off": (
        DENSE,
        {"{arch}.rope.scaling.type": "none", "{arch}.rope.scaling.factor": 4.0},
        None,
    ),
    "scaling by one": (HYBRID, {"{arch}.rope.scaling.factor": 1.0}, None),
    "sections that cover all pairs": (
        HYBRID,
        {"{arch}.rope.dimension_sections": [11, 11, 10, 0]},
        None,
    ),
    "zero attention biases": (DENSE, {}, _zero_biases),
    "sizes per layer": (
        DENSE,
        {
            "{arch}.attention.head_count": [4] * 4,
            "{arch}.attention.head_count_kv": [2] * 4,
            "{arch}.feed_forward_length": [96] * 4,
        },
        None,
    ),
    "kv heads per layer, none in recurrent ones": (
        HYBRID,
        {"{arch}.attention.head_count_kv": [0, 0, 0, 2]},
        None,
    ),
    "keys that do not count": (
        MOE,
        {"{arch}.expert_weights_scale": 3.0, "{arch}.expert_weights_norm": False},
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_same_logits(case, variant, golden, reference):
    name, keys, edit = CASES[case]
    tokens = reference(name)["tokens"].tolist()
    with GgufFile.open(variant(name, keys, edit)) as file:
        model = load_model(file)
    got = model.forward(ubatch_of(tokens), NaiveMemory.for_model(model.config)).logits
    expected = golden(name).forward(ubatch_of(tokens), NaiveMemory.for_model(model.config)).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


CHANGES = {
    "linear scaling": (DENSE, {"{arch}.rope.scaling.factor": 2.0}),
    "yarn scaling": (
        DENSE,
        {
            "{arch}.rope.scaling.type": "yarn",
            "{arch}.rope.scaling.factor": 4.0,
            "{arch}.rope.scaling.original_context_length": 64,
        },
    ),
    "sections that leave pairs still": (HYBRID, {"{arch}.rope.dimension_sections": [0, 0, 1, 3]}),
    "freq_base by default": (DENSE, {"{arch}.rope.freq_base": DROP}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_other_logits(case, variant, golden, reference):
    """Metadata that must matter does; what it does exactly is tested where it is computed."""
    name, keys = CHANGES[case]
    tokens = reference(name)["tokens"].tolist()
    with GgufFile.open(variant(name, keys)) as file:
        model = load_model(file)
    got = model.forward(ubatch_of(tokens), NaiveMemory.for_model(model.config)).logits
    expected = golden(name).forward(ubatch_of(tokens), NaiveMemory.for_model(model.config)).logits
    # the first token has position 0: no rope reaches it, but for yarn's factor on q and k,
    # which one lone cell does not feel
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-5)
    assert (got - expected).abs().amax() > 0.01


def test_linear_scaling_equals_slower_positions(variant, golden, reference):
    """Positions divided by 2: every second position of the scaled model is one of the plain."""
    tokens = reference(DENSE)["tokens"].tolist()[:16]
    with GgufFile.open(variant(DENSE, {"{arch}.rope.scaling.factor": 2.0})) as file:
        scaled = load_model(file)
    plain = golden(DENSE).forward(ubatch_of(tokens), NaiveMemory()).logits
    spread = ubatch_of(tokens)
    spread.positions[:] *= 2
    got = scaled.forward(spread, NaiveMemory()).logits
    torch.testing.assert_close(got, plain, rtol=0, atol=1e-5)


def test_irregular_schedule(variant):
    """Attention first: the blocks of a golden model in another order."""
    order = {0: 3, 1: 0, 2: 1, 3: 2}

    def edit(tensors: Tensors) -> None:
        old = dict(tensors)
        tensors.clear()
        for name, data in old.items():
            words = name.split(".")
            if words[0] == "blk":
                source = int(words[1])
                words[1] = str(next(new for new, was in order.items() if was == source))
            tensors[".".join(words)] = data

    keys = {"{arch}.attention.recurrent_layers": [False, True, True, True]}
    with GgufFile.open(variant(HYBRID, keys, edit)) as file:
        model = load_model(file)
    assert model.recurrent_layers == (1, 2, 3)
    memory = NaiveMemory.for_model(model.config)
    assert model.forward(ubatch_of([1, 2, 3]), memory).logits.isfinite().all()
    assert {key.layer for key, _ in memory.recurrent.states} == {1, 2, 3}
    assert {layer for layer, _ in memory.attention.cells} == {0}
