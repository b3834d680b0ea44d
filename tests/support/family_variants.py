"""Forms of the further families that their golden files do not have, as edits of those files.

What llama.cpp (0c1e57098) makes of them is in tests/data/family-variants.npz: logits of TOKENS,
from llama-cpp-python 0.3.36 with f32 cells and without flash attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.rewrite_gguf import DROP, Tensors

TOKENS = np.random.default_rng(5).integers(3, 376, 24).tolist()
Edit = Callable[[Tensors], None]


@dataclass(frozen=True)
class Variant:
    """An edit of the golden model `base`: metadata keys, and tensors."""

    base: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    edit: Edit | None = None


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def _biases(tensors: Tensors) -> None:
    """On every projection of attention and every dense matrix."""
    for name in list(tensors):
        stem, kind = name.removesuffix(".weight"), name.split(".")[-2]
        if kind in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"):
            tensors[f"{stem}.bias"] = 0.3 * _random(tensors[name].shape[0])


def _fused(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("attn_q.weight")]:
        prefix = name.removesuffix("q.weight")
        parts = [tensors.pop(f"{prefix}{part}.weight") for part in "qkv"]
        tensors[f"{prefix}qkv.weight"] = np.concatenate(parts)


def _without_norm(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("ssm_norm.weight")]:
        del tensors[name]


def _experts(tensors: Tensors) -> None:
    """Four experts and a shared one in place of each dense feed-forward part."""
    for name in [name for name in tensors if name.endswith("ffn_gate.weight")]:
        prefix = name.removesuffix("gate.weight")
        f, d = tensors[name].shape
        for part in ("gate", "up", "down"):
            matrix = tensors.pop(f"{prefix}{part}.weight")
            each = [np.roll(matrix, shift, 0) for shift in range(4)]
            tensors[f"{prefix}{part}_exps.weight"] = np.stack(each)
            half = matrix[:, : f // 2] if part == "down" else matrix[: f // 2]
            tensors[f"{prefix}{part}_shexp.weight"] = half
        tensors[f"{prefix}gate_inp.weight"] = _random(4, d)


def _latent(tensors: Tensors) -> None:
    """Routed experts that work on rows of half the width."""
    for name in [name for name in tensors if name.endswith("ffn_up_exps.weight")]:
        prefix = name.removesuffix("up_exps.weight")
        d = tensors[name].shape[2]
        tensors[name] = tensors[name][:, :, : d // 2]
        down = f"{prefix}down_exps.weight"
        tensors[down] = tensors[down][:, : d // 2]
        tensors[f"{prefix}latent_down.weight"] = _random(d // 2, d) / d**0.5
        tensors[f"{prefix}latent_up.weight"] = _random(d, d // 2) / (d // 2) ** 0.5


GRANITE, NEMOTRON = "granitehybrid-a-f32", "nemotron_h-a-f32"
VARIANTS = {
    "granite with rope and another scale": Variant(
        GRANITE, {"{arch}.rope.scaling.finetuned": True, "{arch}.attention.scale": 0.4}
    ),
    "granite without scales, rope by default": Variant(
        GRANITE,
        {
            f"{{arch}}.{key}": DROP
            for key in (
                "rope.scaling.finetuned",
                "attention.scale",
                "embedding_scale",
                "residual_scale",
                "logit_scale",
            )
        },
    ),
    "granite with experts": Variant(
        GRANITE,
        {
            "{arch}.expert_count": np.uint32(4),
            "{arch}.expert_used_count": np.uint32(2),
            "{arch}.expert_shared_feed_forward_length": np.uint32(48),
        },
        _experts,
    ),
    "nemotron with biases": Variant(NEMOTRON, edit=_biases),
    "nemotron with fused projections": Variant(NEMOTRON, edit=_fused),
    "nemotron with latent experts, not normalised": Variant(
        "nemotron_h_moe-b-mtp-f32",
        {
            "{arch}.moe_latent_size": np.uint32(32),
            "{arch}.expert_weights_norm": DROP,
            "{arch}.expert_weights_scale": DROP,
        },
        _latent,
    ),
    "falcon without a norm": Variant("falcon-h1-a-f32", edit=_without_norm),
    "lfm2 with a window": Variant(
        "lfm2-a-tied-f32", {"{arch}.attention.sliding_window": np.uint32(5)}
    ),
    "lfm2moe by softmax": Variant("lfm2moe-b-f32", {"{arch}.expert_gating_func": np.uint32(1)}),
}
