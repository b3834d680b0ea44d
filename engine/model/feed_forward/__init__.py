"""What computes a feed-forward part: a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from engine.model.feed_forward.mixture import MixtureOfExperts
from engine.model.feed_forward.swiglu import Swiglu
from engine.model.parts import FeedForwardPart
from engine.model.parts.feed_forward import MixturePart, SwigluPart
from engine.model.weights import Weights


class FeedForward(Protocol):
    """The half of a block that looks at each token by itself."""

    def __call__(self, x: torch.Tensor, *, invariant: bool) -> torch.Tensor:
        """x [B, T, n_embd], normed -> the same shape."""


_FEED_FORWARD: Mapping[type, Callable[..., FeedForward]] = {
    SwigluPart: Swiglu,
    MixturePart: MixtureOfExperts,
}


def make_feed_forward(part: FeedForwardPart, weights: Weights) -> FeedForward:
    """weights: of the block."""
    return _FEED_FORWARD[type(part)](part, weights)
