"""Quantisation mixes: the type of each tensor in a file, and random contents.

The rules are those of llama.cpp's quantiser (llama-quant.cpp) for models with a tied embedding and
without an importance matrix. `q4_k` is ours: Q4_K with Q6_K for attention values, the embedding and
every other ffn_down. `mxfp4` is llama.cpp's for mixtures of experts: MXFP4 for routed experts and
Q8_0 otherwise; dense models, which it does not cover, get MXFP4 except for the embedding. `nvfp4`
follows the same rules; only llama.cpp's converter writes it, with a scale for every matrix.

Random weights are generated directly in GGML's storage formats. Block layouts are those of
ggml-common.h. Values are uniform within a block instead of normal, which affects neither speed nor
the scale of a matrix's outputs. Types with asymmetric levels get scales of either sign, or a
minimum that centres them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType, quants

from engine.model.config import ModelConfig
from engine.model.parts.attention import AttentionPart
from engine.model.parts.feed_forward import MixturePart

Quant = GGMLQuantizationType

QUANTS = (
    *("f32", "f16", "bf16", "q8_0", "q4_k", "q4_k_m", "q6_k", "iq4_xs", "q4_0", "q5_k_m", "q3_k_m"),
    *("q2_k", "q4_1", "q5_0", "q5_1", "iq4_nl", "iq3_s", "iq2_xxs", "iq1_s", "tq2_0", "nvfp4"),
    "mxfp4",
)
"""Names of the mixes."""
_BASES = {mix: GGMLQuantizationType[mix.removesuffix("_m").upper()] for mix in QUANTS}
"""The main type of a mix."""
_FILE_TYPES = {"f32": "ALL_F32", "q4_k": "MOSTLY_Q4_K_M", "mxfp4": "MOSTLY_MXFP4_MOE"}
_HALVES = "f16", "bf16"

_GRIDS = Quant.IQ3_S, Quant.IQ2_XXS, Quant.IQ1_S
_SHORTER = {
    Quant.Q2_K: Quant.Q4_0,
    Quant.Q3_K: Quant.Q4_0,
    Quant.Q4_K: Quant.Q5_0,
    Quant.Q5_K: Quant.Q5_1,
    Quant.Q6_K: Quant.Q8_0,
    Quant.IQ4_XS: Quant.IQ4_NL,
    **dict.fromkeys(_GRIDS, Quant.IQ4_NL),
    **{Quant.TQ2_0: Quant.Q4_0, Quant.NVFP4: Quant.Q8_0},
}
"""llama.cpp's fallback types for rows that are not whole blocks of 256."""
_UNROUNDED = ("conv1d", "shortconv.conv", "ffn_gate_inp")
_UNROUNDED_OF = {
    "deepseek4": ("hc_", "_ape."),
    "glm5-next": (
        "hc_",
        "indexer",
        "ssm_f_",
        "ssm_g_",
        "ssm_beta",
        "attn_kv_a_mqa",
        "attn_k_b",
        "attn_v_b",
    ),
}
_NOT_BELOW_Q8_0 = {"glm5-next": ("attn_q_a.", "attn_q_b.", "nextn.eh_proj")}
"""Tensors that llama.cpp's quantiser keeps in full, or in more bits, per architecture."""
_FP4, _BELOW_3_BITS = ("mxfp4", "nvfp4"), ("iq2_xxs", "iq1_s")
_OUTPUT_IN_Q5_K = ("q2_k", "q3_k_m", "q4_k_m", "iq4_nl", "iq4_xs", "iq3_s", *_BELOW_3_BITS)


def file_type(mix: str) -> LlamaFileType:
    """The file type stated in the metadata."""
    return LlamaFileType[_FILE_TYPES.get(mix, f"MOSTLY_{mix.upper()}")]


def is_norm(name: str) -> bool:
    """Whether a tensor is a norm's weight; norms of several groups are matrices."""
    return name.removesuffix(".weight").endswith("norm") or "ple_norm_" in name


def tensor_type(
    name: str, shape: tuple[int, ...], config: ModelConfig, mix: str, *, tied: bool = True
) -> GGMLQuantizationType:
    """Type of a tensor in a mix, one of QUANTS. shape: numpy order. tied: the file has no output
    matrix of its own.

    Vectors, convolutions and routers stay f32. Rows that are not whole blocks get a type with
    shorter blocks.
    """
    if name.endswith("tid2eid.weight"):
        return Quant.I32
    kept = len(shape) == 1 or not name.endswith(".weight") or is_norm(name)
    unrounded = _UNROUNDED + _UNROUNDED_OF.get(config.architecture, ())
    if _BASES[mix] == Quant.F32 or kept or any(word in name for word in unrounded):
        return Quant.F32
    kind = _wanted(name, shape, config, mix, tied)
    if any(word in name for word in _NOT_BELOW_Q8_0.get(config.architecture, ())):
        kind = _BASES[mix] if mix in _HALVES else Quant.Q8_0
    return _SHORTER.get(kind, kind) if shape[-1] % GGML_QUANT_SIZES[kind][0] else kind


def _wanted(
    name: str, shape: tuple[int, ...], config: ModelConfig, mix: str, tied: bool
) -> GGMLQuantizationType:
    base = _BASES[mix]
    if mix in (*_HALVES, "q8_0"):
        return base
    if name == "output.weight" or (name == "token_embd.weight" and tied):
        if mix in _FP4:
            return Quant.Q8_0
        return Quant.Q5_K if mix in _BELOW_3_BITS else Quant.Q6_K
    if mix in _FP4:
        return base if "_exps" in name or not n_experts(config) else Quant.Q8_0
    if not name.startswith("blk."):
        return {"iq2_xxs": Quant.Q2_K, "iq1_s": Quant.Q2_K, "tq2_0": Quant.Q4_K}.get(mix, base)
    block = int(name.split(".")[1])
    if mix == "q4_k":
        halved = "ffn_down" in name and block % 2 == 0
        return Quant.Q6_K if halved or "attn_v" in name else base
    n = n_experts(config)
    if "attn_v.weight" in name or "attn_qkv.weight" in name:
        if n == 8 and mix not in _BELOW_3_BITS:
            return Quant.Q8_0
        return _value_type(mix, block, config) or base
    if "ffn_down" in name:
        return _down_type(mix, block, config) or base
    if n == 8 and "attn_k.weight" in name:
        return Quant.Q4_K if mix in _BELOW_3_BITS else Quant.Q8_0
    if "attn_output" in name:
        if n == 8:
            return Quant.Q5_K if mix in _OUTPUT_IN_Q5_K else base
        more = {"q2_k": Quant.Q3_K, "q3_k_m": Quant.Q4_K, "iq1_s": Quant.IQ2_XXS}
        return more.get(mix, base)
    return base


def n_experts(config: ModelConfig) -> int:
    """Routed experts of the first mixture, 0 without one."""
    mixtures = (block.ffn for block in config.blocks if isinstance(block.ffn, MixturePart))
    return next((mixture.n_experts for mixture in mixtures), 0)


def _value_type(mix: str, block: int, config: ModelConfig) -> GGMLQuantizationType | None:
    """Type of attention values, or of a recurrent layer's values; None for the mix's main type."""
    mixers = (mixer for part in config.blocks for mixer in part.mixers)
    attention = next((mixer for mixer in mixers if isinstance(mixer, AttentionPart)), None)
    shared = attention is not None and attention.n_head // attention.n_head_kv >= 4
    if mix == "q3_k_m":
        return Quant.Q5_K if block < 2 else Quant.Q4_K
    if mix in _BELOW_3_BITS:
        shared = shared or n_experts(config) >= 4
    if mix in _VALUES:
        return _VALUES[mix][not shared]
    return _with_more_bits(mix, block, config)


_VALUES = {
    **dict.fromkeys(("iq4_nl", "iq4_xs"), (Quant.Q5_K, None)),
    **dict.fromkeys(_BELOW_3_BITS, (Quant.Q4_K, Quant.Q2_K)),
    **{"q2_k": (Quant.Q4_K, Quant.Q3_K), "iq3_s": (Quant.Q4_K, None)},
}
"""For models with four or more heads per key head, and for others."""


def _down_type(mix: str, block: int, config: ModelConfig) -> GGMLQuantizationType | None:
    n = config.n_layer + config.n_mtp
    if mix == "q2_k":
        return Quant.Q3_K
    if mix == "q3_k_m":
        return Quant.Q5_K if block < n // 16 else Quant.Q4_K
    if mix in ("iq4_nl", "iq4_xs"):
        return Quant.Q5_K if block < n // 8 else None
    if mix in _BELOW_3_BITS:
        return Quant.Q2_K if block < n // 8 else None
    return _with_more_bits(mix, block, config)


def _with_more_bits(mix: str, block: int, config: ModelConfig) -> GGMLQuantizationType | None:
    """More bits for the first and last eighth of the blocks and every third one between; else
    None."""
    n = config.n_layer + config.n_mtp
    more = block < n // 8 or block >= 7 * n // 8 or (block - n // 8) % 3 == 2
    return Quant.Q6_K if more and mix in ("q4_k_m", "q5_k_m") else None


_SIX_BITS = np.arange(64) - 32


def random_tensor(
    rng: np.random.Generator, shape: tuple[int, ...], std: float, kind: GGMLQuantizationType
) -> np.ndarray:
    """Values of mean 0 and this standard deviation, stored as F32, F16, BF16 or one of BLOCK_TYPES.

    F32, F16: float32, float16 of `shape`. BF16: its upper halves, uint16 of `shape`. Otherwise
    uint8 [..., bytes of a row]; the last dimension of `shape` is a multiple of the block length.
    """
    if kind in (Quant.F32, Quant.F16, Quant.BF16):
        values = rng.standard_normal(shape, dtype=np.float32)
        values *= np.float32(std)
        if kind != Quant.BF16:
            return values.astype(np.float16 if kind == Quant.F16 else np.float32, copy=False)
        # truncated instead of rounded: as random as before
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    length, size = GGML_QUANT_SIZES[kind]
    if shape[-1] % length:
        raise ValueError(f"rows of {shape[-1]} are not whole {kind.name} blocks of {length}")
    n_blocks = math.prod(shape) // length
    blocks = rng.integers(0, 256, (n_blocks, size), dtype=np.uint8)
    _FILL[kind](rng, blocks, std)
    return blocks.reshape(*shape[:-1], -1)


def _fill_signed(
    rng: np.random.Generator, blocks: np.ndarray, std: float, *, kind: Quant, at: int = 0
) -> None:
    """A half scale of either sign at a byte; the other bits are random, and their RMS is
    measured."""
    blocks[:, at : at + 2] = _half(1.0)
    levels = quants.dequantize(blocks[:1024], kind)
    blocks[:, at : at + 2] = _signed(rng, blocks, std / _rms(levels))


def _fill_centred(
    _rng: np.random.Generator, blocks: np.ndarray, std: float, *, centre: float
) -> None:
    """A half scale d and a half minimum m, then quants q from 0 to twice the centre: d q + m."""
    _centred(blocks, std / _rms(np.arange(2 * centre + 1) - centre), -centre)


def _fill_q8_0(rng: np.random.Generator, blocks: np.ndarray, std: float) -> None:
    # half scale, 32 signed bytes: -128..127 is asymmetric, so -128 becomes 0
    quants = blocks[:, 2:].view(np.int8)
    quants[quants == -128] = 0
    blocks[:, :2] = _half(std / math.sqrt(127 * 128 / 3))


def _fill_fp4(
    rng: np.random.Generator, blocks: np.ndarray, std: float, *, scales: np.ndarray, n: int
) -> None:
    """n leading bytes that select a scale, then nibbles that select levels. Two neighbouring scales
    are mixed to match the mean square."""
    scale = std / _rms(np.array(quants.NVFP4.kvalues))
    low = int(np.searchsorted(scales, scale, "right")) - 1
    first, second = np.square(scales[low : low + 2])
    share = (scale**2 - first) / (second - first)
    blocks[:, :n] = low + (rng.random((len(blocks), n)) < share)


def _fill_q2_k(rng: np.random.Generator, blocks: np.ndarray, std: float) -> None:
    # 16 bytes of 4-bit scale and 4-bit minimum, 256 quants of 2 bits, half scale d, half scale m:
    # d scale q - m minimum. Equal scale and minimum with m = 1.5 d centre the quants.
    scales = rng.integers(8, 16, (len(blocks), 16), dtype=np.uint8)
    blocks[:, :16] = scales | scales << 4
    d = std / (_rms(np.arange(8, 16)) * _rms(np.arange(4) - 1.5))
    _centred(blocks[:, 80:], d, 1.5)


def _fill_q4_k(
    rng: np.random.Generator, blocks: np.ndarray, std: float, *, n_levels: int = 16
) -> None:
    # half scale d, half scale m, 8 sub-blocks of 6-bit scale and 6-bit minimum, 256 nibbles q, of
    # Q5_K with a fifth bit: d scale q - m minimum. Equal scale and minimum with m = 7.5 d centre
    # the nibbles.
    centre = (n_levels - 1) / 2
    d = std / (_equal_scales(rng, blocks) * _rms(np.arange(n_levels) - centre))
    _centred(blocks, d, centre)


def _fill_q6_k(rng: np.random.Generator, blocks: np.ndarray, std: float) -> None:
    # 256 quants of 6 bits in 192 bytes, 16 signed byte scales, half scale d: d scale (q - 32);
    # scales of either sign make up for quants that are off centre
    scales = rng.integers(16, 32, (len(blocks), 16), dtype=np.int8)
    scales *= 2 * rng.integers(0, 2, scales.shape, dtype=np.int8) - 1
    blocks[:, 192:208] = scales.view(np.uint8)
    blocks[:, 208:] = _half(std / (_rms(np.arange(16, 32)) * _rms(_SIX_BITS)))


_SIGNED = (Quant.Q4_0, Quant.Q5_0, Quant.IQ4_NL, Quant.IQ4_XS, *_GRIDS)
_FILL: dict[GGMLQuantizationType, Callable[[np.random.Generator, np.ndarray, float], None]] = {
    **{kind: partial(_fill_signed, kind=kind) for kind in _SIGNED},
    Quant.Q3_K: partial(_fill_signed, kind=Quant.Q3_K, at=108),
    Quant.TQ2_0: partial(_fill_signed, kind=Quant.TQ2_0, at=64),
    Quant.Q4_1: partial(_fill_centred, centre=7.5),
    Quant.Q5_1: partial(_fill_centred, centre=15.5),
    Quant.Q8_0: _fill_q8_0,
    Quant.MXFP4: partial(_fill_fp4, scales=2.0 ** (np.arange(255) - 128), n=1),
    Quant.NVFP4: partial(
        _fill_fp4, scales=quants.NVFP4.ue4m3_to_fp32(np.arange(127, dtype=np.uint8)), n=4
    ),
    Quant.Q2_K: _fill_q2_k,
    Quant.Q4_K: _fill_q4_k,
    Quant.Q5_K: partial(_fill_q4_k, n_levels=32),
    Quant.Q6_K: _fill_q6_k,
}
BLOCK_TYPES = tuple(_FILL)
"""Types in blocks that random_tensor can make."""


def _equal_scales(rng: np.random.Generator, blocks: np.ndarray) -> float:
    """Fill the scales and minimums of Q4_K or Q5_K with equal ones; returns their RMS."""
    scales = rng.integers(32, 64, (len(blocks), 8), dtype=np.uint8)
    low, high = scales[:, :4], scales[:, 4:]
    blocks[:, 4:8] = blocks[:, 8:12] = low | (high >> 4) << 6
    blocks[:, 12:16] = (high & 15) | (high & 15) << 4
    return _rms(np.arange(32, 64))


def _centred(blocks: np.ndarray, scale: float, centre: float) -> None:
    """Store scale and minimum as halves at the start of the blocks; the minimum is `centre`
    scales."""
    blocks[:, :2] = _half(scale)
    blocks[:, 2:4] = _half(centre * scale)


def _signed(rng: np.random.Generator, blocks: np.ndarray, scale: float) -> np.ndarray:
    """The scale as a half, with random sign, for each block: uint8 [blocks, 2]."""
    halves = np.tile(_half(scale), (len(blocks), 1))
    halves[:, 1] |= rng.integers(0, 2, len(blocks), dtype=np.uint8) << 7
    return halves


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values.astype(np.float64)))))


def _half(value: float) -> np.ndarray:
    return np.frombuffer(np.float16(value).astype("<f2").tobytes(), np.uint8)
