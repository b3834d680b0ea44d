"""The norms of the model family; all divide by a root mean square or a length."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.norm import naive, with_torch

_TRITON, _LLVM = "kernels.norm.with_triton", "kernels.norm.with_llvm"
_rms = pick(naive.rms_norm, with_torch.rms_norm, _TRITON, _LLVM)
_layer = pick(naive.layer_norm, with_torch.layer_norm, None, _LLVM)
_l2 = pick(naive.l2_norm, with_torch.l2_norm, _TRITON, _LLVM)
_head = pick(naive.head_norm, with_torch.head_norm, _TRITON, _LLVM)
_max = pick(naive.max_norm, with_torch.max_norm, None, _LLVM)
_gated = pick(naive.gated_rms_norm, with_torch.gated_rms_norm, _TRITON, _LLVM)
_gated_invariant = pick(
    with_torch.gated_rms_norm_invariant, with_torch.gated_rms_norm_invariant, None, _LLVM
)
_group = pick(naive.group_rms_norm, with_torch.group_rms_norm, _TRITON, _LLVM)
_group_invariant = pick(
    with_torch.group_rms_norm_invariant, with_torch.group_rms_norm_invariant, None, _LLVM
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv 1910.07467).

    x: f32 [..., d]; weight: f32 [d], used as it is, never 1 + weight. Returns [..., d].
    Differentiable, as are the other two.
    """
    return _rms(x, weight, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight over the last axis (arXiv 1607.06450), no bias.

    x: f32 [..., d]; weight: f32 [d]. Returns [..., d]. Differentiable.
    """
    return _layer(x, weight, eps)


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis; a row of zeros stays zero for eps > 0.

    x: f32 [..., d]. Returns [..., d].
    """
    return _l2(x, eps)


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """l2_norm(x, eps) * weight, with a weight of its own for every head.

    x: f32 [..., H, d]; weight: f32 [H, d]. Returns [..., H, d].
    """
    return _head(x, weight, eps)


def max_norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x / max(|x|) over the last axis, and these largest magnitudes.

    x: f32 [..., d]. Returns [..., d] and [..., 1]; the largest magnitude counts as the smallest
    normal number at least, so that a row of zeros stays zero.
    """
    return _max(x)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    sigmoid: bool = False,
    invariant: bool = False,
) -> torch.Tensor:
    """rms_norm(x) * silu(gate): norm first, gate second, as a Gated DeltaNet layer ends.

    x, gate: f32 [..., d]; weight: f32 [d]. Returns [..., d]. sigmoid: times sigmoid(gate) instead,
    as Kimi Delta Attention ends.
    invariant: a row has the same bits whatever rows stand beside it, as in the other two anyway.
    """
    return (_gated_invariant if invariant else _gated)(x, gate, weight, eps, sigmoid)


def group_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """rms_norm(x * silu(gate)) of every group by itself: gate first, norm second, as a Mamba-2
    layer ends.

    x, gate: f32 [..., G, d]; weight: f32 [G, d]. Returns [..., G, d]. Differentiable.
    invariant: as in gated_rms_norm.
    """
    return (_group_invariant if invariant else _group)(x, gate, weight, eps)
