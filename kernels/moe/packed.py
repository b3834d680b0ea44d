"""The matrices of a layer's experts prepared for one compute mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.linear import PackedWeight
from kernels.moe.activation import SWIGLU, Activation
from kernels.moe.places import LayerPlaces, layer_places

Matrices = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""The matrices of each expert in turn: gate stacked on up, f32 [2f, d], or up alone, f32 [f, d];
and down, f32 [d, f]."""


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
    activation: Activation = SWIGLU
    places: LayerPlaces | None = None


def pack_each(
    pack: Callable[[torch.Tensor, str], PackedWeight],
    matrices: Matrices,
    mode: str,
    activation: Activation,
) -> PackedExperts:
    """Experts in this mode. `pack` is applied to both matrices of each; `data` lists the pairs."""
    pairs = ((pack(inner, mode), pack(down, mode)) for inner, down in matrices)
    return put_together(pairs, mode, activation)


def put_together(
    matrices: Iterable[tuple[PackedWeight, PackedWeight]],
    mode: str,
    activation: Activation = SWIGLU,
) -> PackedExperts:
    """Experts of matrices that are packed already, in the order of Matrices."""
    pairs = list(matrices)
    n_embd, width = pairs[0][1].shape
    n_bytes = sum(packed.n_bytes for pair in pairs for packed in pair)
    shape = len(pairs), width, n_embd
    return PackedExperts(mode, shape, n_bytes, pairs, activation, layer_places(pairs))
