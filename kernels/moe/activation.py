"""What an expert does between its matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.relu2 import naive as relu2_law
from kernels.relu2 import relu2
from kernels.swiglu import naive as swiglu_law
from kernels.swiglu import swiglu


@dataclass(frozen=True, slots=True)
class Activation:
    """One kind. gated: whether an expert opens with two matrices, gate above up, else with one.

    law, run: of what the first product gives, [n, 2f] if gated, else [n, f] -> [n, f]; `run` gives
    a row the same bits whatever rows stand beside it.
    """

    name: str
    gated: bool
    law: Callable[[torch.Tensor], torch.Tensor]
    run: Callable[[torch.Tensor], torch.Tensor]


def _swiglu(opened: torch.Tensor) -> torch.Tensor:
    return swiglu(*opened.chunk(2, 1), invariant=True)


SWIGLU = Activation("swiglu", True, lambda opened: swiglu_law.swiglu(*opened.chunk(2, 1)), _swiglu)
RELU2 = Activation("relu2", False, relu2_law.relu2, relu2)
