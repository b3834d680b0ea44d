"""The mixture of experts."""

from __future__ import annotations

import torch

from engine.model.feed_forward.swiglu import Swiglu
from engine.model.parts.feed_forward import MixturePart, SwigluPart
from engine.model.weights import Weights
from kernels.moe import add_shared, experts, route


class MixtureOfExperts:
    """Sum of the routed experts, plus sigmoid(shared gate) times the shared expert.

    Router and shared gate are one matrix and stay f32 in every compute mode: rounding there
    flips expert choices.
    """

    def __init__(self, part: MixturePart, weights: Weights) -> None:
        self._n_used = part.n_used
        self._router = weights.stack(
            [weights.numbers("ffn_gate_inp.weight"), weights.numbers("ffn_gate_inp_shexp.weight")],
            compute="f32",
        )
        self._router_sizes = [part.n_experts, 1]
        self._experts = weights.experts()
        self._shared = Swiglu(SwigluPart(part.n_ff_shared), weights, "_shexp")

    def __call__(self, x: torch.Tensor, *, invariant: bool) -> torch.Tensor:
        """x [B, T, n_embd] -> the same shape."""
        rows = x.flatten(0, 1)
        routing = self._router(rows, invariant=invariant)
        logits, shared_gate = routing.split(self._router_sizes, -1)
        weights, ids = route(logits, self._n_used)
        routed = experts(rows, weights, ids, self._experts, invariant=invariant)
        shared = self._shared(rows, invariant=invariant)
        return add_shared(routed, shared_gate, shared, invariant=invariant).view_as(x)
