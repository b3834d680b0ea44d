"""Rings: states that are the last inputs of a compressor, in slots by position (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.model.recurrence import Recurrence, RowNumbers
from kernels.recurrence.compressor import (
    Compressor,
    compress,
    compress_slots,
    fold_ring,
    ring_places,
    write_ring,
)


class CompressorInputs(NamedTuple):
    """x: values and scores of tokens, [B, T, 2 n_channels]. positions: int64 [B, T], consecutive in
    a sequence."""

    x: torch.Tensor
    positions: torch.Tensor

    def part(self, rows: slice, tokens: slice) -> CompressorInputs:
        """See engine.model.recurrence.RecurrenceInputs."""
        return CompressorInputs(self.x[rows, tokens], self.positions[rows, tokens])


class CompressorRing(Recurrence[CompressorInputs]):
    """Ring [n_slots, 2 n_channels] of values and scores, a token in slot position mod n_slots; a
    token's log entry is its row and its slot.

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
        """The first token that is needed still: of the block that is not whole, or where blocks
        overlap of the one before it."""
        ratio, n_slots = self._part.ratio, self._part.n_slots
        return n_tokens // ratio * ratio - (n_slots - ratio)

    def serves(self, n_tokens: int, n_written: int) -> bool:
        return self._first(n_tokens) >= n_written - self._part.n_slots

    def _slots(self, n_tokens: int, device: torch.device) -> torch.Tensor:
        first = max(0, self._first(n_tokens))
        return torch.arange(first, n_tokens, device=device) % self._part.n_slots

    def needed(self, state: torch.Tensor, n_tokens: int) -> torch.Tensor:
        kept, slots = torch.zeros_like(state), self._slots(n_tokens, state.device)
        kept[slots] = state[slots]
        return kept

    def in_order(self, state: torch.Tensor, n_tokens: int) -> torch.Tensor:
        return state[self._slots(n_tokens, state.device)]

    def into(
        self,
        inputs: CompressorInputs,
        start: torch.Tensor,
        slots: Sequence[torch.Tensor],
        *,
        invariant: bool = False,
    ) -> torch.Tensor:
        x, positions = inputs
        y, n = compress(x, positions, start, self._part), x.shape[1]
        # the slot that is `start`, if one is, when all others are written
        in_turn = sorted(enumerate(slots), key=lambda one: one[1].data_ptr() == start.data_ptr())
        for back, slot in in_turn:
            write_ring(start, x, positions, n - back, slot)
        return y

    def log(
        self, inputs: CompressorInputs, start: torch.Tensor, *, invariant: bool = False
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        x, positions = inputs
        y = compress(x, positions, start, self._part)
        return y, (x, ring_places(positions, self._part.n_slots))

    def fold(
        self,
        start: torch.Tensor,
        entries: Sequence[torch.Tensor],
        n_tokens: int | torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        invariant: bool = False,
    ) -> torch.Tensor:
        x, places = entries
        if isinstance(n_tokens, int):
            n_tokens = torch.full((len(start),), n_tokens, device=start.device)
        return fold_ring(
            start, x, places, n_tokens, torch.empty_like(start) if out is None else out
        )

    def by_index(
        self, inputs: CompressorInputs, pool: torch.Tensor, rows: RowNumbers
    ) -> torch.Tensor:
        return compress_slots(*inputs, pool, rows.read, rows.write, self._part)
