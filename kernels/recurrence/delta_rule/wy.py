"""What the torch versions share: rows per value head, and a chunk of tokens in the WY form.

N = B * H_v and all heads are value heads: q, k [N, T, d_k], v [N, T, d_v], g [N, T, 1] or
[N, T, d_k], beta [N, T, 1], a state [N, d_k, d_v].
"""

from __future__ import annotations

from typing import NamedTuple

import torch

CHUNK = 32


class HeadRows(NamedTuple):
    """The inputs of some tokens, one row of the batch for every sequence and value head."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

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


class SolvedChunk(NamedTuple):
    """A chunk solved: o and u [N, T, d_v], D [N, T, T], the decays e^(c_i) [N, T, 1]."""

    o: torch.Tensor
    u: torch.Tensor
    D: torch.Tensor
    e: torch.Tensor


def rows_per_head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    grouped: bool,
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


def gates_per_head(g: torch.Tensor) -> torch.Tensor:
    """[B, T, H_v] or [B, T, H_v, d_k] -> [N, T, 1] or [N, T, d_k]."""
    width = g.shape[3] if g.dim() == 4 else 1
    return g.transpose(1, 2).reshape(-1, g.shape[1], width)


def per_value_head(x: torch.Tensor, n_heads: int, grouped: bool) -> torch.Tensor:
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


def solve_chunk(rows: HeadRows, state: torch.Tensor) -> SolvedChunk:
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
    return SolvedChunk(torch.baddbmm(read[:, 1], gram[:, 1], u, beta=scale, alpha=scale), u, D, e)
