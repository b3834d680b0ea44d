"""The Qwen families: qwen35, qwen35moe, qwen3next with Gated DeltaNet and gated attention; qwen3
with attention alone; qwen4exp with Gated DeltaNet and block-sparse attention, joined by
hyper-connections, with n-gram embeddings before one layer."""

from __future__ import annotations

import math

import numpy as np

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.file import GgufFile
from engine.model.config import ModelConfig
from engine.model.families.common import (
    CommonSizes,
    common_sizes,
    has_block,
    has_fork_mtp,
    heads,
    is_mtp_file,
    model_config,
)
from engine.model.limits import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_TAPS,
    MAX_WIDTH,
    REMEDY,
    count,
    each,
    uniform,
)
from engine.model.parts import BlockParts, FeedForwardPart, MtpParts
from engine.model.parts.attention import AttentionPart, SparseAttentionPart
from engine.model.parts.feed_forward import DensePart, MixturePart
from engine.model.parts.recurrent import TABLE, DeltaNetPart, NgramEmbeddingPart
from engine.model.parts.trunks import HyperConnections
from engine.model.rope import RopeConfig


def read_qwen3(file: GgufFile) -> ModelConfig:
    """Qwen3, without recurrent layers."""
    sizes = common_sizes(file)
    n = sizes.n_blocks
    attention = AttentionPart(*heads(file, sizes.n_embd, n, range(n)), gated=False)
    ffn = DensePart(uniform(file, "qwen3.feed_forward_length", n, range(n)))
    return model_config(
        file,
        sizes,
        blocks=(BlockParts((attention,), ffn, ffn_norm="ffn_norm.weight"),) * n,
        rope=RopeConfig.from_gguf(file, attention.head_dim),
    )


def read_hybrid(file: GgufFile, *, mixture: bool, legacy: bool = False) -> ModelConfig:
    """Qwen3.5 and 3.6, dense or with a mixture of experts; legacy: Qwen3-Next, whose gates are one
    tensor."""
    sizes = common_sizes(file, runs_mtp=True)
    recurrent = recurrent_schedule(file, sizes.n_blocks)
    attending = [i for i, flag in enumerate(recurrent) if not flag]
    n_head, n_head_kv, head_dim = heads(file, sizes.n_embd, sizes.n_blocks, attending)
    attention = AttentionPart(n_head, n_head_kv, head_dim, gated=True)
    delta_net = None
    if any(recurrent[: sizes.n_layer]):
        delta_net = read_delta_net(file, legacy=legacy)
    ffn: FeedForwardPart
    if mixture:
        ffn = read_mixture(file)
    else:
        blocks = range(sizes.n_blocks)
        ffn = DensePart(uniform(file, ".feed_forward_length", sizes.n_blocks, blocks))
    return model_config(
        file,
        sizes,
        blocks=tuple(
            BlockParts((delta_net if flag and delta_net else attention,), ffn)
            for flag in recurrent[: sizes.n_layer]
        ),
        mtp=MtpParts(BlockParts((attention,), ffn)) if sizes.has_mtp else None,
        rope=RopeConfig.from_gguf(file, head_dim),
    )


def recurrent_schedule(file: GgufFile, blocks: int) -> list[bool]:
    """Whether each block is recurrent. An explicit array overrides the interval; MTP blocks
    attend."""
    key = ".attention.recurrent_layers"
    if (values := file.get(key)) is not None:
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "biu":
            raise file.wrong(key, "not an array of flags")
        if len(values) != blocks:
            raise file.wrong(key, f"{len(values)} entries for {blocks} blocks")
        return [bool(value) for value in values]
    interval = count(file, ".full_attention_interval", 4)
    return [(index + 1) % interval != 0 for index in range(blocks)]


def read_delta_net(file: GgufFile, *, legacy: bool, sigmoid_gate: bool = False) -> DeltaNetPart:
    """The `ssm` keys of a Gated DeltaNet. legacy: in Qwen3-Next's layout."""
    part = DeltaNetPart(
        d_conv=count(file, ".ssm.conv_kernel", low=2, high=MAX_TAPS),
        d_state=count(file, ".ssm.state_size", high=MAX_HEAD_DIM),
        n_k_heads=count(file, ".ssm.group_count", high=MAX_HEADS),
        n_v_heads=count(file, ".ssm.time_step_rank", high=MAX_HEADS),
        grouped=legacy,
        joint_gates=legacy,
        sigmoid_gate=sigmoid_gate,
    )
    if part.n_v_heads % part.n_k_heads:
        what = f"{part.n_v_heads} value heads are no multiple of {part.n_k_heads} key heads"
        raise file.wrong(".ssm.time_step_rank", what)
    inner = count(file, ".ssm.inner_size")
    if inner != part.value_dim:
        what = f"{inner} is not {part.n_v_heads} value heads of {part.d_state}"
        raise file.wrong(".ssm.inner_size", what)
    return part


def read_mixture(file: GgufFile) -> MixturePart:
    """The `expert` keys of a mixture with one shared expert."""
    n_experts = count(file, ".expert_count", high=MAX_HEADS)
    return MixturePart(
        n_experts=n_experts,
        n_used=count(file, ".expert_used_count", high=n_experts),
        n_ff=count(file, ".expert_feed_forward_length"),
        n_ff_shared=count(file, ".expert_shared_feed_forward_length"),
    )


_MOST_STREAMS = 64
_MOST_NGRAM = 8
_MOST_HASHES = 64
_MOST_TOKENS = 1 << 24
"""Token ids below this are exact in float32, the type of states."""


def read_qwen4exp(file: GgufFile) -> ModelConfig:
    """Qwen3.8-Flash-Next."""
    sizes = common_sizes(file, runs_mtp=True)
    if has_fork_mtp(file) and not has_block(file, 0):
        raise UnsupportedModelError(
            f"{file.path.name}: its MTP block has the names of a fork (nextn.fc_hidden …).",
            "Use a file that llama.cpp b11549 or later reads: its block has nextn.eh_proj.",
        )
    n = sizes.n_blocks
    recurrent = recurrent_schedule(file, n)
    if recurrent[sizes.n_layer :] and "qwen4exp.attention.recurrent_layers" not in file.metadata:
        recurrent[sizes.n_layer :] = [False] * sizes.n_mtp
    attending = [i for i, flag in enumerate(recurrent) if not flag]
    n_head, n_head_kv, head_dim = heads(file, sizes.n_embd, n, attending)
    rope = RopeConfig.from_gguf(file, head_dim)
    index_dim = count(file, ".attention.indexer.key_length", high=MAX_HEAD_DIM)
    if index_dim < max(rope.n_rot, sum(rope.sections or ())):
        what = f"{index_dim} numbers are fewer than rope turns"
        raise file.wrong(".attention.indexer.key_length", what)
    n_index_head = count(file, ".attention.indexer.head_count", high=MAX_HEADS)
    budget = count(file, ".attention.indexer.top_k", high=(1 << 31) - 1)
    ratios = each(file, ".attention.compress_ratios", n, 0)
    delta_net = read_delta_net(file, legacy=False, sigmoid_gate=True) if any(recurrent) else None
    n_streams = count(file, ".hyper_connection.count", low=2, high=_MOST_STREAMS)
    rank = count(file, ".hyper_connection.low_rank")
    if sizes.has_mtp and recurrent[sizes.n_layer]:
        what = f"block {sizes.n_layer}, the MTP block, does not attend"
        raise file.wrong(".attention.recurrent_layers", what)
    # the n-gram table is the trunk's and not in an MTP file
    layer, ngrams = (-1, None) if is_mtp_file(file) else _ngrams(file, sizes, recurrent, n_streams)
    mixture = read_mixture(file)
    blocks = []
    for i, ratio in enumerate(ratios):
        attention = SparseAttentionPart(
            n_head,
            n_head_kv,
            head_dim,
            gated=True,
            n_index_head=n_index_head,
            index_dim=index_dim,
            ratio=ratio,
            n_blocks=budget // ratio if ratio else 0,
        )
        mixer = delta_net if recurrent[i] and delta_net else attention
        before = ngrams if i == layer else None
        blocks.append(BlockParts((mixer,), mixture, None, None, before=before))
    return model_config(
        file,
        sizes,
        blocks=tuple(blocks),
        mtp=MtpParts(blocks[sizes.n_layer]) if sizes.has_mtp else None,
        rope=rope,
        output_norm=None,
        trunk=HyperConnections(n_streams, rank, ngrams),
    )


def qwen4exp_notes(config: ModelConfig) -> list[str]:
    if config.mtp is None:
        return []
    notes = ["0c1e57098 does not load the MTP block, b11549 drafts with it"]
    mixers = (mixer for block in config.all_blocks for mixer in block.mixers)
    if len({mixer.ratio for mixer in mixers if isinstance(mixer, SparseAttentionPart)}) > 1:
        notes.append("compress_ratios differ between layers, at which b11549 aborts")
    return notes


def _ngrams(
    file: GgufFile, sizes: CommonSizes, recurrent: list[bool], n_streams: int
) -> tuple[int, NgramEmbeddingPart | None]:
    """The `ple` keys: the layer after the n-gram embedding, and its sizes."""
    key = file.full(".ple")
    layers = file.ints(f"{key}.layers", [])
    if not layers:
        return -1, None
    if len(layers) > 1:
        raise UnsupportedModelError(
            f"{file.path.name}: {key}.layers names {len(layers)} layers with n-gram embeddings.",
            "Open a model with one such layer, or without any.",
        )
    layer = layers[0]
    if not 0 <= layer < len(recurrent) or not recurrent[layer]:
        raise file.wrong(f"{key}.layers", f"{layer} is not a recurrent layer")
    if sizes.n_vocab >= _MOST_TOKENS:
        what = f"{sizes.n_vocab} tokens, of which an n-gram hash takes {_MOST_TOKENS - 1} at most"
        raise ModelFileError(file.path, "tensor token_embd.weight", what, REMEDY)
    n_gram = count(file, f"{key}.ngram_size", low=2, high=_MOST_NGRAM)
    per_order = count(file, f"{key}.heads_per_ngram", high=_MOST_HASHES // (n_gram - 1))
    n_heads = (n_gram - 1) * per_order
    width = count(file, ".embedding_length_per_layer_input")
    if width * n_heads != sizes.n_embd:
        what = f"{n_heads} rows of {width} are no embedding of {sizes.n_embd}"
        raise file.wrong(".embedding_length_per_layer_input", what)
    part = NgramEmbeddingPart(
        n_gram=n_gram,
        d_conv=count(file, f"{key}.conv_kernel", low=2, high=MAX_TAPS // n_gram),
        multipliers=_whole(file, f"{key}.layer_multipliers", n_gram, 0, (1 << 64) - 1),
        sizes=_whole(file, f"{key}.head_vocab_sizes", n_heads, 1, (1 << 31) - 1),
        offsets=_whole(file, f"{key}.head_offsets", n_heads, 0, (1 << 31) - 1),
        end_id=count(file, f"{key}.eos_token_id", low=0, high=sizes.n_vocab - 1),
        n_streams=n_streams,
        n_embd=sizes.n_embd,
        n_rows=_table_rows(file),
    )
    reach = max(map(sum, zip(part.sizes, part.offsets, strict=True)))
    if reach > part.n_rows:
        what = f"{part.n_rows} rows are fewer than the {reach} that n-grams are hashed to"
        raise ModelFileError(file.path, f"tensor {TABLE}", what, REMEDY)
    if part.n_taps > MAX_TAPS or part.n_channels > MAX_WIDTH:
        what = f"a convolution of {part.n_taps} taps over {part.n_channels} channels is too large"
        raise file.wrong(f"{key}.conv_kernel", what)
    return layer, part


def _whole(file: GgufFile, key: str, n: int, low: int, high: int) -> tuple[int, ...]:
    """The first n numbers of an array, within low..high."""
    values = file.ints(key)
    if len(values) < n:
        raise file.wrong(key, f"{len(values)} numbers, where {n} are needed")
    outside = [value for value in values[:n] if not low <= value <= high]
    if outside:
        raise file.wrong(key, f"{outside[0]} is outside {low}..{high}")
    return tuple(values[:n])


def _table_rows(file: GgufFile) -> int:
    info = file.tensors.get(TABLE)
    if info is None:
        raise ModelFileError(file.path, f"tensor {TABLE}", "the tensor is missing", REMEDY)
    return math.prod(info.shape[:-1])
