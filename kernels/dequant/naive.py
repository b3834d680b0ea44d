"""Dequantisation by gguf-py, the reference for every block format."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize


def dequantise_slice(raw: torch.Tensor, type_name: str) -> torch.Tensor:
    """Whole blocks of a GGML type, uint8 [n_bytes], to float32 [n_elements].

    Raises NotImplementedError for a type that gguf-py has no decoder for.
    """
    with np.errstate(all="ignore"):  # infinite scales are legal; what becomes of them is too
        values = dequantize(raw.contiguous().numpy(), GGMLQuantizationType[type_name])
    return torch.from_numpy(np.array(values, dtype=np.float32))
