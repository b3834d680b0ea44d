"""glm5-next (GLM-5.3-Flash): Kimi Delta Attention and latent attention sparse by pooled keys, on
four mixed streams; its MTP block has one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families.common import common_sizes, hold_to_own_head, model_config
from engine.model.families.kda import (
    dense_width,
    lower_bound,
    n_dense,
    read_clamps,
    read_kda,
    read_latent_attention,
    read_mixture,
)
from engine.model.families.mamba import attending_layers
from engine.model.limits import MAX_HEAD_DIM, MAX_HEADS, MAX_TAPS, REMEDY, count
from engine.model.parts import BlockParts, FeedForwardPart, MixerPart, MtpParts
from engine.model.parts.attention import SparseLatentAttentionPart
from engine.model.parts.feed_forward import SwigluPart
from engine.model.parts.trunks import SinkhornConnections

_MOST_ROUNDS = 1000
_SIGMOID = 2
_L2_EPS = 1e-6
"""What llama.cpp adds in the norm of queries and keys, whatever the file's epsilon is."""


def read_glm5_next(file: GgufFile) -> ModelConfig:
    """GLM-5.3-Flash, perhaps with an MTP block."""
    arch = file.architecture
    sizes = common_sizes(file, runs_mtp=True)
    n = sizes.n_blocks
    hold_to_own_head(file)
    kda = read_kda(
        file,
        n,
        decay=("ssm_f_a.weight", "ssm_f_b.weight"),
        gate=("ssm_g_a.weight", "ssm_g_b.weight"),
        flat_a=True,
        bound=lower_bound(file, required=False),
        l2_eps=_L2_EPS,
    )
    latent = read_latent_attention(file, n)
    if latent.n_rope:
        raise UnsupportedModelError(
            f"{file.path.name}: {latent.n_rope} dimensions of its heads are rotated, and attention "
            f"of {arch} has no positions.",
            f"Set {arch}.rope.dimension_count to 0, if the model is one of these; llama.cpp does "
            "not take another number either.",
        )
    n_latent, rank = latent.n_latent, count(file, f"{arch}.attention.q_lora_rank")
    attention = SparseLatentAttentionPart(
        latent.n_head, n_latent, latent.n_nope, 0, latent.v_dim, rank, **_indexer(file)
    )
    attending, chooses = attending_layers(file, n), _own_indexers(file, sizes.n_layer)
    attending_first = next((i for i in attending if i < sizes.n_layer), None)
    if attending_first is not None and not chooses[attending_first]:
        what = (
            f"layer {attending_first}, the first that attends, has no indexer, and there is none "
            "before it to go by (llama.cpp aborts)"
        )
        raise ModelFileError(file.path, f"key {arch}.attention.indexer.types", what, REMEDY)
    if sizes.has_mtp and sizes.n_layer not in attending:
        what = f"block {sizes.n_layer}, the MTP block, does not attend"
        raise ModelFileError(file.path, f"key {arch}.attention.head_count_kv", what, REMEDY)

    routed = read_clamps(file, f"{arch}.swiglu_clamp_exp", n, before=True) or [None] * n
    shared = read_clamps(file, f"{arch}.swiglu_clamp_shexp", n, before=True) or routed
    normalised = file.bool_(f"{arch}.expert_weights_norm", False)
    mixture = read_mixture(file, n, normalised=normalised, scores=_SIGMOID)
    dense, leading = SwigluPart(dense_width(file, n)), n_dense(file)

    def feed_forward(index: int) -> FeedForwardPart:
        if index < leading:
            return replace(dense, gating=shared[index])
        return replace(mixture, gating=routed[index], shared_gating=shared[index])

    def mixer(index: int) -> MixerPart:
        if index not in attending:
            return kda
        own = index >= sizes.n_layer or chooses[index]
        return attention if own else replace(attention, chooses=False)

    blocks = [
        BlockParts((mixer(i),), feed_forward(i), ffn_norm="ffn_norm.weight") for i in range(n)
    ]
    return model_config(
        file,
        sizes,
        blocks=tuple(blocks),
        mtp=MtpParts(blocks[sizes.n_layer]) if sizes.has_mtp else None,
        trunk=read_sinkhorn(file),
    )


def glm5_next_notes(config: ModelConfig) -> list[str]:
    """See engine.model.families.Family.peer_notes."""
    if config.mtp is None:
        return []
    return ["0c1e57098 has no graph for the MTP block, b11549 drafts with it"]


def read_sinkhorn(file: GgufFile, *, has_head: bool = False) -> SinkhornConnections:
    """The `hyper_connection` keys. has_head: see SinkhornConnections."""
    key = f"{file.architecture}.hyper_connection"
    n_streams = count(file, f"{key}.count")
    if n_streams != SinkhornConnections.n_streams:
        raise UnsupportedModelError(
            f"{file.path.name}: {key}.count is {n_streams}, and streams of this kind run with "
            f"{SinkhornConnections.n_streams}, here and in llama.cpp.",
            f"Open a model with {SinkhornConnections.n_streams} streams.",
        )
    eps = file.float_(f"{key}.epsilon")
    if not 0.0 <= eps < 1.0:
        raise ModelFileError(file.path, f"key {key}.epsilon", f"{eps} is not an epsilon", REMEDY)
    n_rounds = count(file, f"{key}.sinkhorn_iterations", high=_MOST_ROUNDS)
    return SinkhornConnections(n_rounds, eps, has_head)


def _indexer(file: GgufFile) -> dict[str, Any]:
    """The fields of SparseLatentAttentionPart that an indexer has."""
    arch = file.architecture
    key = f"{arch}.attention.indexer"
    if not file.bool_(f"{key}.kpool_select_tail", True):
        raise UnsupportedModelError(
            f"{file.path.name}: {key}.kpool_select_tail is false, so that the first tokens of a "
            "text see nothing: in llama.cpp every logit is NaN.",
            "Convert the model again with the key true, or left out.",
        )
    ratio = count(file, f"{key}.kpool", low=2, high=MAX_TAPS)
    budget = count(file, f"{key}.top_k", high=(1 << 31) - 1)
    if budget % ratio:
        what = f"{budget} tokens are no whole number of pools of {ratio}"
        raise ModelFileError(file.path, f"key {key}.top_k", what, REMEDY)
    eps = file.float_(f"{arch}.attention.layer_norm_epsilon", 0.0)
    if not 0.0 <= eps < 1.0:
        place = f"key {arch}.attention.layer_norm_epsilon"
        raise ModelFileError(file.path, place, f"{eps} is not an epsilon", REMEDY)
    return {
        "n_index_head": count(file, f"{key}.head_count", high=MAX_HEADS),
        "index_dim": count(file, f"{key}.key_length", high=MAX_HEAD_DIM),
        "ratio": ratio,
        "n_pools": budget // ratio,
        "index_eps": eps,
    }


def _own_indexers(file: GgufFile, n_layer: int) -> list[bool]:
    """Which layers of the trunk choose for themselves, if they attend."""
    key = f"{file.architecture}.attention.indexer.types"
    values = file.metadata.get(key, True)
    if isinstance(values, bool):
        return [values] * n_layer
    if (
        not isinstance(values, np.ndarray)
        or values.dtype.kind not in "biu"
        or len(values) < n_layer
    ):
        raise ModelFileError(file.path, f"key {key}", f"not {n_layer} flags", REMEDY)
    return [bool(value) for value in values[:n_layer]]
