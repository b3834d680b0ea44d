"""The families with Kimi Delta Attention: kimi-linear, kimi-k3 and bailingmoe3 (Ling 3); and their
keys and latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from engine.errors import UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families.common import (
    CommonSizes,
    attending_layers,
    common_sizes,
    hold_to_own_head,
    mixed_blocks,
    model_config,
)
from engine.model.families.lfm2 import expert_scores
from engine.model.families.nemotron import expert_scale
from engine.model.limits import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_TAPS, count, real, uniform
from engine.model.parts import BlockParts, FeedForwardPart, MtpParts, TrunkPart
from engine.model.parts.attention import LatentAttentionPart
from engine.model.parts.feed_forward import DensePart, Gating, LatentPart, MixturePart, RouterPart
from engine.model.parts.recurrent import KdaPart
from engine.model.parts.trunks import CrossLayerResidual
from engine.model.rope import RopeConfig

_LEAST_LIMIT = 1e-6
"""Smaller limits count as none, as in llama.cpp."""


def lower_bound(file: GgufFile, *, required: bool) -> float | None:
    """Lower bound of the log decay; None without one."""
    key = ".kda.gate_lower_bound"
    if file.get(key) is None and not required:
        return None
    bound = file.float_(key)
    if not -1e4 <= bound < 0.0:
        raise file.wrong(key, f"{bound} is not a bound of a decay")
    return bound


def read_kda(
    file: GgufFile,
    n_blocks: int,
    *,
    decay: tuple[str, ...],
    gate: tuple[str, ...],
    positive_a: bool = False,
    flat_a: bool = False,
    bound: float | None = None,
    l2_eps: float | None = None,
) -> KdaPart:
    """The `kda` keys; queries, keys and values have attention's number of heads."""
    return KdaPart(
        n_heads=_n_heads(file, n_blocks),
        head_dim=count(file, ".kda.head_dim", high=MAX_HEAD_DIM),
        d_conv=count(file, ".ssm.conv_kernel", low=2, high=MAX_TAPS),
        decay=decay,
        gate=gate,
        positive_a=positive_a,
        flat_a=flat_a,
        bound=bound,
        l2_eps=l2_eps,
    )


def read_latent_attention(
    file: GgufFile,
    n_blocks: int,
    *,
    pairs: Literal["neighbours", "halves"] | None = None,
    gate: Literal["heads", "numbers"] | None = None,
) -> LatentAttentionPart:
    """The keys of latent attention, whose matrices must be separate."""
    if any(name.endswith(".attn_kv_b.weight") for name in file.tensors):
        raise UnsupportedModelError(
            f"{file.path.name}: attn_kv_b holds keys and values of latent attention in one matrix.",
            "Convert the original again: llama.cpp's converter writes attn_k_b and attn_v_b.",
        )
    n_latent = count(file, ".attention.kv_lora_rank", high=MAX_HEAD_DIM)
    n_rope = count(file, ".rope.dimension_count", low=0, high=MAX_HEAD_DIM)
    key = ".attention.key_length_mla"
    n_nope = count(file, key, high=2 * MAX_HEAD_DIM) - n_rope
    if n_nope < 1 or n_rope % 2:
        what = f"{n_nope + n_rope} is not a sum of {n_rope} rotated dimensions and others"
        raise file.wrong(key, what)
    rank = count(file, ".attention.q_lora_rank", 0, low=0)
    return LatentAttentionPart(
        n_head=_n_heads(file, n_blocks),
        n_latent=n_latent,
        n_nope=n_nope,
        n_rope=n_rope,
        v_dim=count(file, ".attention.value_length_mla", high=MAX_HEAD_DIM),
        q_rank=rank or None,
        pairs=pairs,
        gate=gate,
    )


def read_clamps(
    file: GgufFile, key: str, n_blocks: int, *, before: bool = False
) -> list[Gating | None] | None:
    """The clamp of each block, given once or as an array; None for no clamp, and for all without
    the key. before: whether gates are clamped before silu."""
    values = file.get(key)
    if values is None:
        return None
    if not isinstance(values, np.ndarray):
        values = np.full(n_blocks, file.float_(key))
    if values.dtype.kind != "f" or len(values) != n_blocks:
        raise file.wrong(key, f"not {n_blocks} numbers")
    if not np.isfinite(values).all() or values.min() < 0:
        raise file.wrong(key, "a limit is not a positive number")
    name = "clamped_swiglu" if before else "swiglu"
    return [(name, (float(value),)) if value > _LEAST_LIMIT else None for value in values]


def n_dense(file: GgufFile) -> int:
    """Number of leading blocks without experts."""
    return count(file, ".leading_dense_block_count", 0, low=0, high=MAX_LAYERS)


def dense_width(file: GgufFile, n_blocks: int) -> int:
    """Width of the dense feed-forward parts."""
    return uniform(file, ".feed_forward_length", n_blocks, range(n_blocks))


def read_mixture(
    file: GgufFile,
    n_blocks: int,
    *,
    normalised: bool,
    shared_width: int | None = None,
    latent: LatentPart | None = None,
    scores: int | None = None,
) -> MixturePart:
    """The `expert` keys. shared_width: None for a multiple of the routed experts' width. scores:
    default gating function."""
    n_experts = count(file, ".expert_count", high=MAX_HEADS)
    width = uniform(file, ".expert_feed_forward_length", n_blocks, range(n_blocks))
    if shared_width is None:
        shared_width = width * count(file, ".expert_shared_count", 1, high=MAX_HEADS)
    n_groups = count(file, ".expert_group_count", 1, low=0, high=MAX_HEADS) or 1
    n_groups_used = 1
    if n_groups > 1:
        n_groups_used = count(file, ".expert_group_used_count", high=n_groups)
        if n_experts % n_groups or n_experts // n_groups < 2:
            what = f"{n_experts} experts do not make {n_groups} groups"
            raise file.wrong(".expert_group_count", what)
    candidates = n_experts // n_groups * n_groups_used if n_groups > 1 else n_experts
    return MixturePart(
        n_experts=n_experts,
        n_used=count(file, ".expert_used_count", high=candidates),
        n_ff=width,
        n_ff_shared=shared_width,
        shared_gate=False,
        router=RouterPart(
            expert_scores(file, scores),
            normalised=normalised,
            scale=expert_scale(file),
            n_groups=n_groups,
            n_groups_used=n_groups_used,
        ),
        latent=latent,
    )


def _n_heads(file: GgufFile, n_blocks: int) -> int:
    return uniform(file, ".attention.head_count", n_blocks, range(n_blocks), high=MAX_HEADS)


_DECAY = "ssm_f_a.weight", "ssm_f_b.weight"


def read_kimi_linear(file: GgufFile) -> ModelConfig:
    """Kimi Linear (arXiv 2510.26692)."""
    sizes = common_sizes(file)
    n = sizes.n_blocks
    kda = read_kda(file, n, decay=_DECAY, gate=("ssm_g_a.weight", "ssm_g_b.weight"))
    attention = read_latent_attention(file, n)
    dense, mixture = DensePart(dense_width(file, n)), read_mixture(file, n, normalised=True)
    leading = n_dense(file)
    ffns = [dense if i < leading else mixture for i in range(n)]
    blocks = mixed_blocks(attention, kda, attending_layers(file, n), ffns)
    return _config(file, sizes, blocks, TrunkPart())


def read_kimi_k3(file: GgufFile) -> ModelConfig:
    """Kimi K3: SiTU instead of SwiGLU, experts on a latent row, residuals across layers."""
    sizes = common_sizes(file)
    n = sizes.n_blocks
    bound = lower_bound(file, required=False)
    kda = read_kda(file, n, decay=_DECAY, gate=("ssm_g.weight",), flat_a=True, bound=bound)
    gated = any(name.endswith(".attn_gate.weight") for name in file.tensors)
    attention = read_latent_attention(file, n, gate="numbers" if gated else None)
    beta = real(file, ".activation.situ_beta")
    # 0 or less: the other half passes unchanged
    situ = "situ", (beta, max(file.float_(".activation.situ_linear_beta"), 0.0))
    dense = DensePart(dense_width(file, n), situ)
    mixture = replace(
        read_mixture(
            file, n, normalised=file.bool_(".expert_weights_norm", False), latent=_latent(file)
        ),
        gating=situ,
        shared_gating=situ,
    )
    leading = n_dense(file)
    ffns = [dense if i < leading else mixture for i in range(n)]
    blocks = mixed_blocks(attention, kda, attending_layers(file, n), ffns)
    group = count(file, ".attn_res.block_size", low=0, high=MAX_LAYERS)
    return _config(file, sizes, blocks, CrossLayerResidual(group) if group else TrunkPart())


def _latent(file: GgufFile) -> LatentPart | None:
    width = count(file, ".expert_latent_length", 0, low=0)
    if not width:
        return None
    normed = any(name.endswith(".ffn_routed_norm.weight") for name in file.tensors)
    norm = "ffn_routed_norm.weight" if normed else None
    return LatentPart(width, "ffn_routed_down.weight", "ffn_routed_up.weight", norm)


def _config(
    file: GgufFile, sizes: CommonSizes, blocks: tuple[BlockParts, ...], trunk: TrunkPart
) -> ModelConfig:
    hold_to_own_head(file)
    return model_config(file, sizes, blocks=blocks, trunk=trunk)


def read_bailingmoe3(file: GgufFile) -> ModelConfig:
    """Ling 3, perhaps with an MTP block."""
    arch = file.architecture
    sizes = common_sizes(file, runs_mtp=True)
    n = sizes.n_blocks
    if not file.bool_(".kda.safe_gate", True):
        raise UnsupportedModelError(
            f"{file.path.name}: its decay has no lower bound ({arch}.kda.safe_gate is false).",
            "Open a model whose gates are safe gates.",
        )
    kda = read_kda(
        file,
        n,
        decay=("ssm_f_a.weight",),
        gate=("ssm_g_a.weight",),
        positive_a=True,
        bound=lower_bound(file, required=True),
    )
    sections = file.get(".rope.dimension_sections")
    multimodal = isinstance(sections, np.ndarray) and len(sections) > 1 and min(sections[:2]) > 0
    attention = read_latent_attention(
        file, n, pairs="halves" if multimodal else "neighbours", gate="heads"
    )
    width = count(file, ".expert_shared_feed_forward_length", 0, low=0)
    normalised = file.bool_(".expert_weights_norm", False)
    mixture = read_mixture(file, n, normalised=normalised, shared_width=width)
    dense, leading = DensePart(dense_width(file, n)), n_dense(file)
    keys = (f".swiglu_clamp_{name}" for name in ("exp", "shexp"))
    routed, shared = (read_clamps(file, key, n) or [None] * n for key in keys)

    def feed_forward(index: int) -> FeedForwardPart:
        # llama.cpp applies the shared expert's limit to dense parts
        if index < leading:
            return replace(dense, gating=shared[index])
        return replace(mixture, gating=routed[index], shared_gating=shared[index])

    ffns = list(map(feed_forward, range(n)))
    blocks = mixed_blocks(attention, kda, attending_layers(file, n), ffns)
    mtp = None
    if sizes.has_mtp:
        mtp = MtpParts(blocks[sizes.n_layer], "layer_output_norm.weight")
    return model_config(
        file, sizes, blocks=blocks, mtp=mtp, rope=RopeConfig.from_gguf(file, attention.n_rope)
    )
