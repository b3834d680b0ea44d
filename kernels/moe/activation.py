"""What an expert does between its matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.pointwise import naive, relu2, situ, swiglu


@dataclass(frozen=True, slots=True)
class Activation:
    """One kind. gated: whether an expert opens with two matrices, gate above up, else with one.

    law, run: of what the first product gives, [n, 2f] if gated, else [n, f] -> [n, f]; `run` gives
    a row the same bits whatever rows stand beside it. kind, numbers: which of the formulas and its
    constants, for kernels that have them built in.
    """

    name: str
    gated: bool
    law: Callable[[torch.Tensor], torch.Tensor]
    run: Callable[[torch.Tensor], torch.Tensor]
    kind: str
    numbers: tuple[float, ...] = ()


def _halves(opened: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


def situ_activation(beta: float, linear_beta: float) -> Activation:
    """See kernels.pointwise.situ."""
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
