"""Recurrent states in rows of one tensor, the pool, found by row numbers that lie on the device.

With views of storage the host chooses the rows, and a recording would repeat its choice for ever.
With numbers it chooses nothing: two passes of the same shape differ in values alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.machine.graphs import PassInputs
from engine.machine.transfer import upload
from engine.model.recurrence import Recurrence, RecurrenceInputs, RowNumbers
from kernels.rows import put_rows, take_rows


@dataclass(frozen=True, slots=True)
class PoolRows:
    """Rows of one pass, int64, all of them views of `table`.

    windows: of the states that are windows; states: of the others. carried, carried_to: [n], rows
    that move on unchanged.
    """

    table: torch.Tensor
    states: RowNumbers
    windows: RowNumbers
    carried: torch.Tensor
    carried_to: torch.Tensor

    @classmethod
    def on(
        cls,
        device: torch.device,
        states: Sequence[int],
        windows: Sequence[int],
        write: Sequence[Sequence[int]],
        carried: Sequence[int] = (),
        carried_to: Sequence[int] = (),
    ) -> PoolRows:
        """Put the numbers there in one upload. states, windows: [n_seqs], rows to start from.
        write: [n_seqs, n_new], newest first."""
        n, n_new = len(write), len(write[0])
        newest_first = [row for rows in write for row in rows]
        oldest_first = [row for rows in write for row in reversed(rows)]
        parts = states, windows, newest_first, oldest_first, carried, carried_to
        table = upload([row for part in parts for row in part], device)
        read, also, new, in_order, moving, to = table.split_with_sizes([len(x) for x in parts])
        written = new.view(n, n_new), in_order.view(n, n_new)
        return cls(table, RowNumbers(read, *written), RowNumbers(also, *written), moving, to)

    def pass_inputs(self) -> PassInputs:
        """The shapes that a recording of the pass is bound to, and the table of rows it reads."""
        return PassInputs((self.states.write.shape, self.carried.shape), (self.table,))

    def advance(
        self, recurrence: Recurrence[Any], pool: torch.Tensor, inputs: RecurrenceInputs
    ) -> torch.Tensor:
        """A recurrence from rows into rows of a pool [n_rows, *shape], carried ones moved on."""
        carried = take_rows(pool, self.carried) if self.carried.numel() else None
        rows = self.windows if recurrence.is_window else self.states
        o = recurrence.by_index(inputs, pool, rows)
        if carried is not None:
            put_rows(pool, self.carried_to, carried)
        return o
