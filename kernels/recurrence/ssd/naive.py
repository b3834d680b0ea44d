"""State-space duality one head and one token at a time, as its definition reads, in the dtype of
its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.recurrence import UpdateLog

SsdInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""x, dt, g, B, C and D, as kernels.recurrence.ssd.ssd describes them."""
SsdArguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The same and the state."""
SsdSlotArguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The inputs, pool, read and write, as kernels.recurrence.ssd.ssd_slots describes them."""


def ssd(*inputs: *SsdArguments, n_snapshots: int = 1) -> tuple[Tensor, Tensor]:
    x, dt, g, B, C, D, state = inputs
    n_batch, n_tokens, n_heads = dt.shape
    share = n_heads // B.shape[2]
    rows, kept = [], []
    for b in range(n_batch):
        for h in range(n_heads):
            i, S = h // share, state[b, h]
            outputs, states = [], []
            for t in range(n_tokens):
                x_t = x[b, t, h]
                S = g[b, t, h].exp() * S + torch.outer(dt[b, t, h] * x_t, B[b, t, i])
                outputs.append(S @ C[b, t, i] + D[h] * x_t)
                states.append(S)
            rows.append(torch.stack(outputs))
            kept.append(torch.stack(states[::-1][:n_snapshots]))
    o = torch.stack(rows).unflatten(0, (n_batch, n_heads)).transpose(1, 2)
    return o, torch.stack(kept).unflatten(0, (n_batch, n_heads)).transpose(1, 2)


def ssd_into(*inputs: *SsdArguments, slots: Sequence[Tensor]) -> Tensor:
    o, states = ssd(*inputs, n_snapshots=len(slots))
    for slot, newest_first in zip(slots, states.unbind(1), strict=True):
        slot.copy_(newest_first)
    return o


def ssd_slots(*inputs: *SsdSlotArguments) -> Tensor:
    x, dt, g, B, C, D, pool, read, write = inputs
    o, states = ssd(x, dt, g, B, C, D, pool[read], n_snapshots=write.shape[1])
    for rows, newest_first in zip(write.tolist(), states, strict=True):
        for row, S in zip(rows, newest_first, strict=True):
            pool[row] = S
    return o


def ssd_log(*inputs: *SsdArguments) -> tuple[Tensor, UpdateLog]:
    x, dt, g, B, *_ = inputs
    o, _ = ssd(*inputs)
    return o, UpdateLog(dt.unsqueeze(-1) * x, B, g)
