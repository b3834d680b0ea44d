"""Where the matrices of a layer's experts are, for programs that choose among them themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.dispatch import uses_llvm
from kernels.linear import PackedWeight
from kernels.linear.blocks import BlockData


class ExpertPlaces(NamedTuple):
    """One matrix of every expert, in one or two parts of as many rows, one below the other.

    type: GGML's name. n_rows: of a part. row_bytes: of a row. addresses: int64 [parts, experts];
    what is there has to stay alive, and is kept by whoever keeps this.
    """

    type: str
    n_rows: int
    row_bytes: int
    addresses: torch.Tensor

    @property
    def n_parts(self) -> int:
        return self.addresses.shape[0]


class LayerPlaces(NamedTuple):
    """Of every expert what opens it, perhaps gate above up, and down."""

    inner: ExpertPlaces
    down: ExpertPlaces


def layer_places(pairs: Sequence[tuple[PackedWeight, PackedWeight]]) -> LayerPlaces | None:
    """The places of a layer's experts, None unless `find_places` has those of both matrices and
    there are programs to read them."""
    if not uses_llvm():
        return None
    inner, down = (find_places(matrices) for matrices in zip(*pairs, strict=True))
    return LayerPlaces(inner, down) if inner and down else None


def find_places(matrices: Sequence[PackedWeight]) -> ExpertPlaces | None:
    """The places of one matrix of each expert; None unless all of them are on the processor, in
    blocks of one type for integer products, in equal parts."""
    parts = [_parts(matrix) for matrix in matrices]
    first = parts[0]
    if not first or any(
        len(found) != len(first)
        or any(
            (one.type, one.bytes.shape) != (first[0].type, first[0].bytes.shape) for one in found
        )
        for found in parts
    ):
        return None
    addresses = [[found[i].bytes.data_ptr() for found in parts] for i in range(len(first))]
    n_rows, row_bytes = first[0].bytes.shape
    return ExpertPlaces(first[0].type, n_rows, row_bytes, torch.tensor(addresses))


def _parts(matrix: PackedWeight) -> list[BlockData]:
    parts = matrix.data if matrix.mode == "parts" else (matrix,)
    return [
        part.data
        for part in parts
        if part.mode == "q8" and isinstance(part.data, BlockData) and not part.data.bytes.is_cuda
    ]
