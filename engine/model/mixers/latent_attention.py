"""Multi-head latent attention in its absorbed form: every head attends to one row per token."""

from __future__ import annotations

import torch

from engine.model.config import ModelConfig
from engine.model.mixers.mixer import RopeAndMemory
from engine.model.parts.latent_attention import LatentAttentionPart
from engine.model.weights import MatrixRows, Projection, Weights
from kernels.attention import attend
from kernels.linear.head_linear import head_linear
from kernels.norm import rms_norm
from kernels.pointwise import output_gate
from kernels.rope import apply_rope
from kernels.rows import join


class LatentAttention:
    """Causal attention over the memory's cells of `layer`, each the normed latent and the rotated
    key that all heads share.

    score = (k_b q_nope) . latent + q_rope . key, output = v_b (weighted latents): the same as
    expanding every latent into keys and values of all heads. One projection gives, in this order
    of rows, the queries or their bottleneck, latent and key, and the gates.
    """

    def __init__(
        self, part: LatentAttentionPart, weights: Weights, config: ModelConfig, layer: int
    ) -> None:
        self._part, self._layer, self._eps = part, layer, config.eps
        n_q = part.n_head * (part.n_nope + part.n_rope)
        self._sizes = [part.q_rank or n_q, part.n_latent + part.n_rope, part.n_gates]
        self._split = [part.n_latent, part.n_rope]
        self._q_split = [part.n_nope, part.n_rope]
        self._scale = (part.n_nope + part.n_rope) ** -0.5
        kv = weights.rows("attn_kv_a_mqa.weight")
        last = [_key_last(kv, part)]
        gate = [weights.rows("attn_gate.weight")] if part.gate else []
        self._q_b: Projection | None = None
        if part.q_rank is None:
            first = _queries(weights.rows("attn_q.weight"), part)
        else:
            first = weights.rows("attn_q_a.weight")
            self._q_a_norm = weights.keep("attn_q_a_norm.weight")
            self._q_b = weights.stack([_queries(weights.rows("attn_q_b.weight"), part)])
        self._input = weights.stack([first, *last, *gate])
        self._norm = weights.keep("attn_kv_a_norm.weight")
        self._k_b = weights.keep("attn_k_b.weight").transpose(1, 2).contiguous()
        self._v_b = weights.keep("attn_v_b.weight").transpose(1, 2).contiguous()
        self._output = weights.project("attn_output.weight")

    def __call__(self, x: torch.Tensor, around: RopeAndMemory) -> torch.Tensor:
        """x [B, T, n_embd], normed -> the same shape; stores the tokens' latents and keys."""
        part, invariant = self._part, around.invariant
        q, kv, gate = self._input(x, invariant=invariant).split_with_sizes(self._sizes, -1)
        if self._q_b is not None:
            q = self._q_b(rms_norm(q, self._q_a_norm, self._eps), invariant=invariant)
        q = q.view(*x.shape[:2], part.n_head, -1)
        q_nope, q_rope = q.split_with_sizes(self._q_split, 3)
        latent, key = kv.unsqueeze(2).split_with_sizes(self._split, 3)
        if part.pairs:
            q_rope = apply_rope(q_rope, around.cos, around.sin)
            key = apply_rope(key, around.cos, around.sin)
        row = join((rms_norm(latent, self._norm, self._eps), key))
        cells = around.memory.attention.update(self._layer, row)
        absorbed = head_linear(q_nope, self._k_b, invariant=invariant)
        context = attend(
            join((absorbed, q_rope)),
            cells.k,
            cells.k[..., : part.n_latent],
            cells.mask,
            scale=self._scale,
            invariant=invariant,
        )
        out = head_linear(context, self._v_b, invariant=invariant)
        if part.gate:
            out = output_gate(out, gate.view(*out.shape[:3], -1), invariant=invariant)
        return self._output(out.flatten(2), invariant=invariant)


def _queries(rows: MatrixRows, part: LatentAttentionPart) -> MatrixRows:
    """Rows of all query heads; those that are rotated in halves, as kernels.rope pairs them."""
    if part.pairs != "neighbours":
        return rows
    size = part.n_nope + part.n_rope

    def apart(data: torch.Tensor) -> list[torch.Tensor]:
        heads = data.unflatten(0, (part.n_head, size))
        nope, rope = heads.split([part.n_nope, part.n_rope], 1)
        return [torch.cat((nope, rope[:, 0::2], rope[:, 1::2]), 1).flatten(0, 1)]

    return rows.rearranged(apart)[0]


def _key_last(rows: MatrixRows, part: LatentAttentionPart) -> MatrixRows:
    """Rows of the latent, then those of the shared key in the order of the queries'."""
    if part.pairs != "neighbours":
        return rows

    def apart(data: torch.Tensor) -> list[torch.Tensor]:
        latent, rope = data.split([part.n_latent, part.n_rope])
        return [torch.cat((latent, rope[0::2], rope[1::2]))]

    return rows.rearranged(apart)[0]
