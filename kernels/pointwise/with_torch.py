"""The operations in PyTorch, on its fused functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch.nn import functional

from kernels.pointwise import naive
from kernels.pointwise.naive import in_terms_of
from kernels.whole_vectors import pointwise

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
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
