"""Which type each tensor of a file has: the mixes of types that files are quantised to.

The rules are those of llama.cpp's quantiser (llama-quant.cpp) for models with a tied embedding and
without an importance matrix. `q4_k` is ours: Q4_K with Q6_K for attention values, the embedding and
every other ffn_down. `mxfp4` is llama.cpp's for mixtures of experts, MXFP4 for routed experts and
Q8_0 next to them; a dense model, for which it has none, gets MXFP4 but for the embedding.
"""

from __future__ import annotations

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from engine.model.config import ModelConfig
from engine.model.parts.attention import AttentionPart
from engine.model.parts.feed_forward import MixturePart

Quant = GGMLQuantizationType

_MIXES = {
    "f32": (Quant.F32, LlamaFileType.ALL_F32),
    "bf16": (Quant.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (Quant.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_k": (Quant.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
    "q4_k_m": (Quant.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
    "q6_k": (Quant.Q6_K, LlamaFileType.MOSTLY_Q6_K),
    "iq4_xs": (Quant.IQ4_XS, LlamaFileType.MOSTLY_IQ4_XS),
    "q4_0": (Quant.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q5_k_m": (Quant.Q5_K, LlamaFileType.MOSTLY_Q5_K_M),
    "q3_k_m": (Quant.Q3_K, LlamaFileType.MOSTLY_Q3_K_M),
    "q2_k": (Quant.Q2_K, LlamaFileType.MOSTLY_Q2_K),
    "q4_1": (Quant.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "q5_0": (Quant.Q5_0, LlamaFileType.MOSTLY_Q5_0),
    "q5_1": (Quant.Q5_1, LlamaFileType.MOSTLY_Q5_1),
    "iq4_nl": (Quant.IQ4_NL, LlamaFileType.MOSTLY_IQ4_NL),
    "mxfp4": (Quant.MXFP4, LlamaFileType.MOSTLY_MXFP4_MOE),
}
QUANTS = tuple(_MIXES)
"""Names of the mixes."""

_SHORTER = {
    Quant.Q2_K: Quant.Q4_0,
    Quant.Q3_K: Quant.Q4_0,
    Quant.Q4_K: Quant.Q5_0,
    Quant.Q5_K: Quant.Q5_1,
    Quant.Q6_K: Quant.Q8_0,
    Quant.IQ4_XS: Quant.IQ4_NL,
}
"""What llama.cpp takes for rows that are no whole blocks of 256."""
_UNROUNDED = ("conv1d", "shortconv.conv", "ffn_gate_inp")
_UNROUNDED_OF = {
    "deepseek4": ("hc_", "_ape."),
    "glm5-next": ("hc_", "indexer", "ssm_f_", "ssm_g_", "ssm_beta", "attn_kv_a_mqa", "attn_k_b"),
}
_NOT_BELOW_Q8_0 = {"glm5-next": ("attn_q_a.", "attn_q_b.", "nextn.eh_proj")}
"""What llama.cpp's quantiser leaves in full, and in more bits, in an architecture."""
_OUTPUT_IN_Q5_K = ("q2_k", "q3_k_m", "q4_k_m", "iq4_nl", "iq4_xs")


def file_type(mix: str) -> LlamaFileType:
    """What the file says of itself."""
    return _MIXES[mix][1]


def is_norm(name: str) -> bool:
    """Whether a tensor is what a norm multiplies by; norms of several groups are matrices."""
    return name.removesuffix(".weight").endswith("norm") or "ple_norm_" in name


def tensor_type(
    name: str, shape: tuple[int, ...], config: ModelConfig, mix: str, *, tied: bool = True
) -> GGMLQuantizationType:
    """Type of a tensor in a mix, one of QUANTS. shape: numpy order. tied: the file has no output
    matrix of its own.

    Vectors, convolutions and routers stay f32. Rows that are no whole blocks get a type of shorter
    blocks.
    """
    if name.endswith("tid2eid.weight"):
        return Quant.I32
    kept = len(shape) == 1 or not name.endswith(".weight") or is_norm(name)
    unrounded = _UNROUNDED + _UNROUNDED_OF.get(config.architecture, ())
    if _MIXES[mix][0] == Quant.F32 or kept or any(word in name for word in unrounded):
        return Quant.F32
    kind = _wanted(name, shape, config, mix, tied)
    if any(word in name for word in _NOT_BELOW_Q8_0.get(config.architecture, ())):
        kind = Quant.BF16 if mix == "bf16" else Quant.Q8_0
    return _SHORTER.get(kind, kind) if shape[-1] % GGML_QUANT_SIZES[kind][0] else kind


def _wanted(
    name: str, shape: tuple[int, ...], config: ModelConfig, mix: str, tied: bool
) -> GGMLQuantizationType:
    base = _MIXES[mix][0]
    if mix in ("bf16", "q8_0"):
        return base
    if name == "output.weight" or (name == "token_embd.weight" and tied):
        return Quant.Q8_0 if mix == "mxfp4" else Quant.Q6_K
    if mix == "mxfp4":
        return base if "_exps" in name or not n_experts(config) else Quant.Q8_0
    if not name.startswith("blk."):
        return base
    block = int(name.split(".")[1])
    if mix == "q4_k":
        halved = "ffn_down" in name and block % 2 == 0
        return Quant.Q6_K if halved or "attn_v" in name else base
    n = n_experts(config)
    if "attn_v.weight" in name or "attn_qkv.weight" in name:
        if n == 8:
            return Quant.Q8_0
        return _value_type(mix, block, config) or base
    if "ffn_down" in name:
        return _down_type(mix, block, config) or base
    if n == 8 and "attn_k.weight" in name:
        return Quant.Q8_0
    if "attn_output" in name:
        if n == 8:
            return Quant.Q5_K if mix in _OUTPUT_IN_Q5_K else base
        return {"q2_k": Quant.Q3_K, "q3_k_m": Quant.Q4_K}.get(mix, base)
    return base


def n_experts(config: ModelConfig) -> int:
    """Routed experts of its first mixture, 0 without one."""
    mixtures = (block.ffn for block in config.blocks if isinstance(block.ffn, MixturePart))
    return next((mixture.n_experts for mixture in mixtures), 0)


def _value_type(mix: str, block: int, config: ModelConfig) -> GGMLQuantizationType | None:
    """Of what holds the values of attention, or those of a recurrent layer; None: the mix's."""
    mixers = (mixer for part in config.blocks for mixer in part.mixers)
    attention = next((mixer for mixer in mixers if isinstance(mixer, AttentionPart)), None)
    shared = attention is not None and attention.n_head // attention.n_head_kv >= 4
    if mix == "q2_k":
        return Quant.Q4_K if shared else Quant.Q3_K
    if mix == "q3_k_m":
        return Quant.Q5_K if block < 2 else Quant.Q4_K
    if mix in ("iq4_nl", "iq4_xs"):
        return Quant.Q5_K if shared else None
    return _with_more_bits(mix, block, config)


def _down_type(mix: str, block: int, config: ModelConfig) -> GGMLQuantizationType | None:
    n = config.n_layer + config.n_mtp
    if mix == "q2_k":
        return Quant.Q3_K
    if mix == "q3_k_m":
        return Quant.Q5_K if block < n // 16 else Quant.Q4_K
    if mix in ("iq4_nl", "iq4_xs"):
        return Quant.Q5_K if block < n // 8 else None
    return _with_more_bits(mix, block, config)


def _with_more_bits(mix: str, block: int, config: ModelConfig) -> GGMLQuantizationType | None:
    """In the first eighth of the blocks, in the last, and in every third between."""
    n = config.n_layer + config.n_mtp
    more = block < n // 8 or block >= 7 * n // 8 or (block - n // 8) % 3 == 2
    return Quant.Q6_K if more and mix in ("q4_k_m", "q5_k_m") else None
