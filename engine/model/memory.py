"""What a model asks of the memory that holds attention cells and recurrent states."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from engine.batch import GreedyTokens, UBatch, UBatchTensors
from engine.model.parts import CellKey
from engine.model.recurrence import RecurrenceInputs, StateKey
from kernels.rows.cells import CellPlaces


class AttentionView(Protocol):
    """Cells of a ubatch's sequences: k, v [B, H_kv, N, hd] f32; mask bool [B, T, N]; positions
    int64 [B, N] of visible cells, where a layer keeps further rows or rows of blocks; seen: the
    mask without a window, for rows of blocks."""

    @property
    def k(self) -> torch.Tensor: ...
    @property
    def v(self) -> torch.Tensor: ...
    @property
    def mask(self) -> torch.Tensor: ...
    @property
    def positions(self) -> torch.Tensor | None: ...
    @property
    def seen(self) -> torch.Tensor | None: ...


class AttentionMemory(Protocol):
    """Keys and values by trunk layer index."""

    def update(
        self, layer: CellKey, k: torch.Tensor, v: torch.Tensor | None = None
    ) -> AttentionView:
        """Store k (roped) and v [B, T, H_kv, hd]; return everything these tokens may see. v: None
        for a layer that keeps nothing but keys, whose values are then these."""

    def places(self, layer: CellKey) -> CellPlaces | None:
        """Where a kernel may write the tokens' keys and values itself, before `read`; None where
        only `update` can."""

    def read(self, layer: CellKey) -> AttentionView:
        """What `update` returns, without storing."""


class RecurrentMemory(Protocol):
    """The states of the recurrent layers, advanced in place."""

    def advance(self, key: StateKey, inputs: RecurrenceInputs) -> torch.Tensor:
        """Advance one state by the tokens of this ubatch; the recurrence's output [B, T, …]."""


class ModelMemory(Protocol):
    """Both parts, and the frame of one forward pass: begin, layer calls, commit."""

    @property
    def attention(self) -> AttentionMemory: ...
    @property
    def recurrent(self) -> RecurrentMemory | None: ...
    @property
    def batch_invariant(self) -> bool:
        """Whether a token's bits must not depend on the tokens and sequences decoded with it."""

    def begin(self, ubatch: UBatch) -> UBatchTensors:
        """Get ready for the tokens of `ubatch`; its arrays where the model is, for this pass."""

    def run(
        self,
        key: Hashable,
        arguments: tuple[torch.Tensor, ...],
        compute: Callable[..., tuple[torch.Tensor, ...]],
        ahead: GreedyTokens | None = None,
        *,
        keeps: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        """compute(*arguments): all layer calls of this pass, or a recording of an earlier pass
        like it (engine.machine.graphs). key: what else the computation depends on. ahead: passes
        that may be done at once; what they give is then given in turn. keeps: whether what it
        returns is still wanted when the next pass starts."""

    def commit(self) -> None:
        """Called when all layers have run: count the tokens to their sequences."""


class PartwiseMemory(ModelMemory, Protocol):
    """A memory whose layers may take the tokens of a ubatch in parts, one after the other."""

    def part(self, first: int, n: int) -> None:
        """Show layers tokens first .. first + n - 1 of the current ubatch."""
