"""Types of tensors by the number that a GGUF file gives them: those of the gguf package, newer and
older ones of llama.cpp, and those of its forks, which are named and cannot be decoded here."""

from __future__ import annotations

from typing import NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

LARGEST = 1023
"""A larger number is taken for damage: forks count to 400."""

_NEWER = {42: "Q2_0"}
_REMOVED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip
# ik_llama.cpp's ggml.h of 2026-08-15; 36 was IQ4_NL_4_4 in llama.cpp for a short time
_IK = {
    36: "I2_S", 97: "Q8_0_X4", 98: "Q8_1_X4", 99: "Q8_2_X4", 133: "Q6_0", 134: "IQ1_BN",
    135: "IQ2_BN", 136: "Q8_K64", 137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K",
    141: "IQ6_K", 144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 147: "Q8_K16", 148: "Q8_K32",
    149: "Q8_KR8", 150: "Q8_K128", 151: "Q8_KV", 152: "IQ5_KS", 153: "IQ2_KT", 154: "IQ3_KT",
    155: "IQ4_KT", 156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT", 202: "Q4_0_R8", 206: "Q5_0_R4",
    208: "Q8_0_R8", 210: "Q2_K_R4", 211: "Q3_K_R4", 212: "Q4_K_R4", 213: "Q5_K_R4",
    214: "Q6_K_R4", 216: "IQ2_XXS_R4", 217: "IQ2_XS_R4", 218: "IQ3_XXS_R4", 219: "IQ1_S_R4",
    220: "IQ4_NL_R4", 221: "IQ3_S_R4", 222: "IQ2_S_R4", 223: "IQ4_XS_R8", 229: "IQ1_M_R4",
    230: "BF16_R16", 233: "Q6_0_R4", 335: "IQ2_BN_R4", 337: "IQ2_K_R4", 338: "IQ3_K_R4",
    339: "IQ4_K_R4", 340: "IQ5_K_R4", 344: "IQ4_KS_R4", 352: "IQ5_KS_R4", 353: "MXFP4_R8",
    397: "Q8_K_R16", 398: "Q8_KV_R8", 399: "Q8_K_R8",
}  # fmt: skip
# PrismML's fork; the same numbers were IQ2_TN and IQ1_TN of an old ik_llama.cpp
_PRISM = {142: "PQ2_0", 143: "PTQ1_0"}

_QUANTISE = "Use a file of another quantisation, such as Q4_K_M or Q8_0, or quantise the original"
_OBSERVE = "and look at that with `draftscope observe`"
_REMEDIES = {
    "a newer llama.cpp": f"{_QUANTISE} again, or run it in llama-server {_OBSERVE}.",
    "an old llama.cpp, which reads it no longer": f"{_QUANTISE} again with llama-quantize.",
    "ik_llama.cpp": f"{_QUANTISE} with llama.cpp's llama-quantize, or run it in ik_llama.cpp's "
    f"server {_OBSERVE}.",
    "PrismML's llama.cpp or an old ik_llama.cpp": f"{_QUANTISE} with llama.cpp's llama-quantize, "
    f"or run it in the fork's server {_OBSERVE}.",
    "a newer llama.cpp or a fork": f"{_QUANTISE} with llama.cpp's llama-quantize, or run it in the "
    f"server that it was made for {_OBSERVE}.",
}
_NEW, _OLD, _OF_IK, _OF_PRISM, _UNKNOWN = _REMEDIES


class TensorType(NamedTuple):
    """name: as ggml's. block: elements of a block, of n_bytes; 1 and 0 where that is not known.
    owner: what writes it, empty for a type of the gguf package."""

    name: str
    block: int
    n_bytes: int
    owner: str = ""

    @property
    def remedy(self) -> str:
        """What to do about a type with an owner."""
        return _REMEDIES[self.owner]


def tensor_type(number: int) -> TensorType:
    """The type that ggml, or the engine that has taken the number, means by it."""
    if number in _KNOWN:
        return _KNOWN[number]
    return TensorType(f"type {number}", 1, 0, _UNKNOWN)


_KNOWN = {
    int(one): TensorType(one.name, *GGML_QUANT_SIZES[one]) for one in GGMLQuantizationType
} | {
    number: TensorType(name, 1, 0, owner)
    for owner, names in ((_NEW, _NEWER), (_OLD, _REMOVED), (_OF_IK, _IK), (_OF_PRISM, _PRISM))
    for number, name in names.items()
    if number not in list(GGMLQuantizationType)
}
