"""The matrices of a layer's experts prepared for one compute mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import uses_llvm
from kernels.linear.packed import BlockData, PackedWeight
from kernels.pointwise import clamped_swiglu, naive, relu2, situ, swiglu


class ExpertPlaces(NamedTuple):
    """One matrix of every expert, in one or two parts of as many rows, one below the other.

    type: GGML's name. n_rows: of a part. row_bytes: of a row. addresses: int64 [parts, experts];
    what is there has to stay alive, and is kept by the owner of this.
    """

    type: str
    n_rows: int
    row_bytes: int
    addresses: Tensor

    @property
    def n_parts(self) -> int:
        return self.addresses.shape[0]


LayerPlaces = tuple[ExpertPlaces, ExpertPlaces]
"""For every expert its first matrix (gate above up, or up alone), and down."""


def layer_places(pairs: Sequence[tuple[PackedWeight, PackedWeight]]) -> LayerPlaces | None:
    """The places of a layer's experts, None unless `find_places` has those of both matrices and
    there are programs to read them."""
    if not uses_llvm():
        return None
    inner, down = (find_places(matrices) for matrices in zip(*pairs, strict=True))
    return (inner, down) if inner and down else None


def find_places(matrices: Sequence[PackedWeight]) -> ExpertPlaces | None:
    """The places of one matrix of each expert; None unless all of them are on the CPU, in
    blocks of one type for integer products, in equal parts without factors."""
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
        if part.mode == "q8"
        and isinstance(part.data, BlockData)
        and not part.data.bytes.is_cuda
        and part.factors is None
    ]


@dataclass(frozen=True, slots=True)
class Activation:
    """One kind. gated: whether an expert opens with two matrices, gate above up, else with one.

    reference, run: of what the first product gives, [n, 2f] if gated, else [n, f] -> [n, f]; `run`
    gives a row the same bits whatever the other rows are. kind, numbers: which of the formulas and
    its constants, for kernels that have them built in.
    """

    name: str
    gated: bool
    reference: Callable[[Tensor], Tensor]
    run: Callable[[Tensor], Tensor]
    kind: str
    numbers: tuple[float, ...] = ()


def _halves(opened: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = opened.chunk(2, 1)
    return gate, up


def swiglu_within(limit: float | None) -> Activation:
    """SwiGLU with a limit, if there is one; see kernels.pointwise.swiglu."""
    return Activation(
        "swiglu" if limit is None else f"swiglu within {limit}",
        True,
        lambda opened: naive.swiglu(*_halves(opened), limit),
        lambda opened: swiglu(*_halves(opened), limit, invariant=True),
        "swiglu",
        () if limit is None else (limit,),
    )


def clamped_swiglu_activation(limit: float) -> Activation:
    return Activation(
        f"clamped swiglu {limit}",
        True,
        lambda opened: naive.clamped_swiglu(*_halves(opened), limit),
        lambda opened: clamped_swiglu(*_halves(opened), limit, invariant=True),
        "clamped_swiglu",
        (limit,),
    )


def situ_activation(beta: float, linear_beta: float) -> Activation:
    return Activation(
        f"situ {beta} {linear_beta}",
        True,
        lambda opened: naive.situ(*_halves(opened), beta, linear_beta),
        lambda opened: situ(*_halves(opened), beta, linear_beta, invariant=True),
        "situ",
        (beta, linear_beta),
    )


SWIGLU = swiglu_within(None)
RELU2 = Activation("relu2", False, naive.relu2, relu2, "relu2")


Matrices = Iterable[tuple[Tensor, Tensor]]
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

    @property
    def reads(self) -> tuple[PackedWeight, ...]:
        """For blocks on a GPU: matrices of one expert that multiply rows (rms_norm_rows)."""
        if self.mode != "q8" or not isinstance(self.data, tuple):
            return ()
        return tuple(
            PackedWeight(
                "q8", (self.shape[1], self.shape[2]), 0, part._replace(bytes=part.bytes[0])
            )
            for part in self.data[:-1]
        )


def pack_each(
    pack: Callable[[Tensor, str], PackedWeight],
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
