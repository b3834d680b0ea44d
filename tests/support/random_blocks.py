"""GGUF blocks with random bits and tame scales."""

from __future__ import annotations

import gguf
import numpy as np
import torch

# byte offsets of the float16 numbers of a block
HALVES = {
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_1": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "MXFP4": [],
    "NVFP4": [],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "IQ1_M": [],
}


def random_blocks(
    type_name: str, n_out: int, n_in: int, seed: int = 42, fill: int | None = None
) -> torch.Tensor:
    """uint8 [n_out, bytes per row]: every bit random, or every byte `fill`, but for the scales, in
    0.5 .. 2."""
    block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    assert n_in % block == 0
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n_out * n_in // block, n_bytes), dtype=np.uint8)
    if fill is not None:
        raw[:] = fill
    for start in HALVES.get(type_name, [0]):
        scales = rng.uniform(0.5, 2, len(raw)) * rng.choice([-1, 1], len(raw))
        raw[:, start : start + 2] = scales.astype("<f2")[:, None].view(np.uint8)
    if type_name == "MXFP4":
        # a power of two: 128 stands for 1, of numbers that are doubled
        raw[:, 0] = rng.integers(127, 130, len(raw))
    if type_name == "IQ1_M":
        # the scale has the upper four bits of each of four words
        words, scales = raw[:, 48:].view("<u2"), rng.uniform(0.5, 2, len(raw)).astype("<f2")
        words &= 0xFFF
        words |= (scales.view("<u2")[:, None] >> np.arange(0, 16, 4) & 15).astype("<u2") << 12
    return torch.from_numpy(raw.reshape(n_out, -1))
