"""Inputs of the gated delta rule as upstream's kernel test draws them, and its shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor

    def tokens(self, start: int, stop: int, state: torch.Tensor | None = None) -> Inputs:
        piece = [x[:, start:stop] for x in self[:5]]
        return Inputs(*piece, self.state if state is None else state)

    def double(self) -> Inputs:
        return Inputs(*(x.double() for x in self))

    def to(self, device: str) -> Inputs:
        return Inputs(*(x.to(device) for x in self))


def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
    return torch.rand(shape) * (high - low) + low


def make(
    n_k_heads: int,
    d: int,
    n_tokens: int,
    n_batch: int,
    repeat: int = 1,
    kda: bool = False,
    lowest_g: float = -20.0,
    d_v: int | None = None,
) -> Inputs:
    """The distributions of upstream's kernel test; d_v: the width of v, d unless given."""
    n_heads, d_v = n_k_heads * repeat, d_v or d
    q, k = (
        torch.nn.functional.normalize(uniform(-1, 1, n_batch, n_tokens, n_k_heads, d), dim=-1)
        for _ in range(2)
    )
    gates = (n_batch, n_tokens, n_heads)
    return Inputs(
        q,
        k,
        uniform(-0.3, 5, n_batch, n_tokens, n_heads, d_v),
        uniform(lowest_g, -1e-4, *((*gates, d) if kda else gates)),
        uniform(0, 1, *gates),
        uniform(-1, 1, n_batch, n_heads, d, d_v),
    )


def strided(plain: Inputs) -> Inputs:
    """The same numbers stored as [B, H, T, d], as every second element, as transposed states."""
    return Inputs(
        *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain[:4]),
        torch.stack((plain.beta, plain.beta + 9), -1)[..., 0],
        plain.state.transpose(2, 3).contiguous().transpose(2, 3),
    )


# heads, d, tokens, batch, value heads per key head, gate per channel, snapshots
UPSTREAM = [
    *[(32, 128, 1, 1, 1, False, 1), (32, 16, 1, 1, 1, False, 1), (16, 64, 1, 2, 1, False, 1)],
    *[(4, 64, 4, 1, 1, False, 1), (4, 64, 4, 2, 1, False, 1), (8, 32, 4, 2, 2, False, 1)],
    *[(32, 16, 1, 1, 1, True, 1), (4, 64, 1, 1, 1, True, 1), (4, 64, 1, 2, 1, True, 1)],
    *[(4, 16, 1, 2, 1, True, 1), (4, 32, 4, 1, 1, True, 1), (4, 64, 4, 2, 1, True, 1)],
    *[(8, 32, 4, 2, 2, True, 1), (4, 16, 4, 2, 1, True, 1)],
    *[(4, 64, n, 1, 1, False, 1) for n in (64, 127, 256, 65, 100, 200)],
    (4, 64, 127, 2, 1, False, 1),
    *[(4, 64, n, 1, 1, True, 1) for n in (64, 33, 100)],
    # every intermediate state kept
    *[(4, 16, 2, 1, 1, False, 2), (4, 32, 4, 1, 1, False, 4), (4, 64, 4, 2, 1, False, 4)],
    *[(8, 128, 4, 1, 1, False, 4), (4, 64, 4, 2, 1, True, 4), (8, 32, 4, 2, 2, True, 4)],
    # fewer planes than tokens, then more
    *[(4, 32, 8, 1, 1, False, 3), (4, 64, 16, 2, 1, False, 4)],
    *[(4, 32, 1, 1, 1, False, 4), (4, 32, 2, 1, 1, False, 4), (4, 32, 2, 1, 1, True, 4)],
]
