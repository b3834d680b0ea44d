"""A kernel under test: the interface of its adapter, and the memory that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.conform.cases import Recurrence, Rows, Shape
from engine.conform.packages import Package


class Memory:
    """Tensors filled with NaN, so that a kernel which reads what was never written is seen."""

    def __init__(self, device: str) -> None:
        self.device = device

    def empty(self, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor of NaN, or of -1 for whole numbers."""
        fill = float("nan") if dtype.is_floating_point else -1
        return torch.full(sizes, fill, dtype=dtype, device=self.device)

    def zeros(self, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor of zeros, for what the engine clears."""
        return torch.zeros(*sizes, dtype=dtype, device=self.device)

    def whole(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Whole numbers as a tensor: indices, counts."""
        return torch.tensor(values, dtype=dtype, device=self.device)


class Subject(Protocol):
    """What an adapter offers: states of `shape.n_sequences` sequences, and the calls of a round."""

    def load(self, sequence: int, state: torch.Tensor) -> None:
        """Make state (the reference's layout, float32) that of an empty sequence."""

    def verify(self, rows: Rows) -> torch.Tensor:
        """Outputs of all rows, [tokens, …]; which of them will be accepted is not known."""

    def accept(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """The engine's step after judging: the first `counts` rows of the last pass remain."""

    def decode(self, rows: Rows) -> torch.Tensor:
        """One row a sequence without drafts, by the path that the engine takes for it."""

    def state(self, sequence: int) -> torch.Tensor | None:
        """The state after the accepted rows in the reference's layout; None: not readable."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel with its index rules, as an adapter plays it.

    `ring` is the number of rows that a circular log of inputs holds (0: there is none), `log`
    whether a pass keeps its rows and not its states; `least_d` is the smallest head that it takes;
    `dtypes` those that stored states may have; `grouped` whether value heads may share a key head,
    `square` whether d_v must be d_k; `equal_lengths` whether all sequences of a pass must have the
    same number of rows.
    """

    name: str
    recurrences: tuple[Recurrence, ...]
    make: Callable[[Shape, Memory, Package], Subject]
    ring: int = 0
    log: bool = False
    least_d: int = 16
    equal_lengths: bool = False
    grouped: bool = True
    square: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
