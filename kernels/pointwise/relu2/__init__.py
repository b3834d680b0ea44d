"""Squared ReLU: what a feed-forward network without a gate does between its projections."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.pointwise.relu2 import naive, with_torch

_run = pick(
    naive.relu2,
    with_torch.relu2,
    "kernels.pointwise.relu2.with_triton",
    "kernels.pointwise.relu2.with_llvm",
)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2 (So et al. 2021, arXiv 2109.08668).

    x: f32 [..., d], any strides. Returns [..., d]. Differentiable. Each result has the same bits
    whatever numbers stand before and behind it.
    """
    return _run(x)
