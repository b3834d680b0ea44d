"""qwen4exp models that are written with random weights: shapes, metadata."""

from __future__ import annotations

from gguf import GGUFValueType, GGUFWriter

from engine.experiments.random_models.random_qwen import add_qwen_keys
from engine.model.config import ModelConfig
from engine.model.parts import BlockParts
from engine.model.parts.attention import SparseAttentionPart
from engine.model.parts.feed_forward import MixturePart
from engine.model.parts.ngram_embedding import NgramEmbeddingPart
from engine.model.parts.recurrent import DeltaNetPart
from engine.model.parts.trunks import HyperConnections
from engine.model.rope import RopeConfig

_INTERVAL, _N_CTX, _N_GRAM, _RATIO = 4, 4096, 3, 32
_FACTORS = 6_364_136_223_847, 1_442_695_040_889, 3_935_559_000_371
"""Odd, below 2^43: products with a token stay below 2^63."""


def _config(
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
        n_ctx_train=_N_CTX,
        eps=1e-6,
        blocks=tuple(
            BlockParts(
                (delta_net if (i + 1) % _INTERVAL else attention,),
                mixture,
                None,
                None,
                before=ngrams if i == 1 else None,
            )
            for i in range(n_layer)
        ),
        rope=RopeConfig(heads[2] // 4, 1e7, sections, n_ctx_orig=_N_CTX),
        output_norm=None,
        trunk=HyperConnections(4, rank, ngrams),
    )


QWEN4EXP_SIZES = {
    "moe-1b": _config(
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
    "tiny": _config(
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
