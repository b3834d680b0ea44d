"""Rows that a target hands to drafters: its hidden rows, and taps into its trunk.

Tap i is the residual stream that enters block i: the embedding for i = 0, else what block i - 1
gives, before any norm. Tap n_layer is the row after the final norm, the one the MTP head reads. Of
several streams (deepseek4) every tap is the mean, the last one before the head mixes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kernels.rows import join


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What the target computed of some tokens in addition to logits.

    hidden: float32 [..., n_handed], after the final norm, or the raw streams of a trunk with
    several. taps: rows [..., n_embd] by layer, of those layers that were asked for.
    """

    hidden: torch.Tensor
    taps: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.hidden.shape[0]  # four times as fast as len()

    def __getitem__(self, which: int | slice) -> TargetRows:
        """Some of the rows, by their first dimension."""
        return TargetRows(self.hidden[which], {i: rows[which] for i, rows in self.taps.items()})

    def first(self, n: int) -> TargetRows:
        """The first n rows."""
        return self if n == len(self) else self[:n]

    def side_by_side(self, layers: Sequence[int]) -> torch.Tensor:
        """The taps of these layers in this order: float32 [..., len(layers) * n_embd]."""
        return join([self.taps[i] for i in layers])


def join_rows(parts: Sequence[TargetRows]) -> TargetRows:
    """Parts [n_i, n_embd] with the same taps, one after the other."""
    if len(parts) == 1:
        return parts[0]
    layers = parts[0].taps
    return TargetRows(
        torch.cat([part.hidden for part in parts]),
        {i: torch.cat([part.taps[i] for part in parts]) for i in layers},
    )


class TapCollector:
    """Picks the wanted rows out while the trunk computes."""

    __slots__ = ("_rows",)

    def __init__(self, layers: Sequence[int]) -> None:
        self._rows: dict[int, torch.Tensor | None] = dict.fromkeys(layers)

    def wants(self, layer: int) -> bool:
        """Whether the row that enters this layer is asked for."""
        return layer in self._rows

    def enters(self, layer: int, x: torch.Tensor) -> None:
        """x [B, T, n_embd] is what `layer` takes."""
        if layer in self._rows:
            self._rows[layer] = x

    def found(self) -> tuple[torch.Tensor, ...]:
        """In the order in which the layers were asked for."""
        rows = tuple(x for x in self._rows.values() if x is not None)
        assert len(rows) == len(self._rows), "a layer that the trunk does not have"
        return rows
