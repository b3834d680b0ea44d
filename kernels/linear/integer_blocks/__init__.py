"""Matrix products in the integer arithmetic of GGUF blocks, as llama.cpp forms them.

Weights stay in the blocks of their file; rows of x are rounded to 8 bits as ggml rounds them for
the type of the weight; products are sums of integers, exact, whose scales come in once for a block.
"""

from __future__ import annotations

import functools

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels.dispatch import pick
from kernels.linear.integer_blocks import naive
from kernels.linear.integer_blocks.parts import SPLITTERS

__all__ = ["TYPES", "integer_linear"]

TYPES = tuple(SPLITTERS)
"""The types that have such a product."""

_run = pick(
    naive.integer_linear, naive.integer_linear, llvm="kernels.linear.integer_blocks.with_llvm"
)


def integer_linear(x: torch.Tensor, blocks: torch.Tensor, type: str) -> torch.Tensor:
    """x @ weight.T, x rounded to integers of 8 bits
    (kernels.linear.integer_blocks.rows_of_integers).

    x: f32 [..., in]; blocks: uint8 [out, bytes per row], contiguous, each row whole blocks of the
    GGML type named `type`. Returns f32 [..., out].

    Integers add up exactly, and floats in one order (kernels.linear.integer_blocks.naive): a row
    has the same bits whatever rows stand beside it, on every number of threads and every processor.

    Raises ValueError for a type that is not one of TYPES and for rows of another length.
    """
    _check(type, x.shape[-1], blocks.shape[1])
    return _run(x, blocks, type)


@functools.cache
def _check(type: str, n_in: int, n_bytes: int) -> None:
    if type not in TYPES:
        raise ValueError(f"no integer product with blocks of {type}, only with {', '.join(TYPES)}")
    elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    n_blocks, rest = divmod(n_in, elements)
    if rest or n_bytes != n_blocks * block_bytes:
        raise ValueError(f"{n_bytes} bytes are no row of {n_in} {type} weights")
