"""The matrices of a layer's experts prepared for one compute mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.linear import PackedWeight
from kernels.moe.places import LayerPlaces, layer_places

Matrices = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""The matrices of each expert in turn: gate stacked on up, f32 [2f, d], and down, f32 [d, f]."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """Experts ready for `experts`; data belongs to the implementation that packed them.

    shape: how many there are, their width f, the model's width d. n_bytes is what their matrices
    occupy in memory, scales included. places: for programs that choose among them, or None.
    """

    mode: str
    shape: tuple[int, int, int]
    n_bytes: int
    data: Any
    places: LayerPlaces | None = None


def pack_each(
    pack: Callable[[torch.Tensor, str], PackedWeight], matrices: Matrices, mode: str
) -> PackedExperts:
    """Experts in this mode. `pack` is applied to both matrices of each; `data` lists the pairs."""
    return put_together(
        ((pack(gate_up, mode), pack(down, mode)) for gate_up, down in matrices), mode
    )


def put_together(matrices: Iterable[tuple[PackedWeight, PackedWeight]], mode: str) -> PackedExperts:
    """Experts of matrices that are packed already: gate stacked on up [2f, d], and down [d, f]."""
    pairs = list(matrices)
    n_embd, width = pairs[0][1].shape
    n_bytes = sum(packed.n_bytes for pair in pairs for packed in pair)
    shape = len(pairs), width, n_embd
    return PackedExperts(mode, shape, n_bytes, pairs, layer_places(pairs))
