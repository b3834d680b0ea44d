"""The gates on a GPU: both in one pass."""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.triton_setup import as_rows, cdiv, jit

TILE = 1024


@jit
def _softplus(x):
    """ln(1 + e^x), without an e^x that overflows; small ones keep their digits."""
    e = tl.exp(-tl.abs(x))
    whole = 1 + e
    # what rounding the sum took is put back (Kahan)
    logarithm = tl.where(whole == 1, e, tl.log(whole) * (e / tl.where(whole == 1, 1.0, whole - 1)))
    return tl.where(x < 0, 0.0, x) + logarithm


@jit
def _channel_gates(
    decay, dt, a, beta, g, opened, n_channels, n_heads, decay_row, beta_row, bound,
    BOUNDED: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = column < n_channels
    x = tl.load(decay + row * decay_row + column, inside, 0.0) + tl.load(dt + column, inside, 0.0)
    scale = tl.load(a + column, inside, 0.0)
    kept = tl.sigmoid(-x * scale) * bound if BOUNDED else _softplus(x) * scale
    tl.store(g + row * n_channels + column, kept, inside)
    inside = column < n_heads
    written = tl.sigmoid(tl.load(beta + row * beta_row + column, inside, 0.0))
    tl.store(opened + row * n_heads + column, written, inside)


def channel_gates(
    decay: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    beta: torch.Tensor,
    bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.recurrence.channel_gates.channel_gates."""
    n_channels, n_heads = decay.shape[-1], beta.shape[-1]
    g, opened = decay.new_empty(decay.shape), beta.new_empty(beta.shape)
    decays, betas = as_rows(decay), as_rows(beta)
    grid = decays.shape[0], cdiv(max(n_channels, n_heads), TILE)
    _channel_gates[grid](
        decays, dt.contiguous(), a.contiguous(), betas, g, opened, n_channels, n_heads,
        decays.stride(0), betas.stride(0), float(bound or 0.0),
        BOUNDED=bound is not None, BD=TILE, num_warps=4,
    )  # fmt: skip
    return g, opened
