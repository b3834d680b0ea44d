"""The gated delta rule one head and one token at a time, as its definition reads, in the dtype of
its inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.recurrence import FoldArguments, UpdateLog

DeltaArguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v, g, beta and the state, as kernels.recurrence.delta_rule.gated_delta_rule describes
them."""
DeltaSlotArguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v, g, beta, pool, read and write, as kernels.recurrence.delta_rule.gated_delta_slots
describes them.
"""


def gated_delta_rule(
    *inputs: *DeltaArguments, grouped: bool, n_snapshots: int = 1
) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta, state = inputs
    n_batch, n_tokens, n_k_heads, d_k = k.shape
    n_v_heads = v.shape[2]
    rows, kept = [], []
    for b in range(n_batch):
        for j in range(n_v_heads):
            i = _key_head(j, n_v_heads, n_k_heads, grouped)
            S = state[b, j]
            outputs, states = [], []
            for t in range(n_tokens):
                # [1] for a gate per head, [d_k, 1] for a gate per key channel
                S = g[b, t, j].exp().unsqueeze(-1) * S
                u = beta[b, t, j] * (v[b, t, j] - S.T @ k[b, t, i])
                S = S + torch.outer(k[b, t, i], u)
                outputs.append(S.T @ q[b, t, i] / math.sqrt(d_k))
                states.append(S)
            rows.append(torch.stack(outputs))
            kept.append(torch.stack(states[::-1][:n_snapshots]))
    o = torch.stack(rows).unflatten(0, (n_batch, n_v_heads)).transpose(1, 2)
    snapshots = torch.stack(kept).unflatten(0, (n_batch, n_v_heads)).transpose(1, 2)
    return o, snapshots


def gated_delta_into(*inputs: *DeltaArguments, grouped: bool, slots: Sequence[Tensor]) -> Tensor:
    o, states = gated_delta_rule(*inputs, grouped=grouped, n_snapshots=len(slots))
    for slot, newest_first in zip(slots, states.unbind(1), strict=True):
        slot.copy_(newest_first)
    return o


def gated_delta_slots(*inputs: *DeltaSlotArguments, grouped: bool) -> Tensor:
    q, k, v, g, beta, pool, read, write = inputs
    o, states = gated_delta_rule(
        q, k, v, g, beta, pool[read], grouped=grouped, n_snapshots=write.shape[1]
    )
    for rows, newest_first in zip(write.tolist(), states, strict=True):
        for row, S in zip(rows, newest_first, strict=True):
            pool[row] = S
    return o


def gated_delta_log(*inputs: *DeltaArguments, grouped: bool) -> tuple[Tensor, UpdateLog]:
    """See kernels.recurrence.delta_rule.gated_delta_log. Forms every state, as the definition of u
    does."""
    _, k, v, g, beta, state = inputs
    n_tokens, n_v_heads = v.shape[1:3]
    o, states = gated_delta_rule(*inputs, grouped=grouped, n_snapshots=n_tokens)
    before = [state, *states.flip(1)[:, :-1].unbind(1)]
    u = torch.empty_like(v)
    for b in range(v.shape[0]):
        for j in range(n_v_heads):
            i = _key_head(j, n_v_heads, k.shape[2], grouped)
            for t in range(n_tokens):
                decayed = g[b, t, j].exp().unsqueeze(-1) * before[t][b, j]
                u[b, t, j] = beta[b, t, j] * (v[b, t, j] - decayed.T @ k[b, t, i])
    return o, UpdateLog(k, u, g)


def fold(*inputs: *FoldArguments, grouped: bool, out: Tensor | None = None) -> Tensor:
    """See kernels.recurrence.delta_rule.fold: the recurrence with what it adds known."""
    state, log, n_tokens = inputs
    left, right, g = log
    n_batch, n_heads = state.shape[:2]
    counts = [n_tokens] * n_batch if isinstance(n_tokens, int) else n_tokens.tolist()
    folded = state.clone()
    for b in range(n_batch):
        for j in range(n_heads):
            i = _key_head(j, n_heads, left.shape[2], grouped)
            group = _key_head(j, n_heads, right.shape[2], True)
            for t in range(counts[b]):
                decayed = g[b, t, j].exp().unsqueeze(-1) * folded[b, j]
                folded[b, j] = decayed + torch.outer(left[b, t, i], right[b, t, group])
    return folded if out is None else out.copy_(folded)


def _key_head(j: int, n_v_heads: int, n_k_heads: int, grouped: bool) -> int:
    return j // (n_v_heads // n_k_heads) if grouped else j % n_k_heads
