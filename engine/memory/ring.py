"""A cyclic buffer of states (discussion of llama.cpp #22400): each token writes the next slot.

A sequence refers to the slots of its last R + 1 states, oldest first. Decoding writes new states
into free slots and lets the oldest go, a rollback lets the newest go, a copied sequence refers to
the same slots: no state is ever copied.

Slot `column * (R + 1) + lane` of the pool is on lane `lane`. The states of a sequence lie on
consecutive lanes, each on one of its own. So with a column for every sequence, a lane always has
a slot to spare for whoever needs one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import UBatch
from engine.graphs import Fixed
from engine.memory.cursor import CursorMemory
from engine.memory.pool import PoolRows, conv_in_pool, delta_in_pool
from engine.memory.recurrent import InputRows, RecurrentShape, SlotState
from engine.transfer import upload
from kernels.conv import causal_conv
from kernels.delta_rule import gated_delta_into


@dataclass(slots=True)
class _Plan:
    """What one ubatch does. Per row: slots held afterwards, new ones, and where to read.

    rows: all of these as numbers on the device, if the pass goes by them; else index: the new ones
    as a tensor [n_seqs, n_new].
    """

    n_refs: np.ndarray
    held: list[list[int]]
    new: list[list[int]]
    read: Sequence[int | None]
    read_windows: Sequence[int | None]
    rows: PoolRows | None
    index: torch.Tensor


class RingMemory(CursorMemory):
    """Per layer a pool of n_seqs * (n_rs_seq + 1) states and windows, with counts of references."""

    accumulates = True

    def __init__(
        self,
        shape: RecurrentShape,
        n_seqs: int,
        n_rs_seq: int,
        device: torch.device,
        faults: Collection[str] = (),
    ) -> None:
        super().__init__(shape, n_seqs, n_rs_seq, device, faults)
        self._n_lanes = n_rs_seq + 1
        state = (n_seqs * self._n_lanes, shape.n_v_heads, shape.d_state, shape.d_state)
        window = (n_seqs * self._n_lanes, shape.d_conv - 1, shape.conv_dim)
        self._states = {i: torch.zeros(state, device=device) for i in shape.layers}
        self._windows = {i: torch.zeros(window, device=device) for i in shape.layers}
        # every slot as a batch of one, made once: a view costs as much as a small operation
        self._slots = {i: s.unsqueeze(1).unbind(0) for i, s in self._states.items()}
        self._n_refs = np.zeros((n_seqs, self._n_lanes), np.int64)
        self._held: list[list[int]] = [[] for _ in range(n_seqs)]
        self._newest_written = [0] * n_seqs
        self._n_fresh = [0] * n_seqs
        self._n_stale = [0] * n_seqs
        self._plan: _Plan  # begin() makes it

    def begin(self, ubatch: UBatch, *, by_index: bool = False) -> None:
        super().begin(ubatch)
        n_new, n_refs = min(self._n_new, self._n_lanes), self._n_refs.copy()
        choices = [self._choose(n_refs, seq, n_new) for seq in self._seqs]
        read = [self._held[seq][-1] if self._held[seq] else None for seq in self._seqs]
        windows: Sequence[int | None] = read
        if "no-conv-rollback" in self.faults:
            windows = [self._newest_written[s] if self._held[s] else None for s in self._seqs]
        held, new = [choice[0] for choice in choices], [choice[1] for choice in choices]
        rows = self._numbers(read, windows, new) if by_index else None
        index = rows.in_order if rows else upload(new, self.device)
        self._plan = _Plan(n_refs, held, new, read, windows, rows, index)

    def fixed(self) -> Fixed | None:
        return self._plan.rows.fixed() if self._plan.rows else None

    def _numbers(
        self,
        read: Sequence[int | None],
        windows: Sequence[int | None],
        new: Sequence[Sequence[int]],
    ) -> PoolRows | None:
        """None where a sequence has no state yet, or writes what another one reads: all of them
        run at once then, not in the order of the plan."""
        known = [slot for slot in read if slot is not None]
        starts = [slot for slot in windows if slot is not None]
        if len(known) < len(read) or len(starts) < len(windows):
            return None
        for row, slots in enumerate(new):
            if set(slots) & {*known[:row], *known[row + 1 :]}:
                return None
        return PoolRows.on(self.device, known, starts, [slots[::-1] for slots in new])

    def conv(self, layer: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        windows, width = self._windows[layer], self.shape.d_conv - 1
        if self._plan.rows:
            return conv_in_pool(windows, self._plan.rows, x, weight)
        read = [self._window(layer, i) for i in self._plan.read_windows]
        window = read[0] if len(read) == 1 else torch.cat(read)
        y, history = causal_conv(x, weight, window, invariant=self.batch_invariant)
        index = self._plan.index
        windows[index] = history.unfold(1, width, 1)[:, -index.shape[1] :].transpose(2, 3)
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
        slots, plan, outputs = self._slots[layer], self._plan, []
        if plan.rows:
            pool, grouped = self._states[layer], self.shape.grouped
            return delta_in_pool(pool, plan.rows, q, k, v, g, beta, grouped=grouped)
        # One by one, because only then can states be written where they stay. The order is that
        # of the plan: a slot is free for a later sequence when all earlier ones have read it.
        for row, (read, new) in enumerate(zip(plan.read, plan.new, strict=True)):
            one = slice(row, row + 1)
            state = self._state(layer, read)
            o = gated_delta_into(
                q[one],
                k[one],
                v[one],
                g[one],
                beta[one],
                state,
                grouped=self.shape.grouped,
                slots=[slots[i] for i in reversed(new)],
                invariant=self.batch_invariant,
            )
            outputs.append(o)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def commit(self) -> None:
        super().commit()
        plan = self._plan
        self._n_refs = plan.n_refs
        self.traffic.written += plan.index.numel() * self.shape.n_bytes
        for seq, held, new in zip(self._seqs, plan.held, plan.new, strict=True):
            self._held[seq] = held
            self._newest_written[seq] = held[-1]
            self._n_fresh[seq] = len(new)
            self._n_stale[seq] = max(0, self._n_stale[seq] - len(new))

    def valid_depth(self, seq: int) -> int:
        return max(0, len(self._held[seq]) - 1)

    def guaranteed_depth(self, seq: int, n_last: int) -> int:
        return min(self.n_rs_seq, len(self._held[seq]) + n_last - 1)

    def _input(self) -> tuple[list[InputRows], list[InputRows]]:
        plan, layers = self._plan, self.shape.layers
        if rows := plan.rows:
            return (
                [self._states[layer][rows.states] for layer in layers],
                [self._windows[layer][rows.windows] for layer in layers],
            )
        return (
            [[self._state(layer, i)[0] for i in plan.read] for layer in layers],
            [[self._window(layer, i)[0] for i in plan.read_windows] for layer in layers],
        )

    def _state(self, layer: int, slot: int | None) -> torch.Tensor:
        """A state as a batch of one; zeros for None."""
        slots = self._slots[layer]
        return torch.zeros_like(slots[0]) if slot is None else slots[slot]

    def _window(self, layer: int, slot: int | None) -> torch.Tensor:
        """A window as a batch of one; zeros for None."""
        windows = self._windows[layer]
        return torch.zeros_like(windows[:1]) if slot is None else windows[slot : slot + 1]

    def put(
        self, seq: int, pos: int, states: Sequence[torch.Tensor], windows: Sequence[torch.Tensor]
    ) -> None:
        self._clear(seq)
        if pos < 0:
            return
        [slot], _ = self._choose(self._n_refs, seq, 1)
        for layer, state, window in zip(self.shape.layers, states, windows, strict=True):
            self._states[layer][slot] = state
            self._windows[layer][slot] = window
        self._held[seq], self._newest_written[seq] = [slot], slot
        self._pos[seq] = pos

    def slots(self, seq: int) -> list[SlotState]:
        """By lane. A slot that was rolled back is stale until a token is written there."""
        found = [SlotState(lane, "free", None) for lane in range(self._n_lanes)]
        held, pending = self._held[seq], int(self._pending[seq])
        if not held:
            return found
        newest = held[-1] % self._n_lanes
        for back in range(len(held)):
            name = "fresh" if back < self._n_fresh[seq] else "carried"
            if back == 0:
                name = "pending" if pending else "live"
            lane = (newest - back) % self._n_lanes
            found[lane] = SlotState(lane, name, pending + back)
        for ahead in range(1, self._n_stale[seq] + 1):
            lane = (newest + ahead) % self._n_lanes
            # those of an earlier rollback belong to a text that has no newest state any more
            age = pending - ahead if ahead <= pending else None
            found[lane] = SlotState(lane, "stale", age)
        return found

    def storage(self) -> list[torch.Tensor]:
        return [*self._states.values(), *self._windows.values()]

    def _choose(self, n_refs: np.ndarray, seq: int, n_new: int) -> tuple[list[int], list[int]]:
        """The slots of a sequence after n_new more states, and those of the new ones; counts."""
        held = self._held[seq]
        n_kept = min(len(held), self._n_lanes - n_new)
        self._count(n_refs, held[: len(held) - n_kept], -1)
        lane = held[-1] % self._n_lanes if held else -1
        new = []
        for _ in range(n_new):
            lane = (lane + 1) % self._n_lanes
            # at home if possible, so that the ring is seen to turn
            column = int(n_refs[:, lane].argmin()) if n_refs[seq, lane] else seq
            new.append(column * self._n_lanes + lane)
        self._count(n_refs, new, 1)
        return held[len(held) - n_kept :] + new, new

    def _count(self, n_refs: np.ndarray, slots: Sequence[int], change: int) -> None:
        for slot in slots:
            n_refs[divmod(slot, self._n_lanes)] += change

    def _move_cursor(self, seq: int, depth: int) -> None:
        super()._move_cursor(seq, depth)
        held = self._held[seq]
        self._count(self._n_refs, held[-depth:], -1)
        del held[-depth:]
        self._n_fresh[seq] = max(0, self._n_fresh[seq] - depth)
        self._n_stale[seq] += depth

    def _forget(self, seq: int) -> None:
        self._count(self._n_refs, self._held[seq], -1)
        self._held[seq] = []
        self._n_fresh[seq] = self._n_stale[seq] = 0

    def _share(self, src: int, dst: int) -> None:
        self._held[dst] = list(self._held[src])
        self._count(self._n_refs, self._held[dst], 1)
        self._newest_written[dst] = self._newest_written[src]
        self._n_fresh[dst] = self._n_fresh[src]
