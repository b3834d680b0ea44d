"""Operations on one number after another, each said once as an expression.

`naive` has the expressions, which are the reference as they stand; `with_torch`, `with_llvm` and
`with_triton` make theirs from the same ones. All tensors are f32 with any strides, and all results
are differentiable.

invariant: each result has the same bits whatever numbers are next to it in memory. Operations
without the argument always have them.
"""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import pick
from kernels.pointwise import naive, with_torch

_LLVM, _TRITON = "kernels.pointwise.with_llvm", "kernels.pointwise.with_triton"

_ON_GPU = ("relu2", "swiglu", "clamped_swiglu", "situ", "geglu", "step_gates")
_usual = {
    name: pick(getattr(naive, name), each, _TRITON if name in _ON_GPU else None, _LLVM)
    for name, each in vars(with_torch.fused).items()
}
_same = {
    name: pick(each, each, _TRITON if name in _ON_GPU else None, _LLVM)
    for name, each in vars(with_torch.invariant).items()
}
"""Those whose results have the same bits in any company: PyTorch in whole vectors, LLVM, Triton."""


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y. x [..., d]; y of the same shape, or [d], added to every row. Returns [..., d]."""
    return _usual["add"](x, y)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """x * y. x [..., d]; y of the same shape, or [d], for every row. Returns [..., d]."""
    return _usual["multiply"](x, y)


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021, arXiv 2109.08668). x [..., d]. Returns [..., d]."""
    return _usual["relu2"](x)


def swiglu(
    gate: Tensor, up: Tensor, limit: float | None = None, *, invariant: bool = False
) -> Tensor:
    """silu(gate) * up, silu(x) = x / (1 + e^-x) (Shazeer 2020, arXiv 2002.05202).

    gate, up [..., d], of one shape. limit: the first factor is cut off above it, the second on
    both sides. Returns [..., d].
    """
    return (_same if invariant else _usual)["swiglu"](gate, up, limit)


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, *, invariant: bool = False) -> Tensor:
    """silu(min(gate, limit)) times up cut off on both sides: unlike in swiglu, the limit comes
    before silu (glm5-next, deepseek4).

    gate, up [..., d], of one shape. Returns [..., d].
    """
    return (_same if invariant else _usual)["clamped_swiglu"](gate, up, limit)


def situ(
    gate: Tensor, up: Tensor, beta: float, linear_beta: float, *, invariant: bool = False
) -> Tensor:
    """beta tanh(gate / beta) sigmoid(gate) times up, which passes as linear_beta
    tanh(up / linear_beta) if that is above 0 (kimi-k3).

    gate, up [..., d], of one shape; beta > 0. Returns [..., d].
    """
    return (_same if invariant else _usual)["situ"](gate, up, beta, linear_beta)


def geglu(gate: Tensor, up: Tensor, *, invariant: bool = False) -> Tensor:
    """gelu(gate) * up with gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
    (Hendrycks & Gimpel 2016, arXiv 1606.08415).

    gate, up [..., d], of one shape. Returns [..., d].
    """
    return (_same if invariant else _usual)["geglu"](gate, up)


def output_gate(x: Tensor, gate: Tensor, *, invariant: bool = False) -> Tensor:
    """x * sigmoid(gate). x [..., d]; gate of the same shape or [..., 1]. Returns [..., d]."""
    return (_same if invariant else _usual)["output_gate"](x, gate)


def open_low(low: Tensor, n_streams: int, *, invariant: bool = False) -> Tensor:
    """silu(low / n_streams), between the two matrices of a gate of residual streams (Zhu et al.,
    arXiv 2409.19606). low [..., rank]. Returns [..., rank]."""
    return (_same if invariant else _usual)["open_low"](low, float(n_streams))


def delta_gates(
    decay: Tensor, dt: Tensor, a: Tensor, beta: Tensor, *, invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """g = softplus(decay + dt) * a and sigmoid(beta), as kernels.recurrence.delta_rule takes them.

    decay, beta [..., H], a layer's projections; dt, a [H], a = -exp(A_log) (Yang et al. 2024,
    arXiv 2412.06464, after Mamba 2). Returns (g, beta), both [..., H].
    """
    return (_same if invariant else _usual)["delta_gates"](decay, dt, a, beta)


def step_gates(
    step: Tensor, dt: Tensor, a: Tensor, *, invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """dt = softplus(step + dt) and g = dt * a, as kernels.recurrence.ssd takes them.

    step [..., H], a layer's projection; dt, a [H], a = -exp(A_log) (Dao & Gu 2024, arXiv
    2405.21060). Returns (dt, g), both [..., H].
    """
    return (_same if invariant else _usual)["step_gates"](step, dt, a)
