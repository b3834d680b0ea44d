"""lfm2 and lfm2moe: gated short convolutions with interspersed attention."""

from __future__ import annotations

from engine.errors import UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families.common import (
    attending_layers,
    common_sizes,
    heads,
    mixed_blocks,
    model_config,
)
from engine.model.families.nemotron import expert_scale
from engine.model.limits import MAX_CONTEXT, MAX_HEADS, MAX_TAPS, count, uniform
from engine.model.parts.attention import AttentionPart
from engine.model.parts.feed_forward import DensePart, MixturePart, RouterPart
from engine.model.parts.recurrent import ShortConvPart
from engine.model.rope import RopeConfig

_SCORES = {1: "softmax", 2: "sigmoid", 4: "softplus"}
"""The router's scoring function by its number in files (kernels.moe.Choice)."""


def read_lfm2(file: GgufFile) -> ModelConfig:
    """Dense feed-forward parts."""
    window = count(file, "lfm2.attention.sliding_window", 0, low=0, high=MAX_CONTEXT)
    return _read(file, window or None, None)


def read_lfm2moe(file: GgufFile) -> ModelConfig:
    """Mixtures of experts after some leading dense blocks."""
    n_experts = count(file, ".expert_count", high=MAX_HEADS)
    mixture = MixturePart(
        n_experts,
        count(file, ".expert_used_count", high=n_experts),
        count(file, ".expert_feed_forward_length"),
        n_ff_shared=0,
        shared_gate=False,
        router=RouterPart(expert_scores(file), scale=expert_scale(file)),
    )
    return _read(file, None, mixture)


def _read(file: GgufFile, window: int | None, mixture: MixturePart | None) -> ModelConfig:
    sizes = common_sizes(file)
    n = sizes.n_blocks
    attending = attending_layers(file, n)
    attention = None
    if attending:
        n_head, n_head_kv, head_dim = heads(file, sizes.n_embd, n, attending)
        attention = AttentionPart(n_head, n_head_kv, head_dim, gated=False, window=window)
    taps = count(file, ".shortconv.l_cache", low=2, high=MAX_TAPS)
    conv = ShortConvPart(taps, sizes.n_embd)
    n_dense = count(file, ".leading_dense_block_count", 0, low=0, high=n) if mixture else n
    # without a dense block the key is ignored
    key, leading = ".feed_forward_length", range(n_dense)
    dense = DensePart(uniform(file, key, n, leading)) if n_dense else None

    ffns = [dense if i < n_dense else mixture for i in range(n)]
    return model_config(
        file,
        sizes,
        blocks=mixed_blocks(attention, conv, attending, ffns),
        rope=RopeConfig.from_gguf(file, attention.head_dim) if attention else None,
        output_norm="token_embd_norm.weight",
    )


def expert_scores(file: GgufFile, default: int | None = None) -> str:
    """The router's scoring function: "softmax" or "sigmoid". default: the number without the key;
    None if it is required."""
    key = file.full(".expert_gating_func")
    number = count(file, key, default, low=0)
    if number not in _SCORES:
        raise UnsupportedModelError(
            f"{file.path.name}: {key} is {number}, a router that does not run here.",
            "Open a model whose experts are chosen by softmax (1), sigmoid (2) or the root of "
            "softplus (4).",
        )
    return _SCORES[number]
