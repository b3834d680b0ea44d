"""What the weights of a model take in memory once they are loaded, told without loading them."""

from __future__ import annotations

from collections.abc import Mapping

from engine.gguf.file import TensorInfo

MODES = ("f32", "bf16", "int8", "int8x2", "blocks")
"""Compute modes whose memory is told."""

_F32 = 4
# types of which products with blocks exist (kernels.block_linear, which would load torch)
_BLOCKS = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")
# what engine.model keeps as f32 in every mode, by parts of names
_KEPT = (
    "token_embd.", "nextn.embed_tokens.", "ssm_conv1d.", "ssm_alpha.", "ssm_beta.", "ssm_ba.",
    "ffn_gate_inp",
)  # fmt: skip


def loaded_bytes(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Bytes by compute mode for a whole model on a processor.

    bf16 counts 2 bytes a number: a processor without products in bfloat16 keeps 4.
    """
    sizes = dict.fromkeys(MODES, 0)
    for name, tensor in tensors.items():
        whole = tensor.n_elements * _F32
        packed = len(tensor.shape) > 1 and not any(part in name for part in _KEPT)
        for mode in sizes:
            stays = mode == "blocks" and "_exps." in name
            sizes[mode] += _packed(tensor, mode) if packed and not stays else whole
    if "output.weight" not in tensors:
        # in f32 the head is the embedding itself
        table = tensors["token_embd.weight"]
        for mode in MODES[1:]:
            if mode != "blocks" or table.type.name in _BLOCKS:
                sizes[mode] += _packed(table, mode)
    return sizes


def _packed(tensor: TensorInfo, mode: str) -> int:
    if mode.startswith("int8"):
        return tensor.n_elements + _F32 * (tensor.n_elements // tensor.shape[-1])  # and scales
    if mode == "blocks" and tensor.type.name in _BLOCKS:
        return tensor.n_bytes
    return tensor.n_elements * (2 if mode == "bf16" else _F32)
