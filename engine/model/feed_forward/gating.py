"""What stands between the gate and the other half of a feed-forward part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.model.parts.feed_forward import Gating, SituPart
from kernels.moe import SWIGLU, Activation, situ_activation, swiglu_within
from kernels.pointwise import situ, swiglu


def opener(gating: Gating | None) -> Callable[..., torch.Tensor]:
    """A function (gate, up, *, invariant) of a dense part; None for plain SwiGLU."""
    if gating is None:
        return swiglu
    if isinstance(gating, SituPart):
        return partial(situ, beta=gating.beta, linear_beta=gating.linear_beta)
    return partial(swiglu, limit=gating.limit)


def activation(gating: Gating | None) -> Activation:
    """The same for experts."""
    if gating is None:
        return SWIGLU
    if isinstance(gating, SituPart):
        return situ_activation(gating.beta, gating.linear_beta)
    return swiglu_within(gating.limit)
