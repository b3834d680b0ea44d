"""Attention to tokens in a window and to blocks of tokens compressed to one row each; the
compressor's last inputs are kept in rings, by position (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.memory import AttentionView, Mixer, RopeAndMemory
from engine.model.parts.attention import INDEX_RING, INDEX_ROW, RINGS, CompressedAttentionPart
from engine.model.recurrence import LogPart, Recurrence, RowNumbers, StateKey, TokenInputs
from engine.model.weights import MatrixRows, Weights
from kernels.attention import attend
from kernels.attention.compressed_choice import BlockScores, see_blocks
from kernels.linear.block_parts import Residual, Rows
from kernels.norm import head_norm, rms_norm
from kernels.recurrence.compressor import (
    Compressor,
    add_at_places,
    compress,
    compress_slots,
    first_of_block,
    fold_ring,
    ring_places,
    write_ring,
)
from kernels.rope import rope_at_end
from kernels.rows import join, take_rows


class CompressorRing(Recurrence):
    """Ring [n_slots, 2 n_channels] of values and scores, a token in slot position mod n_slots; a
    token's log entry is its row and its slot. Inputs: x, values and scores [B, T, 2 n_channels].

    Advancing gives the rows of blocks that end at a token, [B, T, width], as
    kernels.recurrence.compressor.compress does.
    """

    is_window = True
    by_position = True

    def __init__(self, part: Compressor) -> None:
        self._part = part
        width = 2 * part.n_channels
        super().__init__((part.n_slots, width), [(width,), (1,)])

    def _first(self, n_tokens: int) -> int:
        """The first token that is still needed: of the incomplete block, or of the one before it if
        blocks overlap."""
        ratio, n_slots = self._part.ratio, self._part.n_slots
        return n_tokens // ratio * ratio - (n_slots - ratio)

    def serves(self, n_tokens: int, n_written: int) -> bool:
        return self._first(n_tokens) >= n_written - self._part.n_slots

    def _slots(self, n_tokens: int, device: torch.device) -> Tensor:
        first = max(0, self._first(n_tokens))
        return torch.arange(first, n_tokens, device=device) % self._part.n_slots

    def needed(self, state: Tensor, n_tokens: int) -> Tensor:
        kept, slots = torch.zeros_like(state), self._slots(n_tokens, state.device)
        kept[slots] = state[slots]
        return kept

    def in_order(self, state: Tensor, n_tokens: int) -> Tensor:
        return state[self._slots(n_tokens, state.device)]

    def into(
        self, inputs: Any, start: Tensor, slots: Sequence[Tensor], *, invariant: bool = False
    ) -> Tensor:
        x, positions = inputs
        y, n = compress(x, positions, start, self._part), x.shape[1]
        # write the slot that is `start`, if any, last
        in_turn = sorted(enumerate(slots), key=lambda one: one[1].data_ptr() == start.data_ptr())
        for back, slot in in_turn:
            write_ring(start, x, positions, n - back, slot)
        return y

    def log(
        self, inputs: TokenInputs, start: Tensor, *, invariant: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, positions = inputs
        y = compress(x, positions, start, self._part)
        return y, (x, ring_places(positions, self._part.n_slots))

    def fold(self, *log: *LogPart, out: Tensor | None = None, invariant: bool = False) -> Tensor:
        start, (x, places), n_tokens = log
        if isinstance(n_tokens, int):
            n_tokens = torch.full((len(start),), n_tokens, device=start.device)
        return fold_ring(
            start, x, places, n_tokens, torch.empty_like(start) if out is None else out
        )

    def by_index(self, inputs: TokenInputs, pool: Tensor, rows: RowNumbers) -> Tensor:
        return compress_slots(*inputs, pool, rows.read, rows.write, self._part)


def compressor_of(part: CompressedAttentionPart, width: int) -> Compressor:
    """The compressor for block rows of this width."""
    return Compressor(part.ratio, width, part.has_indexer)


class CompressedAttention(Mixer):
    """Attention whose keys, which are also its values, are the rows of tokens in a window and the
    rows of previous blocks, all of them or those chosen by an indexer.

    The indexer stays f32 in every compute mode: rounding there flips choices.
    """

    def __init__(
        self, part: CompressedAttentionPart, weights: Weights, config: ModelConfig, layer: int
    ) -> None:
        self._part, self._layer, self._eps = part, layer, config.eps
        d, n_head = part.head_dim, part.n_head
        rows = [weights.rows("attn_q_a.weight"), weights.rows("attn_kv.weight")]
        self._sizes = [part.q_rank, d]
        self._rows: _BlockRows | None = None
        if part.ratio:
            self._rows = _BlockRows(part, weights, config, layer, RINGS[part.ratio][0], "attn", d)
            rows += self._rows.matrices(weights.rows)
            self._sizes.append(self._rows.n_inputs)
        self._input = weights.stack(rows)
        self.reads = (self._input.packed,)
        self._q_norm = weights.keep("attn_q_a_norm.weight")
        self._q = weights.project("attn_q_b.weight")
        # x / rms(x) is sqrt(d) x / |x|
        self._head_norm = torch.full((n_head, d), d**0.5, device=weights.device)
        self._kv_norm = weights.keep("attn_kv_a_norm.weight")
        self._sinks = weights.keep("attn_sinks.weight")
        groups = weights.rows("attn_output_a.weight")
        self._groups = [
            weights.stack([rows])
            for rows in groups.rearranged(lambda data: data.split(part.output_rank))
        ]
        self._output = weights.project("attn_output_b.weight")
        self._indexer = _Indexer(part, weights, config, layer) if part.has_indexer else None

    def inject(self, context: Tensor, around: RopeAndMemory) -> None:
        """Store context rows [B, T, n_embd] in memory, in a layer without blocks."""
        _, kv = self._input(context, invariant=around.invariant).split_with_sizes(self._sizes, -1)
        around.memory.attention.update(self._layer, self._key(kv, around))

    def _key(self, kv: Tensor, turned: RopeAndMemory) -> Tensor:
        """kv [B, T, head_dim] as the row of a token, [B, T, 1, head_dim]."""
        kv = rms_norm(kv, self._kv_norm, self._eps).unsqueeze(2)
        return rope_at_end(kv, turned.cos, turned.sin)

    def __call__(self, x: Rows, around: RopeAndMemory, residual: Residual | None = None) -> Tensor:
        part, invariant = self._part, around.invariant
        turned = around.of_blocks if part.ratio else around
        assert turned is not None  # a model with such layers has their rotation
        q, kv, *block = self._input(x, invariant=invariant).split_with_sizes(self._sizes, -1)
        low = rms_norm(q, self._q_norm, self._eps)
        q = self._q(low, invariant=invariant).view(*x.shape[:2], part.n_head, part.head_dim)
        q = head_norm(q, self._head_norm, self._eps * part.head_dim)
        q = rope_at_end(q, turned.cos, turned.sin)
        kv = self._key(kv, turned)
        if self._rows is not None:
            # one head each: the cells of all heads are one list of keys
            kv = join((kv[:, :, 0], self._rows(block[0], around))).unflatten(2, (2, -1))
        cells = around.memory.attention.update(self._layer, kv)
        visible = self._visible(x, low, cells, around)
        keys = cells.k.flatten(1, 2).unsqueeze(1)
        out = attend(q, keys, keys, visible, sinks=self._sinks, invariant=invariant)
        out = rope_at_end(out, turned.cos, turned.sin, back=True).flatten(2)
        wide = out.shape[2] // part.n_groups
        of_groups = [
            project(some, invariant=invariant)
            for project, some in zip(self._groups, out.split(wide, -1), strict=True)
        ]
        return self._output(join(of_groups), invariant=invariant, residual=residual)

    def _visible(self, x: Rows, low: Tensor, cells: AttentionView, around: RopeAndMemory) -> Tensor:
        """Which cells these tokens attend to, bool [B, T, cells of all heads]. low: the query
        bottleneck."""
        part = self._part
        if not part.ratio:
            return cells.mask
        scores = self._indexer(x, low, around) if self._indexer else None
        assert cells.positions is not None
        assert cells.seen is not None
        return see_blocks(
            cells.mask, cells.seen, cells.positions, part.ratio, scores, invariant=around.invariant
        )


class _BlockRows:
    """Compressor of a layer or of its indexer. name: prefix of its tensors."""

    def __init__(
        self,
        part: CompressedAttentionPart,
        weights: Weights,
        config: ModelConfig,
        layer: int,
        ring: str,
        name: str,
        width: int,
    ) -> None:
        self._key, self._ratio, self._eps = StateKey(layer, ring), part.ratio, config.eps
        self._name, self.n_inputs = name, 2 * compressor_of(part, width).n_channels
        ape = weights.keep(f"{name}_compressor_ape.weight")
        self._ape = torch.cat((torch.zeros_like(ape), ape), 1)
        self._norm = weights.keep(f"{name}_compressor_norm.weight")

    def matrices(self, take: Callable[[str], MatrixRows]) -> list[MatrixRows]:
        """Matrices that give values and scores of a row of n_inputs elements. take: a method of
        weights."""
        return [take(f"{self._name}_compressor_{kind}.weight") for kind in ("kv", "gate")]

    def __call__(self, inputs: Tensor, around: RopeAndMemory) -> Tensor:
        """inputs [B, T, n_inputs] -> block rows [B, T, width], at the tokens that end a block."""
        memory, of_blocks = around.recurrent, around.of_blocks
        assert of_blocks is not None
        assert of_blocks.table is not None
        assert around.positions is not None
        rows = add_at_places(inputs, self._ape, around.positions)
        made = memory.advance(self._key, TokenInputs(rows, around.positions))
        made = rms_norm(made, self._norm, self._eps).unsqueeze(2)
        first = first_of_block(around.positions, self._ratio)
        cos, sin = take_rows(of_blocks.table, first).chunk(2, -1)
        return rope_at_end(made, cos, sin)[:, :, 0]


class _Indexer:
    """Scores blocks with its own rows, queries and weights."""

    def __init__(
        self, part: CompressedAttentionPart, weights: Weights, config: ModelConfig, layer: int
    ) -> None:
        self._part, self._row = part, StateKey(layer, INDEX_ROW)
        self._rows = _BlockRows(part, weights, config, layer, INDEX_RING, "indexer", part.index_dim)
        scale = (part.n_index_head * part.index_dim) ** -0.5
        proj = weights.numbers("indexer.proj.weight").rearranged(lambda data: [data * scale])
        matrices = self._rows.matrices(weights.numbers)
        self._input = weights.stack([*proj, *matrices], compute="f32")
        self._sizes = [part.n_index_head, self._rows.n_inputs]
        queries = weights.numbers("indexer.attn_q_b.weight")
        self._q = weights.stack([queries], compute="f32")

    def __call__(self, x: Rows, low: Tensor, around: RopeAndMemory) -> BlockScores:
        """x [B, T, n_embd], low [B, T, q_rank]; stores the tokens' rows."""
        part, invariant, turned = self._part, around.invariant, around.of_blocks
        assert turned is not None
        weights, inputs = self._input(x, invariant=invariant).split_with_sizes(self._sizes, -1)
        rows = self._rows(inputs, around)
        held = around.memory.attention.update(self._row, rows.unsqueeze(2))
        q = self._q(low, invariant=invariant).view(*x.shape[:2], part.n_index_head, part.index_dim)
        q = rope_at_end(q, turned.cos, turned.sin)
        return BlockScores(q, weights, held.k[:, 0], part.n_blocks)
