"""The gated delta rule in batched matrix products: few tokens one by one, more in WY chunks.

Results have the dtype of the inputs. Inside the file all tensors are rows per value head: N = B *
H_v and all heads are value heads: q, k [N, T, d_k], v [N, T, d_v], g [N, T, 1] or [N, T, d_k], beta
[N, T, 1], a state [N, d_k, d_v]. `slots` are the tensors [N, d_k, d_v] that receive the newest
states, newest first; without them only the last state is made, in memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.pointwise.with_torch import pointwise
from kernels.recurrence import FoldArguments, UpdateLog
from kernels.recurrence.delta_rule.naive import DeltaArguments, DeltaSlotArguments

# Up to here the recurrence itself is as fast as the WY form, hands out every state on its way,
# and gives a token the same bits whether it came alone or with others.
SHORT = 4

Slots = Sequence[Tensor] | None


def gated_delta_rule(
    *inputs: *DeltaArguments, grouped: bool, n_snapshots: int = 1
) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta, state = inputs
    n_batch, n_tokens, n_heads, d_v = v.shape
    d_k = k.shape[3]
    rows = rows_per_head(q, k, v, g, beta, grouped)
    state = state.reshape(-1, d_k, d_v)
    n_kept = min(n_tokens, n_snapshots)
    if n_kept == 1 and torch.is_grad_enabled():
        o, last = _any_length(rows, state, None)
        kept = last.unsqueeze(0)
    else:
        # a state is as large as the caches: write each where it stays, copy none
        kept = state.new_empty(n_kept, *state.shape)
        o, _ = _any_length(rows, state, kept.unbind(0))
    o = o.view(n_batch, n_heads, n_tokens, d_v).transpose(1, 2)
    return o, kept.view(n_kept, n_batch, n_heads, d_k, d_v).transpose(0, 1)


def gated_delta_into(
    *inputs: *DeltaArguments, grouped: bool, slots: Sequence[Tensor], invariant: bool = False
) -> Tensor:
    """See kernels.recurrence.delta_rule.gated_delta_into. invariant: by the recurrence at every
    length."""
    q, k, v, g, beta, state = inputs
    n_batch, n_tokens, n_heads, d_v = v.shape
    size = (-1, k.shape[3], d_v)
    rows = rows_per_head(q, k, v, g, beta, grouped)
    compute = partial(by_token, invariant=True) if invariant else _any_length
    o, _ = compute(rows, state.reshape(size), [slot.view(size) for slot in slots])
    return o.view(n_batch, n_heads, n_tokens, d_v).transpose(1, 2)


def gated_delta_slots(*inputs: *DeltaSlotArguments, grouped: bool) -> Tensor:
    q, k, v, g, beta, pool, read, write = inputs
    state = pool.index_select(0, read)
    o, kept = gated_delta_rule(q, k, v, g, beta, state, grouped=grouped, n_snapshots=write.shape[1])
    pool.index_put_((write,), kept)
    return o


def _any_length(rows: HeadRows, state: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    """The outputs [N, T, d_v] and the last state."""
    if rows.n_tokens == 1:
        return _token(rows, state, slots)
    if rows.n_tokens <= SHORT or rows.by_channel:
        return by_token(rows, state, slots)
    if rows.n_tokens <= CHUNK:
        return _chunk(rows, state, slots)
    return _chunks(rows, state, slots)


def _token(rows: HeadRows, state: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    """One token by the recurrence: by_token without its bookkeeping, which would double the
    time."""
    q, k, v, g, beta = rows
    out = slots[0] if slots else None
    S = torch.mul(state, g.exp().transpose(1, 2), out=out)
    u = torch.baddbmm(v, k, S, alpha=-1) * beta
    # an outer product through addcmul: half the time of a matrix product of depth 1
    S = torch.addcmul(S, k.transpose(1, 2), u, out=out)
    return torch.bmm(q * k.shape[2] ** -0.5, S), S


def by_token(
    rows: HeadRows,
    state: Tensor,
    slots: Slots,
    *,
    invariant: bool = False,
    written: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """All tokens one by one by the recurrence. written: receives the rows u [N, 1, d_v]."""
    q, k, v, g, beta = rows
    q, decay = q * k.shape[2] ** -0.5, pointwise(torch.exp, g, invariant=invariant).transpose(1, 2)
    tokens = zip(
        *(x.split(1, 1) for x in (q, k, v, beta)),
        decay.split(1, 2),
        range(rows.n_tokens - 1, -1, -1),
        strict=True,
    )
    outputs = []
    for q_t, k_t, v_t, beta_t, decay_t, back in tokens:
        # states too old to be kept pass through the oldest slot
        out = slots[min(back, len(slots) - 1)] if slots else None
        S = torch.mul(state, decay_t, out=out)
        u = torch.baddbmm(v_t, k_t, S, alpha=-1) * beta_t
        state = torch.addcmul(S, k_t.transpose(1, 2), u, out=out)
        outputs.append(torch.bmm(q_t, state))
        if written is not None:
            written.append(u)
    return torch.cat(outputs, 1), state


def _chunks(rows: HeadRows, state: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    """All tokens in chunks, each starting from the state that the one before left."""
    n_tokens = rows.n_tokens
    outputs: list[Tensor] = []
    # the first chunk takes the remainder, so that the newest states come out of one chunk
    start, stop = 0, (n_tokens - 1) % CHUNK + 1
    while start < n_tokens:
        mine = slots[n_tokens - stop : n_tokens - start] if slots else None
        o, state = _chunk(rows.tokens(start, stop), state, mine)
        outputs.append(o)
        start, stop = stop, stop + CHUNK
    return torch.cat(outputs, 1), state


def _chunk(rows: HeadRows, state: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    """T tokens at once in the WY form."""
    o, u, D, e = solve_chunk(rows, state)
    k, n_tokens = rows.k, rows.n_tokens
    # the oldest state to keep, rebuilt from the rows of the whole prefix up to token t:
    # S_t = e^(c_t) S0 + sum over i <= t of e^(c_t - c_i) k_i u_i^T
    t = n_tokens - len(slots) if slots else n_tokens - 1
    weighted = (k * D[:, t].unsqueeze(2)).transpose(1, 2)
    if not slots:
        return o, torch.baddbmm(state * e[:, t : t + 1], weighted, u)
    torch.mul(state, e[:, t : t + 1], out=slots[-1]).baddbmm_(weighted, u)
    # the recurrence leads on from it
    decay = rows.g.exp()
    for i in range(t + 1, n_tokens):
        here, before = slots[n_tokens - 1 - i], slots[n_tokens - i]
        torch.mul(before, decay[:, i : i + 1], out=here)
        here.addcmul_(k[:, i].unsqueeze(2), u[:, i : i + 1])
    return o, slots[0]


def gated_delta_log(
    *inputs: *DeltaArguments, grouped: bool, invariant: bool = False
) -> tuple[Tensor, UpdateLog]:
    """See kernels.recurrence.delta_rule.gated_delta_log. invariant: by the recurrence at every
    length, through a state that is thrown away; so are gates per channel."""
    q, k, v, g, beta, state = inputs
    n_batch, n_tokens, n_heads, d_v = v.shape
    rows = rows_per_head(q, k, v, g, beta, grouped)
    state = state.reshape(-1, k.shape[3], d_v)
    if invariant or (rows.by_channel and n_tokens > 1):
        written: list[Tensor] = []
        scratch = [torch.empty_like(state)]
        o, _ = by_token(rows, state, scratch, invariant=invariant, written=written)
        u = torch.cat(written, 1)
    else:
        o, u = _log_token(rows, state) if n_tokens == 1 else _log_chunks(rows, state)
    o, u = (x.view(n_batch, n_heads, n_tokens, d_v).transpose(1, 2) for x in (o, u))
    return o, UpdateLog(k, u, g)


def _log_token(rows: HeadRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: q^T S1 = (e^g q)^T S0 + (q^T k) u^T, so the state is only read, and once."""
    q, k, v, g, beta = rows
    k_read, q_read = torch.bmm(torch.cat((k, q), 1) * g.exp(), state).split(1, 1)
    u = (v - k_read) * beta
    return torch.addcmul(q_read, (q * k).sum(2, keepdim=True), u) * k.shape[2] ** -0.5, u


def _log_chunks(rows: HeadRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """All tokens in the WY form; only between two chunks is a state made."""
    n_tokens = rows.n_tokens
    outputs, written = [], []
    start, stop = 0, (n_tokens - 1) % CHUNK + 1
    while True:
        part = rows.tokens(start, stop)
        o, u, D, e = solve_chunk(part, state)
        outputs.append(o)
        written.append(u)
        if stop == n_tokens:
            break
        weighted = (part.k * D[:, -1].unsqueeze(2)).transpose(1, 2)
        state = (state * e[:, -1:]).baddbmm_(weighted, u)
        start, stop = stop, stop + CHUNK
    if len(outputs) == 1:
        return o, u
    return torch.cat(outputs, 1), torch.cat(written, 1)


def fold(
    *inputs: *FoldArguments, grouped: bool, out: Tensor | None = None, invariant: bool = False
) -> Tensor:
    """See kernels.recurrence.delta_rule.fold. invariant: token by token, with the bits of the
    states of an invariant gated_delta_into or ssd_into."""
    state, log, n_tokens = inputs
    rows, columns, g = _prefix(log, n_tokens)
    if g.shape[1] == 0:
        return state.clone() if out is None else out.copy_(state)
    n_heads, size = state.shape[1], (-1, *state.shape[2:])
    rows, columns = per_value_head(rows, n_heads, grouped), per_value_head(columns, n_heads, True)
    g = gates_per_head(g)
    if invariant:
        whole = torch.empty(state.shape, device=state.device) if out is None else out
        S = whole.view(size).copy_(state.reshape(size))
        decay = pointwise(torch.exp, g, invariant=True)
        for t in range(g.shape[1]):
            S.mul_(decay[:, t].unsqueeze(2)).addcmul_(
                rows[:, t].unsqueeze(2), columns[:, t : t + 1]
            )
        return whole
    target = None if out is None else out.view(size)
    if g.shape[1] == 1:
        S = torch.mul(state.reshape(size), g.exp().transpose(1, 2), out=target)
        S.addcmul_(rows.transpose(1, 2), columns)
    else:
        # f64: the differences of long sums would lose the small ones, which weigh most
        c = g.cumsum(1, dtype=torch.float64)
        last = c[:, -1:]
        S = torch.mul(state.reshape(size), last.to(g.dtype).exp().transpose(1, 2), out=target)
        S.baddbmm_((rows * (last - c).to(g.dtype).exp()).transpose(1, 2), columns)
    return S.view(state.shape) if out is None else out


def _prefix(log: UpdateLog, n_tokens: int | Tensor) -> UpdateLog:
    """The first n_tokens of a log. Where rows differ, the rest of the shorter ones is zeros:
    no decay and nothing added, whatever the log holds there."""
    if isinstance(n_tokens, int):
        return UpdateLog(*(x[:, :n_tokens] for x in log))
    inside = torch.arange(log.g.shape[1], device=log.g.device) < n_tokens.unsqueeze(1)
    zero = log.g.new_zeros(())
    wide = (inside.view(*inside.shape, *[1] * (x.dim() - 2)) for x in log)
    return UpdateLog(*(torch.where(mask, x, zero) for mask, x in zip(wide, log, strict=True)))


CHUNK = 32


class HeadRows(NamedTuple):
    """The inputs of some tokens, one row of the batch for every sequence and value head."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def n_tokens(self) -> int:
        return self.v.shape[1]

    @property
    def by_channel(self) -> bool:
        """Whether each key channel has a gate. Then the recurrence is the fastest at every length:
        a chunk has a decay for every pair of tokens and channel, each an exponential."""
        return self.g.shape[2] > 1

    def tokens(self, start: int, stop: int) -> HeadRows:
        return HeadRows(*(x[:, start:stop] for x in self))


def rows_per_head(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, grouped: bool
) -> HeadRows:
    """From [B, T, H, …] to [N, T, …]; each value head gets its key head's q and k."""
    n_tokens, n_heads = v.shape[1:3]
    return HeadRows(
        per_value_head(q, n_heads, grouped),
        per_value_head(k, n_heads, grouped),
        v.transpose(1, 2).reshape(-1, n_tokens, v.shape[3]),
        gates_per_head(g),
        beta.transpose(1, 2).reshape(-1, n_tokens, 1),
    )


def gates_per_head(g: Tensor) -> Tensor:
    """[B, T, H_v] or [B, T, H_v, d_k] -> [N, T, 1] or [N, T, d_k]."""
    width = g.shape[3] if g.dim() == 4 else 1
    return g.transpose(1, 2).reshape(-1, g.shape[1], width)


def per_value_head(x: Tensor, n_heads: int, grouped: bool) -> Tensor:
    """[B, T, H_k, d] -> [B * H_v, T, d], without a copy where the strides allow it."""
    n_batch, n_tokens, n_k_heads, d = x.shape
    x = x.transpose(1, 2)
    repeat = n_heads // n_k_heads
    if repeat == 1:
        return x.reshape(n_batch * n_heads, n_tokens, d)
    if grouped:
        x = x.unsqueeze(2).expand(n_batch, n_k_heads, repeat, n_tokens, d)
    else:
        x = x.unsqueeze(1).expand(n_batch, repeat, n_k_heads, n_tokens, d)
    return x.reshape(n_batch * n_heads, n_tokens, d)


def solve_chunk(rows: HeadRows, state: Tensor) -> tuple[Tensor, ...]:
    """T tokens at once, one gate per head.

    With c the running sum of g and D_ij = e^(c_i - c_j) for i >= j, the rows u of the recurrence
    solve (I + strictly lower(diag(beta) (K K^T * D))) U = diag(beta) (V - diag(e^c) K S0).
    """
    q, k, v, g, beta = rows
    n, n_tokens, d_v = v.shape
    # f64: the differences of long sums would lose the small ones, which weigh most
    c = g.cumsum(1, dtype=torch.float64)
    # cut before exp as well as after it: above the diagonal the exponents are positive
    D = (c - c.transpose(1, 2)).tril().to(v.dtype).exp().tril()
    e = c.to(v.dtype).exp()

    kq = torch.cat((k, q), 1)
    gram = torch.bmm(kq, k.transpose(1, 2)).view(n, 2, n_tokens, n_tokens) * D.unsqueeze(1)
    read = torch.bmm(kq, state).view(n, 2, n_tokens, d_v) * e.unsqueeze(1)
    # only the strictly lower part is read: the diagonal counts as ones
    inverse = torch.linalg.solve_triangular(
        gram[:, 0] * beta,
        torch.eye(n_tokens, dtype=v.dtype, device=v.device),
        upper=False,
        unitriangular=True,
    )
    u = torch.bmm(inverse, (v - read[:, 0]) * beta)
    scale = k.shape[2] ** -0.5
    return torch.baddbmm(read[:, 1], gram[:, 1], u, beta=scale, alpha=scale), u, D, e
