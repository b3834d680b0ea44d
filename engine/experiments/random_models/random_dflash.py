"""Drafters of the DFlash family that are written with random weights: shapes, metadata.

Shapes follow published ones: five layers of the target read, attention values in all layers.
"""

from __future__ import annotations

from dataclasses import replace

from gguf import GGUFValueType, GGUFWriter

from engine.model.config import ModelConfig
from engine.model.drafters.dflash_config import (
    ARCHITECTURE,
    BlockConvSizes,
    DFlashConfig,
    SelectorSizes,
)
from engine.model.parts import Shapes
from engine.model.rope import RopeConfig

_N_TAPS = 5
# below this width, targets are small enough for tests
_LARGE = 1024


def dflash_for(target: ModelConfig) -> DFlashConfig:
    """Blocks of 16."""
    large = target.n_embd >= _LARGE
    head_dim, n_layer = (128, 5) if large else (64, 2)
    n_heads = target.n_embd // head_dim
    last = target.n_layer - 1
    return DFlashConfig(
        name="",
        n_embd=target.n_embd,
        n_ff=3 * target.n_embd,
        n_heads=n_heads,
        n_heads_kv=max(1, n_heads // 4),
        head_dim=head_dim,
        eps=1e-6,
        rope=RopeConfig(head_dim, 1e7, n_ctx_orig=target.n_ctx_train),
        taps=tuple(sorted({1 + i * (last - 1) // (_N_TAPS - 1) for i in range(_N_TAPS)})),
        n_ctx_train=target.n_ctx_train,
        block_size=16,
        mask_token=0,
        causal=False,
        windows=(None,) * n_layer,
        scale=head_dim**-0.5,
        value_scale=1.0,
        embedding_scale=1.0,
        anchor=False,
        markov=0,
        confident=False,
        conv=None,
        selector=None,
    )


def dflash2_for(target: ModelConfig) -> DFlashConfig:
    """Blocks of 8, two taps of convolution, 16 candidates."""
    sizes = SelectorSizes(_rank(target), 16, 1.0, 0.0)
    conv = BlockConvSizes(2, target.n_embd // 16)
    return replace(dflash_for(target), block_size=8, conv=conv, selector=sizes)


def dspark_for(target: ModelConfig) -> DFlashConfig:
    """Blocks of 7, each row of which drafts."""
    rank = _rank(target)
    return replace(dflash_for(target), block_size=7, anchor=True, markov=rank, confident=True)


def _rank(target: ModelConfig) -> int:
    return 256 if target.n_embd >= _LARGE else 32


def dflash_further(config: DFlashConfig) -> Shapes:
    """Value projections of all layers, and a confidence head's bias."""
    shape = (config.n_heads_kv * config.head_dim, config.n_embd)
    shapes: Shapes = {f"blk.{layer}.attn_v.weight": shape for layer in range(config.n_layer)}
    return shapes | ({"conf_proj.bias": (1,)} if config.confident else {})


def add_dflash_keys(writer: GGUFWriter, config: DFlashConfig) -> None:
    """What a file says of its sizes."""
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_ctx_train)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.n_ff)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_heads_kv)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_freq_base(config.rope.freq_base)
    writer.add_rope_dimension_count(config.rope.n_rot)
    taps = f"{ARCHITECTURE}.target_layers"
    writer.add_key_value(taps, list(config.taps), GGUFValueType.ARRAY, GGUFValueType.INT32)
    writer.add_uint32(f"{ARCHITECTURE}.block_size", config.block_size)
    if config.markov:
        writer.add_bool(f"{ARCHITECTURE}.sample_from_anchor", config.anchor)
        writer.add_bool(f"{ARCHITECTURE}.has_confidence_head", config.confident)
    if config.conv and config.selector:
        group = config.n_embd // config.conv.n_groups
        writer.add_uint32(f"{ARCHITECTURE}.conv_kernel_size", config.conv.n_taps)
        writer.add_uint32(f"{ARCHITECTURE}.conv_group_size", group)
        writer.add_uint32(f"{ARCHITECTURE}.selector_rank", config.selector.rank)
        writer.add_uint32(f"{ARCHITECTURE}.selector_top_k", config.selector.top_k)
