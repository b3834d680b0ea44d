"""The norms in as few operations as PyTorch allows."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.whole_vectors import pointwise


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.norm.rms_norm."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.norm.layer_norm."""
    return functional.layer_norm(x, (x.shape[-1],), weight, None, eps)


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.norm.l2_norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.norm.head_norm."""
    return l2_norm(x, eps) * weight


def max_norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.norm.max_norm."""
    # the infinity norm would be one operation less and up to twenty times slower
    largest = x.abs().amax(-1, True).clamp_min_(torch.finfo(x.dtype).tiny)
    return x / largest, largest


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, sigmoid: bool = False
) -> torch.Tensor:
    """See kernels.norm.gated_rms_norm."""
    return rms_norm(x, weight, eps) * _opened(gate, sigmoid, invariant=False)


def gated_rms_norm_invariant(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, sigmoid: bool = False
) -> torch.Tensor:
    """gated_rms_norm, with each row's bits independent of the rows around it."""
    return rms_norm(x, weight, eps) * _opened(gate, sigmoid, invariant=True)


def _opened(gate: torch.Tensor, sigmoid: bool, *, invariant: bool) -> torch.Tensor:
    return pointwise(torch.sigmoid if sigmoid else functional.silu, gate, invariant=invariant)


def group_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See kernels.norm.group_rms_norm."""
    opened = x * functional.silu(gate)
    return functional.rms_norm(opened, (x.shape[-1],), None, eps) * weight


def group_rms_norm_invariant(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """group_rms_norm, with each row's bits independent of the rows around it."""
    opened = x * pointwise(functional.silu, gate, invariant=True)
    return functional.rms_norm(opened, (x.shape[-1],), None, eps) * weight
