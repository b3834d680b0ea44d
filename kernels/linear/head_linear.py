"""A small matrix for every head, as latent attention has before and after its softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.dispatch import operation, torch_version
from kernels.llvm import F32, F32X16, Code, Value, kernel
from kernels.llvm.functions import LANES, rows, start


@operation(triton="kernels.linear.with_triton", llvm=__name__)
def head_linear(x: Tensor, weight: Tensor, *, invariant: bool = False) -> Tensor:
    """x of every head times the matrix of that head.

    x: f32 [B, T, H, n], any strides; weight: f32 [H, n, m], contiguous: the rows of a head's
    matrix are its inputs. Returns f32 [B, T, H, m].

    invariant: a token's result has the same bits whatever the other tokens are.
    """
    # all heads at once; where the results are to be invariant, token by token
    if invariant:
        # in memory of its own: sums may depend on alignment
        tokens = [one.clone() for one in x.flatten(0, 1).split(1)]
        y = torch.cat([torch_version(head_linear)(one.unsqueeze(0), weight) for one in tokens], 1)
        return y.view(*x.shape[:3], weight.shape[2])
    n_batch, n_tokens, n_heads, n = x.shape
    rows = x.permute(2, 0, 1, 3).reshape(n_heads, n_batch * n_tokens, n)
    return torch.bmm(rows, weight).view(n_heads, n_batch, n_tokens, -1).permute(1, 2, 0, 3)


def head_linear_naive(x: Tensor, weight: Tensor) -> Tensor:
    """The products head by head. Keeps the dtype of its inputs."""
    return torch.stack([x[:, :, h] @ weight[h] for h in range(x.shape[2])], 2)


# vectors of results side by side, and tokens whose results are in registers with them
COLUMNS, TOKENS = 2, 2
# multiplications below which other threads are not worth waking
LEAST_WORK = 1 << 17


def head_linear_with_llvm(x: Tensor, weight: Tensor) -> Tensor:
    """The products on a CPU: each piece of a head's matrix read once for all tokens."""
    n_batch, n_tokens, n_heads, n = x.shape
    m = weight.shape[2]
    y = torch.empty(n_batch, n_tokens, n_heads, m)
    x, places = rows(x)
    n_rows = n_batch * n_tokens
    _program(n, m, n_heads)(
        *places,
        weight.contiguous().data_ptr(),
        y.data_ptr(),
        n_rows,
        tasks=n_heads * -(-m // (COLUMNS * LANES)),
        chunk=1,
        threads=torch.get_num_threads() if n_rows * weight.numel() > LEAST_WORK else 1,
    )
    return y


@kernel(7)
def _program(code: Code, args: Sequence[Value], task: Value, n: int, m: int, n_heads: int) -> None:
    """A task is COLUMNS vectors of results of one head, for all tokens; every sum goes along the
    inputs, whatever the other tokens are.

    Arguments: x in RowPlaces, a row for every token and head; the matrices, y, the tokens.
    """
    weight, y, n_rows = args[4:]
    width = min(COLUMNS * LANES, m)
    counts = [min(LANES, width - i) for i in range(0, width, LANES)]
    n_blocks = -(-m // width)
    head = task // n_blocks
    # the last block reaches back, so that every block is whole
    column = code.smaller(task % n_blocks * width, code.integer(m - width)) * 4
    matrix = weight + head * (4 * n * m) + column
    pairs = n_rows // TOKENS * TOKENS

    def tile(row: Value, n_tokens: int) -> None:
        sources = [start(args[:4], (row + i) * n_heads + head) for i in range(n_tokens)]
        zero = code.constant(F32X16, 0.0)
        sums = [[code.variable(zero) for _ in counts] for _ in range(n_tokens)]
        with code.loop(0, code.integer(n)) as d:
            at = matrix + d * (4 * m)
            factors = [
                code.load_first(at + 4 * LANES * c, F32X16, count) for c, count in enumerate(counts)
            ]
            for source, totals in zip(sources, sums, strict=True):
                number = code.splat(code.load(source + d * 4, F32))
                for factor, total in zip(factors, totals, strict=True):
                    total.set(code.fma(factor, number, total.value))
        for i, totals in enumerate(sums):
            target = y + ((row + i) * n_heads + head) * (4 * m) + column
            for c, (count, total) in enumerate(zip(counts, totals, strict=True)):
                code.store_first(total.value, target + 4 * LANES * c, count)

    with code.loop(0, pairs, TOKENS) as row:
        tile(row, TOKENS)
    with code.loop(pairs, n_rows) as row:
        tile(row, 1)
