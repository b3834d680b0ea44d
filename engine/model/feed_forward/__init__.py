"""What computes a feed-forward part: a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from engine.model.feed_forward.mixture import MixtureOfExperts
from engine.model.feed_forward.relu2 import Relu2
from engine.model.feed_forward.swiglu import Swiglu
from engine.model.parts import FeedForwardPart
from engine.model.parts.feed_forward import MixturePart, Relu2Part, SwigluPart
from engine.model.weights import Weights


class FeedForward(Protocol):
    """The half of a block that looks at each token by itself."""

    def __call__(self, x: torch.Tensor, *, invariant: bool) -> torch.Tensor:
        """x [B, T, n_embd], normed -> the same shape."""


_FEED_FORWARD: Mapping[type, Callable[[Any, Weights, float], FeedForward]] = {
    SwigluPart: lambda part, weights, eps: Swiglu(part, weights),
    Relu2Part: lambda part, weights, eps: Relu2(part, weights),
    MixturePart: MixtureOfExperts,
}


def make_feed_forward(part: FeedForwardPart, weights: Weights, eps: float) -> FeedForward:
    """weights: of the block. eps: of the model's norms."""
    return _FEED_FORWARD[type(part)](part, weights, eps)
