"""The gated delta rule in batched matrix products: few tokens one by one, more in WY chunks.

Inside the file N = B * H_v and all heads are value heads: q, k [N, T, d_k], v [N, T, d_v],
g [N, T, 1] or [N, T, d_k], beta [N, T, 1], a state [N, d_k, d_v], states kept
[n_snapshots, N, d_k, d_v].
"""

from __future__ import annotations

import torch

CHUNK = 32
# Up to here the recurrence itself is as fast as the WY form, hands out every state on its way,
# and gives a token the same bits whether it came alone or with others.
SHORT = 4


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
    d_k = k.shape[3]
    q = _per_value_head(q, n_heads, grouped)
    k = _per_value_head(k, n_heads, grouped)
    v = v.transpose(1, 2).reshape(-1, n_tokens, d_v)
    beta = beta.transpose(1, 2).reshape(-1, n_tokens, 1)
    per_channel = g.dim() == 4
    g = g.transpose(1, 2).reshape(-1, n_tokens, d_k if per_channel else 1)
    state = state.reshape(-1, d_k, d_v)
    n_kept = min(n_tokens, n_snapshots)

    if n_tokens == 1:
        o, kept = _token(q, k, v, g, beta, state)
    elif n_tokens <= SHORT or per_channel:
        o, kept = _tokens(q, k, v, g, beta, state, n_kept)
    elif n_tokens <= CHUNK:
        o, kept = _chunk(q, k, v, g, beta, state, n_kept)
    else:
        o, kept = _chunks(q, k, v, g, beta, state, n_kept)
    o = o.view(n_batch, n_heads, n_tokens, d_v).transpose(1, 2)
    return o, kept.view(n_kept, n_batch, n_heads, d_k, d_v).transpose(0, 1)


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
    """One token by the recurrence: _tokens without its bookkeeping, which would double the time."""
    S = state * g.exp().transpose(1, 2)
    u = torch.baddbmm(v, k, S, alpha=-1) * beta
    # an outer product through addcmul: half the time of a matrix product of depth 1
    S = torch.addcmul(S, k.transpose(1, 2), u)
    return torch.bmm(q * k.shape[2] ** -0.5, S), S.unsqueeze(0)


def _tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    n_kept: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens one by one by the recurrence: o [N, T, d_v] and the n_kept <= T newest states."""
    if n_kept == 1 and torch.is_grad_enabled():
        slots = None
    else:
        # a state is as large as the caches: write each where it stays, copy none
        kept = state.new_empty(n_kept, *state.shape)
        slots = kept.unbind(0)
    n_tokens = q.shape[1]
    q, decay = q * k.shape[2] ** -0.5, g.exp().transpose(1, 2)
    tokens = zip(
        *(x.split(1, 1) for x in (q, k, v, beta)),
        decay.split(1, 2),
        range(n_tokens - 1, -1, -1),
        strict=True,
    )
    outputs = []
    for q_t, k_t, v_t, beta_t, decay_t, back in tokens:
        out = slots[min(back, n_kept - 1)] if slots else None
        S = torch.mul(state, decay_t, out=out)
        u = torch.baddbmm(v_t, k_t, S, alpha=-1) * beta_t
        state = torch.addcmul(S, k_t.transpose(1, 2), u, out=out)
        outputs.append(torch.bmm(q_t, state))
    return torch.cat(outputs, 1), kept if slots else state.unsqueeze(0)


def _chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    n_kept: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens in chunks, each starting from the state that the one before left."""
    n_tokens = v.shape[1]
    outputs: list[torch.Tensor] = []
    snapshots: list[torch.Tensor] = []
    # the first chunk takes the remainder, so that the newest states come out of one chunk
    start, stop = 0, (n_tokens - 1) % CHUNK + 1
    while start < n_tokens:
        wanted = n_kept - (n_tokens - stop)
        part = slice(start, stop)
        o, states = _chunk(
            q[:, part],
            k[:, part],
            v[:, part],
            g[:, part],
            beta[:, part],
            state,
            min(stop - start, max(1, wanted)),
        )
        outputs.append(o)
        if wanted > 0:
            snapshots.insert(0, states)
        state = states[0]
        start, stop = stop, stop + CHUNK
    kept = snapshots[0] if len(snapshots) == 1 else torch.cat(snapshots)
    return torch.cat(outputs, 1), kept


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    n_kept: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """T tokens at once in the WY form: o [N, T, d_v] and the n_kept <= T newest states.

    With c the running sum of g and D_ij = e^(c_i - c_j) for i >= j, the rows u of the recurrence
    solve (I + strictly lower(diag(beta) (K K^T * D))) U = diag(beta) (V - diag(e^c) K S0).
    """
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
    o = torch.baddbmm(read[:, 1], gram[:, 1], u, beta=scale, alpha=scale)

    # the oldest state to keep, rebuilt from the rows of the whole prefix up to token t:
    # S_t = e^(c_t) S0 + sum over i <= t of e^(c_t - c_i) k_i u_i^T
    t = n_tokens - n_kept
    S = state * e[:, t : t + 1]
    weighted = (k * D[:, t].unsqueeze(2)).transpose(1, 2)
    if n_kept == 1:
        return o, torch.baddbmm(S, weighted, u).unsqueeze(0)
    states = S.new_empty(n_kept, *S.shape)
    torch.baddbmm(S, weighted, u, out=states[-1])
    # the recurrence leads on from it
    decay = g.exp()
    for i in range(t + 1, n_tokens):
        here, before = states[n_tokens - 1 - i], states[n_tokens - i]
        torch.mul(before, decay[:, i : i + 1], out=here)
        here.addcmul_(k[:, i].unsqueeze(2), u[:, i : i + 1])
    return o, states
