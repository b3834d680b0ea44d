"""Qwen3.5 and qwen4exp models that are written with random weights: shapes, metadata."""

from __future__ import annotations

from gguf import GGUFValueType, GGUFWriter

from engine.model.config import ModelConfig
from engine.model.parts import BlockParts, MtpParts
from engine.model.parts.attention import AttentionPart, SparseAttentionPart
from engine.model.parts.feed_forward import MixturePart, SwigluPart
from engine.model.parts.ngram_embedding import NgramEmbeddingPart
from engine.model.parts.recurrent import DeltaNetPart
from engine.model.parts.trunks import HyperConnections
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


_QWEN4EXP_INTERVAL, _QWEN4EXP_N_CTX, _N_GRAM, _RATIO = 4, 4096, 3, 32
_FACTORS = 6_364_136_223_847, 1_442_695_040_889, 3_935_559_000_371
"""Odd, below 2^43: products with a token stay below 2^63."""


def _qwen4exp_config(
    n_layer: int,
    n_embd: int,
    n_vocab: int,
    heads: tuple[int, int, int],
    sections: tuple[int, int, int, int],
    ssm: tuple[int, int, int],
    mixture: MixturePart,
    rank: int,
    hashes: tuple[int, int],
) -> ModelConfig:
    """heads, ssm: as in random_qwen. hashes: n-gram rows of a token, and how many each can be."""
    n_heads, n_rows = hashes
    ngrams = NgramEmbeddingPart(
        n_gram=_N_GRAM,
        d_conv=4,
        multipliers=_FACTORS,
        sizes=(n_rows - 1,) * n_heads,
        offsets=tuple(n_rows * i for i in range(n_heads)),
        end_id=n_vocab - 1,
        n_streams=4,
        n_embd=n_embd,
        n_rows=n_heads * n_rows,
    )
    attention = SparseAttentionPart(
        *heads, gated=True, n_index_head=4, index_dim=heads[2] // 2, ratio=_RATIO, n_blocks=16
    )
    delta_net = DeltaNetPart(4, *ssm, sigmoid_gate=True)
    return ModelConfig(
        architecture="qwen4exp",
        name="",
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_ctx_train=_QWEN4EXP_N_CTX,
        eps=1e-6,
        blocks=tuple(
            BlockParts(
                (delta_net if (i + 1) % _QWEN4EXP_INTERVAL else attention,),
                mixture,
                None,
                None,
                before=ngrams if i == 1 else None,
            )
            for i in range(n_layer)
        ),
        rope=RopeConfig(heads[2] // 4, 1e7, sections, n_ctx_orig=_QWEN4EXP_N_CTX),
        output_norm=None,
        trunk=HyperConnections(4, rank, ngrams),
    )


QWEN4EXP_SIZES = {
    "moe-1b": _qwen4exp_config(
        16,
        1024,
        151_936,
        (8, 2, 256),
        (11, 11, 10, 0),
        (128, 16, 16),
        MixturePart(32, 8, 512, 512),
        rank=128,
        hashes=(16, 20_000),
    ),
    "tiny": _qwen4exp_config(
        4,
        256,
        512,
        (4, 2, 64),
        (3, 3, 2, 0),
        (32, 8, 8),
        MixturePart(8, 2, 256, 256),
        rank=32,
        hashes=(4, 100),
    ),
}
"""Shapes by the name of their size."""


def add_qwen4exp_keys(writer: GGUFWriter, config: ModelConfig) -> None:
    """What a file says of its sizes."""
    add_qwen_keys(writer, config)
    trunk, arch = config.trunk, config.architecture
    assert isinstance(trunk, HyperConnections)
    ngrams = trunk.ngrams
    assert ngrams is not None
    mixers = [mixer for block in config.blocks for mixer in block.mixers]
    attention = next(part for part in mixers if isinstance(part, SparseAttentionPart))
    layer = next(i for i, block in enumerate(config.blocks) if block.before)
    ratios = [part.ratio if isinstance(part, SparseAttentionPart) else 0 for part in mixers]
    numbers = {
        "hyper_connection.count": trunk.n_streams,
        "hyper_connection.low_rank": trunk.rank,
        "attention.indexer.head_count": attention.n_index_head,
        "attention.indexer.key_length": attention.index_dim,
        "attention.indexer.top_k": attention.ratio * attention.n_blocks,
        "embedding_length_per_layer_input": ngrams.table_shape()[1],
        "ple.ngram_size": ngrams.n_gram,
        "ple.heads_per_ngram": len(ngrams.sizes) // (ngrams.n_gram - 1),
        "ple.conv_kernel": ngrams.d_conv,
        "ple.eos_token_id": ngrams.end_id,
    }
    for key, number in numbers.items():
        writer.add_uint32(f"{arch}.{key}", number)
    arrays = {
        "attention.compress_ratios": (ratios, GGUFValueType.INT32),
        "ple.layers": ([layer], GGUFValueType.INT32),
        "ple.layer_multipliers": (list(ngrams.multipliers), GGUFValueType.UINT64),
        "ple.head_offsets": (list(ngrams.offsets), GGUFValueType.UINT64),
        "ple.head_vocab_sizes": (list(ngrams.sizes), GGUFValueType.UINT64),
    }
    for key, (values, kind) in arrays.items():
        writer.add_key_value(f"{arch}.{key}", values, GGUFValueType.ARRAY, kind)
