"""Block-sparse attention: an indexer chooses the blocks of tokens that a query looks at (QSA)."""

from __future__ import annotations

import torch

from engine.model.config import ModelConfig
from engine.model.memory import AttentionView
from engine.model.mixers.attention import Attention
from engine.model.mixers.mixer import RopeAndMemory
from engine.model.parts import CellRow
from engine.model.parts.sparse_attention import INDEX_ROW, SparseAttentionPart
from engine.model.rope_tables import RopeTables
from engine.model.weights import Weights
from kernels.norm import rms_norm
from kernels.rope import apply_rope


class SparseAttention(Attention):
    """Attention of which each query sees the best n_blocks of the blocks before it, as the indexer
    scores them, and the tokens behind the last whole block.

    A block is `ratio` tokens by position; its key is the mean of theirs, normed and roped as its
    first token. The indexer stays f32 in every compute mode: rounding there flips choices.
    """

    def __init__(
        self, part: SparseAttentionPart, weights: Weights, config: ModelConfig, layer: int
    ) -> None:
        super().__init__(part, weights, config, layer)
        assert config.rope is not None
        self._part, self._eps = part, config.eps
        self._row = CellRow(layer, INDEX_ROW)
        rows = [weights.numbers(f"indexer.{name}_proj.weight") for name in ("q", "k")]
        self._index = weights.stack(rows, compute="f32")
        self._index_sizes = [part.n_index_head * part.index_dim, part.index_dim]
        self._index_norms = [weights.keep(f"indexer.{name}_norm.weight") for name in ("q", "k")]
        self._rope = RopeTables(config.rope, self._index_norms[0].device)

    def _visible(
        self, x: torch.Tensor, cells: AttentionView, around: RopeAndMemory
    ) -> torch.Tensor:
        part, ratio = self._part, self._part.ratio
        if not ratio:
            return cells.mask
        q, k = self._index(x, invariant=around.invariant).split_with_sizes(self._index_sizes, -1)
        held = around.memory.attention.update(self._row, k.unsqueeze(2))
        assert held.positions is not None
        positions = torch.where(held.mask[:, -1], held.positions, -1)  # of all that any token sees
        own = torch.where(held.mask, positions[:, None], -1).amax(2)
        n_whole = (own + 1) // ratio
        most = int(n_whole.max())
        if most <= part.n_blocks:
            return cells.mask
        q = q.unflatten(-1, (part.n_index_head, part.index_dim))
        q = apply_rope(rms_norm(q, self._index_norms[0], self._eps), around.cos, around.sin)
        scores = self._scores(q, self._block_keys(held.k[:, 0], positions, most), around.invariant)
        is_whole = torch.arange(most, device=x.device) < n_whole[..., None]
        chosen = _best(scores.masked_fill(~is_whole, -torch.inf), part.n_blocks) & is_whole
        block = (positions // ratio).clamp(0, most - 1)
        in_chosen = chosen.gather(2, block[:, None].expand(-1, x.shape[1], -1))
        in_tail = positions[:, None] >= (n_whole * ratio)[..., None]
        return cells.mask & (in_chosen | in_tail)

    def _block_keys(self, raw: torch.Tensor, positions: torch.Tensor, n: int) -> torch.Tensor:
        """Keys of the first n blocks [B, n, d] of cells' raw keys [B, N, d] at these positions,
        -1 where a cell is not seen."""
        n_seqs, ratio = len(raw), self._part.ratio
        # the last place takes what belongs to no block
        place = torch.where(positions < 0, n * ratio, positions).clamp(max=n * ratio)
        cell_of = positions.new_zeros(n_seqs, n * ratio + 1)
        numbers = torch.arange(raw.shape[1], device=raw.device).expand(n_seqs, -1)
        cell_of.scatter_(1, place, numbers)
        rows = torch.arange(n_seqs, device=raw.device)[:, None]
        first, *others = raw[rows, cell_of[:, :-1]].unflatten(1, (n, ratio)).unbind(2)
        for other in others:  # in this order whatever the batch
            first = first + other
        normed = rms_norm((first / ratio)[:, :, None], self._index_norms[1], self._eps)
        starts = torch.arange(n, device=raw.device) * ratio
        self._rope.reach(n * ratio)
        return apply_rope(normed, *self._rope.at(starts.expand(n_seqs, -1)))[:, :, 0]

    def _scores(self, q: torch.Tensor, keys: torch.Tensor, invariant: bool) -> torch.Tensor:
        """q [B, T, H, d], keys [B, n, d] -> sums over heads of what is positive, [B, T, n]."""
        if invariant:  # the order of sums differs between batches by less than what float32 keeps
            q, keys = q.double(), keys.double()
        products = torch.einsum("bthd,bnd->bthn", q, keys)
        return products.relu().sum(2).float()


def _best(scores: torch.Tensor, n: int) -> torch.Tensor:
    """Which of the last axis are the n largest, bool; of equal ones the first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
