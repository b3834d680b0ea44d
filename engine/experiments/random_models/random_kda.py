"""Models with Kimi Delta Attention that are written with random weights: shapes, metadata."""

from __future__ import annotations

from dataclasses import replace

from gguf import GGUFWriter

from engine.model.config import ModelConfig
from engine.model.parts import BlockParts, FeedForwardPart, MtpParts
from engine.model.parts.attention import (
    LatentAttentionPart,
    PooledIndexer,
    SparseLatentAttentionPart,
)
from engine.model.parts.feed_forward import (
    ClampPart,
    LatentPart,
    MixturePart,
    RouterPart,
    SituPart,
    SwigluPart,
)
from engine.model.parts.recurrent import KdaPart
from engine.model.parts.trunks import CrossLayerResidual, SinkhornConnections
from engine.model.rope import RopeConfig

_INTERVAL, _N_CTX, _BOUND, _SCALE = 4, 4096, -5.0, 2.5
_LOW_RANK = "ssm_f_a.weight", "ssm_f_b.weight"


def _blocks(
    n_layer: int, kda: KdaPart, attention: LatentAttentionPart, ffn: tuple[FeedForwardPart, ...]
) -> tuple[BlockParts, ...]:
    """ffn: of the first block, of the others. Attention in every fourth block."""

    def block(index: int) -> BlockParts:
        mixer = kda if (index + 1) % _INTERVAL else attention
        return BlockParts((mixer,), ffn[min(index, 1)], ffn_norm="ffn_norm.weight")

    return tuple(block(index) for index in range(n_layer))


def _bailingmoe3(
    n_layer: int,
    n_embd: int,
    n_vocab: int,
    heads: tuple[int, int],
    latent: tuple[int, int, int, int],
    widths: tuple[int, int],
    experts: tuple[int, int, int],
) -> ModelConfig:
    """heads: how many, their dimension. latent: n_latent, n_nope, n_rope, v_dim. widths: dense,
    expert. experts: how many, used, groups."""
    kda = KdaPart(
        *heads, 4, ("ssm_f_a.weight",), ("ssm_g_a.weight",), positive_a=True, bound=_BOUND
    )
    attention = LatentAttentionPart(heads[0], *latent, pairs="neighbours", gate="heads")
    n, used, groups = experts
    router = RouterPart(scale=_SCALE, n_groups=groups, n_groups_used=groups // 2)
    mixture = MixturePart(n, used, widths[1], widths[1], shared_gate=False, router=router)
    blocks = _blocks(n_layer, kda, attention, (SwigluPart(widths[0]), mixture))
    head = BlockParts((attention,), mixture, ffn_norm="ffn_norm.weight")
    return ModelConfig(
        architecture="bailingmoe3",
        name="",
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_ctx_train=_N_CTX,
        eps=1e-6,
        blocks=blocks,
        mtp=MtpParts(head, "layer_output_norm.weight"),
        rope=RopeConfig(latent[2], 6e6, n_ctx_orig=_N_CTX),
    )


def _kimi_linear(like: ModelConfig) -> ModelConfig:
    """Of the sizes of a bailingmoe3 model."""
    kda, attention, dense, mixture = _parts(like)
    kda = replace(
        kda,
        decay=_LOW_RANK,
        gate=("ssm_g_a.weight", "ssm_g_b.weight"),
        positive_a=False,
        bound=None,
    )
    attention = replace(attention, pairs=None, gate=None)
    mixture = replace(mixture, router=RouterPart(scale=_SCALE))
    blocks = _blocks(like.n_layer, kda, attention, (dense, mixture))
    return replace(like, architecture="kimi-linear", blocks=blocks, mtp=None, rope=None)


def _kimi_k3(like: ModelConfig) -> ModelConfig:
    """Of the sizes of a bailingmoe3 model."""
    kda, attention, dense, mixture = _parts(_kimi_linear(like))
    situ = SituPart(4.0, 25.0)
    names = ("ffn_routed_down.weight", "ffn_routed_up.weight", "ffn_routed_norm.weight")
    mixture = replace(
        mixture, latent=LatentPart(like.n_embd // 2, *names), gating=situ, shared_gating=situ
    )
    blocks = _blocks(
        like.n_layer,
        replace(kda, gate=("ssm_g.weight",), flat_a=True, bound=_BOUND),
        replace(attention, gate="numbers"),
        (replace(dense, gating=situ), mixture),
    )
    return replace(
        like,
        architecture="kimi-k3",
        blocks=blocks,
        mtp=None,
        rope=None,
        trunk=CrossLayerResidual(_INTERVAL),
    )


def _glm5_next(like: ModelConfig, n_pools: int) -> ModelConfig:
    """Of the sizes of a bailingmoe3 model. n_pools: of four tokens, that a query sees."""
    kda, attention, dense, mixture = _parts(_kimi_linear(like))
    kda = replace(kda, flat_a=True, bound=_BOUND, l2_eps=1e-6)
    n_latent, n_nope = attention.n_latent, attention.n_nope
    indexer = PooledIndexer(8, n_latent // 4, 4, n_pools, 1e-6)
    sparse = SparseLatentAttentionPart(
        attention.n_head, n_latent, n_nope, 0, attention.v_dim, 4 * n_nope, indexer=indexer
    )
    clamp = ClampPart(7.0, before=True)
    dense = replace(dense, gating=clamp)
    mixture = replace(mixture, gating=clamp, shared_gating=clamp)
    head = BlockParts((sparse,), mixture, ffn_norm="ffn_norm.weight")
    return replace(
        like,
        architecture="glm5-next",
        blocks=_blocks(like.n_layer, kda, sparse, (dense, mixture)),
        mtp=MtpParts(head),
        rope=None,
        trunk=SinkhornConnections(20, 1e-6),
    )


def _parts(config: ModelConfig) -> tuple[KdaPart, LatentAttentionPart, SwigluPart, MixturePart]:
    kda, attention = (config.blocks[i].mixers[0] for i in (0, _INTERVAL - 1))
    dense, mixture = (config.blocks[i].ffn for i in (0, 1))
    assert isinstance(kda, KdaPart)
    assert isinstance(attention, LatentAttentionPart)
    assert isinstance(dense, SwigluPart)
    assert isinstance(mixture, MixturePart)
    return kda, attention, dense, mixture


_LING = {
    # of 0.69 billion parameters 0.34 act on a token
    "0.7b": _bailingmoe3(16, 1024, 151_936, (8, 128), (512, 128, 64, 128), (3072, 512), (16, 4, 4)),
    "tiny": _bailingmoe3(4, 256, 512, (4, 64), (64, 32, 32, 64), (256, 256), (8, 2, 4)),
}
KDA_SIZES = {
    "bailingmoe3": _LING,
    "kimi-linear": {name: _kimi_linear(like) for name, like in _LING.items()},
    "kimi-k3": {name: _kimi_k3(like) for name, like in _LING.items()},
    "glm5-next": {
        name: _glm5_next(like, 512 if name == "0.7b" else 8) for name, like in _LING.items()
    },
}
"""Shapes by architecture and the name of their size."""


def add_kda_keys(writer: GGUFWriter, config: ModelConfig) -> None:
    """What a file says of its sizes."""
    arch = config.architecture
    kda, attention, dense, mixture = _parts(config)
    router, latent = mixture.router, attention.n_latent + attention.n_rope
    assert router is not None
    writer.add_block_count(len(config.all_blocks))
    writer.add_context_length(config.n_ctx_train)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(dense.width)
    writer.add_head_count(kda.n_heads)
    writer.add_head_count_kv([int(block.cells() is not None) for block in config.all_blocks])
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_freq_base(config.rope.freq_base if config.rope else 10000.0)
    writer.add_rope_dimension_count(attention.n_rope)
    writer.add_key_length(latent)
    writer.add_value_length(attention.n_latent)
    writer.add_key_length_mla(attention.n_nope + attention.n_rope)
    writer.add_value_length_mla(attention.v_dim)
    writer.add_kv_lora_rank(attention.n_latent)
    writer.add_ssm_conv_kernel(kda.d_conv)
    writer.add_uint32(f"{arch}.kda.head_dim", kda.head_dim)
    if kda.bound is not None:
        writer.add_float32(f"{arch}.kda.gate_lower_bound", kda.bound)
    if kda.positive_a:
        writer.add_bool(f"{arch}.kda.safe_gate", True)
    writer.add_expert_count(mixture.n_experts)
    writer.add_expert_used_count(mixture.n_used)
    writer.add_expert_feed_forward_length(mixture.n_ff)
    writer.add_expert_shared_count(mixture.n_ff_shared // mixture.n_ff)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_weights_scale(router.scale)
    writer.add_uint32(f"{arch}.expert_gating_func", 2)
    if arch != "kimi-linear":
        writer.add_expert_weights_norm(router.normalised)
    if router.n_groups > 1:
        writer.add_uint32(f"{arch}.expert_group_count", router.n_groups)
        writer.add_uint32(f"{arch}.expert_group_used_count", router.n_groups_used)
        writer.add_expert_shared_feed_forward_length(mixture.n_ff_shared)
    if config.mtp is not None:
        writer.add_nextn_predict_layers(config.n_mtp)
    if isinstance(config.trunk, CrossLayerResidual):
        _add_k3_keys(writer, config, mixture)
    if isinstance(config.trunk, SinkhornConnections):
        _add_glm5_keys(writer, config, attention, mixture)


def _add_k3_keys(writer: GGUFWriter, config: ModelConfig, mixture: MixturePart) -> None:
    assert isinstance(config.trunk, CrossLayerResidual)
    assert isinstance(mixture.gating, SituPart)
    assert mixture.latent is not None
    arch = config.architecture
    writer.add_uint32(f"{arch}.attn_res.block_size", config.trunk.group)
    writer.add_float32(f"{arch}.activation.situ_beta", mixture.gating.beta)
    writer.add_float32(f"{arch}.activation.situ_linear_beta", mixture.gating.linear_beta)
    writer.add_uint32(f"{arch}.expert_latent_length", mixture.latent.width)


def _add_glm5_keys(
    writer: GGUFWriter, config: ModelConfig, attention: LatentAttentionPart, mixture: MixturePart
) -> None:
    assert isinstance(config.trunk, SinkhornConnections)
    assert isinstance(attention, SparseLatentAttentionPart)
    assert isinstance(mixture.gating, ClampPart)
    assert attention.q_rank is not None
    arch, indexer, limits = config.architecture, attention.indexer, len(config.all_blocks)
    writer.add_q_lora_rank(attention.q_rank)
    writer.add_vocab_size(config.n_vocab)
    writer.add_layer_norm_eps(indexer.eps)
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        writer.add_array(f"{arch}.{name}", [mixture.gating.limit] * limits)
    for name, number in {
        "attention.indexer.head_count": indexer.n_head,
        "attention.indexer.key_length": indexer.dim,
        "attention.indexer.top_k": indexer.ratio * indexer.n_pools,
        "attention.indexer.kpool": indexer.ratio,
        "hyper_connection.count": config.trunk.n_streams,
        "hyper_connection.sinkhorn_iterations": config.trunk.n_rounds,
    }.items():
        writer.add_uint32(f"{arch}.{name}", number)
    writer.add_float32(f"{arch}.hyper_connection.epsilon", config.trunk.eps)
