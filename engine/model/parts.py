"""What the layers of a model keep, as sizes: no tensors, and nothing of how they are computed."""

from __future__ import annotations

from typing import NamedTuple


class CellSize(NamedTuple):
    """What a layer keeps of every token in attention memory, float32.

    n_heads: heads of keys and values. k_dim, v_dim: their lengths; with v_dim 0 nothing but keys
    is kept, and values, if there are any, are the first columns of the keys (latent attention).
    window: how many of the newest positions a token sees, itself among them; None for all.
    """

    n_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of one cell."""
        return 4 * self.n_heads * (self.k_dim + self.v_dim)


class CellRow(NamedTuple):
    """A further row that a layer keeps beside its keys and values, by its name."""

    layer: int
    name: str


CellKey = int | CellRow
"""Whose rows in the cells: those of an attention layer, or further ones of it."""
