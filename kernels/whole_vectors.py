"""Functions of single numbers whose results do not depend on where a number lies in its tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

# PyTorch computes whole vectors and the rest number by number, through other approximations of
# exp and log: sigmoid, silu and softplus then differ in the last bit. This many fill the vectors
# of every CPU, and up to GRAIN numbers stay with one thread, so no rest arises in between.
VECTOR = 64
GRAIN = 32768

Function = Callable[[torch.Tensor], torch.Tensor]


def pointwise(function: Function, x: torch.Tensor, *, invariant: bool) -> torch.Tensor:
    """function(x). x: f32, any shape.

    function: an operation of PyTorch on every number by itself. invariant: each result has the
    same bits whatever its neighbours are.
    """
    return _in_vectors(function, x) if invariant else function(x)


def _in_vectors(function: Function, x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1)
    n = flat.numel()
    if n % VECTOR:
        flat = functional.pad(flat, (0, -n % VECTOR))
    if flat.numel() > GRAIN:
        y = torch.cat([function(part) for part in flat.split(GRAIN)])
    else:
        y = function(flat)
    return y[:n].view(x.shape)
