"""deepseek4 models that are written with random weights: shapes, metadata."""

from __future__ import annotations

from dataclasses import replace

from gguf import GGUFWriter

from engine.model.config import ModelConfig
from engine.model.parts import BlockParts, MtpParts
from engine.model.parts.attention import CompressedAttentionPart
from engine.model.parts.feed_forward import ClampPart, MixturePart, RouterPart
from engine.model.parts.trunks import SinkhornConnections
from engine.model.rope import RopeConfig

_N_CTX, _SCALE, _N_BY_TOKEN = 4096, 1.5, 1
_CLAMP = ClampPart(7.0, before=True)


def _config(
    n_layer: int,
    n_embd: int,
    n_vocab: int,
    attention: CompressedAttentionPart,
    experts: tuple[int, int, int],
) -> ModelConfig:
    """experts: how many, used, their width. Blocks of tokens in all but the first layer, of 4 and
    of 128 by turns."""
    n, used, width = experts
    router = RouterPart("softplus", scale=_SCALE)
    mixture = MixturePart(n, used, width, width, False, router, gating=_CLAMP, shared_gating=_CLAMP)
    by_token = replace(mixture, router=replace(router, biased=False, by_token=n_vocab))

    def block(index: int) -> BlockParts:
        ratio = (4 if index % 2 else 128) if index else 0
        ffn = by_token if index < _N_BY_TOKEN else mixture
        return BlockParts((replace(attention, ratio=ratio),), ffn, ffn_norm="ffn_norm.weight")

    rope = RopeConfig(attention.n_rot, 1e4, n_ctx_orig=_N_CTX)
    return ModelConfig(
        architecture="deepseek4",
        name="",
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_ctx_train=_N_CTX,
        eps=1e-6,
        blocks=tuple(map(block, range(n_layer))),
        mtp=MtpParts(BlockParts((attention,), mixture, ffn_norm="ffn_norm.weight")),
        rope=rope,
        block_rope=replace(rope, freq_base=4e4, keeps_magnitude=True),
        trunk=SinkhornConnections(20, 1e-6, has_head=True),
    )


DEEPSEEK4_SIZES = {
    "0.6b": _config(
        14,
        1024,
        65_536,
        CompressedAttentionPart(
            8, 128, 64, 512, 4, 256, 128, n_index_head=8, index_dim=64, n_blocks=64
        ),
        (16, 4, 512),
    ),
    "tiny": _config(
        4,
        256,
        512,
        CompressedAttentionPart(4, 32, 16, 64, 2, 64, 16, n_index_head=4, index_dim=64, n_blocks=4),
        (8, 2, 64),
    ),
}
"""Shapes by the name of their size."""


def add_deepseek4_keys(writer: GGUFWriter, config: ModelConfig) -> None:
    """What a file says of its sizes."""
    arch = config.architecture
    add_stream_keys(writer, config)
    part = config.blocks[-1].mixers[0]
    assert isinstance(part, CompressedAttentionPart)
    assert config.block_rope is not None
    writer.add_vocab_size(config.n_vocab)
    writer.add_nextn_predict_layers(config.n_mtp)
    for name, number in {
        "attention.indexer.head_count": part.n_index_head,
        "attention.indexer.key_length": part.index_dim,
        "attention.indexer.top_k": part.n_blocks,
        "hash_layer_count": _N_BY_TOKEN,
        "embedding_length_out": SinkhornConnections.n_streams * config.n_embd,
    }.items():
        writer.add_uint32(f"{arch}.{name}", number)
    theta = config.block_rope.freq_base
    writer.add_float32(f"{arch}.attention.compress_rope_freq_base", theta)


def add_stream_keys(writer: GGUFWriter, config: ModelConfig) -> None:
    """The sizes of layers on four streams, of a model or of a drafter for one."""
    arch, trunk = config.architecture, config.trunk
    assert config.rope is not None
    assert isinstance(trunk, SinkhornConnections)
    last = config.all_blocks[-1]
    (part,), mixture = last.mixers, last.ffn
    assert isinstance(part, CompressedAttentionPart)
    assert isinstance(mixture, MixturePart)
    mixers = (mixer for block in config.all_blocks for mixer in block.mixers)
    ratios = [mixer.ratio for mixer in mixers if isinstance(mixer, CompressedAttentionPart)]
    writer.add_block_count(len(ratios))
    writer.add_context_length(config.n_ctx_train)
    writer.add_embedding_length(config.n_embd)
    writer.add_head_count(part.n_head)
    writer.add_head_count_kv(1)
    writer.add_key_length(part.head_dim)
    writer.add_value_length(part.head_dim)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_freq_base(config.rope.freq_base)
    writer.add_rope_dimension_count(part.n_rot)
    writer.add_q_lora_rank(part.q_rank)
    writer.add_sliding_window(part.window)
    writer.add_array(f"{arch}.attention.compress_ratios", ratios)
    writer.add_expert_count(mixture.n_experts)
    writer.add_expert_used_count(mixture.n_used)
    writer.add_expert_feed_forward_length(mixture.n_ff)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(_SCALE)
    writer.add_expert_weights_norm(True)
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        writer.add_array(f"{arch}.{name}", [_CLAMP.limit] * len(ratios))
    for name, number in {
        "attention.output_group_count": part.n_groups,
        "attention.output_lora_rank": part.output_rank,
        "hyper_connection.count": trunk.n_streams,
        "hyper_connection.sinkhorn_iterations": trunk.n_rounds,
        "expert_gating_func": 4,
    }.items():
        writer.add_uint32(f"{arch}.{name}", number)
    writer.add_float32(f"{arch}.hyper_connection.epsilon", trunk.eps)
