"""States and windows in rows of a pool that are named by numbers on the device.

With views of storage the host chooses the rows, and a CUDA graph would repeat its choice for ever.
With numbers it chooses nothing: two passes of the same shape differ in values alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.graphs import Fixed
from engine.transfer import upload_together
from kernels.conv import causal_conv
from kernels.delta_rule import gated_delta_slots


@dataclass(frozen=True, slots=True)
class PoolRows:
    """Rows of one pass, int64, all of them views of `table`.

    states, windows: [n_seqs], read as input. write: [n_seqs, n_new], for the new states, newest
    first; in_order: the same oldest first. carried, carried_to: [n], rows that move on unchanged.
    """

    table: torch.Tensor
    states: torch.Tensor
    windows: torch.Tensor
    write: torch.Tensor
    in_order: torch.Tensor
    carried: torch.Tensor
    carried_to: torch.Tensor

    @classmethod
    def on(
        cls,
        device: torch.device,
        states: Sequence[int],
        windows: Sequence[int],
        write: Sequence[Sequence[int]],
        carried: Sequence[int] = (),
        carried_to: Sequence[int] = (),
    ) -> PoolRows:
        """Put the numbers there in one upload."""
        read, also, new, moving, to = (
            np.array(rows, np.int64) for rows in (states, windows, write, carried, carried_to)
        )
        table, parts = upload_together((read, also, new, new[:, ::-1], moving, to), device)
        return cls(table, *parts)

    def fixed(self) -> Fixed:
        """What a recording of the pass takes for granted, and what it looks up."""
        return Fixed((self.write.shape, self.carried.shape), (self.table,))


def conv_in_pool(
    pool: torch.Tensor, rows: PoolRows, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """silu of the causal convolution of x [n_seqs, T, C]; pool: windows [n_rows, K - 1, C]."""
    carried = pool[rows.carried] if rows.carried.numel() else None
    y, history = causal_conv(x, weight, pool[rows.windows])
    after_each = history.unfold(1, pool.shape[1], 1).transpose(2, 3)
    pool[rows.in_order] = after_each[:, -rows.in_order.shape[1] :]
    if carried is not None:
        pool[rows.carried_to] = carried
    return y


def delta_in_pool(
    pool: torch.Tensor,
    rows: PoolRows,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    grouped: bool,
) -> torch.Tensor:
    """The gated delta rule; pool: states [n_rows, n_v_heads, d, d]."""
    carried = pool[rows.carried] if rows.carried.numel() else None
    o = gated_delta_slots(q, k, v, g, beta, pool, rows.states, rows.write, grouped=grouped)
    if carried is not None:
        pool[rows.carried_to] = carried
    return o
