"""Full attention, in the variants of engine.model.parts.attention: norms, rope, gate, biases."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.model.memory import AttentionView
from engine.model.mixers.mixer import RopeAndMemory
from engine.model.parts.attention import AttentionPart
from engine.model.rope import RopeConfig
from engine.model.weights import MatrixRows, Projection, Weights
from kernels.attention import attend
from kernels.norm import head_norm
from kernels.pointwise import multiply, output_gate
from kernels.rope import apply_rope


class Rotation(Protocol):
    """What attention takes from a configuration: rope, and the eps of norms."""

    @property
    def rope(self) -> RopeConfig | None: ...
    @property
    def eps(self) -> float: ...


class Attention:
    """Causal attention over the memory's cells of `layer`.

    One projection gives, in this order of rows, all query heads, all key heads, the values and
    the gate: queries and keys lie side by side, so their norm and rotation are one call each.
    """

    def __init__(self, part: AttentionPart, weights: Weights, config: Rotation, layer: int) -> None:
        self._layer = layer
        self._heads = [part.n_head, part.n_head_kv]
        self._head_dim = part.head_dim
        n_q, n_kv = part.n_head * part.head_dim, part.n_head_kv * part.head_dim
        self._sizes = [n_q + n_kv, n_kv, n_q if part.gated else 0]
        n_rot = config.rope.n_rot if config.rope else 0
        order = _pairs_as_halves(part.head_dim, n_rot) if part.rope == "pairs" else None
        self._input = _input_projection(weights, part, order)
        self._output = weights.biased("attn_output")
        self._turns = part.rope != "none"
        # attention divides by sqrt(d): another scale is a factor of the queries
        scale = part.scale * part.head_dim**0.5 if part.scale else 1.0
        # x / rms(x) is sqrt(d) x / |x|: so one l2 norm serves both, each head with its weight
        self._qk_eps = config.eps * part.head_dim
        self._qk_norm = _head_norms(weights, part, order, scale) if part.normed else None
        self._scale = None
        if scale != 1.0 and not part.normed:
            self._scale = torch.full((part.head_dim,), scale, device=weights.device)

    def __call__(self, x: torch.Tensor, around: RopeAndMemory) -> torch.Tensor:
        """x [B, T, n_embd], normed -> the same shape; stores the tokens' keys and values."""
        (n_seqs, n_tokens, _), invariant = x.shape, around.invariant
        # split_with_sizes and view: split and unflatten would add Python calls of their own
        qk, v, gate = self._input(x, invariant=invariant).split_with_sizes(self._sizes, -1)
        qk = qk.view(n_seqs, n_tokens, -1, self._head_dim)
        if self._qk_norm is not None:
            qk = head_norm(qk, self._qk_norm, self._qk_eps)
        if self._turns:
            qk = apply_rope(qk, around.cos, around.sin)
        q, k = qk.split_with_sizes(self._heads, 2)
        if self._scale is not None:
            q = multiply(q, self._scale)
        v = v.view(n_seqs, n_tokens, -1, self._head_dim)
        cells = around.memory.attention.update(self._layer, k, v)
        mask = self._visible(x, cells, around)
        out = attend(q, cells.k, cells.v, mask, invariant=invariant)
        out = out.reshape(n_seqs, n_tokens, -1)
        if self._sizes[2]:
            out = output_gate(out, gate, invariant=invariant)
        return self._output(out, invariant=invariant)

    def _visible(
        self, x: torch.Tensor, cells: AttentionView, around: RopeAndMemory
    ) -> torch.Tensor:
        """Where these tokens look, bool [B, T, N]."""
        return cells.mask


def _head_norms(
    weights: Weights, part: AttentionPart, order: list[int] | None, scale: float
) -> torch.Tensor:
    """What normed queries and keys are multiplied by, [n_head + n_head_kv, head_dim]."""
    q, k = (weights.keep(f"attn_{name}_norm.weight") for name in ("q", "k"))
    if order is not None:
        q, k = q[order], k[order]
    rows = (scale * q).expand(part.n_head, -1), k.expand(part.n_head_kv, -1)
    return part.head_dim**0.5 * torch.cat(rows)


def _pairs_as_halves(head_dim: int, n_rot: int) -> list[int]:
    """The numbers of a head in an order in which neighbours that turn together, the first n_rot,
    stand half of n_rot apart, as kernels.rope has them. Products of queries and keys in one order
    are the same in the other."""
    return [*range(0, n_rot, 2), *range(1, n_rot, 2), *range(n_rot, head_dim)]


def _input_projection(weights: Weights, part: AttentionPart, order: list[int] | None) -> Projection:
    """Queries, keys, values and gate as one matrix, from the fused or the separate tensors.

    order: of the numbers of each query and key head, if not that of the file.
    """
    rows = part.n_head * part.head_dim * (2 if part.gated else 1)
    kv_rows = part.n_head_kv * part.head_dim

    def in_order(data: torch.Tensor) -> list[torch.Tensor]:
        return [data.unflatten(0, (-1, part.head_dim))[:, order].flatten(0, 1)]

    def parts(kind: str) -> list[MatrixRows]:
        if f"attn_qkv.{kind}" in weights:
            fused = weights.rows(f"attn_qkv.{kind}")
            q, k, v = fused.rearranged(lambda data: data.split([rows, kv_rows, kv_rows]))
        else:
            q, k, v = (
                weights.rows(name) if name in weights else MatrixRows(torch.zeros(n))
                for name, n in (
                    (f"attn_q.{kind}", rows),
                    (f"attn_k.{kind}", kv_rows),
                    (f"attn_v.{kind}", kv_rows),
                )
            )
        queries: list[MatrixRows] = [q]
        gates: list[MatrixRows] = []
        if part.gated:
            # the file interleaves per head: head_dim query rows, then head_dim gate rows
            pieces = q.rearranged(lambda data: data.split(part.head_dim))
            queries, gates = pieces[::2], pieces[1::2]
        if order is not None:
            (k,) = k.rearranged(in_order)
            queries = [piece for heads in queries for piece in heads.rearranged(in_order)]
        return [*queries, k, v, *gates]

    biased = any(f"attn_{name}.bias" in weights for name in ("q", "k", "v", "qkv"))
    return weights.stack(parts("weight"), parts("bias") if biased else None)
