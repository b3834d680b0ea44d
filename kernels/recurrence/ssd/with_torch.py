"""State-space duality in batched matrix products: few tokens one by one, more in chunks.

Results have the dtype of the inputs. Inside the file all tensors are rows per sequence and head, n
= B * H: u, x [n, T, P], g [n, T, 1], B, C [n, T, N], D [n, 1, 1], a state [n, P, N]. `slots` are
the tensors [n, P, N] that receive the newest states, newest first. In a chunk, with c the running
sum of g and M_ij = e^(c_i - c_j) for i >= j:

    O = (C B^T * M) U + diag(e^c) C S0^T + D X,   S = e^(c_last) S0 + U^T diag(M_last) B
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.pointwise.with_torch import pointwise
from kernels.recurrence import UpdateLog
from kernels.recurrence.ssd.naive import SsdArguments, SsdInputs, SsdSlotArguments

# Up to here the recurrence is as fast, and hands out every state on its way.
SHORT = 4
CHUNK = 64

Slots = Sequence[Tensor]


class SsdHeadRows(NamedTuple):
    """The inputs of some tokens, one row of the batch for every sequence and head."""

    u: Tensor
    x: Tensor
    g: Tensor
    B: Tensor
    C: Tensor
    D: Tensor

    @property
    def n_tokens(self) -> int:
        return self.x.shape[1]

    def tokens(self, start: int, stop: int) -> SsdHeadRows:
        u, x, g, B, C = (part[:, start:stop] for part in self[:5])
        return SsdHeadRows(u, x, g, B, C, self.D)


def ssd(*inputs: *SsdArguments, n_snapshots: int = 1) -> tuple[Tensor, Tensor]:
    x, *_, state = inputs
    kept = state.new_empty(min(x.shape[1], n_snapshots), *state.shape)
    return ssd_into(*inputs, slots=kept.unbind(0)), kept.transpose(0, 1)


def ssd_into(*inputs: *SsdArguments, slots: Slots, invariant: bool = False) -> Tensor:
    """See kernels.recurrence.ssd.ssd_into. invariant: by the recurrence at every length."""
    return _by_heads(inputs, slots, invariant=invariant)


def ssd_slots(*inputs: *SsdSlotArguments) -> Tensor:
    x, dt, g, B, C, D, pool, read, write = inputs
    state = pool.index_select(0, read)
    o, kept = ssd(x, dt, g, B, C, D, state, n_snapshots=write.shape[1])
    pool.index_put_((write,), kept)
    return o


def ssd_log(*inputs: *SsdArguments, invariant: bool = False) -> tuple[Tensor, UpdateLog]:
    """See kernels.recurrence.ssd.ssd_log: the outputs through a state that is thrown away.
    invariant: by the recurrence at every length."""
    x, dt, g, B, *_, state = inputs
    o = _by_heads(inputs, [torch.empty_like(state)], invariant=invariant)
    return o, UpdateLog(dt.unsqueeze(-1) * x, B, g)


def _by_heads(inputs: SsdArguments, slots: Slots, *, invariant: bool) -> Tensor:
    state = inputs[6]
    size = (-1, *state.shape[2:])
    rows = _rows_per_head(inputs[:6])
    places = [slot.view(size) for slot in slots]
    if invariant or rows.n_tokens <= SHORT:
        o = _by_token(rows, state.reshape(size), places, invariant=invariant)
    else:
        o = _chunks(rows, state.reshape(size), places)
    return o.view(*state.shape[:2], rows.n_tokens, -1).transpose(1, 2)


def _by_token(rows: SsdHeadRows, state: Tensor, slots: Slots, *, invariant: bool) -> Tensor:
    """All tokens one by one; states too old to be kept pass through the oldest slot."""
    decay = pointwise(torch.exp, rows.g, invariant=invariant)
    outputs = []
    for t in range(rows.n_tokens):
        out = slots[min(rows.n_tokens - 1 - t, len(slots) - 1)]
        S = torch.mul(state, decay[:, t : t + 1], out=out)
        state = S.addcmul_(rows.u[:, t].unsqueeze(2), rows.B[:, t : t + 1])
        outputs.append(torch.bmm(state, rows.C[:, t].unsqueeze(2)).transpose(1, 2))
    return torch.cat(outputs, 1) + rows.D * rows.x


def _chunks(rows: SsdHeadRows, state: Tensor, slots: Slots) -> Tensor:
    """All tokens in chunks, each starting from the state that the one before left."""
    n_tokens = rows.n_tokens
    outputs = []
    # the first chunk takes the remainder, so that the newest states come out of one chunk
    start, stop = 0, (n_tokens - 1) % CHUNK + 1
    while start < n_tokens:
        mine = slots[n_tokens - stop : n_tokens - start]
        o, state = _chunk(rows.tokens(start, stop), state, mine or [torch.empty_like(state)])
        outputs.append(o)
        start, stop = stop, stop + CHUNK
    return torch.cat(outputs, 1)


def _chunk(rows: SsdHeadRows, state: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    """The outputs of a chunk and the state after it; its newest states go into the slots."""
    u, x, g, B, C, D = rows
    M, e = _decays(g)
    o = torch.baddbmm(D * x, torch.bmm(C, B.transpose(1, 2)) * M, u)
    o += torch.bmm(C, state.transpose(1, 2)) * e
    # the oldest state to keep by one product, the recurrence leads on from it
    t = rows.n_tokens - len(slots)
    weighted = (u * M[:, t].unsqueeze(2)).transpose(1, 2)
    torch.mul(state, e[:, t : t + 1], out=slots[-1]).baddbmm_(weighted, B)
    decay = g.exp()
    for i in range(t + 1, rows.n_tokens):
        here, before = slots[rows.n_tokens - 1 - i], slots[rows.n_tokens - i]
        torch.mul(before, decay[:, i : i + 1], out=here)
        here.addcmul_(u[:, i].unsqueeze(2), B[:, i : i + 1])
    return o, slots[0]


def _decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """M [n, T, T] and e^c [n, T, 1]."""
    # f64: the differences of long sums would lose the small ones, which weigh most
    c = g.cumsum(1, dtype=torch.float64)
    # cut before exp as well as after it: above the diagonal the exponents are positive
    M = (c - c.transpose(1, 2)).tril().to(g.dtype).exp().tril()
    return M, c.to(g.dtype).exp()


def _rows_per_head(inputs: SsdInputs) -> SsdHeadRows:
    x, dt, g, B, C, D = inputs
    n_batch, _, n_heads = dt.shape
    x = _heads_first(x)
    u = x * _heads_first(dt.unsqueeze(-1))
    B, C = (_heads_first(part.repeat_interleave(n_heads // part.shape[2], 2)) for part in (B, C))
    return SsdHeadRows(u, x, _heads_first(g.unsqueeze(-1)), B, C, D.repeat(n_batch).view(-1, 1, 1))


def _heads_first(x: Tensor) -> Tensor:
    """[B, T, H, d] -> [B * H, T, d]."""
    return x.transpose(1, 2).flatten(0, 1)
