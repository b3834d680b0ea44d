"""Inputs of state-space duality, as kernels.recurrence.ssd takes them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Inputs(NamedTuple):
    x: torch.Tensor
    dt: torch.Tensor
    g: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    state: torch.Tensor

    def tokens(self, start: int, stop: int, state: torch.Tensor | None = None) -> Inputs:
        piece = [part[:, start:stop] for part in self[:5]]
        return Inputs(*piece, self.D, self.state if state is None else state)

    def sequences(self, start: int, stop: int) -> Inputs:
        piece = [part[start:stop] for part in self[:5]]
        return Inputs(*piece, self.D, self.state[start:stop])

    def double(self) -> Inputs:
        return Inputs(*(part.double() for part in self))

    def to(self, device: str) -> Inputs:
        return Inputs(*(part.to(device) for part in self))


def make(
    n_tokens: int,
    *,
    n_batch: int = 1,
    n_groups: int = 2,
    share: int = 2,
    p: int = 8,
    n: int = 16,
    slowest: float = -0.05,
) -> Inputs:
    """n_groups groups of `share` heads; slowest: the a nearest to zero, of -2 and above."""
    n_heads = n_groups * share
    dt = torch.rand(n_batch, n_tokens, n_heads) + 0.01
    a = -torch.rand(n_heads) * (2 + slowest) + slowest
    B, C = torch.randn(2, n_batch, n_tokens, n_groups, n).unbind(0)
    return Inputs(
        torch.randn(n_batch, n_tokens, n_heads, p),
        dt,
        dt * a,
        B,
        C,
        torch.randn(n_heads),
        torch.randn(n_batch, n_heads, p, n),
    )


def strided(plain: Inputs) -> Inputs:
    """The same numbers as the columns of one projection, as every second element, as transposed
    states."""
    joined = torch.cat([part.flatten(2) for part in (plain.x, plain.B, plain.C)], -1)
    sizes = [part.shape[2] * part.shape[3] for part in (plain.x, plain.B, plain.C)]
    x, B, C = (
        columns.unflatten(2, part.shape[2:])
        for columns, part in zip(joined.split(sizes, -1), (plain.x, plain.B, plain.C), strict=True)
    )
    dt, g = (torch.stack((part, part + 9), -1)[..., 0] for part in (plain.dt, plain.g))
    state = plain.state.transpose(2, 3).contiguous().transpose(2, 3)
    return Inputs(x, dt, g, B, C, plain.D, state)
