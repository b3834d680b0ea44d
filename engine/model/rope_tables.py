"""Cosines and sines by position."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.machine.device import CPU
from engine.model.rope import RopeConfig
from kernels.rope import rope_table
from kernels.rows import take_rows

_LEAST = 4096
"""Positions of a table at first: recorded passes are bound to it, so it should not grow soon."""


class RopeTables:
    """Cosines and sines of all positions so far, extended by doubling as positions grow; without
    columns where nothing rotates."""

    def __init__(
        self,
        config: RopeConfig | None,
        device: torch.device = CPU,
        factors: torch.Tensor | None = None,
    ) -> None:
        """factors: what each pair's angle is divided by, [n_rot/2]; None for 1."""
        self._device = device
        self._n_rot = config.n_rot if config else 0
        self._scale = config.magnitude if config else 1.0
        inverse = config.inverse_frequencies() if config else []
        self._inv_freq = torch.tensor(inverse, dtype=torch.float64)
        if factors is not None:
            self._inv_freq /= factors.double()
        self._table = torch.empty(0, self._n_rot)
        self._place: Callable[[torch.Tensor], torch.Tensor] | None = None

    def turned(
        self,
        base: float = 1.0,
        stretch: float = 1.0,
        share: float = 1.0,
        place: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> RopeTables:
        """Others whose frequency base, and whose angles, are this many times these; of the pairs
        only this share turns. place: what positions int64 [n] are taken for."""
        made = RopeTables(None, self._device)
        made._n_rot, made._scale, made._place = self._n_rot, self._scale, place
        power = torch.arange(len(self._inv_freq), dtype=torch.float64) * (-2 / max(1, self._n_rot))
        made._inv_freq = self._inv_freq * stretch * base**power
        made._inv_freq[round(share * len(power)) :] = 0
        return made

    def reach(self, highest: int) -> int:
        """Make the tables reach the position `highest`; how many positions they have."""
        if highest >= self._table.shape[0]:
            self._extend(highest)
        return self._table.shape[0]

    @property
    def table(self) -> torch.Tensor:
        """Of every position so far cosines, then sines, f32 [n_positions, n_rot]."""
        return self._table

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [B, T], within reach, on the device -> cos, sin f32 [B, T, n_rot/2]."""
        cos, sin = take_rows(self._table, positions).chunk(2, -1)
        return cos, sin

    def _extend(self, highest: int) -> None:
        size = max(_LEAST, 1 << (highest + 1).bit_length())
        places = torch.arange(size)
        if self._place is not None:
            places = self._place(places)
        cos, sin = rope_table(places, self._n_rot, self._inv_freq, self._scale)
        self._table = torch.cat((cos, sin), -1).to(self._device)
