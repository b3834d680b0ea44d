"""Attention of a drafted block, over the rows of the context and over the block itself.

Keys and values of the context come straight from the target's rows; there is no query among them.
"""

from __future__ import annotations

import torch

from engine.model.drafters.dflash_config import DFlashConfig
from engine.model.mixers.mixer import RopeAndMemory
from engine.model.weights import Weights
from kernels.attention import attend
from kernels.norm import head_norm
from kernels.pointwise import multiply
from kernels.rope import apply_rope


class BlockAttention:
    """The attention of one layer. A file without `attn_v` uses the key projection as values, normed
    without a weight and not turned."""

    def __init__(self, weights: Weights, config: DFlashConfig, layer: int) -> None:
        d = config.head_dim
        self._layer, self._head_dim, self._scale = layer, d, config.scale
        self._q = weights.project("attn_q.weight")
        self._own_values = "attn_v.weight" in weights
        names = ("attn_k.weight", "attn_v.weight") if self._own_values else ("attn_k.weight",)
        self._kv = weights.project(*names)
        self._output = weights.project("attn_output.weight")
        # x / rms(x) is sqrt(d) x / |x|
        self._eps = config.eps * d
        self._q_norm, self._k_norm = (
            (d**0.5 * weights.keep(f"attn_{name}_norm.weight")).expand(n, -1).contiguous()
            for name, n in (("q", config.n_heads), ("k", config.n_heads_kv))
        )
        self._v_norm = torch.full_like(self._k_norm, d**0.5)
        self._sinks = weights.keep("attn_sinks.weight") if "attn_sinks.weight" in weights else None
        self._value_factors = None
        if config.value_scale != 1.0:
            device = weights.device
            self._value_factors = torch.full((config.n_embd,), config.value_scale, device=device)

    def inject(self, context: torch.Tensor, around: RopeAndMemory) -> None:
        """Leave keys and values of context rows [B, T, n_embd] in memory."""
        around.memory.attention.update(self._layer, *self._keys_and_values(context, around))

    def __call__(self, x: torch.Tensor, around: RopeAndMemory) -> torch.Tensor:
        """x [B, T, n_embd], normed rows of the block -> the same shape."""
        n_seqs, n_tokens, _ = x.shape
        q = self._heads(self._q(x, invariant=around.invariant))
        q = apply_rope(head_norm(q, self._q_norm, self._eps), around.cos, around.sin)
        k, v = self._keys_and_values(x, around)
        cells = around.memory.attention.update(self._layer, k, v)
        out = attend(
            q,
            cells.k,
            cells.v,
            cells.mask,
            scale=self._scale,
            sinks=self._sinks,
            invariant=around.invariant,
        )
        y = self._output(out.reshape(n_seqs, n_tokens, -1), invariant=around.invariant)
        return y if self._value_factors is None else multiply(y, self._value_factors)

    def _keys_and_values(
        self, x: torch.Tensor, around: RopeAndMemory
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self._kv(x, invariant=around.invariant)
        if self._own_values:
            half = kv.shape[-1] // 2
            k, v = (self._heads(part) for part in kv.split_with_sizes([half, half], -1))
        else:
            k = self._heads(kv)
            v = head_norm(k, self._v_norm, self._eps)
        k = apply_rope(head_norm(k, self._k_norm, self._eps), around.cos, around.sin)
        return k, v

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self._head_dim)
