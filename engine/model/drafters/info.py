"""The figures of a drafter's file, for estimates. Imports nothing that reads files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """A drafter as described by its file; sizes in bytes.

    loaded_bytes: its own weights in memory by compute mode. cell_bytes: of what it keeps of every
    token. taps: as DrafterConfig has them.
    """

    drafter: str
    name: str
    n_params: int
    weight_bytes: int
    loaded_bytes: dict[str, int]
    cell_bytes: int
    n_target: int
    taps: tuple[int, ...]

    def n_bytes(self, n_seqs: int, n_ctx: int, compute: str) -> int:
        """What it takes for so many sequences of so many cells. compute: mode of the weights, empty
        for their size in the file."""
        weights = self.loaded_bytes[compute] if compute else self.weight_bytes
        return weights + n_seqs * n_ctx * self.cell_bytes
