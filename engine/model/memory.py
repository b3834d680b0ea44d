"""What a model asks of the memory that holds attention cells and recurrent states, and mixers,
which are called with normed rows and it."""

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

    k: float32 [n_seqs, n_heads, n_cells, k_dim]. v: the same with v_dim columns; of a layer that
    keeps nothing but keys it is k itself. mask: bool [n_seqs, n_seq_tokens, n_cells], True where
    the query may look; what is hidden is finite. positions: int64 [n_seqs, n_cells], in hidden
    cells any; None in a memory where no layer keeps further rows or rows of blocks, which alone ask
    for them. seen: the mask without the layer's window, for rows of blocks.
    """

    k: Tensor
    v: Tensor
    mask: Tensor
    positions: Tensor | None = None
    seen: Tensor | None = None


class AttentionMemory:
    """Keys and values by trunk layer index."""

    def update(self, layer: CellKey, k: Tensor, v: Tensor | None = None) -> AttentionView:
        """Store k (roped) and v [B, T, H_kv, hd]; return everything these tokens may see. v: None
        for a layer that keeps nothing but keys, whose values are then these."""
        raise NotImplementedError

    def places(self, layer: CellKey) -> CellPlaces | None:
        """Where a kernel may write the tokens' keys and values itself, before `read`; None where
        only `update` can."""
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
    """Both parts, and the frame of one forward pass: begin, layer calls, commit."""

    attention: AttentionMemory
    recurrent: RecurrentMemory | None
    batch_invariant: bool
    """Whether a token's bits must not depend on the tokens and sequences decoded with it."""

    def begin(self, ubatch: UBatch) -> UBatchTensors:
        """Get ready for the tokens of `ubatch`; its arrays where the model is, for this pass."""
        raise NotImplementedError

    def part(self, first: int, n: int) -> None:
        """Show layers tokens first .. first + n - 1 of the current ubatch alone, which they may
        take in parts, one after the other."""
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
        """compute(*arguments): all layer calls of this pass, or a recording of an earlier pass
        like it (engine.machine.graphs). key: what else the computation depends on. ahead: passes
        that may be done at once; what they give is then given in turn. keeps: whether what it
        returns is still wanted when the next pass starts."""
        raise NotImplementedError

    def commit(self) -> None:
        """Called when all layers have run: count the tokens to their sequences."""


@dataclass(frozen=True, slots=True)
class RopeAndMemory:
    """What a block needs in addition to its input: cos, sin [B, T, n_rot/2] of the tokens, the
    memory, and the table of cosines and sines of all positions, [n_positions, n_rot]; None where no
    mixer looks at other positions than the tokens'. chosen: where the last indexer in this pass has
    its tokens look, bool [B, T, N], for layers after it that look there, too. tokens, positions:
    int64 [B, T]. of_blocks: the same in the rotation of layers that compress blocks of tokens, None
    without such layers.
    """

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
        """The states of recurrent layers, with which a model that has some is given its memory."""
        assert self.memory.recurrent is not None
        return self.memory.recurrent


class Mixer:
    """The token-mixing half of a block. reads: matrices that its input is multiplied with, for
    kernels.norm.rms_norm_rows."""

    reads: tuple[PackedWeight, ...]

    def __call__(self, x: Rows, around: RopeAndMemory, residual: Residual | None = None) -> Tensor:
        """x [B, T, n_embd], normed -> the same shape, added to a residual if there is one."""
        raise NotImplementedError
