"""Matrix products in the integer arithmetic of GGUF blocks, as llama.cpp forms them.

Weights stay in the blocks of their file; rows of x are rounded to 8 bits as ggml rounds them for
the type of the weight; products are sums of integers, exact, whose scales come in once for a block.
"""

from __future__ import annotations

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor
from torch.nn import functional

from kernels.dispatch import pick
from kernels.linear.block_parts import (
    LONG,
    SHORT,
    SPLITTERS,
    STEPS,
    IntegerBlockParts,
    IntegerRows,
    check_rows,
    is_long,
    quantise,
    split,
)

GPU_TYPES = tuple(SPLITTERS)
"""The types that have such a product everywhere."""
TYPES = (*GPU_TYPES, *STEPS)
"""Those that have one on a processor."""


def integer_linear(x: Tensor, blocks: Tensor, type: str, *, invariant: bool = False) -> Tensor:
    """x @ weight.T, x rounded to integers of 8 bits
    (kernels.linear.block_parts).

    x: f32 [..., in]; blocks: uint8 [out, bytes per row], contiguous, each row whole blocks of the
    GGML type named `type`. Returns f32 [..., out].

    Integers add up exactly, and floats in one order (integer_linear_naive): a row
    has the same bits whatever the other rows are, on every number of threads and every processor.
    On a GPU that holds up to 64 rows, and for more with `invariant`: else those of a prompt are
    multiplied as bfloat16.

    Raises ValueError for a type that is not one of TYPES and for rows of another length.
    """
    check_rows(TYPES, type, x.shape[-1], blocks.shape[1])
    if x.is_cuda and invariant:
        return _run(x, blocks, type, invariant=True)
    return _run(x, blocks, type)


def integer_linear_naive(
    x: Tensor, blocks: Tensor, type: str, *, invariant: bool = False
) -> Tensor:
    """The reference of the integer products: exact integers, and one order of f32 operations.

    Every 256 neighbouring numbers of a row give one number t, and a result is the sum of the t in
    order, starting from 0. With i the exact sum of integer products of a block, group scales
    included, d the product of the scales of the weight's block and the row's, everything in f32:

     * eight short blocks, those missing at the end of a row counting as 0: p = float(i) * d, with a
       minimum fma(minimum, the row's sum, float(i) * d), and
       t = ((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7));
     * one long block: t = float(i) * d, with minimums less float(m) * (minimum * the row's scale),
       m the exact sum of group minimums times the row's integers.
    """
    n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]][1]
    parts = split(blocks.unflatten(-1, (-1, n_bytes)), type)
    rows = quantise(x.float().reshape(-1, x.shape[-1]), long=is_long(type))
    terms = _long_terms(rows, parts) if is_long(type) else _short_terms(rows, parts)
    y = torch.zeros(terms.shape[:-1], device=x.device)
    for t in terms.unbind(-1):
        y = y + t
    return y.view(*x.shape[:-1], blocks.shape[0])


def _short_terms(rows: IntegerRows, parts: IntegerBlockParts) -> Tensor:
    """Every t, f32 [n, out, stretches]."""
    p = _sums(rows, parts).float() * (parts.scale * rows.scales.unsqueeze(1))
    if parts.minimum is not None:
        assert rows.sums is not None
        # products of two f16 are exact in f64, where rounding their sum does not affect the f32 one
        more = parts.minimum.double() * rows.sums.unsqueeze(1).double()
        p = (more + p.double()).float()
    p = functional.pad(p, (0, -p.shape[-1] % (LONG // SHORT))).unflatten(-1, (-1, 8))
    p0, p1, p2, p3, p4, p5, p6, p7 = p.unbind(-1)
    return ((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7))


def _long_terms(rows: IntegerRows, parts: IntegerBlockParts) -> Tensor:
    """Every t, f32 [n, out, blocks]."""
    scales = rows.scales.unsqueeze(1)
    t = _sums(rows, parts).float() * (parts.scale * scales)
    if parts.minimum is None or parts.group_minimums is None:
        return t
    less = _in_groups(rows.integers, parts.group_minimums).sum(-1).unsqueeze(1)
    return t - (less * parts.group_minimums).sum(-1).float() * (parts.minimum * scales)


def _sums(rows: IntegerRows, parts: IntegerBlockParts) -> Tensor:
    """Sums of integer products in every block, times the scales of groups: int64 [n, out, blocks],
    which f64 holds exactly."""
    x, w = (_in_groups(each.integers, parts.group_scales).double() for each in (rows, parts))
    exact = torch.einsum("nbgk,obgk->nobg", x, w).long()
    return (exact if parts.group_scales is None else exact * parts.group_scales).sum(-1)


def _in_groups(integers: Tensor, of_groups: Tensor | None) -> Tensor:
    """[n, blocks, elements] as [n, blocks, groups, k]."""
    return integers.unflatten(-1, (1 if of_groups is None else of_groups.shape[-1], -1))


_HERE = "kernels.linear.integer_blocks."
_run = pick(integer_linear_naive, integer_linear_naive, _HERE + "with_triton", _HERE + "with_llvm")
