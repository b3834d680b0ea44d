"""The gated short convolution: sizes, tensors, its window."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from engine.model.parts import Shapes, StateSize


@dataclass(frozen=True, slots=True)
class ShortConvPart:
    """Short convolution of n_channels, the model's width, between two gates (LFM2)."""

    d_conv: int
    n_channels: int

    @property
    def kind(self) -> str:
        """See engine.model.parts.MixerPart."""
        return "short convolution"

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        """See engine.model.parts.MixerPart."""
        return {
            "shortconv.in_proj.weight": (3 * n_embd, n_embd),
            "shortconv.conv.weight": (n_embd, self.d_conv),
            "shortconv.out_proj.weight": (n_embd, n_embd),
        }

    def states(self) -> Mapping[str, StateSize]:
        """The last rows that entered the convolution: the whole state."""
        window = (self.d_conv - 1, self.n_channels)
        return {"window": StateSize(window, ((self.n_channels,),), is_window=True)}

    def cells(self) -> None:
        """None."""
