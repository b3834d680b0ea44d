"""The gated delta rule in batched matrix products: one token directly, more in WY chunks.

Inside the file N = B * H_v and all heads are value heads: q, k [N, T, d_k], v [N, T, d_v],
g, beta [N, T], states [B, H_v, d_k, d_v].
"""

from __future__ import annotations

import torch

CHUNK = 32


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    grouped: bool,
    n_snapshots: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.delta_rule.gated_delta_rule. Keeps the dtype of its inputs."""
    n_batch, n_tokens, n_heads, d_v = v.shape
    q = _per_value_head(q, n_heads, grouped)
    k = _per_value_head(k, n_heads, grouped)
    v = v.transpose(1, 2).reshape(-1, n_tokens, d_v)
    beta = beta.transpose(1, 2).reshape(-1, n_tokens)
    per_channel = g.dim() == 4
    g = g.transpose(1, 2).reshape(-1, n_tokens, g.shape[3] if per_channel else 1)

    if n_tokens == 1:
        o, kept = _token(q, k, v, g, beta, state)
    elif per_channel:
        o, kept = _pieces(q, k, v, g, beta, state, 1, n_snapshots)
    elif n_tokens <= CHUNK:
        o, kept = _chunk(q, k, v, g, beta, state, min(n_tokens, n_snapshots))
    else:
        o, kept = _pieces(q, k, v, g, beta, state, CHUNK, n_snapshots)
    return o.view(n_batch, n_heads, n_tokens, d_v).transpose(1, 2), kept


def _pieces(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    size: int,
    n_snapshots: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens in pieces of `size`, each starting from the state the one before left."""
    n_tokens = v.shape[1]
    outputs: list[torch.Tensor] = []
    snapshots: list[torch.Tensor] = []
    # the first piece takes the remainder, so that the newest snapshots come out of one piece
    start, stop = 0, (n_tokens - 1) % size + 1
    while start < n_tokens:
        piece = slice(start, stop)
        q_, k_, v_, g_, beta_ = q[:, piece], k[:, piece], v[:, piece], g[:, piece], beta[:, piece]
        if stop - start == 1:
            o, states = _token(q_, k_, v_, g_, beta_, state)
        else:
            wanted = min(stop - start, max(1, n_snapshots - (n_tokens - stop)))
            o, states = _chunk(q_, k_, v_, g_, beta_, state, wanted)
        outputs.append(o)
        if stop + n_snapshots > n_tokens:
            snapshots.insert(0, states)
        state = states[:, 0]
        start, stop = stop, stop + size
    kept = snapshots[0] if len(snapshots) == 1 else torch.cat(snapshots, 1)
    return torch.cat(outputs, 1), kept


def _per_value_head(x: torch.Tensor, n_heads: int, grouped: bool) -> torch.Tensor:
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


def _token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token by the recurrence: o [N, 1, d_v] and the new state [B, 1, H_v, d_k, d_v].

    g: [N, 1, 1], or [N, 1, d_k] for a gate per key channel.
    """
    n_batch, n_heads, d_k, d_v = state.shape
    S = state.reshape(-1, d_k, d_v) * g.exp().transpose(1, 2)
    u = torch.baddbmm(v, k, S, alpha=-1) * beta.unsqueeze(2)
    # an outer product through addcmul: half the time of a matrix product of depth 1
    S = torch.addcmul(S, k.transpose(1, 2), u)
    o = torch.bmm(q, S) * d_k**-0.5
    return o, S.view(n_batch, 1, n_heads, d_k, d_v)


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    wanted: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """T tokens at once in the WY form: o [N, T, d_v] and the `wanted` newest states.

    With c the running sum of g and D_ij = e^(c_i - c_j) for i >= j, the rows u of the recurrence
    solve (I + strictly lower(diag(beta) (K K^T * D))) U = diag(beta) (V - diag(e^c) K S0).
    """
    n, n_tokens, d_v = v.shape
    d_k = k.shape[2]
    S0 = state.reshape(n, d_k, d_v)
    # f64: the differences of long sums would lose the small ones, which weigh most
    c = g.cumsum(1, dtype=torch.float64)
    # cut before exp as well as after it: above the diagonal the exponents are positive
    D = (c - c.transpose(1, 2)).tril().to(v.dtype).exp().tril()
    e = c.to(v.dtype).exp()

    kq = torch.cat((k, q), 1)
    gram = torch.bmm(kq, k.transpose(1, 2)).view(n, 2, n_tokens, n_tokens) * D.unsqueeze(1)
    read = torch.bmm(kq, S0).view(n, 2, n_tokens, d_v) * e.unsqueeze(1)
    beta = beta.unsqueeze(2)
    # only the strictly lower part is read: the diagonal counts as ones
    inverse = torch.linalg.solve_triangular(
        gram[:, 0] * beta,
        torch.eye(n_tokens, dtype=v.dtype, device=v.device),
        upper=False,
        unitriangular=True,
    )
    u = torch.bmm(inverse, (v - read[:, 0]) * beta)
    scale = d_k**-0.5
    o = torch.baddbmm(read[:, 1], gram[:, 1], u, beta=scale, alpha=scale)
    return o, _states(k, u, g, D, e, state, wanted)


def _states(
    k: torch.Tensor,
    u: torch.Tensor,
    g: torch.Tensor,
    D: torch.Tensor,
    e: torch.Tensor,
    state: torch.Tensor,
    wanted: int,
) -> torch.Tensor:
    """The `wanted` newest states, newest first: [B, wanted, H_v, d_k, d_v].

    The oldest of them is rebuilt from the rows of the whole prefix,
    S_t = e^(c_t) S0 + sum over i <= t of e^(c_t - c_i) k_i u_i^T; the recurrence leads on from it.
    """
    n_batch, n_heads, d_k, d_v = state.shape
    n_tokens = k.shape[1]
    t = n_tokens - wanted
    weighted = k[:, : t + 1] * D[:, t, : t + 1].unsqueeze(2)
    S0 = state.reshape(-1, d_k, d_v) * e[:, t].unsqueeze(2)
    S = torch.baddbmm(S0, weighted.transpose(1, 2), u[:, : t + 1])
    S = S.view(n_batch, n_heads, d_k, d_v)
    if wanted == 1:
        return S.unsqueeze(1)
    states = S.new_empty(n_batch, wanted, n_heads, d_k, d_v)
    states[:, -1] = S
    heads = (n_batch, n_heads, n_tokens, -1)
    decay, k, u = g.exp().view(heads), k.view(heads), u.view(heads)
    for i in range(t + 1, n_tokens):
        S = states[:, n_tokens - 1 - i]
        torch.mul(states[:, n_tokens - i], decay[:, :, i].unsqueeze(3), out=S)
        S.addcmul_(k[:, :, i].unsqueeze(3), u[:, :, i].unsqueeze(2))
    return states
