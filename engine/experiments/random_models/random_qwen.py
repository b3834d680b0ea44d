"""Qwen3.5 models that are written with random weights: shapes, metadata."""

from __future__ import annotations

from gguf import GGUFValueType, GGUFWriter

from engine.model.config import ModelConfig
from engine.model.parts import BlockParts, MtpParts
from engine.model.parts.attention import AttentionPart
from engine.model.parts.feed_forward import MixturePart, SwigluPart
from engine.model.parts.recurrent import DeltaNetPart
from engine.model.rope import RopeConfig

# every n-th layer has attention; the others are recurrent
_INTERVAL = 4
_N_CTX = 4096


def _config(
    n_layer: int,
    n_embd: int,
    ffn: SwigluPart | MixturePart,
    n_vocab: int,
    heads: tuple[int, int, int],
    sections: tuple[int, int, int, int],
    ssm: tuple[int, int, int],
) -> ModelConfig:
    """heads: attention's, those of keys and values, their dimension. ssm: d_state, key heads,
    value heads."""
    attention = BlockParts((AttentionPart(*heads, gated=True),), ffn)
    delta_net = BlockParts((DeltaNetPart(4, *ssm),), ffn)
    return ModelConfig(
        architecture="qwen35" if isinstance(ffn, SwigluPart) else "qwen35moe",
        name="",
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_ctx_train=_N_CTX,
        eps=1e-6,
        blocks=tuple(delta_net if (i + 1) % _INTERVAL else attention for i in range(n_layer)),
        mtp=MtpParts(attention),
        rope=RopeConfig(heads[2] // 4, 1e7, sections, n_ctx_orig=_N_CTX),
    )


_N_VOCAB = 151_936
_SECTIONS = (11, 11, 10, 0)
_LARGE = _N_VOCAB, (8, 2, 256), _SECTIONS, (128, 16, 16)
_TINY = 512, (4, 2, 64), (3, 3, 2, 0), (32, 8, 8)

CONFIGS = {
    "0.65b": _config(24, 1024, SwigluPart(3584), *_LARGE),
    "4b": _config(32, 2560, SwigluPart(9216), _N_VOCAB, (16, 4, 256), _SECTIONS, (128, 16, 32)),
    "moe-1b": _config(16, 1024, MixturePart(32, 8, 512, 512), *_LARGE),
    # 8.4 billion parameters, of which 1.0 act on a token in addition to the output head
    "moe-8b-a1b": _config(24, 2048, MixturePart(64, 4, 768, 512), *_LARGE),
    "tiny": _config(4, 256, SwigluPart(256), *_TINY),
    "moe-tiny": _config(4, 256, MixturePart(8, 2, 256, 256), *_TINY),
}
"""Shapes by the name of their size; all have an MTP head."""


def add_qwen_keys(writer: GGUFWriter, config: ModelConfig) -> None:
    """What a file says of its sizes."""
    mixers = [mixer for block in config.blocks for mixer in block.mixers]
    attention = next(part for part in mixers if isinstance(part, AttentionPart))
    delta_net = next(part for part in mixers if isinstance(part, DeltaNetPart))
    ffn, rope = config.blocks[0].ffn, config.rope
    assert rope is not None
    assert rope.sections is not None
    writer.add_block_count(len(config.all_blocks))
    writer.add_context_length(config.n_ctx_train)
    writer.add_embedding_length(config.n_embd)
    if isinstance(ffn, SwigluPart):
        writer.add_feed_forward_length(ffn.width)
    elif isinstance(ffn, MixturePart):
        writer.add_expert_count(ffn.n_experts)
        writer.add_expert_used_count(ffn.n_used)
        writer.add_expert_feed_forward_length(ffn.n_ff)
        writer.add_expert_shared_feed_forward_length(ffn.n_ff_shared)
    writer.add_head_count(attention.n_head)
    writer.add_head_count_kv(attention.n_head_kv)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_freq_base(rope.freq_base)
    writer.add_rope_dimension_count(rope.n_rot)
    writer.add_rope_dimension_sections(rope.sections)
    writer.add_nextn_predict_layers(config.n_mtp)
    writer.add_ssm_conv_kernel(delta_net.d_conv)
    writer.add_ssm_state_size(delta_net.d_state)
    writer.add_ssm_group_count(delta_net.n_k_heads)
    writer.add_ssm_time_step_rank(delta_net.n_v_heads)
    writer.add_ssm_inner_size(delta_net.value_dim)
    writer.add_uint32(f"{config.architecture}.full_attention_interval", _INTERVAL)
    recurrent = [*config.recurrent_layers, *[False] * config.n_mtp]
    writer.add_key_value(
        f"{config.architecture}.attention.recurrent_layers",
        recurrent,
        GGUFValueType.ARRAY,
        GGUFValueType.BOOL,
    )
