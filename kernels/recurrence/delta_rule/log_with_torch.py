"""The gated delta rule without states: a log of its rows, and the state rebuilt from a log."""

from __future__ import annotations

import torch

from kernels.recurrence.delta_rule.naive import DeltaArguments, DeltaLog
from kernels.recurrence.delta_rule.with_torch import by_token
from kernels.recurrence.delta_rule.wy import (
    CHUNK,
    HeadRows,
    gates_per_head,
    per_value_head,
    rows_per_head,
    solve_chunk,
)
from kernels.whole_vectors import pointwise


def gated_delta_log(
    *inputs: *DeltaArguments, grouped: bool, invariant: bool = False
) -> tuple[torch.Tensor, DeltaLog]:
    """See kernels.recurrence.delta_rule.gated_delta_log. Keeps the dtype of its inputs. invariant:
    by the recurrence at every length, through a state that is thrown away; so are gates per
    channel."""
    q, k, v, g, beta, state = inputs
    n_batch, n_tokens, n_heads, d_v = v.shape
    rows = rows_per_head(q, k, v, g, beta, grouped)
    state = state.reshape(-1, k.shape[3], d_v)
    if invariant or (rows.by_channel and n_tokens > 1):
        written: list[torch.Tensor] = []
        scratch = [torch.empty_like(state)]
        o, _ = by_token(rows, state, scratch, invariant=invariant, written=written)
        u = torch.cat(written, 1)
    else:
        o, u = _token(rows, state) if n_tokens == 1 else _chunks(rows, state)
    o, u = (x.view(n_batch, n_heads, n_tokens, d_v).transpose(1, 2) for x in (o, u))
    return o, DeltaLog(k, u, g)


def _token(rows: HeadRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: q^T S1 = (e^g q)^T S0 + (q^T k) u^T, so the state is only read, and once."""
    q, k, v, g, beta = rows
    k_read, q_read = torch.bmm(torch.cat((k, q), 1) * g.exp(), state).split(1, 1)
    u = (v - k_read) * beta
    return torch.addcmul(q_read, (q * k).sum(2, keepdim=True), u) * k.shape[2] ** -0.5, u


def _chunks(rows: HeadRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
    state: torch.Tensor,
    log: DeltaLog,
    n_tokens: int | torch.Tensor,
    *,
    grouped: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See kernels.recurrence.delta_rule.fold. Keeps the dtype of its inputs."""
    k, u, g = _prefix(log, n_tokens)
    if k.shape[1] == 0:
        return state.clone() if out is None else out.copy_(state)
    size = (-1, *state.shape[2:])
    n_heads = u.shape[2]
    k, u, g = (
        per_value_head(k, n_heads, grouped),
        per_value_head(u, n_heads, grouped),
        gates_per_head(g),
    )
    target = None if out is None else out.view(size)
    if k.shape[1] == 1:
        S = torch.mul(state.reshape(size), g.exp().transpose(1, 2), out=target)
        S.addcmul_(k.transpose(1, 2), u)
    else:
        # f64: the differences of long sums would lose the small ones, which weigh most
        c = g.cumsum(1, dtype=torch.float64)
        last = c[:, -1:]
        S = torch.mul(state.reshape(size), last.to(u.dtype).exp().transpose(1, 2), out=target)
        S.baddbmm_((k * (last - c).to(u.dtype).exp()).transpose(1, 2), u)
    return S.view(state.shape) if out is None else out


def fold_invariant(
    state: torch.Tensor,
    log: DeltaLog,
    n_tokens: int | torch.Tensor,
    *,
    grouped: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """fold token by token, with the bits of the states of an invariant gated_delta_into."""
    k, u, g = _prefix(log, n_tokens)
    size = (-1, *state.shape[2:])
    target = torch.empty(state.shape, device=state.device) if out is None else out
    S = target.view(size).copy_(state.reshape(size))
    if k.shape[1] == 0:
        return target
    k, u = (per_value_head(x, u.shape[2], grouped) for x in (k, u))
    decay = pointwise(torch.exp, gates_per_head(g), invariant=True)
    for t in range(k.shape[1]):
        S.mul_(decay[:, t].unsqueeze(2)).addcmul_(k[:, t].unsqueeze(2), u[:, t : t + 1])
    return target


def _prefix(log: DeltaLog, n_tokens: int | torch.Tensor) -> DeltaLog:
    """The first n_tokens of a log. Where rows differ, the rest of the shorter ones is zeros:
    no decay and nothing added, whatever the log holds there."""
    if isinstance(n_tokens, int):
        return DeltaLog(*(x[:, :n_tokens] for x in log))
    inside = torch.arange(log.g.shape[1], device=log.g.device) < n_tokens.unsqueeze(1)
    zero = log.g.new_zeros(())
    wide = (inside.view(*inside.shape, *[1] * (x.dim() - 2)) for x in log)
    return DeltaLog(*(torch.where(mask, x, zero) for mask, x in zip(wide, log, strict=True)))
