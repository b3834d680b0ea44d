"""Expressions of the operations: on the functions of this file they are the reference;
`in_terms_of` puts the functions of another implementation in their place.

See kernels.pointwise for shapes. `larger` and `smaller` take the bound first, and keep NaN.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., object])


def in_terms_of(expression: F, functions: Mapping[str, Callable[..., object]]) -> F:
    """An expression of this file in terms of other functions than those of this file."""
    source = cast(FunctionType, expression)
    names = {**functions, "__name__": source.__module__, "__builtins__": builtins}
    made = FunctionType(source.__code__, names, source.__name__, source.__defaults__)
    made.__annotations__ = source.__annotations__  # Triton reads which are tl.constexpr
    return cast(F, made)


def larger(least: float, x: Tensor) -> Tensor:
    return x.clamp(min=least)


def smaller(most: float, x: Tensor) -> Tensor:
    return x.clamp(max=most)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def tanh(x: Tensor) -> Tensor:
    return torch.tanh(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), without an e^x that overflows."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


# of whatever an implementation computes with: tensors, vectors of LLVM, blocks of Triton


def add(x, y):
    return x + y


def multiply(x, y):
    return x * y


def relu2(x):
    x = larger(0.0, x)
    return x * x


def swiglu(gate, up, limit=None):
    gate = silu(gate)
    if limit is not None:
        gate, up = smaller(limit, gate), larger(-limit, smaller(limit, up))
    return gate * up


def clamped_swiglu(gate, up, limit):
    return silu(smaller(limit, gate)) * larger(-limit, smaller(limit, up))


def situ(gate, up, beta, linear_beta):
    if linear_beta > 0:
        up = tanh(up / linear_beta) * linear_beta
    return tanh(gate / beta) * beta * sigmoid(gate) * up


def geglu(gate, up):
    # 1 + tanh(y) is 2 sigmoid(2 y)
    inner = gate * (gate * gate * 0.044715 + 1.0)
    return gate * sigmoid(inner * 1.5957691216057308) * up


def output_gate(x, gate):
    return x * sigmoid(gate)


def open_low(low, n_streams):
    return silu(low / n_streams)


def delta_gates(decay, dt, a, beta):
    return softplus(decay + dt) * a, sigmoid(beta)


def step_gates(step, dt, a):
    size = softplus(step + dt)
    return size, size * a
