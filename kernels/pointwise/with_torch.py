"""The operations in PyTorch, on its fused functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional

from kernels.pointwise import naive
from kernels.pointwise.naive import in_terms_of

# PyTorch computes whole vectors and the rest number by number, through other approximations of
# exp and log: sigmoid, silu and softplus then differ in the last bit. This many fill the vectors
# of every CPU, and up to GRAIN numbers stay with one thread, so no rest arises in between.
VECTOR = 64
GRAIN = 32768

Function = Callable[[Tensor], Tensor]


def pointwise(function: Function, x: Tensor, *, invariant: bool) -> Tensor:
    """function(x). x: f32, any shape.

    function: an operation of PyTorch on every number by itself. invariant: each result has the
    same bits whatever its neighbours are.
    """
    return _in_vectors(function, x) if invariant else function(x)


def _in_vectors(function: Function, x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    n = flat.numel()
    if n % VECTOR:
        flat = functional.pad(flat, (0, -n % VECTOR))
    if flat.numel() > GRAIN:
        y = torch.cat([function(part) for part in flat.split(GRAIN)])
    else:
        y = function(flat)
    return y[:n].view(x.shape)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
}
_FUSED = {**_FUNCTIONS, "larger": naive.larger, "smaller": naive.smaller}
_IN_VECTORS = _FUSED | {
    name: partial(pointwise, f, invariant=True) for name, f in _FUNCTIONS.items()
}

_EXACT = ("add", "multiply", "relu2")
_ROUNDED = (
    *("swiglu", "clamped_swiglu", "situ", "geglu", "output_gate", "open_low"),
    *("delta_gates", "step_gates"),
)


def _all_in_terms_of(functions: dict[str, Callable[..., Tensor]], *names: str) -> SimpleNamespace:
    made = {name: in_terms_of(getattr(naive, name), functions) for name in names}
    return SimpleNamespace(**made)


fused = _all_in_terms_of(_FUSED, *_EXACT, *_ROUNDED)
invariant = _all_in_terms_of(_IN_VECTORS, *_ROUNDED)
"""Those whose results would depend on their neighbours, where they do not."""
