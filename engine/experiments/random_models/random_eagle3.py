"""An EAGLE-3 drafter that is written with random weights: shapes, metadata.

Shapes follow published ones: early, middle and late layers of the target read, one block.
"""

from __future__ import annotations

from gguf import GGUFValueType, GGUFWriter

from engine.model.config import ModelConfig
from engine.model.drafters.eagle3_config import ARCHITECTURE, Eagle3Config
from engine.model.parts import Shapes
from engine.model.parts.attention import AttentionPart
from engine.model.rope import RopeConfig

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
    taps = f"{ARCHITECTURE}.target_layers"
    writer.add_key_value(taps, list(config.taps), GGUFValueType.ARRAY, GGUFValueType.INT32)
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", config.n_target)
