"""What the weights of a model take in memory once they are loaded, told without loading them."""

from __future__ import annotations

from collections.abc import Mapping

from engine.gguf.file import TensorInfo
from engine.model.parts.ngram_embedding import TABLE

MODES = ("f32", "bf16", "int8", "int8x2", "blocks")
"""Compute modes whose memory is told."""

_F32 = 4
# types of which products with blocks exist (kernels.block_linear, which would load torch)
_BLOCKS = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")
# what engine.model keeps as f32 in every mode, by parts of names
_KEPT = (
    "ssm_conv1d.",
    "ssm_alpha.",
    "ssm_beta.",
    "ssm_ba.",
    "ffn_gate_inp",
    "ple_conv1d.",
    "indexer.",
    "_norm",
)
_EMBEDDINGS = ("token_embd.weight", "nextn.embed_tokens.weight")


def loaded_bytes(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Bytes by compute mode for a whole model on a processor.

    bf16 counts 2 bytes for a number that does not stay in its block: a processor without products
    in bfloat16 keeps 4. int8 may come to a little more, where a matrix is no whole number of
    sixteens long or wide.
    """
    # the experts of a layer stay in their blocks together, or not at all
    expanded = {_block(name) for name, t in tensors.items() if "_exps." in name and not _stays(t)}
    sizes = dict.fromkeys(MODES, 0)
    for name, tensor in tensors.items():
        if name == TABLE:  # it stays in the file
            continue
        stays = _stays(tensor) and not ("_exps." in name and _block(name) in expanded)
        for mode in sizes:
            if name.endswith(_EMBEDDINGS):
                kept = tensor.n_bytes if mode != "f32" and stays else tensor.n_elements * _F32
            elif len(tensor.shape) > 1 and not any(part in name for part in _KEPT):
                kept = _packed(tensor, mode, stays)
            else:
                kept = tensor.n_elements * _F32
            sizes[mode] += kept
    if "output.weight" not in tensors:
        table = tensors["token_embd.weight"]
        for mode in MODES:
            # unpacked, the head is the embedding itself
            if mode.startswith("int8") or (mode == "bf16" and not _stays(table)):
                sizes[mode] += _packed(table, mode, False)
    return sizes


def _block(name: str) -> str:
    """The part of a tensor's name that all of its block share."""
    return name.split(".ffn_")[0]


def _stays(tensor: TensorInfo) -> bool:
    return tensor.type.name in _BLOCKS


def _packed(tensor: TensorInfo, mode: str, stays: bool) -> int:
    if mode.startswith("int8"):
        return tensor.n_elements + _F32 * (tensor.n_elements // tensor.shape[-1])  # and scales
    if mode in ("bf16", "blocks") and stays:
        return tensor.n_bytes
    return tensor.n_elements * (2 if mode == "bf16" else _F32)
