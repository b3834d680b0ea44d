"""Rotary position embedding: frequencies of a head's pairs. No tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf.binary import shorten
from engine.gguf.file import GgufFile
from engine.model.limits import MAX_CONTEXT, REMEDY, count, real

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the angles: one number per pair, the same in all layers."""

_M_ROPE = ("qwen35", "qwen35moe", "qwen4exp")
_WITH_FACTORS = ("granitehybrid", "eagle3", "dflash")
"""Architectures whose rope uses this tensor if the file has it, as in llama.cpp."""
LEAVES_FACTORS = ("falcon-h1", "granitehybrid")
"""Architectures for which llama.cpp loads this tensor without using it: always in falcon-h1, with
rope off in granitehybrid."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotation of the first `n_rot` dimensions of a head, NEOX pairing.

    sections: the four m-rope sections (time, height, width, extra), None for plain rope. scaling:
    "none", "linear" or "yarn", with factor, n_ctx_orig, beta_fast and beta_slow. factors: further
    divisors of each pair's angle, empty for 1. keeps_magnitude: cosines and sines are not
    multiplied by YaRN's attention temperature.
    """

    n_rot: int
    freq_base: float
    sections: tuple[int, int, int, int] | None = None
    scaling: str = "none"
    factor: float = 1.0
    n_ctx_orig: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    factors: tuple[float, ...] = ()
    keeps_magnitude: bool = False

    @classmethod
    def from_gguf(cls, file: GgufFile, head_dim: int) -> RopeConfig:
        """Read the `rope` keys of `file` for heads of `head_dim`.

        Raises UnsupportedModelError for an unknown scaling, ModelFileError for bad values.
        """
        arch = file.architecture
        key = ".rope.dimension_count"
        n_rot = count(file, key, head_dim)
        if n_rot % 2 or n_rot > head_dim or (arch == "qwen3" and n_rot != head_dim):
            raise file.wrong(key, f"{n_rot} rotated dimensions do not fit heads of {head_dim}")
        key = ".rope.freq_base"
        theta = real(file, key, 10000.0)
        if theta <= 1.0:
            raise file.wrong(key, f"{theta} is not above 1")
        scaling, factor = _scaling(file)
        return cls(
            n_rot=n_rot,
            freq_base=theta,
            sections=_sections(file, head_dim) if arch in _M_ROPE else None,
            scaling=scaling,
            factor=factor,
            n_ctx_orig=count(
                file,
                ".rope.scaling.original_context_length",
                count(file, ".context_length", high=MAX_CONTEXT),
                high=MAX_CONTEXT,
            ),
            beta_fast=real(file, ".rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=real(file, ".rope.scaling.yarn_beta_slow", 1.0),
            factors=_factors(file, n_rot // 2) if arch in _WITH_FACTORS else (),
        )

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines: YaRN's attention temperature, else 1."""
        is_scaled = self.scaling == "yarn" and not self.keeps_magnitude
        return 1.0 + 0.1 * math.log(self.factor) if is_scaled else 1.0

    def inverse_frequencies(self) -> list[float]:
        """Angle per position of each of the n_rot/2 pairs, radians.

        Linear scaling divides positions by `factor`; YaRN (Peng et al. 2023) does so only for pairs
        that turn rarely within the original context. Text has position 0 on the extra m-rope
        stream, so pairs of that stream do not turn.
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
        if self.factors:
            scaled = [f / factor for f, factor in zip(scaled, self.factors, strict=True)]
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


def _scaling(file: GgufFile) -> tuple[str, float]:
    """The scaling type and its factor; a factor without a type means linear."""
    factor = real(file, ".rope.scaling.factor", 1.0)
    kind = file.str_(".rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path.name}: the rope scaling {shorten(kind)!r} is not supported.",
            "Open a model with scaling none, linear or yarn.",
        )
    return (kind, factor) if kind != "none" and factor != 1.0 else ("none", 1.0)


def _factors(file: GgufFile, n_pairs: int) -> tuple[float, ...]:
    """The first numbers of the tensor ROPE_FACTORS; none if the file lacks it."""
    info = file.tensors.get(ROPE_FACTORS)
    if info is None:
        return ()
    place = f"tensor {ROPE_FACTORS}"
    if info.type.name != "F32" or info.n_elements < n_pairs:
        what = f"{info.n_elements} numbers of type {info.type.name} where {n_pairs} F32 are needed"
        raise ModelFileError(file.path, place, what, REMEDY)
    factors = np.frombuffer(file.raw(ROPE_FACTORS).tobytes(), np.float32)
    if not (np.isfinite(factors) & (factors > 0)).all():
        what = "a pair's angle cannot be divided by every one of its numbers"
        raise ModelFileError(file.path, place, what, REMEDY)
    return tuple(factors[:n_pairs].tolist())


def _sections(file: GgufFile, head_dim: int) -> tuple[int, int, int, int]:
    key = ".rope.dimension_sections"
    values = file.ints(key)
    if len(values) != 4 or min(values) < 0 or not 0 < sum(values) <= head_dim:
        raise file.wrong(key, f"{values[:8]} are not four sections within a head of {head_dim}")
    first, second, third, fourth = values
    return first, second, third, fourth
