"""Matrix products whose rows have the same bits whatever the other rows are.

A library picks another order of summation for one row than for two, for some widths, and for the
last rows of a thread's share. So the rows are multiplied in blocks of one size, the last filled up
with zeros: where a product of that size is found to give a row the same bits at every place and
with any other rows, the width of a batch cannot be seen any more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from kernels.linear.packed import INTEGER_MODES, PackedWeight

BLOCK, WIDE = 8, 64
Product = Callable[[torch.Tensor, PackedWeight], torch.Tensor]


def linear(product: Product, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """product(x, packed), each row with the bits it has alone. Integers add up exactly anyway."""
    if packed.mode in INTEGER_MODES:
        return product(x, packed)
    rows = x.reshape(-1, x.shape[-1])
    sizes = _sizes(product, packed, torch.get_num_threads(), x.device)
    outputs, start = [], 0
    for size in sizes:
        while len(rows) - start >= size or (size == sizes[-1] and start < len(rows)):
            outputs.append(_block(product, rows[start : start + size], packed, size))
            start += size
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return y.view(*x.shape[:-1], packed.shape[0])


def _block(product: Product, rows: torch.Tensor, packed: PackedWeight, size: int) -> torch.Tensor:
    """The product of up to `size` rows, in memory of their own: sums may depend on alignment."""
    filled = rows.new_zeros(size, rows.shape[1])
    filled[: len(rows)] = rows
    return product(filled, packed)[: len(rows)]


_found: dict[tuple[Product, str, tuple[int, int], int, torch.device], tuple[int, ...]] = {}


def _sizes(
    product: Product, packed: PackedWeight, n_threads: int, device: torch.device
) -> tuple[int, ...]:
    """Sizes of blocks to use, largest first; found by trying, once for every shape of matrix."""
    key = product, packed.mode, packed.shape, n_threads, device
    if key not in _found:
        _found[key] = _try_sizes(functools.partial(_block, product), packed, device)
    return _found[key]


def _try_sizes(
    block: Callable[[torch.Tensor, PackedWeight, int], torch.Tensor],
    packed: PackedWeight,
    device: torch.device,
) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(WIDE, packed.shape[1], generator=generator)
    x = (x * torch.logspace(-2, 2, WIDE).unsqueeze(1)).to(device)
    first = block(x[:BLOCK], packed, BLOCK)
    for shift in (1, 3, 4):
        # the same rows at other places, and rows of zeros next to the last ones
        if not torch.equal(block(x[shift:BLOCK], packed, BLOCK), first[shift:]):
            return (1,)
        if not torch.equal(block(x[:BLOCK].roll(shift, 0), packed, BLOCK), first.roll(shift, 0)):
            return (1,)
    narrow = torch.cat([block(part, packed, BLOCK) for part in x.split(BLOCK)])
    return (WIDE, BLOCK) if torch.equal(block(x, packed, WIDE), narrow) else (BLOCK,)
