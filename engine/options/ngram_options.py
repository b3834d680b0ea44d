"""Parameters of the drafters that look tokens up; names, defaults and ranges are llama.cpp's."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import OptionError

LOOKUP_CACHE_N_MAX = 8
"""Longest draft of ngram-cache."""

SHORT_MATCH = 16
"""Below this n_match, ngram-mod drafts are often wrong."""


@dataclass(frozen=True, slots=True)
class NgramSizes:
    """ngram-simple and ngram-map: look up size_n tokens, draft size_m.

    min_hits: look-ups of a key before ngram-map-k4v drafts; the others do not use it.
    """

    size_n: int = 12
    size_m: int = 48
    min_hits: int = 1

    def check(self, drafter: str) -> None:
        """Raise OptionError naming the option of this drafter that is out of range."""
        for field in ("size_n", "size_m", "min_hits"):
            _in_range(drafter, field, getattr(self, field), 1)


@dataclass(frozen=True, slots=True)
class NgramModOptions:
    """ngram-mod: look up n_match tokens, draft n_max; a find shorter than n_min is thrown away."""

    n_match: int = 24
    n_min: int = 48
    n_max: int = 64

    def check(self) -> None:
        """Raise OptionError naming the option that is out of range."""
        _in_range("ngram-mod", "n_match", self.n_match, 1)
        _in_range("ngram-mod", "n_min", self.n_min, 0)
        _in_range("ngram-mod", "n_max", self.n_max, 0)


def _in_range(drafter: str, field: str, value: int, low: int) -> None:
    if not low <= value <= 1024:
        raise OptionError(
            f"--spec-{drafter}-{field.replace('_', '-')} is outside {low}..1024.",
            f"Choose a number from {low}.",
        )
