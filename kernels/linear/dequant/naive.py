"""Dequantisation by gguf-py, the reference for every block format."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor


def decoder(type: str) -> Callable[[Tensor, Tensor], None]:
    """A function that takes blocks uint8 [n, bytes per block] and fills out float32 [n, elements].

    It raises NotImplementedError for a type that gguf-py has no decoder for.
    """

    def decode(blocks: Tensor, out: Tensor) -> None:
        with np.errstate(all="ignore"):  # infinite scales are legal; so is what becomes of them
            values = dequantize(blocks.contiguous().numpy(), GGMLQuantizationType[type])
        out.numpy()[:] = values

    return decode
