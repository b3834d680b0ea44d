"""Rows of a matrix on their way into a layer, as numbers or in the blocks of their file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """Matrix rows f32 [out, in], or biases f32 [out]; with a `type` each row's GGUF blocks of that
    type, uint8 [out, bytes]. rounding: the GGML type whose products are to round their other side
    as llama.cpp does, or None.

    A row of blocks is as whole as a row of numbers, so layers rearrange both alike.
    """

    data: torch.Tensor
    type: str | None = None
    rounding: str | None = None

    def rearranged(self, rearrange: Callable[[torch.Tensor], Iterable[torch.Tensor]]) -> list[Rows]:
        """The parts that `rearrange` makes of the data; it may move rows, never look into one."""
        return [replace(self, data=part) for part in rearrange(self.data)]
