"""The norms as their formulas read."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.norm.rms_norm."""
    mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return x / torch.sqrt(mean_square + eps) * weight


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.norm.layer_norm."""
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return rms_norm(centred, weight, eps)


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.norm.l2_norm."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.norm.head_norm."""
    return l2_norm(x, eps) * weight


def max_norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.norm.max_norm."""
    largest = x.abs().max(-1, keepdim=True).values.clamp(min=torch.finfo(x.dtype).tiny)
    return x / largest, largest


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, sigmoid: bool = False
) -> torch.Tensor:
    """See kernels.norm.gated_rms_norm."""
    opened = torch.sigmoid(gate)
    return rms_norm(x, weight, eps) * (opened if sigmoid else gate * opened)


def group_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See kernels.norm.group_rms_norm."""
    return rms_norm(x * (gate * torch.sigmoid(gate)), weight, eps)
