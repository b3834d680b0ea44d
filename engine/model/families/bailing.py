"""bailingmoe3 (Ling 3): Kimi Delta Attention, latent attention with rope, groups of experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.errors import UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families.common import common_sizes, model_config
from engine.model.families.kda import (
    dense_width,
    lower_bound,
    n_dense,
    read_blocks,
    read_clamps,
    read_kda,
    read_latent_attention,
    read_mixture,
)
from engine.model.limits import count
from engine.model.parts import FeedForwardPart, MtpParts
from engine.model.parts.feed_forward import SwigluPart
from engine.model.rope import RopeConfig


def read_bailingmoe3(file: GgufFile) -> ModelConfig:
    """Ling 3, perhaps with an MTP block."""
    arch = file.architecture
    sizes = common_sizes(file, runs_mtp=True)
    n = sizes.n_blocks
    if not file.bool_(f"{arch}.kda.safe_gate", True):
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
    sections = file.metadata.get(f"{arch}.rope.dimension_sections")
    multimodal = isinstance(sections, np.ndarray) and len(sections) > 1 and min(sections[:2]) > 0
    attention = read_latent_attention(
        file, n, pairs="halves" if multimodal else "neighbours", gate="heads"
    )
    width = count(file, f"{arch}.expert_shared_feed_forward_length", 0, low=0)
    normalised = file.bool_(f"{arch}.expert_weights_norm", False)
    mixture = read_mixture(file, n, normalised=normalised, shared_width=width)
    dense, leading = SwigluPart(dense_width(file, n)), n_dense(file)
    keys = (f"{arch}.swiglu_clamp_{name}" for name in ("exp", "shexp"))
    routed, shared = (read_clamps(file, key, n) or [None] * n for key in keys)

    def feed_forward(index: int) -> FeedForwardPart:
        # llama.cpp holds a dense part to the limit of the shared expert
        if index < leading:
            return replace(dense, gating=shared[index])
        return replace(mixture, gating=routed[index], shared_gating=shared[index])

    blocks = read_blocks(file, n, kda, attention, feed_forward)
    mtp = None
    if sizes.has_mtp:
        mtp = MtpParts(blocks[sizes.n_layer], "layer_output_norm.weight")
    return model_config(
        file,
        sizes,
        blocks=tuple(blocks[: sizes.n_layer]),
        mtp=mtp,
        rope=RopeConfig.from_gguf(file, attention.n_rope),
    )
