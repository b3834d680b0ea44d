"""A base state and a log of tokens instead of states (ReplaySSM; WY form of the delta rule).

Of the last ubatch's tokens, at most L = R + 1, memory keeps the rows (k, u, g) and the columns of
the convolution. A rollback moves a cursor in that log. The next ubatch folds the tokens in front
of the cursor into the base, in one product, and starts a new log there: the deferred commit. A
draft token so needs d_k + d_v + 1 numbers per head, where a snapshot would need d_k * d_v.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import UBatch
from engine.graphs import Fixed
from engine.memory.cursor import CursorMemory
from engine.memory.recurrent import InputRows, RecurrentShape, SlotState
from engine.transfer import upload
from kernels.conv import causal_conv
from kernels.delta_rule import DeltaLog, fold, gated_delta_into, gated_delta_log

Rows = slice | torch.Tensor
"""Rows of storage side by side as a view, or anywhere by index."""


@dataclass(slots=True)
class _Plan:
    """What one ubatch does.

    row_of: every sequence's row afterwards. src, dst: rows to read and to write. moved: per
    sequence, whether these differ. new: rows that start from nothing. cursors: per sequence, the
    logged tokens to fold into the base; n_folded and window_at are one number where all agree.
    n_kept: tokens that go to the log. n_read: logged tokens to look at. fixed: whether counts are
    on the device and all else is the same in every pass of these rows.
    """

    row_of: np.ndarray
    src: Rows
    dst: Rows
    moved: list[bool]
    new: Rows | None
    cursors: list[int]
    n_folded: int | torch.Tensor
    window_at: int | torch.Tensor
    n_kept: int
    n_read: int
    fixed: bool


class ReplayMemory(CursorMemory):
    """Per layer n_seqs rows, each a base [n_v_heads, d, d], a log and d_conv - 1 + L columns.

    A row may belong to several sequences, which then differ in their cursors only; whoever
    decodes leaves it first. n_rs_seq = 0 is a single state and one token of log.
    """

    def __init__(
        self,
        shape: RecurrentShape,
        n_seqs: int,
        n_rs_seq: int,
        device: torch.device,
        faults: Collection[str] = (),
    ) -> None:
        super().__init__(shape, n_seqs, n_rs_seq, device, faults)
        self._n_log = n_rs_seq + 1
        d, n_heads, head = shape.d_state, shape.n_v_heads, (n_seqs, self._n_log)
        columns = (n_seqs, shape.d_conv - 1 + self._n_log, shape.conv_dim)
        sizes = (*head, _n_key_heads(shape), d), (*head, n_heads, d), (*head, n_heads)
        self._bases = {i: torch.zeros(n_seqs, n_heads, d, d, device=device) for i in shape.layers}
        self._logs = {
            i: DeltaLog(*(torch.zeros(size, device=device) for size in sizes)) for i in shape.layers
        }
        self._columns = {i: torch.zeros(columns, device=device) for i in shape.layers}
        self._row = np.full(n_seqs, -1, np.int64)
        self._n_logged = np.zeros(n_seqs, np.int64)
        self._plan: _Plan  # begin() makes it

    def begin(self, ubatch: UBatch, *, by_index: bool = False) -> None:
        super().begin(ubatch)
        row_of, src, dst, new = self._row.copy(), [], [], []
        for seq in self._seqs:
            row = int(row_of[seq])
            if row < 0 or np.count_nonzero(row_of == row) > 1:
                row_of[seq] = self._free_row(row_of, seq)
            dst.append(int(row_of[seq]))
            # a new sequence reads its own row, which is cleared first
            src.append(dst[-1] if row < 0 else row)
            if row < 0:
                new.append(dst[-1])
        side_by_side = src == dst == list(range(src[0], src[0] + len(src)))
        as_views = side_by_side or len(src) == 1
        cursors = [self._cursor(seq) for seq in self._seqs]
        window_at = cursors
        if "no-conv-rollback" in self.faults:
            window_at = [int(self._n_logged[seq]) for seq in self._seqs]
        # a row that moves, a new one and tokens too long ago for the log take steps of their own
        fixed = by_index and src == dst and as_views and not new and self._n_new <= self._n_log
        n_folded = starts = self._counts(cursors, fixed)
        if window_at is not cursors:
            starts = self._counts(window_at, fixed)
        self._plan = _Plan(
            row_of,
            self._rows(src, as_views),
            self._rows(dst, as_views),
            [a != b for a, b in zip(src, dst, strict=True)],
            self._rows(new, False) if new else None,
            cursors,
            n_folded,
            starts,
            min(self._n_new, self._n_log),
            self._n_log if fixed else max(cursors),
            fixed,
        )

    def fixed(self) -> Fixed | None:
        plan = self._plan
        if not plan.fixed:
            return None
        counts = (plan.n_folded, plan.window_at)[: 1 + (plan.window_at is not plan.n_folded)]
        first = plan.dst.start if isinstance(plan.dst, slice) else None
        return Fixed((first, self._n_new), tuple(x for x in counts if isinstance(x, torch.Tensor)))

    def conv(self, layer: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        columns, width, plan = self._columns[layer], self.shape.d_conv - 1, self._plan
        if plan.new is not None:
            columns[plan.new, :width] = 0.0
        y, history = causal_conv(x, weight, self._window(layer), invariant=self.batch_invariant)
        columns[:, : width + plan.n_kept][plan.dst] = history[:, x.shape[1] - plan.n_kept :]
        return y

    def _window(self, layer: int) -> torch.Tensor:
        """The windows that this ubatch starts from: [n_seqs, d_conv - 1, conv_dim]."""
        columns, width, plan = self._columns[layer], self.shape.d_conv - 1, self._plan
        at = plan.window_at
        if isinstance(at, int):
            return columns[:, at : at + width][plan.src]
        steps = torch.arange(width, device=self.device)
        return columns[plan.src].gather(
            1, (at[:, None] + steps)[..., None].expand(-1, -1, columns.shape[2])
        )

    def delta(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        bases, log, grouped = self._bases[layer], self._logs[layer], self.shape.grouped
        plan, invariant = self._plan, self.batch_invariant
        if plan.new is not None:
            bases[plan.new] = 0.0
        n_early = self._n_new - plan.n_kept
        state = self._committed(layer, n_early > 0)
        outputs = []
        if n_early:
            # what is too long ago for the log is decoded into the base
            base = bases[plan.dst] if isinstance(plan.dst, slice) else state
            early = [x.split((n_early, plan.n_kept), 1) for x in (q, k, v, g, beta)]
            (q1, q), (k1, k), (v1, v), (g1, g), (beta1, beta) = early
            o = gated_delta_into(
                q1, k1, v1, g1, beta1, state, grouped=grouped, slots=[base], invariant=invariant
            )
            outputs.append(o)
            state = base
        o, new = gated_delta_log(q, k, v, g, beta, state, grouped=grouped, invariant=invariant)
        if not isinstance(plan.dst, slice):
            bases[plan.dst] = state
        for stored, rows in zip(log, new, strict=True):
            stored[:, : plan.n_kept][plan.dst] = rows
        return torch.cat((*outputs, o), 1) if outputs else o

    def _committed(self, layer: int, temporary: bool) -> torch.Tensor:
        """The states that this ubatch starts from: in storage if rows are views, else gathered.

        temporary: storage will be overwritten anyway, so it is not written now.
        """
        bases, plan = self._bases[layer], self._plan
        in_storage = isinstance(plan.dst, slice)
        state = bases[plan.src]
        target = bases[plan.dst] if in_storage else state
        if plan.n_read == 0:
            return target.copy_(state) if any(plan.moved) and not temporary else state
        return self._folded(layer, state, None if temporary and in_storage else target)

    def _folded(
        self, layer: int, state: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The bases of this ubatch's rows with the tokens in front of the cursors folded in."""
        plan = self._plan
        read = DeltaLog(*(rows[:, : plan.n_read][plan.src] for rows in self._logs[layer]))
        return fold(
            state,
            read,
            plan.n_folded,
            grouped=self.shape.grouped,
            out=out,
            invariant=self.batch_invariant,
        )

    def commit(self) -> None:
        super().commit()
        shape, plan, n_bytes = self.shape, self._plan, 4 * len(self.shape.layers)
        state = n_bytes * shape.n_v_heads * shape.d_state**2
        token = n_bytes * sum(x[0, 0].numel() for x in self._logs[shape.layers[0]])
        column = n_bytes * shape.conv_dim
        for moved, n_commit in zip(plan.moved, plan.cursors, strict=True):
            if n_commit or self._n_new > plan.n_kept:
                self.traffic.written += state
            elif moved:
                self.traffic.copied += state
            self.traffic.written += token * plan.n_kept
            self.traffic.written += column * (shape.d_conv - 1 + plan.n_kept)
        self._row = plan.row_of
        for seq in self._seqs:
            self._n_logged[seq] = plan.n_kept

    def valid_depth(self, seq: int) -> int:
        return int(min(self.n_rs_seq, self._n_logged[seq]) - self._pending[seq])

    def guaranteed_depth(self, seq: int, n_last: int) -> int:
        return min(self.n_rs_seq, n_last)

    def _input(self) -> tuple[list[InputRows], list[InputRows]]:
        bases = {layer: base[self._plan.src] for layer, base in self._bases.items()}
        if self._plan.n_read:
            bases = {layer: self._folded(layer, base) for layer, base in bases.items()}
        return list(bases.values()), [self._window(layer) for layer in self.shape.layers]

    def put(
        self, seq: int, pos: int, states: Sequence[torch.Tensor], windows: Sequence[torch.Tensor]
    ) -> None:
        self._clear(seq)
        if pos < 0:
            return
        row = self._free_row(self._row, seq)
        for layer, state, window in zip(self.shape.layers, states, windows, strict=True):
            self._bases[layer][row] = state
            self._columns[layer][row, : self.shape.d_conv - 1] = window
        self._row[seq], self._pos[seq] = row, pos

    def slots(self, seq: int) -> list[SlotState]:
        """Slot 0 is the base, slot i the state after i logged tokens."""
        found = []
        logged, at, empty = int(self._n_logged[seq]), self._cursor(seq), self._row[seq] < 0
        for slot in range(self._n_log + 1):
            if empty or slot > logged:
                found.append(SlotState(slot, "free", None))
                continue
            name = "stale" if slot > at else "fresh" if slot else "carried"
            if slot == at:
                name = "pending" if self._pending[seq] else "live"
            found.append(SlotState(slot, name, logged - slot))
        return found

    def storage(self) -> list[torch.Tensor]:
        logs = [rows for log in self._logs.values() for rows in log]
        return [*self._bases.values(), *logs, *self._columns.values()]

    def _cursor(self, seq: int) -> int:
        return int(self._n_logged[seq] - self._pending[seq])

    def _rows(self, rows: list[int], as_views: bool) -> Rows:
        if as_views:
            return slice(rows[0], rows[0] + len(rows))
        return upload(rows, self.device)

    def _counts(self, counts: list[int], on_device: bool) -> int | torch.Tensor:
        """One number where all sequences agree: it saves a mask."""
        if min(counts) == max(counts) and not on_device:
            return counts[0]
        return upload(counts, self.device)

    @staticmethod
    def _free_row(rows: np.ndarray, seq: int) -> int:
        """A row that nobody has, the sequence's own number if possible."""
        if seq not in rows:
            return seq
        return next(row for row in range(len(rows)) if row not in rows)

    def _forget(self, seq: int) -> None:
        self._row[seq], self._n_logged[seq] = -1, 0

    def _share(self, src: int, dst: int) -> None:
        self._row[dst], self._n_logged[dst] = self._row[src], self._n_logged[src]


def _n_key_heads(shape: RecurrentShape) -> int:
    """The convolved channels are queries, keys and values; queries have as many heads as keys."""
    n, rest = divmod(shape.conv_dim - shape.n_v_heads * shape.d_state, 2 * shape.d_state)
    if n < 1 or rest:
        raise ValueError(f"{shape.conv_dim} channels are not those of queries, keys and values")
    return n
