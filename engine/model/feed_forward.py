"""Feed-forward parts of blocks: gated, ungated, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from engine.model.parts import FeedForwardPart
from engine.model.parts.feed_forward import DensePart, Gating, LatentPart, MixturePart
from engine.model.weights import Weights
from kernels import pointwise
from kernels.linear import operation_rows
from kernels.linear.block_parts import PreparedRows, Residual, Rows
from kernels.linear.packed import PackedWeight
from kernels.moe import Added, Choice, add_to_experts, experts, route, route_given, route_product
from kernels.moe.packed import (
    RELU2,
    SWIGLU,
    Activation,
    clamped_swiglu_activation,
    situ_activation,
    swiglu_within,
)
from kernels.norm import rms_norm
from kernels.pointwise import relu2
from kernels.rows import take_rows


class MixtureOfExperts:
    """Sum of the routed experts, plus the shared expert, optionally times sigmoid(its gate)."""

    def __init__(self, part: MixturePart, weights: Weights, eps: float) -> None:
        self._route = _Router(part, weights)
        self._latent = _Latent(part.latent, weights, eps) if part.latent else None
        self._experts = weights.experts(
            RELU2 if part.activation == "relu2" else activation(part.gating)
        )
        self._shared = _dense(part.shared, weights, "_shexp") if part.shared else None
        self.reads: tuple[PackedWeight, ...] = self._shared.reads if self._shared else ()
        if self._latent is None:
            self.reads += self._experts.reads

    def __call__(
        self,
        x: Rows,
        *,
        invariant: bool,
        tokens: Tensor | None = None,
        residual: Residual | None = None,
    ) -> Tensor:
        shape, flat = x.shape, x
        if isinstance(x, PreparedRows):
            rows = x.numbers.flatten(0, 1)
            flat = x._replace(numbers=rows)
        else:
            rows = flat = x.flatten(0, 1)
        weights, ids, gate = self._route(rows, tokens, invariant=invariant)
        shared = None if self._shared is None else self._shared(flat, invariant=invariant)
        added: Added = shared, gate, residual
        if self._latent is None:
            y = experts(flat, weights, ids, self._experts, invariant=invariant, added=added)
        else:
            inner = self._latent.open(rows, invariant=invariant)
            inner = experts(inner, weights, ids, self._experts, invariant=invariant)
            y = self._latent.close(inner, invariant=invariant)
            y = add_to_experts(y, added, invariant=invariant)
        return y.view(shape)


class _Router:
    """Weights and ids of the experts for each row.

    Router and shared gate are one matrix and stay f32 in every compute mode: rounding there flips
    expert choices.
    """

    def __init__(self, part: MixturePart, weights: Weights) -> None:
        rows, self._sizes = ["ffn_gate_inp.weight"], [part.n_experts]
        if part.shared and part.shared_gate:
            rows.append("ffn_gate_inp_shexp.weight")
            self._sizes.append(1)
        self._matrix = weights.stack([weights.numbers(name) for name in rows], compute="f32")
        router = part.router
        self._choice = Choice(
            part.n_used,
            router.scores,
            router.normalised,
            router.scale,
            router.n_groups,
            router.n_groups_used,
        )
        self._bias = weights.keep("exp_probs_b.bias") if router.biased else None
        self._by_token: Tensor | None = None
        if router.by_token:
            self._by_token = weights.keep_ids("ffn_gate_tid2eid.weight", part.n_experts)

    def __call__(
        self, x: Tensor, tokens: Tensor | None, *, invariant: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """x f32 [n, n_embd] of tokens int64 [B, T], n in total; see kernels.moe.route. The third
        result is the gate of the shared expert, f32 [n, 1], if it has one."""
        found = None
        if self._by_token is None:
            matrix, n_experts = self._matrix.packed, self._sizes[0]
            found = route_product(
                x, matrix, n_experts, self._bias, self._choice, invariant=invariant
            )
        routing = self._matrix(x, invariant=invariant) if found is None else found[0]
        logits, *gate = routing.split(self._sizes, -1)
        if found is not None:
            _, weights, ids = found
        elif self._by_token is not None:
            assert tokens is not None  # a trunk with such layers supplies them
            ids = take_rows(self._by_token, tokens.flatten())
            weights = route_given(logits, ids, self._choice)
        else:
            weights, ids = route(logits, self._bias, self._choice)
        return weights, ids, gate[0] if gate else None


class _Latent:
    """The matrices around routed experts of another width."""

    def __init__(self, part: LatentPart, weights: Weights, eps: float) -> None:
        self._down, self._up = weights.project(part.down), weights.project(part.up)
        self._norm = weights.keep(part.norm) if part.norm else None
        self._eps = eps

    def open(self, x: Tensor, *, invariant: bool) -> Tensor:
        return self._down(x, invariant=invariant)

    def close(self, y: Tensor, *, invariant: bool) -> Tensor:
        if self._norm is not None:
            y = rms_norm(y, self._norm, self._eps)
        return self._up(y, invariant=invariant)


def _dense(part: DensePart, weights: Weights, suffix: str = "") -> Swiglu:
    return (Relu2 if part.activation == "relu2" else Swiglu)(part, weights, suffix)


class Swiglu:
    """down(silu(gate x) * up x), or the part's own gating instead of SwiGLU. suffix: of tensor
    names."""

    def __init__(self, part: DensePart, weights: Weights, suffix: str = "") -> None:
        self._open = opener(part.gating)
        self._up = weights.biased(*part.opening(suffix))
        self._down = weights.biased(f"ffn_down{suffix}")
        self.reads: tuple[PackedWeight, ...] = (self._up.packed,)

    def __call__(
        self,
        x: Rows,
        *,
        invariant: bool,
        tokens: Tensor | None = None,
        residual: Residual | None = None,
    ) -> Tensor:
        opened = self._opened(x, invariant=invariant)
        return self._down(opened, invariant=invariant, residual=residual)

    def _opened(self, x: Rows, *, invariant: bool) -> Rows:
        return self._up.gated(x, *self._open, self._down, invariant=invariant)


class Relu2(Swiglu):
    """down(max(up x, 0)^2)."""

    def _opened(self, x: Rows, *, invariant: bool) -> Rows:
        return operation_rows(relu2, (self._up(x, invariant=invariant),), (self._down.packed,))


FeedForward = Swiglu | MixtureOfExperts
"""The token-wise half of a block. reads: matrices that its input is multiplied with, for
kernels.norm.rms_norm_rows. Called with normed x [B, T, n_embd], returns the same shape, added to a
residual if given; tokens: int64 [B, T], for experts chosen by token id."""


_FEED_FORWARD: Mapping[type, Callable[[Any, Weights, float], FeedForward]] = {
    DensePart: lambda part, weights, eps: _dense(part, weights),
    MixturePart: MixtureOfExperts,
}


def make_feed_forward(part: FeedForwardPart, weights: Weights, eps: float) -> FeedForward:
    """weights: of the block. eps: of the model's norms."""
    return _FEED_FORWARD[type(part)](part, weights, eps)


def opener(gating: Gating | None) -> tuple[Callable[..., Tensor], tuple[float, ...]]:
    """The gating operation of a dense part and its constants; None for plain SwiGLU."""
    name, numbers = gating or ("swiglu", ())
    return getattr(pointwise, name), numbers


_OF_EXPERTS: Mapping[str, Callable[..., Activation]] = {
    "situ": situ_activation,
    "swiglu": swiglu_within,
    "clamped_swiglu": clamped_swiglu_activation,
}


def activation(gating: Gating | None) -> Activation:
    """The same for experts."""
    if gating is None:
        return SWIGLU
    name, numbers = gating
    return _OF_EXPERTS[name](*numbers)
