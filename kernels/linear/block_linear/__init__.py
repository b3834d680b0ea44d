"""Matrix products with weights that stay in the blocks of their GGUF file."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.dispatch import pick
from kernels.linear.block_parts import check_rows
from kernels.linear.decode_with_llvm import HALVES
from kernels.linear.dequant import dequantise

TYPES = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")
"""The types a product can be formed with; weights of others are expanded once, when loaded."""
_HERE = "kernels.linear.block_linear."


def block_linear(
    x: Tensor, blocks: Tensor, type: str, *, rounded: bool = False, invariant: bool = False
) -> Tensor:
    """x @ weight.T in f32, the weight expanded on the way to the same numbers as `dequantise`.

    x: f32 or bf16 [..., in]; blocks: uint8 [out, bytes per row], contiguous, each row whole
    blocks of the GGML type named `type`, on an even address; on a CPU also F32, F16 and BF16,
    rows of whole 32 numbers. Returns f32 [..., out]. On a GPU
    meant for few rows (1 .. 16): every 16 rows read the weight once, nothing else is stored.

    rounded: x is rounded to bfloat16 first, and the weights where that is faster than leaving
    them as they are; processors with the instructions multiply such numbers faster.
    invariant: a row has the same bits whatever the other rows are.

    Raises ValueError for a type that is not one of TYPES and for rows of another length.
    """
    check_rows((*TYPES, *HALVES, "F32"), type, x.shape[-1], blocks.shape[1])
    if not x.is_cuda:
        x = x.float()
    return _run(x, blocks, type, rounded=rounded, invariant=invariant)


def block_linear_naive(
    x: Tensor, blocks: Tensor, type: str, *, rounded: bool = False, invariant: bool = False
) -> Tensor:
    """The product with expanded weights, summed in f64: its order does not show in f32."""
    n_out, n_in = blocks.shape[0], x.shape[-1]
    weight = dequantise(blocks.reshape(-1), type, n_out * n_in).view(n_out, n_in)
    if rounded:
        x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
    return (x.double() @ weight.double().T).float()


def block_linear_with_torch(
    x: Tensor, blocks: Tensor, type: str, *, rounded: bool = False, invariant: bool = False
) -> Tensor:
    """The product with weights expanded for the call: right everywhere, fast nowhere."""
    n_out, n_in = blocks.shape[0], x.shape[-1]
    weight = dequantise(blocks.reshape(-1), type, n_out * n_in).view(n_out, n_in)
    x = x.float()
    if rounded:
        x, weight = x.to(torch.bfloat16).float(), weight.to(torch.bfloat16).float()
    if not invariant:
        return functional.linear(x, weight)
    # one by one, each in memory of its own: sums may depend on alignment
    rows = [functional.linear(row.clone(), weight) for row in x.reshape(-1, n_in).split(1)]
    return torch.cat(rows).view(*x.shape[:-1], n_out)


_run = pick(block_linear_naive, block_linear_with_torch, _HERE + "with_triton", _HERE + "with_llvm")
