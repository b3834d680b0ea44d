"""Rotary position embedding: which frequencies the pairs of a head turn with. No tensors here."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotation of the first `n_rot` dimensions of a head, NEOX pairing.

    sections: the four m-rope sections (time, height, width, extra), None for plain rope.
    scaling: "none", "linear" or "yarn"; factor, n_ctx_orig, beta_fast and beta_slow belong to it.
    """

    n_rot: int
    freq_base: float
    sections: tuple[int, int, int, int] | None = None
    scaling: str = "none"
    factor: float = 1.0
    n_ctx_orig: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by: YaRN's attention temperature, else 1."""
        return 1.0 + 0.1 * math.log(self.factor) if self.scaling == "yarn" else 1.0

    def inverse_frequencies(self) -> list[float]:
        """Angle per position of each of the n_rot/2 pairs, in radians.

        Linear scaling divides positions by `factor`; YaRN (Peng et al. 2023) does so only for
        pairs that turn rarely within the original context. Text has position 0 on the extra
        m-rope stream, so pairs that belong to it do not turn.
        """
        pairs = range(self.n_rot // 2)
        plain = [self.freq_base ** (-2.0 * j / self.n_rot) for j in pairs]
        if self.scaling == "linear":
            scaled = [f / self.factor for f in plain]
        elif self.scaling == "yarn":
            keep = self._yarn_ramp()
            scaled = [f / self.factor * (1.0 - r) + f * r for f, r in zip(plain, keep, strict=True)]
        else:
            scaled = plain
        return [f if self._turns(j) else 0.0 for j, f in zip(pairs, scaled, strict=True)]

    def _yarn_ramp(self) -> list[float]:
        """Per pair: 1 where the original frequency stays, 0 where it is divided by the factor."""

        def dimension(rotations: float) -> float:
            turns = self.n_ctx_orig / (2.0 * math.pi * rotations)
            return self.n_rot * math.log(turns) / (2.0 * math.log(self.freq_base))

        low = max(0, math.floor(dimension(self.beta_fast)))
        high = min(self.n_rot - 1, math.ceil(dimension(self.beta_slow)))
        width = max(0.001, high - low)
        return [1.0 - min(1.0, max(0.0, (j - low) / width)) for j in range(self.n_rot // 2)]

    def _turns(self, pair: int) -> bool:
        """Whether a pair follows one of the streams that carry the text position."""
        if self.sections is None:
            return True
        sector = pair % sum(self.sections)
        return sector < 3 * self.sections[sector % 3]
