"""Families of random models: metadata by architecture and size.

Sizes with Mamba or convolutions follow released models: Nemotron-H, Granite 4 (350M), Falcon-H1
(0.5B), LFM2 (700M).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.experiments.random_models.random_file import (
    Keys,
    RandomFile,
    experts,
    heads,
    ints,
    model_file,
    sizes,
    ssm,
    streams,
)
from engine.model.parts.recurrent import TABLE

# one layer in this many uses attention, the others are recurrent
_INTERVAL = 4
_FACTORS = 6_364_136_223_847, 1_442_695_040_889, 3_935_559_000_371
"""Factors of n-gram hashes: odd, below 2^43, so that products with a token stay below 2^63."""
_EPS = 2.0**-17  # exact in f32
Heads = tuple[int, int, int]
"""Attention heads, key-value heads, head dimension."""
Blocks = tuple[str, int, int, Heads]
"""A letter per block, * for attention; embedding width, vocabulary, and attention heads."""


def _qwen35(
    n_layer: int,
    n_embd: int,
    ffn: Keys,
    n_vocab: int,
    attention: Heads,
    sections: Sequence[int],
    delta_net: tuple[int, int, int],
    n_mtp: int = 1,
) -> RandomFile:
    """delta_net: d_state, key heads, value heads."""
    n_head, n_head_kv, width = attention
    d_state, n_k, n_v = delta_net
    recurrent = [(i + 1) % _INTERVAL > 0 for i in range(n_layer)] + [False] * n_mtp
    keys = {
        **sizes(n_layer + n_mtp, n_embd),
        **ffn,
        **heads(n_head, n_head_kv, width, width // 4, 1e7),
        "rope.dimension_sections": ints(sections),
        "nextn_predict_layers": n_mtp,
        **ssm(4, n_v * d_state, d_state, n_v, n_k),
        "full_attention_interval": _INTERVAL,
        "attention.recurrent_layers": np.array(recurrent),
    }
    return model_file("qwen35moe" if "expert_count" in ffn else "qwen35", n_vocab, keys)


def _qwen4exp(like: RandomFile, rank: int, n_hashes: int, n_rows: int) -> RandomFile:
    """like: a qwen35 file without MTP. n_hashes: n-gram rows per token, each one of n_rows."""
    n_vocab, n_embd = like.shapes["token_embd.weight"]
    attends = ~like.keys["attention.recurrent_layers"]
    keys = {
        **like.keys,
        "hyper_connection.count": 4,
        "hyper_connection.low_rank": rank,
        "attention.indexer.head_count": 4,
        "attention.indexer.key_length": like.keys["attention.key_length"] // 2,
        "attention.indexer.top_k": 512,
        "attention.compress_ratios": ints(attends * 32),
        "embedding_length_per_layer_input": n_embd // n_hashes,
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": n_hashes // 2,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": n_vocab - 1,
        "ple.layers": ints([1]),
        "ple.layer_multipliers": np.array(_FACTORS, np.uint64),
        "ple.head_offsets": np.arange(n_hashes, dtype=np.uint64) * np.uint64(n_rows),
        "ple.head_vocab_sizes": np.full(n_hashes, n_rows - 1, np.uint64),
    }
    table = {TABLE: (n_hashes * n_rows, n_embd // n_hashes)}
    return RandomFile("qwen4exp", keys, like.shapes | table)


def _kda(
    arch: str,
    n_layer: int,
    n_embd: int,
    n_vocab: int,
    attention: tuple[int, int],
    latent: tuple[int, int, int, int],
    widths: tuple[int, int],
    mixture: tuple[int, int, int],
    n_pools: int,
) -> RandomFile:
    """attention: heads, their dimension. latent: n_latent, n_nope, n_rope, v_dim. widths: dense,
    expert. mixture: experts, used ones, groups. n_pools: pools of four tokens that a query sees."""
    n_head, head_dim = attention
    n_latent, n_nope, n_rope, v_dim = latent
    n_rope = 0 if arch == "glm5-next" else n_rope
    n_mtp = int(arch in ("bailingmoe3", "glm5-next"))
    n_blocks = n_layer + n_mtp
    n_kv = [int((i + 1) % _INTERVAL == 0 or i == n_layer) for i in range(n_blocks)]
    theta = 6e6 if arch == "bailingmoe3" else 1e4
    keys = {
        **sizes(n_blocks, n_embd),
        "feed_forward_length": widths[0],
        **heads(n_head, n_kv, n_latent + n_rope, n_rope, theta, n_latent),
        "attention.key_length_mla": n_nope + n_rope,
        "attention.value_length_mla": v_dim,
        "attention.kv_lora_rank": n_latent,
        "ssm.conv_kernel": 4,
        "kda.head_dim": head_dim,
        **experts(*mixture[:2], widths[1]),
        "expert_shared_count": 1,
        "leading_dense_block_count": 1,
        "expert_weights_scale": 2.5,
        "expert_gating_func": 2,
    }
    if arch != "kimi-linear":
        keys |= {"kda.gate_lower_bound": -5.0, "expert_weights_norm": True}
    if n_mtp:
        keys["nextn_predict_layers"] = n_mtp
    also: list[str] = []
    if arch == "bailingmoe3":
        keys |= {
            "kda.safe_gate": True,
            "expert_group_count": mixture[2],
            "expert_group_used_count": mixture[2] // 2,
            "expert_shared_feed_forward_length": widths[1],
        }
    elif arch == "kimi-k3":
        also = ["blk.0.attn_gate.weight", "blk.1.ffn_routed_norm.weight"]
        keys |= {
            "attn_res.block_size": _INTERVAL,
            "activation.situ_beta": 4.0,
            "activation.situ_linear_beta": 25.0,
            "expert_latent_length": n_embd // 2,
        }
    elif arch == "glm5-next":
        keys |= {
            "attention.q_lora_rank": 4 * n_nope,
            "vocab_size": n_vocab,
            "attention.layer_norm_epsilon": 1e-6,
            "attention.indexer.head_count": 8,
            "attention.indexer.key_length": n_latent // 4,
            "attention.indexer.top_k": 4 * n_pools,
            "attention.indexer.kpool": 4,
            **streams(n_blocks),
        }
    return model_file(arch, n_vocab, keys, tied=arch == "bailingmoe3", also=also)


def _deepseek4(
    n_layer: int,
    n_embd: int,
    n_vocab: int,
    attention: Heads,
    ranks: tuple[int, int, int],
    window: int,
    mixture: tuple[int, int, int],
    n_indexed: int,
) -> RandomFile:
    """Layers after the first compress blocks of tokens, alternately 4 and 128. attention: heads,
    their dimension, rotated dimensions. ranks: of queries, of the output, and number of output
    groups. mixture: experts, used ones, their width. n_indexed: blocks that a query sees."""
    n_head, width, n_rot = attention
    ratios = [0, *(4 if i % 2 else 128 for i in range(1, n_layer)), 0]
    keys = {
        **sizes(len(ratios), n_embd),
        **heads(n_head, 1, width, n_rot),
        "attention.q_lora_rank": ranks[0],
        "attention.output_lora_rank": ranks[1],
        "attention.output_group_count": ranks[2],
        "attention.sliding_window": window,
        "attention.compress_ratios": ints(ratios),
        "attention.compress_rope_freq_base": 4e4,
        "attention.indexer.head_count": n_head,
        "attention.indexer.key_length": 64,
        "attention.indexer.top_k": n_indexed,
        **experts(*mixture),
        "expert_shared_count": 1,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "hash_layer_count": 1,
        **streams(len(ratios)),
        "vocab_size": n_vocab,
        "nextn_predict_layers": 1,
        "embedding_length_out": 4 * n_embd,
    }
    return model_file("deepseek4", n_vocab, keys, tied=False)


def _mamba2(n_heads: int, head_dim: int, d_state: int, n_groups: int) -> Keys:
    return ssm(4, n_heads * head_dim, d_state, n_heads, n_groups)


def _alone(arch: str, n_layer: int, n_embd: int, n_vocab: int, mamba: Keys) -> RandomFile:
    """Mamba blocks only."""
    return model_file(arch, n_vocab, sizes(n_layer, n_embd, _EPS) | mamba)


def _mixed(
    arch: str, blocks: Blocks, widths: int | Sequence[int], own: Keys, also: Sequence[str] = ()
) -> RandomFile:
    """widths: of feed-forward parts, one or per block. own: further keys. also: tensor names."""
    pattern, n_embd, n_vocab, (n_head, n_head_kv, width) = blocks
    n_kv = [n_head_kv * (kind == "*") for kind in pattern]
    keys = {
        **sizes(len(pattern), n_embd, _EPS),
        "feed_forward_length": widths if isinstance(widths, int) else ints(widths),
        **heads(n_head, n_kv, width, width),
        **own,
    }
    return model_file(arch, n_vocab, keys, also=also)


def _nemotron(blocks: Blocks, width: int, mamba: Keys) -> RandomFile:
    """M for Mamba-2, * for attention, - for the feed-forward part."""
    widths = [width * (kind == "-") for kind in blocks[0]]
    return _mixed("nemotron_h", blocks, widths, mamba | {"attention.layer_norm_epsilon": _EPS})


def _nemotron_moe(
    blocks: Blocks, mixture: tuple[int, int, int], shared: int, mamba: Keys
) -> RandomFile:
    """The same with experts and an MTP block. mixture: experts, used ones, their width."""
    pattern, used = blocks[0], mixture[1] * mixture[2]
    own = {
        **mamba,
        "attention.layer_norm_epsilon": _EPS,
        **experts(*mixture),
        "expert_shared_feed_forward_length": shared,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "nextn_predict_layers": 1,
    }
    widths = [*(used * (kind == "-") for kind in pattern), used]
    return _mixed("nemotron_h_moe", (f"{pattern}*", *blocks[1:]), widths, own)


def _jamba(blocks: Blocks, width: int, n: int, mamba: Keys) -> RandomFile:
    """n: experts in every other block; two of them are used."""
    routed = [f"blk.{i}.ffn_gate_inp.weight" for i in range(1, len(blocks[0]), 2)]
    return _mixed("jamba", blocks, width, mamba | experts(n, 2, width), routed)


def _each(arch: str, blocks: Blocks, width: int, own: Keys) -> RandomFile:
    """Every block has a feed-forward part of this width."""
    also = ("blk.0.ssm_norm.weight",) if arch == "falcon-h1" else ()
    return _mixed(arch, blocks, [width] * len(blocks[0]), own, also)


def _lfm2moe(blocks: Blocks, width: int, mixture: tuple[int, int, int]) -> RandomFile:
    """Experts after the first block. The width of such a block is that of the experts used for a
    token."""
    widths = [width, *[mixture[1] * mixture[2]] * (len(blocks[0]) - 1)]
    own = {**_CONV, **experts(*mixture), "leading_dense_block_count": 1, "expert_gating_func": 2}
    return _mixed("lfm2moe", blocks, widths, own)


_CONV: Keys = {"shortconv.l_cache": 3}
_GRANITE: Keys = {"rope.scaling.finetuned": False}
_N_VOCAB, _SECTIONS = 151_936, (11, 11, 10, 0)
_LARGE = _N_VOCAB, (8, 2, 256), _SECTIONS, (128, 16, 16)
_TINY = 512, (4, 2, 64), (3, 3, 2, 0), (32, 8, 8)
_TINY_HEADS = 4, 2, 64


def _shared(n: int, n_used: int, width: int) -> Keys:
    """With one shared expert, as wide as the others but at most 512."""
    return experts(n, n_used, width) | {"expert_shared_feed_forward_length": min(width, 512)}


_MOE_1B = _shared(32, 8, 512)
_MOE_TINY = _shared(8, 2, 256)
# bailingmoe3: of 0.69 billion parameters, 0.34 are active per token
_LING = {
    "0.7b": (16, 1024, _N_VOCAB, (8, 128), (512, 128, 64, 128), (3072, 512), (16, 4, 4), 512),
    "tiny": (4, 256, 512, (4, 64), (64, 32, 32, 64), (256, 256), (8, 2, 4), 8),
}
RANDOM_FAMILIES: Mapping[str, Mapping[str, RandomFile]] = {
    "qwen35": {
        "0.65b": _qwen35(24, 1024, {"feed_forward_length": 3584}, *_LARGE),
        "4b": _qwen35(
            32,
            2560,
            {"feed_forward_length": 9216},
            _N_VOCAB,
            (16, 4, 256),
            _SECTIONS,
            (128, 16, 32),
        ),
        "moe-1b": _qwen35(16, 1024, _MOE_1B, *_LARGE),
        # 8.4 billion parameters, of which 1.0 are active per token in addition to the output head
        "moe-8b-a1b": _qwen35(24, 2048, _shared(64, 4, 768), *_LARGE),
        "tiny": _qwen35(4, 256, {"feed_forward_length": 256}, *_TINY),
        "moe-tiny": _qwen35(4, 256, _MOE_TINY, *_TINY),
    },
    "qwen4exp": {
        "moe-1b": _qwen4exp(_qwen35(16, 1024, _MOE_1B, *_LARGE, 0), 128, 16, 20_000),
        "tiny": _qwen4exp(_qwen35(4, 256, _MOE_TINY, *_TINY, 0), 32, 4, 100),
    },
    **{
        arch: {name: _kda(arch, *size) for name, size in _LING.items()}
        for arch in ("bailingmoe3", "kimi-linear", "kimi-k3", "glm5-next")
    },
    "deepseek4": {
        "0.6b": _deepseek4(14, 1024, 65_536, (8, 128, 64), (512, 256, 4), 128, (16, 4, 512), 64),
        "tiny": _deepseek4(4, 256, 512, (4, 32, 16), (64, 64, 2), 16, (8, 2, 64), 4),
    },
    "nemotron_h": {
        "0.6b": _nemotron(
            ("M-M-M-M-M*-M-" * 4, 1024, 131_072, (8, 2, 128)), 4608, _mamba2(32, 64, 128, 8)
        ),
        "tiny": _nemotron(("M-M*M-", 256, 512, _TINY_HEADS), 512, _mamba2(8, 64, 32, 2)),
    },
    "nemotron_h_moe": {
        "0.8b": _nemotron_moe(
            ("M-M-M*-" * 4, 1024, 131_072, (8, 2, 128)), (32, 4, 512), 1024, _mamba2(32, 64, 128, 8)
        ),
        "tiny": _nemotron_moe(
            ("M-M*-", 256, 512, _TINY_HEADS), (8, 2, 256), 256, _mamba2(8, 64, 32, 2)
        ),
    },
    "granitehybrid": {
        "0.3b": _each(
            "granitehybrid",
            ("MMM*MMMM" * 4, 768, 100_352, (12, 4, 64)),
            2048,
            _mamba2(48, 32, 128, 1) | _GRANITE,
        ),
        "tiny": _each(
            "granitehybrid", ("MMM*M", 256, 512, _TINY_HEADS), 256, _mamba2(8, 64, 32, 1) | _GRANITE
        ),
    },
    "mamba": {
        "0.4b": _alone("mamba", 48, 1024, 50_280, ssm(4, 2048, 16, 64)),
        "tiny": _alone("mamba", 3, 256, 512, ssm(4, 512, 16, 32)),
    },
    "jamba": {
        "0.8b": _jamba(("MMMM*MMM", 1024, 65_536, (8, 2, 128)), 3584, 16, ssm(4, 2048, 16, 64)),
        "tiny": _jamba(("MMMM*M", 256, 512, _TINY_HEADS), 256, 8, ssm(4, 512, 16, 32)),
    },
    # its number of groups is not in the file
    "plamo2": {
        "0.6b": _each(
            "plamo2", ("M*" * 8, 1024, 100_000, (16, 4, 64)), 4096, _mamba2(32, 64, 64, 0)
        ),
        "tiny": _each("plamo2", ("M*" * 2, 256, 512, _TINY_HEADS), 256, _mamba2(8, 64, 64, 0)),
    },
    "mamba2": {
        "0.4b": _alone("mamba2", 48, 1024, 50_288, _mamba2(32, 64, 128, 1)),
        "tiny": _alone("mamba2", 3, 256, 512, _mamba2(8, 64, 32, 2)),
    },
    "falcon-h1": {
        "0.5b": _each(
            "falcon-h1", ("*" * 36, 1024, 32_784, (8, 2, 64)), 2048, _mamba2(24, 64, 128, 1)
        ),
        "tiny": _each("falcon-h1", ("***", 256, 512, _TINY_HEADS), 256, _mamba2(8, 32, 32, 1)),
    },
    "lfm2": {
        "0.7b": _each("lfm2", ("CC*CC*CC*C*C*C*C", 1536, 65_536, (24, 8, 64)), 6912, _CONV),
        "tiny": _each("lfm2", ("CC*C*", 256, 512, _TINY_HEADS), 256, _CONV),
    },
    "lfm2moe": {
        "0.9b": _lfm2moe(("CC*CC*CC*C*C*C*C", 1024, 65_536, (16, 8, 64)), 4096, (32, 4, 512)),
        "tiny": _lfm2moe(("CC*C", 256, 512, _TINY_HEADS), 256, (8, 2, 256)),
    },
}
"""By architecture and name of the size, the default first. Sizes of qwen35 with a mixture of
experts have the architecture qwen35moe."""
