"""Models with Mamba or short convolutions that are written with random weights: shapes, metadata.

Sizes follow released models: Nemotron-H, Granite 4 (350M), Falcon-H1 (0.5B), LFM2 (700M).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from gguf import GGUFWriter

from engine.model.config import ModelConfig
from engine.model.parts import BlockParts, FeedForwardPart, MixerPart, MtpParts
from engine.model.parts.attention import AttentionPart
from engine.model.parts.feed_forward import MixturePart, Relu2Part, RouterPart, SwigluPart
from engine.model.parts.recurrent import LowRankMamba2Part, Mamba2Part, MambaPart, ShortConvPart
from engine.model.rope import RopeConfig

# numbers that f32 holds exactly
_N_CTX, _EPS, _SCALE = 4096, 2.0**-17, 2.5
PartT = TypeVar("PartT")


def _config(
    arch: str,
    n_embd: int,
    n_vocab: int,
    blocks: Sequence[BlockParts],
    *,
    n_rot: int = 0,
    mtp: MtpParts | None = None,
    output_norm: str = "output_norm.weight",
) -> ModelConfig:
    return ModelConfig(
        architecture=arch,
        name="",
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_ctx_train=_N_CTX,
        eps=_EPS,
        blocks=tuple(blocks),
        mtp=mtp,
        rope=RopeConfig(n_rot, 10000.0, n_ctx_orig=_N_CTX) if n_rot else None,
        output_norm=output_norm,
    )


def _nemotron(
    pattern: str,
    n_embd: int,
    n_vocab: int,
    mamba: Mamba2Part,
    heads: tuple[int, int, int],
    ffn: Relu2Part | MixturePart,
) -> ModelConfig:
    """pattern: of each block, M for Mamba-2, * for attention, - for the feed-forward part."""
    attention = AttentionPart(*heads, gated=False, normed=False, rope="none", output_bias=True)
    kinds = {
        "M": BlockParts((mamba,), None),
        "*": BlockParts((attention,), None),
        "-": BlockParts((), ffn, ffn_norm="attn_norm.weight"),
    }
    mixture = isinstance(ffn, MixturePart)
    head = MtpParts(BlockParts((attention,), ffn), centred_eps=_EPS) if mixture else None
    arch = "nemotron_h_moe" if mixture else "nemotron_h"
    return _config(arch, n_embd, n_vocab, [kinds[kind] for kind in pattern], mtp=head)


def _alone(n_layer: int, n_embd: int, n_vocab: int, mamba: Mamba2Part) -> ModelConfig:
    return _config("mamba2", n_embd, n_vocab, [BlockParts((mamba,), None)] * n_layer)


def _mamba(n_layer: int, n_embd: int, n_vocab: int, mamba: MambaPart) -> ModelConfig:
    return _config("mamba", n_embd, n_vocab, [BlockParts((mamba,), None)] * n_layer)


def _jamba(
    n_layer: int,
    n_embd: int,
    n_vocab: int,
    mamba: MambaPart,
    heads: tuple[int, int, int],
    width: int,
    mixture: MixturePart | None,
) -> ModelConfig:
    """Attention in the fifth of every eight blocks, experts in every other one."""
    attention = AttentionPart(*heads, gated=False, normed=False, rope="none")
    blocks = []
    for i in range(n_layer):
        mixer: MixerPart = attention if i % 8 == 4 else mamba
        ffn: FeedForwardPart = mixture if mixture and i % 2 else SwigluPart(width)
        blocks.append(BlockParts((mixer,), ffn, ffn_norm="ffn_norm.weight"))
    return _config("jamba", n_embd, n_vocab, blocks)


def _plamo2(
    n_layer: int, n_embd: int, n_vocab: int, n_heads: int, heads: tuple[int, int, int], width: int
) -> ModelConfig:
    """Attention in every other block. n_heads: of Mamba-2."""
    attention = AttentionPart(*heads, gated=False, own_norms=True)
    mamba = LowRankMamba2Part(4, 64, n_heads, 64, 1, normed=False, step_rank=max(64, n_embd // 16))
    blocks = [
        BlockParts(
            (attention if i % 2 else mamba,),
            SwigluPart(width, joint=True),
            ffn_norm="ffn_norm.weight",
            added_norms=("post_attention_norm", "post_ffw_norm"),
        )
        for i in range(n_layer)
    ]
    return _config("plamo2", n_embd, n_vocab, blocks, n_rot=heads[2])


def _granite(
    n_layer: int,
    n_embd: int,
    n_vocab: int,
    mamba: Mamba2Part,
    heads: tuple[int, int, int],
    width: int,
) -> ModelConfig:
    """Attention in every eighth block, in the fourth of them."""
    attention = AttentionPart(*heads, gated=False, normed=False, rope="none", output_bias=True)
    kinds = [
        BlockParts((part,), SwigluPart(width), ffn_norm="ffn_norm.weight")
        for part in (mamba, attention)
    ]
    blocks = [kinds[i % 8 == 3] for i in range(n_layer)]
    return _config("granitehybrid", n_embd, n_vocab, blocks)


def _falcon(
    n_layer: int,
    n_embd: int,
    n_vocab: int,
    mamba: Mamba2Part,
    heads: tuple[int, int, int],
    width: int,
) -> ModelConfig:
    attention = AttentionPart(*heads, gated=False, normed=False, output_bias=True)
    block = BlockParts((attention, mamba), SwigluPart(width), ffn_norm="ffn_norm")
    return _config("falcon-h1", n_embd, n_vocab, [block] * n_layer, n_rot=heads[2])


def _lfm2(
    pattern: str,
    n_embd: int,
    n_vocab: int,
    heads: tuple[int, int],
    width: int,
    mixture: MixturePart | None = None,
) -> ModelConfig:
    """pattern: of each block, C for a convolution, * for attention. mixture: after the first."""
    head_dim = n_embd // heads[0]
    mixers: dict[str, MixerPart] = {
        "C": ShortConvPart(3, n_embd),
        "*": AttentionPart(*heads, head_dim, gated=False),
    }
    dense: FeedForwardPart = SwigluPart(width)
    blocks = [
        BlockParts((mixers[kind],), mixture if mixture and i else dense, ffn_norm="ffn_norm.weight")
        for i, kind in enumerate(pattern)
    ]
    arch, norm = "lfm2moe" if mixture else "lfm2", "token_embd_norm.weight"
    return _config(arch, n_embd, n_vocab, blocks, n_rot=head_dim, output_norm=norm)


def _of_jamba(n: int, used: int, width: int) -> MixturePart:
    router = RouterPart("softmax", biased=False, normalised=False)
    return MixturePart(n, used, width, 0, shared_gate=False, router=router)


def _mixture(n: int, used: int, width: int, shared: int = 0) -> MixturePart:
    router = RouterPart(scale=_SCALE) if shared else RouterPart()
    kind = "relu2" if shared else "swiglu"
    return MixturePart(n, used, width, shared, shared_gate=False, router=router, activation=kind)


_TINY = Mamba2Part(4, 32, 8, 64, 2)
_TINY_HEADS = 4, 2, 64
MAMBA_SIZES = {
    "nemotron_h": {
        "0.6b": _nemotron(
            "M-M-M-M-M*-M-" * 4,
            1024,
            131_072,
            Mamba2Part(4, 128, 32, 64, 8),
            (8, 2, 128),
            Relu2Part(4608),
        ),
        "tiny": _nemotron("M-M*M-", 256, 512, _TINY, _TINY_HEADS, Relu2Part(512)),
    },
    "nemotron_h_moe": {
        "0.8b": _nemotron(
            "M-M-M*-" * 4,
            1024,
            131_072,
            Mamba2Part(4, 128, 32, 64, 8),
            (8, 2, 128),
            _mixture(32, 4, 512, 1024),
        ),
        "tiny": _nemotron("M-M*-", 256, 512, _TINY, _TINY_HEADS, _mixture(8, 2, 256, 256)),
    },
    "granitehybrid": {
        "0.3b": _granite(32, 768, 100_352, Mamba2Part(4, 128, 48, 32, 1), (12, 4, 64), 2048),
        "tiny": _granite(5, 256, 512, Mamba2Part(4, 32, 8, 64, 1), _TINY_HEADS, 256),
    },
    "mamba": {
        "0.4b": _mamba(48, 1024, 50_280, MambaPart(4, 16, 2048, 64)),
        "tiny": _mamba(3, 256, 512, MambaPart(4, 16, 512, 32)),
    },
    "jamba": {
        "0.8b": _jamba(
            8,
            1024,
            65_536,
            MambaPart(4, 16, 2048, 64, normed=True),
            (8, 2, 128),
            3584,
            _of_jamba(16, 2, 3584),
        ),
        "tiny": _jamba(
            6,
            256,
            512,
            MambaPart(4, 16, 512, 32, normed=True),
            _TINY_HEADS,
            256,
            _of_jamba(8, 2, 256),
        ),
    },
    "plamo2": {
        "0.6b": _plamo2(16, 1024, 100_000, 32, (16, 4, 64), 4096),
        "tiny": _plamo2(4, 256, 512, 8, _TINY_HEADS, 256),
    },
    "mamba2": {
        "0.4b": _alone(48, 1024, 50_288, Mamba2Part(4, 128, 32, 64, 1)),
        "tiny": _alone(3, 256, 512, Mamba2Part(4, 32, 8, 64, 2)),
    },
    "falcon-h1": {
        "0.5b": _falcon(36, 1024, 32_784, Mamba2Part(4, 128, 24, 64, 1), (8, 2, 64), 2048),
        "tiny": _falcon(3, 256, 512, Mamba2Part(4, 32, 8, 32, 1), _TINY_HEADS, 256),
    },
    "lfm2": {
        "0.7b": _lfm2("CC*CC*CC*C*C*C*C", 1536, 65_536, (24, 8), 6912),
        "tiny": _lfm2("CC*C*", 256, 512, (4, 2), 256),
    },
    "lfm2moe": {
        "0.9b": _lfm2("CC*CC*CC*C*C*C*C", 1024, 65_536, (16, 8), 4096, _mixture(32, 4, 512)),
        "tiny": _lfm2("CC*C", 256, 512, (4, 2), 256, _mixture(8, 2, 256)),
    },
}
"""Shapes by architecture and the name of their size."""


def add_mamba_keys(writer: GGUFWriter, config: ModelConfig) -> None:
    """What a file says of its sizes."""
    arch, blocks = config.architecture, config.all_blocks
    writer.add_block_count(len(blocks))
    writer.add_context_length(config.n_ctx_train)
    writer.add_embedding_length(config.n_embd)
    writer.add_layer_norm_rms_eps(config.eps)
    if config.cells():
        attention = _first(config, AttentionPart)
        widths = [_width(block) for block in blocks]
        # jamba's dense parts and experts are of one width
        writer.add_feed_forward_length(widths[0] if arch == "jamba" else widths)
        writer.add_head_count(attention.n_head)
        writer.add_head_count_kv([attention.n_head_kv if block.cells() else 0 for block in blocks])
        writer.add_key_length(attention.head_dim)
        writer.add_value_length(attention.head_dim)
        writer.add_rope_freq_base(10000.0)
        writer.add_rope_dimension_count(attention.head_dim)
    if arch.startswith("nemotron"):
        writer.add_layer_norm_eps(config.eps)
    if arch == "granitehybrid":
        writer.add_bool(f"{arch}.rope.scaling.finetuned", False)
    if arch.startswith("lfm2"):
        writer.add_shortconv_l_cache(_first(config, ShortConvPart).d_conv)
    elif arch in ("mamba", "jamba"):
        part = _first(config, MambaPart)
        writer.add_ssm_conv_kernel(part.d_conv)
        writer.add_ssm_inner_size(part.d_inner)
        writer.add_ssm_state_size(part.d_state)
        writer.add_ssm_time_step_rank(part.step_rank)
    else:
        _add_ssm_keys(writer, _first(config, Mamba2Part))
    mixtures = [block.ffn for block in blocks if isinstance(block.ffn, MixturePart)]
    if mixtures:
        _add_expert_keys(writer, arch, mixtures[0])
    if config.mtp:
        writer.add_nextn_predict_layers(config.n_mtp)


def _add_ssm_keys(writer: GGUFWriter, mamba: Mamba2Part) -> None:
    writer.add_ssm_conv_kernel(mamba.d_conv)
    writer.add_ssm_inner_size(mamba.d_inner)
    writer.add_ssm_state_size(mamba.d_state)
    writer.add_ssm_time_step_rank(mamba.n_heads)
    # 0 where the groups are not the file's to say
    is_low_rank = isinstance(mamba, LowRankMamba2Part)
    writer.add_ssm_group_count(0 if is_low_rank else mamba.n_groups)


def _add_expert_keys(writer: GGUFWriter, arch: str, mixture: MixturePart) -> None:
    writer.add_expert_count(mixture.n_experts)
    writer.add_expert_used_count(mixture.n_used)
    writer.add_expert_feed_forward_length(mixture.n_ff)
    if arch == "jamba":
        return
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(1)
        writer.add_uint32(f"{arch}.expert_gating_func", 2)
        return
    assert mixture.router is not None
    writer.add_expert_shared_feed_forward_length(mixture.n_ff_shared)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_norm(mixture.router.normalised)
    writer.add_expert_weights_scale(mixture.router.scale)


def _first(config: ModelConfig, kind: type[PartT]) -> PartT:
    return next(
        mixer for block in config.blocks for mixer in block.mixers if isinstance(mixer, kind)
    )


def _width(block: BlockParts) -> int:
    """A mixture counts what it uses for one token."""
    if isinstance(block.ffn, MixturePart):
        return block.ffn.n_ff * block.ffn.n_used
    return block.ffn.width if isinstance(block.ffn, SwigluPart | Relu2Part) else 0
