"""Pools of states for the gated delta rule by index, poisoned wherever no state lies."""

from __future__ import annotations

from typing import NamedTuple

import torch

LAYOUTS = ("planes", "slice", "layers")


class Pool(NamedTuple):
    """rows [n_rows, H, d_k, d_v]; whole: all the memory they lie in."""

    whole: torch.Tensor
    rows: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor

    def to(self, device: str) -> Pool:
        """On another device, with rows and tables strided as they are here."""
        whole, table = self.whole.to(device), torch.cat((self.read[:, None], self.write), 1)
        table = table.to(device)
        place = self.rows.shape, self.rows.stride(), self.rows.storage_offset()
        return Pool(whole, whole.as_strided(*place), table[:, 0], table[:, 1:])


def scattered(state: torch.Tensor, n: int, over: int | None, layout: str = "planes") -> Pool:
    """A pool in which row read[b] holds state[b]; write names n rows for each b, in disorder.

    over: which of the rows written is the row read, if one is. layout: planes of cells,
    flattened; a slice of a longer pool; one layer of rows that hold three.
    """
    n_batch, *shape = state.shape
    n_rows = (n + 2) * (n_batch + 1)
    if layout == "planes":
        whole = torch.full((n + 2, n_batch + 1, *shape), torch.nan)
        rows = whole.flatten(0, 1)
    elif layout == "slice":
        whole = torch.full((n_rows + 5, *shape), torch.nan)
        rows = whole[3:-2]
    else:
        whole = torch.full((n_rows, 3, *shape), torch.nan)
        rows = whole[:, 1]
    # columns of one table: neither is contiguous
    table = torch.randperm(n_rows)[: n_batch * (n + 1)].view(n_batch, n + 1)
    if over is not None:
        table[:, 1:][:, over] = table[:, 0]
    rows[table[:, 0]] = state
    return Pool(whole, rows, table[:, 0], table[:, 1:])


def assert_the_rest_is_poison(pool: Pool) -> None:
    """Nothing was written next to the rows that were named; this wipes those."""
    pool.rows[pool.read] = torch.nan
    pool.rows[pool.write] = torch.nan
    assert pool.whole.isnan().all()
