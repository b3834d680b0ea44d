"""Memory interfaces of a model, for attention cells and recurrent states, and the mixer
interface."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor

from engine.batch import GreedyTokens, UBatch, UBatchTensors
from engine.model.parts import CellKey
from engine.model.recurrence import RecurrenceInputs, StateKey
from kernels.linear.block_parts import Residual, Rows
from kernels.linear.packed import PackedWeight
from kernels.rows.cells import CellPlaces


@dataclass(frozen=True, slots=True)
class AttentionView:
    """What one ubatch attends to in one layer.

    k: float32 [n_seqs, n_heads, n_cells, k_dim]. v: the same with v_dim columns; for a layer that
    stores keys only it is k itself. mask: bool [n_seqs, n_seq_tokens, n_cells], True = visible;
    masked cells are finite. positions: int64 [n_seqs, n_cells], arbitrary in masked cells; None if
    no layer has further rows or block rows, which alone use them. seen: the mask without the
    layer's window, for block rows.
    """

    k: Tensor
    v: Tensor
    mask: Tensor
    positions: Tensor | None = None
    seen: Tensor | None = None


class AttentionMemory:
    """Keys and values by trunk layer index."""

    def update(self, layer: CellKey, k: Tensor, v: Tensor | None = None) -> AttentionView:
        """Store k (roped) and v [B, T, H_kv, hd]; returns everything these tokens may attend to. v:
        None for a layer that stores keys only, which are also its values."""
        raise NotImplementedError

    def places(self, layer: CellKey) -> CellPlaces | None:
        """Where a kernel may write the tokens' keys and values itself, before `read`; None if only
        `update` can."""
        raise NotImplementedError

    def read(self, layer: CellKey) -> AttentionView:
        """What `update` returns, without storing."""
        raise NotImplementedError


class RecurrentMemory:
    """The states of the recurrent layers, advanced in place."""

    def advance(self, key: StateKey, inputs: RecurrenceInputs) -> Tensor:
        """Advance one state by the tokens of this ubatch; the recurrence's output [B, T, …]."""
        raise NotImplementedError


class ModelMemory:
    """Both memories, and the frame of one forward pass: begin, layer calls, commit."""

    attention: AttentionMemory
    recurrent: RecurrentMemory | None
    batch_invariant: bool
    """Whether a token's bits must be independent of the tokens and sequences decoded with it."""

    def begin(self, ubatch: UBatch) -> UBatchTensors:
        """Prepare for the tokens of `ubatch`; returns its arrays on the device, valid for this
        pass."""
        raise NotImplementedError

    def part(self, first: int, n: int) -> None:
        """Restrict layers to tokens first .. first + n - 1 of the current ubatch, for processing it
        in parts."""
        raise NotImplementedError

    def run(
        self,
        key: Hashable,
        arguments: tuple[Tensor, ...],
        compute: Callable[..., tuple[Tensor, ...]],
        ahead: GreedyTokens | None = None,
        *,
        keeps: bool = True,
    ) -> tuple[Tensor, ...]:
        """Run compute(*arguments), all layer calls of this pass, or replay the recording of an
        equal pass (engine.machine.graphs). key: everything else that the computation depends on.
        ahead: passes that may be decoded at once; later calls return their results in turn. keeps:
        whether results must stay valid when the next pass starts."""
        raise NotImplementedError

    def commit(self) -> None:
        """Called after all layers: add the tokens to their sequences."""


@dataclass(frozen=True, slots=True)
class RopeAndMemory:
    """Further inputs of a block: cos, sin [B, T, n_rot/2] of the tokens, the memory, and the table
    for all positions, [n_positions, n_rot], None if no mixer uses other positions than the tokens'.
    chosen: the selection of the last indexer in this pass, bool [B, T, N], for later layers that
    reuse it. tokens, positions: int64 [B, T]. of_blocks: the same with the rotation of layers that
    compress blocks of tokens, None without such layers."""

    cos: Tensor
    sin: Tensor
    memory: ModelMemory
    table: Tensor | None = None
    chosen: list[Tensor] = field(default_factory=list)
    tokens: Tensor | None = None
    positions: Tensor | None = None
    of_blocks: RopeAndMemory | None = None

    @property
    def invariant(self) -> bool:
        """Whether a token's result must have the same bits whatever the other tokens are."""
        return self.memory.batch_invariant

    @property
    def recurrent(self) -> RecurrentMemory:
        """The recurrent states; models with recurrent layers always have them."""
        assert self.memory.recurrent is not None
        return self.memory.recurrent


class Mixer:
    """The token-mixing half of a block. reads: matrices that its input is multiplied with, for
    kernels.norm.rms_norm_rows."""

    reads: tuple[PackedWeight, ...]

    def __call__(self, x: Rows, around: RopeAndMemory, residual: Residual | None = None) -> Tensor:
        """x [B, T, n_embd], normed -> the same shape, added to a residual if there is one."""
        raise NotImplementedError
