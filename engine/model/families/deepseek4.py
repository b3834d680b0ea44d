"""The families with four mixed streams: glm5-next (GLM-5.3-Flash) with Kimi Delta Attention and
latent attention sparse by pooled keys, whose MTP block has one stream; deepseek4 (DeepSeek-V4) with
window attention plus compressed blocks of tokens, and experts chosen by token id in the first
layers, whose MTP block has streams of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engine.errors import UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families.common import (
    attending_layers,
    common_sizes,
    heads,
    hold_to_own_head,
    model_config,
)
from engine.model.families.kda import (
    dense_width,
    lower_bound,
    n_dense,
    read_clamps,
    read_kda,
    read_latent_attention,
    read_mixture,
)
from engine.model.limits import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_TAPS, count, real
from engine.model.parts import BlockParts, FeedForwardPart, MixerPart, MtpParts
from engine.model.parts.attention import RINGS, CompressedAttentionPart, SparseLatentAttentionPart
from engine.model.parts.feed_forward import DensePart, MixturePart
from engine.model.parts.trunks import SinkhornConnections
from engine.model.rope import RopeConfig

_MOST_ROUNDS = 1000
_SIGMOID = 2
_L2_EPS = 1e-6
"""llama.cpp's epsilon in the norm of queries and keys, whatever the file's."""


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
    n_latent, rank = latent.n_latent, count(file, ".attention.q_lora_rank")
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
        raise file.wrong(".attention.indexer.types", what)
    if sizes.has_mtp and sizes.n_layer not in attending:
        what = f"block {sizes.n_layer}, the MTP block, does not attend"
        raise file.wrong(".attention.head_count_kv", what)

    routed = read_clamps(file, ".swiglu_clamp_exp", n, before=True) or [None] * n
    shared = read_clamps(file, ".swiglu_clamp_shexp", n, before=True) or routed
    normalised = file.bool_(".expert_weights_norm", False)
    mixture = read_mixture(file, n, normalised=normalised, scores=_SIGMOID)
    dense, leading = DensePart(dense_width(file, n)), n_dense(file)

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
    if config.mtp is None:
        return []
    return ["0c1e57098 has no graph for the MTP block, b11549 drafts with it"]


def read_sinkhorn(file: GgufFile, *, has_head: bool = False) -> SinkhornConnections:
    """The `hyper_connection` keys. has_head: see SinkhornConnections."""
    key = file.full(".hyper_connection")
    n_streams = count(file, f"{key}.count")
    if n_streams != SinkhornConnections.n_streams:
        raise UnsupportedModelError(
            f"{file.path.name}: {key}.count is {n_streams}, and streams of this kind run with "
            f"{SinkhornConnections.n_streams}, here and in llama.cpp.",
            f"Open a model with {SinkhornConnections.n_streams} streams.",
        )
    eps = file.float_(f"{key}.epsilon")
    if not 0.0 <= eps < 1.0:
        raise file.wrong(f"{key}.epsilon", f"{eps} is not an epsilon")
    n_rounds = count(file, f"{key}.sinkhorn_iterations", high=_MOST_ROUNDS)
    return SinkhornConnections(n_rounds, eps, has_head)


def _indexer(file: GgufFile) -> dict[str, Any]:
    """The fields of SparseLatentAttentionPart that an indexer has."""
    key = file.full(".attention.indexer")
    if not file.bool_(f"{key}.kpool_select_tail", True):
        raise UnsupportedModelError(
            f"{file.path.name}: {key}.kpool_select_tail is false, so that the first tokens of a "
            "text see nothing: in llama.cpp every logit is NaN.",
            "Convert the model again with the key true, or left out.",
        )
    ratio = count(file, f"{key}.kpool", low=2, high=MAX_TAPS)
    budget = count(file, f"{key}.top_k", high=(1 << 31) - 1)
    if budget % ratio:
        raise file.wrong(f"{key}.top_k", f"{budget} tokens are no whole number of pools of {ratio}")
    eps = file.float_(".attention.layer_norm_epsilon", 0.0)
    if not 0.0 <= eps < 1.0:
        raise file.wrong(".attention.layer_norm_epsilon", f"{eps} is not an epsilon")
    return {
        "n_index_head": count(file, f"{key}.head_count", high=MAX_HEADS),
        "index_dim": count(file, f"{key}.key_length", high=MAX_HEAD_DIM),
        "ratio": ratio,
        "n_pools": budget // ratio,
        "index_eps": eps,
    }


def _own_indexers(file: GgufFile, n_layer: int) -> list[bool]:
    """Whether each attention layer of the trunk has an indexer of its own."""
    key = ".attention.indexer.types"
    values = file.get(key)
    if values is None or isinstance(values, bool):
        return [values is not False] * n_layer
    if (
        not isinstance(values, np.ndarray)
        or values.dtype.kind not in "biu"
        or len(values) < n_layer
    ):
        raise file.wrong(key, f"not {n_layer} flags")
    return [bool(value) for value in values[:n_layer]]


_SOFTPLUS = 4
"""Gating function of its routers: the square root of softplus."""
_MOST = (1 << 31) - 1


def read_deepseek4(file: GgufFile) -> ModelConfig:
    """DeepSeek-V4, perhaps with an MTP block."""
    sizes = common_sizes(file, runs_mtp=True)
    n = sizes.n_blocks
    hold_to_own_head(file)
    attention, rope = read_window_attention(file, n, sizes.n_embd)
    ratios = _ratios(file, sizes.n_blocks, sizes.n_layer)
    index_dim = count(file, ".attention.indexer.key_length", high=MAX_HEAD_DIM)
    if index_dim < rope.n_rot:
        what = f"{index_dim} numbers are fewer than the {rope.n_rot} that rope turns"
        raise file.wrong(".attention.indexer.key_length", what)
    attention = replace(
        attention,
        n_index_head=count(file, ".attention.indexer.head_count", high=MAX_HEADS),
        index_dim=index_dim,
        n_blocks=count(file, ".attention.indexer.top_k", high=_MOST),
    )
    n_by_token = count(file, ".hash_layer_count", 0, low=0, high=MAX_LAYERS)
    by_token = [i < min(n_by_token, sizes.n_layer) for i in range(n)]
    mixtures = read_mixtures(file, by_token, sizes.n_vocab)
    blocks = [
        BlockParts((replace(attention, ratio=ratio),), mixture, ffn_norm="ffn_norm.weight")
        for ratio, mixture in zip(ratios, mixtures, strict=True)
    ]
    theta = real(file, ".attention.compress_rope_freq_base", rope.freq_base)
    if theta <= 1.0:
        raise file.wrong(".attention.compress_rope_freq_base", f"{theta} is not above 1")
    return model_config(
        file,
        sizes,
        blocks=tuple(blocks),
        mtp=MtpParts(blocks[sizes.n_layer]) if sizes.has_mtp else None,
        # only compressed rows have a stretched context
        rope=replace(rope, scaling="none", factor=1.0),
        block_rope=replace(rope, freq_base=theta, keeps_magnitude=True),
        trunk=read_sinkhorn(file, has_head=True),
    )


def read_window_attention(
    file: GgufFile, n_blocks: int, n_embd: int
) -> tuple[CompressedAttentionPart, RopeConfig]:
    """The attention of a layer without blocks of tokens, and the file's rotation."""
    key = ".attention"
    n_head, n_head_kv, head_dim = heads(file, n_embd, n_blocks, range(n_blocks))
    if n_head_kv != 1:
        what = f"{n_head_kv} key-value heads, where all heads share one row"
        raise file.wrong(f"{key}.head_count_kv", what)
    n_groups = count(file, f"{key}.output_group_count", high=n_head)
    if n_head % n_groups:
        what = f"{n_head} heads do not make {n_groups} groups"
        raise file.wrong(f"{key}.output_group_count", what)
    rope = RopeConfig.from_gguf(file, head_dim)
    part = CompressedAttentionPart(
        n_head,
        head_dim,
        rope.n_rot,
        q_rank=count(file, f"{key}.q_lora_rank"),
        n_groups=n_groups,
        output_rank=count(file, f"{key}.output_lora_rank"),
        window=count(file, f"{key}.sliding_window", high=_MOST),
    )
    return part, rope


def deepseek4_notes(config: ModelConfig) -> list[str]:
    parts = [
        mixer
        for block in config.all_blocks
        for mixer in block.mixers
        if isinstance(mixer, CompressedAttentionPart)
    ]
    part, notes = parts[0], []
    if not any(one.has_indexer for one in parts):
        notes.append("without a layer of ratio 4 every context aborts")
    if part.index_dim % 64:
        length = f"an indexer key length of {part.index_dim}"
        notes.append(f"{length}, which 64 does not divide, aborts every context")
    notes.append("removals beyond the last ubatch are accepted, and wrong for some lengths")
    if config.mtp is not None and part.head_dim == part.index_dim:
        notes.append(
            "0c1e57098 crashes with the MTP block, as heads and indexer keys are of one length"
        )
    return notes


def _ratios(file: GgufFile, n_blocks: int, n_layer: int) -> list[int]:
    """Tokens per block in each layer, 0 without compression."""
    key = file.full(".attention.compress_ratios")
    values = file.ints(key)
    if len(values) < n_blocks:
        raise file.wrong(key, f"{len(values)} numbers for {n_blocks} blocks")
    ratios = [int(value) for value in values[:n_blocks]]
    if other := next((ratio for ratio in ratios if ratio and ratio not in RINGS), None):
        raise UnsupportedModelError(
            f"{file.path.name}: {key} has the ratio {other}, and blocks are of "
            f"{' or '.join(map(str, RINGS))} tokens, here and in llama.cpp.",
            "Open a model with these ratios, and 0 for layers without blocks.",
        )
    if any(ratios[n_layer:]):
        raise UnsupportedModelError(
            f"{file.path.name}: {key} has a ratio for the MTP block, which keeps no blocks of "
            "tokens (llama.cpp aborts).",
            "Convert the model again, with 0 for that block.",
        )
    return ratios


def read_mixtures(file: GgufFile, by_token: list[bool], n_vocab: int) -> list[MixturePart]:
    """The experts of each block. by_token: whether the token id chooses them, of n_vocab."""
    arch, n_blocks = file.architecture, len(by_token)
    key = file.full(".expert_gating_func")
    if (number := count(file, key, low=0)) != _SOFTPLUS:
        raise UnsupportedModelError(
            f"{file.path.name}: {key} is {number}, a router that {arch} does not have.",
            f"Open a model whose experts are weighed by the root of softplus ({_SOFTPLUS}).",
        )
    normalised = file.bool_(".expert_weights_norm", False)
    mixture = read_mixture(file, n_blocks, normalised=normalised, scores=_SOFTPLUS)
    routed = read_clamps(file, ".swiglu_clamp_exp", n_blocks, before=True)
    if routed is None:
        raise file.wrong(".swiglu_clamp_exp", "the key is missing")
    shared = read_clamps(file, ".swiglu_clamp_shexp", n_blocks, before=True) or routed
    by_choice = mixture.router
    assert by_choice is not None
    of_token = replace(by_choice, biased=False, by_token=n_vocab)
    return [
        replace(
            mixture,
            router=of_token if by_token[i] else by_choice,
            gating=routed[i],
            shared_gating=shared[i],
        )
        for i in range(n_blocks)
    ]
