"""The drafters that files of random weights can be written for: a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gguf import GGUFValueType, GGUFWriter

from engine.experiments.random_models.random_deepseek4 import add_stream_keys
from engine.model.config import ModelConfig
from engine.model.drafters.dflash_config import ARCHITECTURE as DFLASH
from engine.model.drafters.dflash_config import BlockConvSizes, DFlashConfig, SelectorSizes
from engine.model.drafters.eagle3_config import ARCHITECTURE as EAGLE3
from engine.model.drafters.eagle3_config import Eagle3Config
from engine.model.parts import Shapes
from engine.model.parts.attention import AttentionPart
from engine.model.parts.trunks import SinkhornConnections
from engine.model.rope import RopeConfig

_N_TAPS = 5
_N_STREAM_LAYERS = 3
# below this width, targets are small enough for tests


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
    """Blocks of 7, each row of which drafts; for deepseek4 in three layers of its own kind."""
    rank = _rank(target)
    config = replace(dflash_for(target), block_size=7, anchor=True, markov=rank, confident=True)
    if not (isinstance(target.trunk, SinkhornConnections) and target.mtp):
        return config
    streams = replace(
        target, architecture=DFLASH, blocks=(target.mtp.block,) * _N_STREAM_LAYERS, mtp=None
    )
    return replace(config, streams=streams, windows=(None,) * _N_STREAM_LAYERS)


def _rank(target: ModelConfig) -> int:
    return 256 if target.n_embd >= _LARGE else 32


def dflash_further(config: DFlashConfig) -> Shapes:
    """Value projections of all layers, and a confidence head's bias."""
    shape = (config.n_heads_kv * config.head_dim, config.n_embd)
    layers = range(0 if config.streams else config.n_layer)
    shapes: Shapes = {f"blk.{layer}.attn_v.weight": shape for layer in layers}
    return shapes | ({"conf_proj.bias": (1,)} if config.confident else {})


def add_dflash_keys(writer: GGUFWriter, config: DFlashConfig) -> None:
    """What a file says of its sizes."""
    if config.streams:
        add_stream_keys(writer, config.streams)
    else:
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
    taps = f"{DFLASH}.target_layers"
    writer.add_key_value(taps, list(config.taps), GGUFValueType.ARRAY, GGUFValueType.INT32)
    writer.add_uint32(f"{DFLASH}.block_size", config.block_size)
    if config.markov:
        writer.add_bool(f"{DFLASH}.sample_from_anchor", config.anchor)
        writer.add_bool(f"{DFLASH}.has_confidence_head", config.confident)
    if config.conv and config.selector:
        group = config.n_embd // config.conv.n_groups
        writer.add_uint32(f"{DFLASH}.conv_kernel_size", config.conv.n_taps)
        writer.add_uint32(f"{DFLASH}.conv_group_size", group)
        writer.add_uint32(f"{DFLASH}.selector_rank", config.selector.rank)
        writer.add_uint32(f"{DFLASH}.selector_top_k", config.selector.top_k)


# below this width, targets are small enough for tests
_LARGE = 1024


def eagle3_for(target: ModelConfig) -> Eagle3Config:
    """As wide as the target, whose embedding and head it shares."""
    head_dim = 128 if target.n_embd >= _LARGE else 64
    n_head = target.n_embd // head_dim
    heads = n_head, max(1, n_head // 4), head_dim
    middle = target.n_layer // 2
    return Eagle3Config(
        name="",
        n_embd=target.n_embd,
        n_target=target.n_embd,
        n_ff=3 * target.n_embd,
        n_ctx_train=target.n_ctx_train,
        eps=1e-6,
        attention=AttentionPart(*heads, gated=False, normed=False, rope="pairs"),
        rope=RopeConfig(head_dim, 1e7, n_ctx_orig=target.n_ctx_train),
        taps=(min(2, middle), middle, max(middle, target.n_layer - 3)),
        norm_before_residual=False,
        norm_before_fc=False,
    )


def eagle3_further(config: Eagle3Config) -> Shapes:
    """None."""
    return {}


def add_eagle3_keys(writer: GGUFWriter, config: Eagle3Config) -> None:
    """What a file says of its sizes."""
    attention = config.attention
    writer.add_block_count(1)
    writer.add_context_length(config.n_ctx_train)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.n_ff)
    writer.add_head_count(attention.n_head)
    writer.add_head_count_kv(attention.n_head_kv)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_freq_base(config.rope.freq_base)
    writer.add_rope_dimension_count(config.rope.n_rot)
    taps = f"{EAGLE3}.target_layers"
    writer.add_key_value(taps, list(config.taps), GGUFValueType.ARRAY, GGUFValueType.INT32)
    writer.add_uint32(f"{EAGLE3}.target_hidden_size", config.n_target)


@dataclass(frozen=True, slots=True)
class RandomDrafter:
    """config_for: its sizes for a target. add_keys: writes what a file says of them. further:
    tensors that a file may have and this one has."""

    architecture: str
    config_for: Callable[[ModelConfig], Any]
    add_keys: Callable[[GGUFWriter, Any], None]
    further: Callable[[Any], Shapes]


RANDOM_DRAFTERS: Mapping[str, RandomDrafter] = {
    "eagle3": RandomDrafter("eagle3", eagle3_for, add_eagle3_keys, eagle3_further),
    "dflash": RandomDrafter("dflash", dflash_for, add_dflash_keys, dflash_further),
    "dflash2": RandomDrafter("dflash", dflash2_for, add_dflash_keys, dflash_further),
    "dspark": RandomDrafter("dflash", dspark_for, add_dflash_keys, dflash_further),
}
"""By the name of the kind. All lack embedding and head, which are the target's."""
