"""Matrix products with prepared weights: several compute modes, and weights as stored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.dispatch import pick, runs_triton
from kernels.linear import naive, with_torch
from kernels.linear.block_parts import PreparedRows, Residual, Rows, round_rows
from kernels.linear.blocks import linear_blocks, pack_plain, stays_plain, takes_any_rows
from kernels.linear.packed import INTEGER_MODES, MODES, BlockData, PackedWeight
from kernels.pointwise import add, multiply
from kernels.rows import join

_CPU = torch.device("cpu")

panels_of = with_torch.panels_of
_pack = pick(naive.pack, with_torch.pack)
_linear = pick(naive.linear, with_torch.linear)


def pack(weight: Tensor, mode: str, device: torch.device = _CPU) -> PackedWeight:
    """Prepares a weight f32 [out, in] once, for many calls of `linear` on a device.

    "f32" keeps the matrix (no copy). "bf16" rounds weight and activations to bfloat16 and sums
    in f32. "int8" rounds the weight to integers with one scale per output row and every
    activation row to -127..127 with its own scale, and sums in int32, so a row of the result has
    the same bits whatever the other rows are; "int8x2" does so with two such rows for every
    activation row, the second for what the first leaves over. The other modes promise nothing of
    the kind.

    Raises ValueError for any other mode, and for int8 on a CUDA device.
    """
    if mode not in MODES:
        raise ValueError(f"compute mode {mode!r} is not one of {', '.join(MODES)}")
    if device.type == "cpu":
        return pack_plain(weight) if stays_plain(weight, mode) else _pack(weight, mode)
    if mode in INTEGER_MODES:
        raise ValueError(f"compute mode {mode} has no product on {device}")
    if mode == "bf16":
        return with_torch.pack_bf16_on_gpu(weight, device)
    return _pack(weight.to(device), mode)


def linear(
    x: Rows, packed: PackedWeight, *, invariant: bool = False, residual: Residual | None = None
) -> Tensor:
    """x @ weight.T in the mode of `packed`. x: f32 [..., in]; returns f32 [..., out].

    invariant: a row of the result has the same bits whatever the other rows are, in any mode.
    residual: added to the result; a launch that can do so also computes its norm.
    """
    return linear_each(x, (packed,), invariant=invariant, residual=residual)[0]


def linear_each(
    x: Rows,
    packed: Sequence[PackedWeight],
    *,
    invariant: bool = False,
    residual: Residual | None = None,
) -> list[Tensor]:
    """`linear` with several matrices, on a GPU one launch for few rows. residual: of just one."""
    if runs_triton(x):
        from kernels.linear.integer_blocks.with_triton import products

        found = products(x, packed, invariant=invariant, residual=residual)
        if found is not None:
            return found
    numbers = x.numbers if isinstance(x, PreparedRows) else x
    results = [_linear_alone(numbers, each, invariant=invariant) for each in packed]
    return results if residual is None else [add(residual.x, y) for y in results]


def linear_of_columns(
    x: Rows,
    packed: Sequence[PackedWeight],
    columns: Sequence[tuple[int, PackedWeight]],
    *,
    invariant: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """`linear_each`, and `linear` of further matrices, each with the columns of the first result
    from a given one on; on a GPU two launches for few rows."""
    if columns and runs_triton(x):
        from kernels.linear.integer_blocks.with_triton import products_of_columns

        found = products_of_columns(x, packed, columns, invariant=invariant)
        if found is not None:
            return found
    first = linear_each(x, packed, invariant=invariant)
    return first, [
        linear(first[0][..., at : at + matrix.shape[1]], matrix, invariant=invariant)
        for at, matrix in columns
    ]


def gated_linear(
    x: Rows,
    packed: PackedWeight,
    operation: Callable[..., Tensor],
    constants: tuple[float, ...] = (),
    *,
    reads: Sequence[PackedWeight] = (),
    invariant: bool = False,
) -> Rows:
    """operation(gate, up, *constants) of the upper and the lower half of the results of `linear`,
    on a GPU one launch for few rows. operation: of kernels.pointwise. reads: as in
    kernels.norm.rms_norm_rows. Returns f32 [..., out / 2].
    """
    if runs_triton(x):
        from kernels.linear.integer_blocks.with_triton import opened

        found = opened(x, packed, operation.__name__, constants, reads=reads, invariant=invariant)
        if found is not None:
            return found
    gate, up = linear(x, packed, invariant=invariant).chunk(2, -1)
    return operation(gate, up, *constants, invariant=invariant)


def operation_rows(
    operation: Callable[..., Tensor],
    operands: tuple[Tensor, ...],
    reads: Sequence[PackedWeight],
    **exact: bool,
) -> Rows:
    """operation(*operands) of kernels.pointwise, operands f32 [..., in] of one shape, as rows that
    these matrices are multiplied with (kernels.norm.rms_norm_rows). exact: its `invariant`."""
    if runs_triton(operands[0]):
        from kernels.linear.integer_blocks import rows_with_triton

        found = rows_with_triton.operation_rows(operation.__name__, operands, reads)
        if found is not None:
            return found
    return operation(*operands, **exact)


def _linear_alone(x: Tensor, packed: PackedWeight, *, invariant: bool = False) -> Tensor:
    if packed.mode == "parts":
        return join([_linear_alone(x, part, invariant=invariant) for part in packed.data])
    if packed.rounding:
        x = round_rows(x, packed.rounding)
    if isinstance(packed.data, BlockData):
        y = linear_blocks(x, packed, invariant=invariant)
        return y if packed.factors is None else multiply(y, packed.factors)
    return _in_blocks(_product, x, packed) if invariant else _product(x, packed)


def _product(x: Tensor, packed: PackedWeight) -> Tensor:
    on_gpu = packed.mode == "bf16" and x.is_cuda
    return with_torch.linear(x, packed) if on_gpu else _linear(x, packed)


def prepare_rows(x: Tensor, packed: PackedWeight) -> tuple[Tensor, Tensor | None]:
    """The part of `linear` that concerns the rows alone, for products of one batch with many
    matrices: linear(x, packed) is finish_rows(multiply_rows(rows, packed), scale).

    x: f32 [n, in]. Returns the rows as `multiply_rows` takes them for every matrix packed like
    this one, and f32 [n, 1], what `finish_rows` multiplies each row of results with, None for
    nothing.
    """
    return (x, None) if takes_any_rows(packed) else with_torch.prepare_rows(x, packed)


def multiply_rows(rows: Tensor, packed: PackedWeight) -> Tensor:
    """Prepared rows [n, in] -> unfinished results [n, out]."""
    return (
        linear(rows, packed) if takes_any_rows(packed) else with_torch.multiply_rows(rows, packed)
    )


def finish_rows(y: Tensor, scale: Tensor | None) -> Tensor:
    """Results of `multiply_rows` f32 or bf16 [n, out] as f32, changed in place where they are
    f32; scale: of the rows, from `prepare_rows`."""
    return y.float() if scale is None else y.mul_(scale)


# A library picks another order of summation for one row than for two, for some widths, and for the
# last rows of a thread's share. So the rows are multiplied in blocks of one size, the last filled
# up with zeros: where a product of that size is found to give a row the same bits at every place
# and with any other rows, the width of a batch cannot be seen any more.

BLOCK, WIDE = 8, 64
Product = Callable[[Tensor, PackedWeight], Tensor]


def _in_blocks(product: Product, x: Tensor, packed: PackedWeight) -> Tensor:
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


def _block(product: Product, rows: Tensor, packed: PackedWeight, size: int) -> Tensor:
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
    block: Callable[[Tensor, PackedWeight, int], Tensor], packed: PackedWeight, device: torch.device
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
