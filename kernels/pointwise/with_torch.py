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

add = in_terms_of(naive.add, _FUSED)
multiply = in_terms_of(naive.multiply, _FUSED)
relu2 = in_terms_of(naive.relu2, _FUSED)
swiglu = in_terms_of(naive.swiglu, _FUSED)
clamped_swiglu = in_terms_of(naive.clamped_swiglu, _FUSED)
situ = in_terms_of(naive.situ, _FUSED)
geglu = in_terms_of(naive.geglu, _FUSED)
output_gate = in_terms_of(naive.output_gate, _FUSED)
delta_gates = in_terms_of(naive.delta_gates, _FUSED)
step_gates = in_terms_of(naive.step_gates, _FUSED)

invariant = SimpleNamespace(
    swiglu=in_terms_of(naive.swiglu, _IN_VECTORS),
    clamped_swiglu=in_terms_of(naive.clamped_swiglu, _IN_VECTORS),
    situ=in_terms_of(naive.situ, _IN_VECTORS),
    geglu=in_terms_of(naive.geglu, _IN_VECTORS),
    output_gate=in_terms_of(naive.output_gate, _IN_VECTORS),
    delta_gates=in_terms_of(naive.delta_gates, _IN_VECTORS),
    step_gates=in_terms_of(naive.step_gates, _IN_VECTORS),
)
"""Those whose results would depend on their neighbours, where they do not."""
