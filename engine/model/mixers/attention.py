"""Attention, full, block-sparse and latent, in the variants of engine.model.parts.attention."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.memory import AttentionView, Mixer, RopeAndMemory
from engine.model.parts import StateKey
from engine.model.parts.attention import (
    INDEX_ROW,
    AttentionPart,
    LatentAttentionPart,
    SparseAttentionPart,
    SparseLatentAttentionPart,
)
from engine.model.rope import RopeConfig
from engine.model.weights import MatrixRows, Projection, Weights
from kernels.attention import attend, attend_rows
from kernels.attention.block_choice import Indexer, choose_blocks, choose_pools
from kernels.dispatch import runs_triton
from kernels.linear.block_parts import Residual, Rows
from kernels.linear.head_linear import head_linear
from kernels.norm import head_norm, layer_norm, rms_norm
from kernels.pointwise import add, multiply, output_gate
from kernels.rope import apply_rope, norm_and_rope, rope_into_cells
from kernels.rows import join


class Attention(Mixer):
    """Causal attention over the memory's cells of `layer`.

    One projection gives, in this order of rows, all query heads, all key heads, the values and the
    gate: queries and keys are adjacent, so their norm and rotation are one call each.
    """

    def __init__(
        self, part: AttentionPart, weights: Weights, rope: RopeConfig | None, eps: float, layer: int
    ) -> None:
        """eps: of the model's norms."""
        self._layer = layer
        self._heads = [part.n_head, part.n_head_kv]
        self._head_dim = part.head_dim
        n_q, n_kv = part.n_head * part.head_dim, part.n_head_kv * part.head_dim
        self._sizes = [n_q + n_kv, n_kv, n_q if part.gated else 0]
        n_rot = rope.n_rot if rope else 0
        order = _pairs_as_halves(part.head_dim, n_rot) if part.rope == "pairs" else None
        self._input = _input_projection(weights, part, order)
        self.reads = (self._input.packed,)
        self._output = weights.biased("attn_output")
        self._turns = part.rope != "none"
        # attention divides by sqrt(d): another scale becomes a factor of the queries
        scale = part.scale * part.head_dim**0.5 if part.scale else 1.0
        # x / rms(x) is sqrt(d) x / |x|, so one l2 norm serves both, with each head's weight
        self._qk_eps = eps * part.head_dim
        self._qk_norm = _head_norms(weights, part, order, scale) if part.normed else None
        self._scale = None
        if scale != 1.0 and not part.normed:
            self._scale = torch.full((part.head_dim,), scale, device=weights.device)

    def __call__(self, x: Rows, around: RopeAndMemory, residual: Residual | None = None) -> Tensor:
        (n_seqs, n_tokens, _), invariant = x.shape, around.invariant
        # split_with_sizes and view: split and unflatten would add Python calls of their own
        joined = self._input(x, invariant=invariant)
        qk, v, gate = joined.split_with_sizes(self._sizes, -1)
        memory = around.memory.attention
        turns_in_cells = self._turns and self._scale is None and runs_triton(x)
        places = memory.places(self._layer) if turns_in_cells else None
        if places is not None:
            heads = joined[..., : sum(self._sizes[:2])].view(n_seqs, n_tokens, -1, self._head_dim)
            table = around.cos, around.sin
            q = rope_into_cells(heads, self._qk_norm, self._qk_eps, *table, places)
            cells = memory.read(self._layer)
        else:
            q, cells = self._turned(qk, v, around)
        mask = self._visible(x, cells, around)
        reads = (self._output.packed,)
        given = gate if self._sizes[2] else None
        rows = attend_rows(q, cells.k, cells.v, mask, given, reads, invariant=invariant)
        return self._output(rows, invariant=invariant, residual=residual)

    def _turned(self, qk: Tensor, v: Tensor, around: RopeAndMemory) -> tuple[Tensor, AttentionView]:
        """The queries, and the cells after keys and values were stored."""
        n_seqs, n_tokens, _ = qk.shape
        qk = qk.view(n_seqs, n_tokens, -1, self._head_dim)
        if self._qk_norm is not None and self._turns:
            qk = norm_and_rope(qk, self._qk_norm, self._qk_eps, around.cos, around.sin)
        elif self._qk_norm is not None:
            qk = head_norm(qk, self._qk_norm, self._qk_eps)
        elif self._turns:
            qk = apply_rope(qk, around.cos, around.sin)
        q, k = qk.split_with_sizes(self._heads, 2)
        if self._scale is not None:
            q = multiply(q, self._scale)
        v = v.view(n_seqs, n_tokens, -1, self._head_dim)
        return q, around.memory.attention.update(self._layer, k, v)

    def _visible(self, x: Rows, cells: AttentionView, around: RopeAndMemory) -> Tensor:
        """Which cells these tokens attend to, bool [B, T, N]."""
        return cells.mask


def _head_norms(
    weights: Weights, part: AttentionPart, order: list[int] | None, scale: float
) -> Tensor:
    """Factors of normed queries and keys, [n_head + n_head_kv, head_dim]."""
    q, k = (weights.keep(f"attn_{name}_norm.weight") for name in ("q", "k"))
    if order is not None:
        q, k = q[..., order], k[..., order]
    rows = (scale * q).expand(part.n_head, -1), k.expand(part.n_head_kv, -1)
    return part.head_dim**0.5 * torch.cat(rows)


def _pairs_as_halves(head_dim: int, n_rot: int) -> list[int]:
    """A permutation of a head's elements that turns adjacent pairs, the first n_rot elements, into
    pairs n_rot / 2 apart, as in kernels.rope. Query-key products do not depend on the order."""
    return [*range(0, n_rot, 2), *range(1, n_rot, 2), *range(n_rot, head_dim)]


def _input_projection(weights: Weights, part: AttentionPart, order: list[int] | None) -> Projection:
    """Queries, keys, values and gate as one matrix, from the fused or the separate tensors.

    order: of the numbers of each query and key head, if not that of the file.
    """
    rows = part.n_head * part.head_dim * (2 if part.gated else 1)
    kv_rows = part.n_head_kv * part.head_dim

    def in_order(data: Tensor) -> list[Tensor]:
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


class SparseAttention(Attention):
    """Attention in which each query attends to its best n_blocks previous blocks, as scored by the
    indexer, and to the tokens after the last whole block.

    A block is `ratio` tokens by position; its key is the mean of theirs, normed and roped as its
    first token. The indexer stays f32 in every compute mode: rounding there flips choices.
    """

    def __init__(
        self, part: SparseAttentionPart, weights: Weights, config: ModelConfig, layer: int
    ) -> None:
        super().__init__(part, weights, config.rope, config.eps, layer)
        self._part, self._eps = part, config.eps
        self._row = StateKey(layer, INDEX_ROW)
        rows = [weights.numbers(f"indexer.{name}_proj.weight") for name in ("q", "k")]
        self._index = weights.stack(rows, compute="f32")
        self._index_sizes = [part.n_index_head * part.index_dim, part.index_dim]
        self._index_norms = [weights.keep(f"indexer.{name}_norm.weight") for name in ("q", "k")]
        self._indexer = Indexer(part.ratio, part.n_blocks, config.eps)

    def _visible(self, x: Rows, cells: AttentionView, around: RopeAndMemory) -> Tensor:
        part = self._part
        if not part.ratio:
            return cells.mask
        q, k = self._index(x, invariant=around.invariant).split_with_sizes(self._index_sizes, -1)
        held = around.memory.attention.update(self._row, k.unsqueeze(2))
        assert held.positions is not None
        assert around.table is not None
        if held.mask.shape[2] // part.ratio <= part.n_blocks:
            return cells.mask  # no query has more blocks to choose from
        q = q.view(*x.shape[:2], part.n_index_head, part.index_dim)
        q = apply_rope(rms_norm(q, self._index_norms[0], self._eps), around.cos, around.sin)
        return choose_blocks(
            q,
            held.k[:, 0],
            held.positions,
            cells.mask,
            self._index_norms[1],
            around.table,
            self._indexer,
            invariant=around.invariant,
        )


class LatentAttention(Mixer):
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
        self.reads = (self._input.packed,)
        self._norm = weights.keep("attn_kv_a_norm.weight")
        self._k_b = weights.keep("attn_k_b.weight").transpose(1, 2).contiguous()
        self._v_b = weights.keep("attn_v_b.weight").transpose(1, 2).contiguous()
        self._output = weights.project("attn_output.weight")

    def __call__(self, x: Rows, around: RopeAndMemory, residual: Residual | None = None) -> Tensor:
        part, invariant = self._part, around.invariant
        q, kv, gate = self._input(x, invariant=invariant).split_with_sizes(self._sizes, -1)
        low = None
        if self._q_b is not None:
            low = rms_norm(q, self._q_a_norm, self._eps)
            q = self._q_b(low, invariant=invariant)
        q = q.view(*x.shape[:2], part.n_head, -1)
        q_nope, q_rope = q.split_with_sizes(self._q_split, 3)
        latent, key = kv.unsqueeze(2).split_with_sizes(self._split, 3)
        if part.pairs:
            q_rope = apply_rope(q_rope, around.cos, around.sin)
            key = apply_rope(key, around.cos, around.sin)
        row = join((rms_norm(latent, self._norm, self._eps), key))
        cells = around.memory.attention.update(self._layer, row)
        mask = self._visible(x, low, cells, around)
        absorbed = head_linear(q_nope, self._k_b, invariant=invariant)
        context = attend(
            join((absorbed, q_rope)),
            cells.k,
            cells.k[..., : part.n_latent],
            mask,
            scale=self._scale,
            invariant=invariant,
        )
        out = head_linear(context, self._v_b, invariant=invariant)
        if part.gate:
            out = output_gate(out, gate.view(*out.shape[:3], -1), invariant=invariant)
        return self._output(out.flatten(2), invariant=invariant, residual=residual)

    def _visible(
        self, x: Rows, low: Tensor | None, cells: AttentionView, around: RopeAndMemory
    ) -> Tensor:
        """Which cells these tokens attend to, bool [B, T, N]. low: the query bottleneck, if any."""
        return cells.mask


class SparseLatentAttention(LatentAttention):
    """Latent attention in which each query attends to its best previous pools of tokens, as scored
    by its own indexer or that of an earlier layer, and to the tokens after the last whole pool.

    A pool is `ratio` tokens by position. The indexer stays f32 in every compute mode: rounding
    there flips choices.
    """

    def __init__(
        self, part: SparseLatentAttentionPart, weights: Weights, config: ModelConfig, layer: int
    ) -> None:
        super().__init__(part, weights, config, layer)
        self._sparse = part
        if "indexer.proj.weight" not in weights:
            return
        self._row = StateKey(layer, INDEX_ROW)
        self._sizes_index = [part.index_dim, part.index_dim, part.n_index_head]
        heads = weights.numbers("indexer.proj.weight")
        scale = (part.index_dim * part.n_index_head) ** -0.5
        names = "indexer.attn_k.weight", "indexer_compressor_gate.weight"
        rows = [*map(weights.numbers, names), *heads.rearranged(lambda data: [data * scale])]
        self._index = weights.stack(rows, compute="f32")
        self._index_q = weights.stack([weights.numbers("indexer.attn_q_b.weight")], compute="f32")
        self._k_norm = [weights.keep(f"indexer.k_norm.{name}") for name in ("weight", "bias")]
        self._bias = weights.keep("indexer_compressor_ape.weight")
        self._choice = Indexer(part.ratio, part.n_pools)

    def _visible(
        self, x: Rows, low: Tensor | None, cells: AttentionView, around: RopeAndMemory
    ) -> Tensor:
        if self._sparse.chooses:
            assert low is not None  # such models have a bottleneck
            around.chosen[:] = [self._choose(x, low, cells.mask, around)]
        return around.chosen[0]

    def _choose(self, x: Rows, low: Tensor, mask: Tensor, around: RopeAndMemory) -> Tensor:
        part, invariant = self._sparse, around.invariant
        key, gate, heads = self._index(x, invariant=invariant).split_with_sizes(
            self._sizes_index, -1
        )
        weight, bias = self._k_norm
        key = add(layer_norm(key, weight, part.index_eps), bias)
        held = around.memory.attention.update(self._row, join((key, gate)).unsqueeze(2))
        assert held.positions is not None
        if mask.shape[2] // part.ratio <= part.n_pools:
            return mask  # no query has more pools to choose from
        q = self._index_q(low, invariant=invariant)
        q = q.view(*x.shape[:2], part.n_index_head, part.index_dim)
        return choose_pools(
            q,
            heads,
            held.k[:, 0],
            held.positions,
            mask,
            self._bias,
            self._choice,
            invariant=invariant,
        )


def _queries(rows: MatrixRows, part: LatentAttentionPart) -> MatrixRows:
    """Rows of all query heads, with rotated elements ordered as kernels.rope pairs them."""
    if part.pairs != "neighbours":
        return rows
    size = part.n_nope + part.n_rope

    def apart(data: Tensor) -> list[Tensor]:
        heads = data.unflatten(0, (part.n_head, size))
        nope, rope = heads.split([part.n_nope, part.n_rope], 1)
        return [torch.cat((nope, rope[:, 0::2], rope[:, 1::2]), 1).flatten(0, 1)]

    return rows.rearranged(apart)[0]


def _key_last(rows: MatrixRows, part: LatentAttentionPart) -> MatrixRows:
    """Rows of the latent, then those of the shared key in the order of the queries'."""
    if part.pairs != "neighbours":
        return rows

    def apart(data: Tensor) -> list[Tensor]:
        latent, rope = data.split([part.n_latent, part.n_rope])
        return [torch.cat((latent, rope[0::2], rope[1::2]))]

    return rows.rearranged(apart)[0]
