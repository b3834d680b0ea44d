"""Rows that a target hands to drafters: its hidden rows, and taps into its trunk.

Tap i is the residual stream that enters block i: the embedding for i = 0, else what block i - 1
gives, before any norm. Tap n_layer is the row behind the final norm, the one the MTP head reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.errors import UnsupportedModelError
from engine.model.config import ModelConfig
from engine.model.parts import ResidualStream
from kernels.rows import join


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What the target computed of some tokens beside logits.

    hidden: float32 [..., n_embd], after the final norm. taps: rows of the same shape by layer, of
    those layers that were asked for.
    """

    hidden: torch.Tensor
    taps: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.hidden)

    def __getitem__(self, which: int | slice) -> TargetRows:
        """Some of the rows, by their first dimension."""
        return TargetRows(self.hidden[which], {i: rows[which] for i, rows in self.taps.items()})

    def side_by_side(self, layers: Sequence[int]) -> torch.Tensor:
        """The taps of these layers in this order: float32 [..., len(layers) * n_embd]."""
        return join([self.taps[i] for i in layers])


def join_rows(parts: Sequence[TargetRows]) -> TargetRows:
    """Parts [n_i, n_embd] with the same taps, one behind the other."""
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

    def enters(self, layer: int, x: torch.Tensor) -> None:
        """x [B, T, n_embd] is what `layer` takes."""
        if layer in self._rows:
            self._rows[layer] = x

    def found(self) -> tuple[torch.Tensor, ...]:
        """In the order in which the layers were asked for."""
        rows = tuple(x for x in self._rows.values() if x is not None)
        assert len(rows) == len(self._rows), "a layer that the trunk does not have"
        return rows


def check_taps(config: ModelConfig, layers: Sequence[int], who: str) -> None:
    """Raise UnsupportedModelError where the model of `config` cannot hand these rows to `who`."""
    remedy = "Choose a drafter that was made for this target."
    if not isinstance(config.trunk, ResidualStream):
        raise UnsupportedModelError(
            f"{who} reads the row that enters a layer, and in {config.name} ({config.architecture})"
            " several streams do.",
            remedy,
        )
    outside = [i for i in layers if not 0 <= i <= config.n_layer]
    if outside:
        raise UnsupportedModelError(
            f"{who} reads the input of layer {outside[0]}, and {config.name} has layers "
            f"0..{config.n_layer - 1}, with {config.n_layer} for the row behind its final norm.",
            remedy,
        )


def tap_bytes(n_embd: int, layers: Sequence[int], n_tokens: int) -> int:
    """Bytes of the rows of a batch of n_tokens."""
    return 4 * n_embd * len(layers) * n_tokens
