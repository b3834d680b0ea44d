"""Snapshot planes (llama.cpp #22400): plane r holds the state r tokens before the newest.

After a ubatch of n tokens the planes 0 .. min(n, K) - 1 are fresh and deeper ones keep what they
held. Upstream accepts any rollback up to R = K - 1; here the bound is what is truthful, so a stale
plane is never read. A rollback only records which plane the next ubatch reads, and a second one
before that is refused (single use).
"""

from __future__ import annotations

import numpy as np
import torch

from engine.memory.batch import UBatch
from engine.memory.recurrent import (
    RecurrentCheckpoint,
    RecurrentMemory,
    RecurrentShape,
    SlotState,
)
from kernels.conv import causal_conv
from kernels.delta_rule import gated_delta_rule

_NEVER = -1


class PlanesMemory(RecurrentMemory):
    """K = n_rs_seq + 1 planes of states [K, n_seqs, …] per layer; n_rs_seq = 0 keeps no history."""

    def __init__(
        self, shape: RecurrentShape, n_seqs: int, n_rs_seq: int, device: torch.device
    ) -> None:
        self.shape, self.n_rs_seq, self.n_seqs = shape, n_rs_seq, n_seqs
        self._n_planes = n_rs_seq + 1
        head = (self._n_planes, n_seqs)
        state = (shape.n_v_heads, shape.d_state, shape.d_state)
        window = (shape.d_conv - 1, shape.conv_dim)
        self._states = {i: torch.zeros(*head, *state, device=device) for i in shape.layers}
        self._windows = {i: torch.zeros(*head, *window, device=device) for i in shape.layers}
        self._pos = np.full(n_seqs, -1, np.int64)
        self._idx = np.zeros(n_seqs, np.int64)
        self._depth = np.zeros(n_seqs, np.int64)
        self._age = np.full((n_seqs, self._n_planes), _NEVER, np.int64)
        self._age[:, 0] = 0
        self._seqs: tuple[int, ...] = ()
        self._n_new = 0
        self._read: list[int] = []

    def begin(self, ubatch: UBatch) -> None:
        self._seqs, self._n_new = ubatch.seq_ids, ubatch.n_seq_tokens
        self._read = [int(self._idx[seq]) for seq in ubatch.seq_ids]

    def conv(self, layer: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        planes = self._windows[layer]
        y, history = causal_conv(x, weight, self._gather(planes))
        n, width = x.shape[1], self.shape.d_conv - 1
        for row, seq in enumerate(self._seqs):
            for r in range(min(n, self._n_planes)):
                planes[r, seq] = history[row, n - r : n - r + width]
        return y

    def delta(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        planes = self._states[layer]
        o, snapshots = gated_delta_rule(
            q, k, v, g, beta, self._gather(planes),
            grouped=self.shape.grouped, n_snapshots=self._n_planes,
        )  # fmt: skip
        n = snapshots.shape[1]
        for row, seq in enumerate(self._seqs):
            planes[:n, seq] = snapshots[row]
        return o

    def commit(self) -> None:
        n = self._n_new
        fresh = min(n, self._n_planes)
        for seq, read in zip(self._seqs, self._read, strict=True):
            older = self._age[seq, fresh:]
            older[older != _NEVER] += n - read
            self._age[seq, :fresh] = np.arange(fresh)
            self._pos[seq] += n
            self._idx[seq] = 0
            self._depth[seq] = fresh - 1

    def seq_rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        pos = int(self._pos[seq])
        if p0 > pos or 0 <= p1 <= pos:
            return True
        if p0 <= 0:
            self._clear(seq)
            return True
        depth = pos - (p0 - 1)
        if self._idx[seq] or depth > self._depth[seq]:
            return False
        self._idx[seq] = depth
        self._pos[seq] = p0 - 1
        return True

    def seq_pos_max(self, seq: int) -> int:
        return int(self._pos[seq])

    def valid_depth(self, seq: int) -> int:
        return 0 if self._idx[seq] else int(self._depth[seq])

    def pending(self, seq: int) -> int:
        return int(self._idx[seq])

    def guaranteed_depth(self, n_last: int) -> int:
        return min(n_last, self._n_planes) - 1

    def save(self, seq: int) -> RecurrentCheckpoint:
        states, windows = self.live(seq)
        return RecurrentCheckpoint(
            int(self._pos[seq]),
            tuple(t.clone() for t in states),
            tuple(t.clone() for t in windows),
        )

    def restore(self, seq: int, checkpoint: RecurrentCheckpoint) -> None:
        self._clear(seq)
        for i, layer in enumerate(self.shape.layers):
            self._states[layer][0, seq] = checkpoint.states[i]
            self._windows[layer][0, seq] = checkpoint.windows[i]
        self._pos[seq] = checkpoint.pos

    def live(self, seq: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        idx = int(self._idx[seq])
        return (
            [self._states[layer][idx, seq] for layer in self.shape.layers],
            [self._windows[layer][idx, seq] for layer in self.shape.layers],
        )

    def slots(self, seq: int) -> list[SlotState]:
        idx, depth = int(self._idx[seq]), int(self._depth[seq])
        found = []
        for plane, age in enumerate(self._age[seq].tolist()):
            if self._pos[seq] < 0 or age == _NEVER:
                found.append(SlotState(plane, "free", None))
                continue
            name = "fresh" if plane <= depth else "stale"
            if plane == idx:
                name = "pending" if idx else "live"
            found.append(SlotState(plane, name, age))
        return found

    def n_bytes(self) -> int:
        held = (*self._states.values(), *self._windows.values())
        return sum(t.numel() * t.element_size() for t in held)

    def _gather(self, planes: torch.Tensor) -> torch.Tensor:
        if len(self._seqs) == 1:
            return planes[self._read[0], self._seqs[0]].unsqueeze(0)
        return planes[self._read, list(self._seqs)]

    def _clear(self, seq: int) -> None:
        for planes in (*self._states.values(), *self._windows.values()):
            planes[0, seq] = 0.0
        self._pos[seq] = -1
        self._idx[seq] = self._depth[seq] = 0
        self._age[seq] = _NEVER
        self._age[seq, 0] = 0
