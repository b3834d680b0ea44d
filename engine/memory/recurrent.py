"""Recurrent memory: the delta-net state and the convolution window of every recurrent layer.

A snapshot policy decides how many past states are kept and what a rollback costs. The model calls
`conv` and `delta` and never sees a policy; the policy owns the states, so it also chooses which
variant of the kernel computes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from engine.batch import UBatch
from engine.graphs import Fixed

States = tuple[list[torch.Tensor], list[torch.Tensor]]
"""States and convolution windows, one of each per recurrent layer."""

InputRows = torch.Tensor | list[torch.Tensor]
"""One tensor for each sequence of a ubatch."""


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Sizes of one layer's state: S [n_v_heads, d_state, d_state], window [d_conv - 1, conv_dim].

    grouped: value head j reads key head j // (n_v_heads / n_k_heads), else j mod n_k_heads.
    """

    layers: tuple[int, ...]
    n_v_heads: int
    d_state: int
    d_conv: int
    conv_dim: int
    grouped: bool

    @property
    def n_bytes(self) -> int:
        """Bytes of one snapshot of one sequence, all layers, float32."""
        state = self.n_v_heads * self.d_state * self.d_state
        return 4 * len(self.layers) * (state + (self.d_conv - 1) * self.conv_dim)

    def fits(self, checkpoint: RecurrentCheckpoint) -> bool:
        """Whether a checkpoint holds states and windows of these sizes."""
        state = (self.n_v_heads, self.d_state, self.d_state)
        window = (self.d_conv - 1, self.conv_dim)
        return (
            len(checkpoint.states) == len(checkpoint.windows) == len(self.layers)
            and all(t.shape == state for t in checkpoint.states)
            and all(t.shape == window for t in checkpoint.windows)
        )


class SlotState(NamedTuple):
    """One snapshot slot as the trace shows it. age: tokens behind the newest state written."""

    slot: int
    state: str
    age: int | None


@dataclass(frozen=True, slots=True)
class RecurrentCheckpoint:
    """A copy of one sequence's live state. pos: its last position."""

    pos: int
    states: tuple[torch.Tensor, ...]
    windows: tuple[torch.Tensor, ...]

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.states, *self.windows))


@dataclass(slots=True)
class Traffic:
    """Bytes of recurrent memory moved since the start.

    written: new states, windows or log entries that forward passes put into storage.
    copied: stored bytes copied to another place unchanged (carry, relocation, copy-on-write).
    saved, restored: checkpoints, counted by the memory that makes them.
    """

    written: int = 0
    copied: int = 0
    saved: int = 0
    restored: int = 0


class RecurrentMemory(ABC):
    """One interface for all snapshot policies; positions count tokens, -1 is empty.

    n_rs_seq (R) bounds every rollback; what is truthful may be less. A sequence without tokens
    has the zero state, whatever its storage holds. `faults` are switched on on purpose, to show
    what they do (engine.options.FAULTS).
    """

    batch_invariant: bool = False
    """Whether the kernels run in the forms whose bits do not depend on the shape of a batch."""

    accumulates: ClassVar[bool] = False
    """Whether a rollback reaches back through several ubatches; else only through the last one,
    so that the tokens that may be undone have to share it (keep-tail)."""

    def __init__(
        self,
        shape: RecurrentShape,
        n_seqs: int,
        n_rs_seq: int,
        device: torch.device,
        faults: Collection[str] = (),
    ) -> None:
        self.shape, self.n_seqs, self.n_rs_seq, self.device = shape, n_seqs, n_rs_seq, device
        self.faults = frozenset(faults)
        self.traffic = Traffic()

    @abstractmethod
    def prepare(self, ubatches: Sequence[UBatch]) -> bool:
        """Whether these ubatches could be decoded in turn; changes nothing (a dry run)."""

    @abstractmethod
    def begin(self, ubatch: UBatch, *, by_index: bool = False) -> None:
        """Choose the rows to read; a pending rollback is consumed here.

        by_index: leave rows to numbers on the device where that is possible, so that the pass
        can be recorded.
        """

    @abstractmethod
    def fixed(self) -> Fixed | None:
        """What a recording of the pass would rest on; None if it cannot be recorded."""

    @abstractmethod
    def conv(self, layer: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Causal convolution and silu of x [n_seqs, n_seq_tokens, conv_dim], window updated."""

    @abstractmethod
    def delta(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """Gated delta rule (kernels.delta_rule) over this ubatch, states updated."""

    @abstractmethod
    def commit(self) -> None:
        """Move the positions after the forward pass that `begin` prepared."""

    @abstractmethod
    def seq_rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        """Undo the tokens from p0 on. False changes nothing: the caller needs a checkpoint.

        Negative p0 is 0, negative p1 is no end. p0 = 0 without end, or an end above the last
        position, forgets the sequence. A range that does not touch the last position is True and
        changes nothing.
        """

    @abstractmethod
    def seq_cp(self, src: int, dst: int) -> None:
        """dst becomes a copy of src, sharing storage until one of them decodes."""

    @abstractmethod
    def seq_keep(self, seq: int) -> None:
        """Forget every other sequence."""

    @abstractmethod
    def seq_add(self, seq: int, p0: int, p1: int, shift: int) -> None:
        """Shift the position by `shift` if it lies in p0 <= pos < p1; states do not change."""

    @abstractmethod
    def seq_pos_max(self, seq: int) -> int:
        """Last position of the logical state, -1 when empty."""

    @abstractmethod
    def valid_depth(self, seq: int) -> int:
        """Deepest rollback that `seq_rm` would accept now."""

    @abstractmethod
    def pending(self, seq: int) -> int:
        """Tokens that the next ubatch will find rolled back (`rs_idx`), 0 = none."""

    @abstractmethod
    def guaranteed_depth(self, seq: int, n_last: int) -> int:
        """Depth that will be truthful after decoding n_last tokens in one ubatch now."""

    @abstractmethod
    def _input(self) -> tuple[list[InputRows], list[InputRows]]:
        """What the pass that has begun starts from, read as the pass itself reads it: states and
        windows of its n_seqs sequences, for every recurrent layer. Those of sequences without
        tokens are not looked at. Changes nothing."""

    @abstractmethod
    def put(
        self, seq: int, pos: int, states: Sequence[torch.Tensor], windows: Sequence[torch.Tensor]
    ) -> None:
        """Replace a sequence by these states, last position pos; nothing else is kept of it."""

    @abstractmethod
    def slots(self, seq: int) -> list[SlotState]:
        """Every snapshot slot of a sequence."""

    @abstractmethod
    def storage(self) -> list[torch.Tensor]:
        """Every tensor held."""

    def inputs(self, seqs: Sequence[int], *, by_index: bool = False) -> list[States]:
        """What the next pass would start from if these sequences had one token each in it.

        It goes through `begin` and reads what that chose, so a wrong row or plane shows here as it
        does in the pass. Per sequence, the states [n_v_heads, d_state, d_state] and windows
        [d_conv - 1, conv_dim] of every recurrent layer; they may be views. by_index: as in `begin`.
        """
        positions = [[self.seq_pos_max(seq) + 1] for seq in seqs]
        tokens = np.zeros((len(seqs), 1), np.int64)
        ubatch = UBatch(tokens, np.array(positions), tuple(seqs), np.arange(0))
        self.begin(ubatch, by_index=by_index)
        found = []
        states, windows = self._input()
        for row, (pos,) in enumerate(positions):
            both = [state[row] for state in states], [window[row] for window in windows]
            if pos == 0:
                both = (
                    [torch.zeros_like(t) for t in both[0]],
                    [torch.zeros_like(t) for t in both[1]],
                )
            found.append(both)
        return found

    def live(self, seq: int) -> States:
        """The logical states and windows of a sequence, also while a rollback is pending."""
        return self.inputs((seq,))[0]

    def save(self, seq: int, device: torch.device | None = None) -> RecurrentCheckpoint:
        """Copy the logical state to `device` (None: where it is)."""
        states, windows = self.live(seq)
        to = self.device if device is None else device
        checkpoint = RecurrentCheckpoint(
            self.seq_pos_max(seq),
            tuple(t.to(to, copy=True) for t in states),
            tuple(t.to(to, copy=True) for t in windows),
        )
        self.traffic.saved += checkpoint.n_bytes
        return checkpoint

    def restore(self, seq: int, checkpoint: RecurrentCheckpoint) -> None:
        """Put a copy back; whatever was pending or kept before is gone."""
        self.put(seq, checkpoint.pos, checkpoint.states, checkpoint.windows)
        self.traffic.restored += checkpoint.n_bytes

    def n_bytes(self) -> int:
        """Bytes of storage held."""
        return self._n_bytes

    @cached_property
    def _n_bytes(self) -> int:
        # no policy allocates later than in its constructor
        return sum(t.nbytes for t in self.storage())

    def poison(self, value: float) -> None:
        """Fill storage, before any sequence is decoded: a read of unwritten memory then shows."""
        for tensor in self.storage():
            tensor.fill_(value)
