"""What --spec-synth-rates and --spec-synth-len come to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from engine.errors import OptionError

_BISECTIONS = 32


def acceptance_rates(rates: Sequence[float], length: float | None, n_max: int) -> tuple[float, ...]:
    """Rate i is the probability that the first i + 1 drafted tokens are all accepted.

    rates: these probabilities, one per token of the longest draft n_max. length: instead, the mean
    of the accepted list of a full draft; rates are then p, p², … Empty if neither is given.
    Raises OptionError.
    """
    if not rates and length is None:
        return ()
    if rates and length is not None:
        raise OptionError(
            "--spec-synth-rates and --spec-synth-len are both given.", "Use one of them."
        )
    if n_max < 1:
        raise OptionError(
            "Synthetic acceptance has nothing to accept.", "Name a drafter with --spec-type."
        )
    if length is not None:
        if not 1.0 <= length <= n_max + 1:
            raise OptionError(
                f"--spec-synth-len is outside 1..{n_max + 1}.",
                f"The longest draft has {n_max} tokens and one more is the target's.",
            )
        p = _rate_for(length, n_max)
        return tuple(p ** (i + 1) for i in range(n_max))
    if len(rates) != n_max:
        raise OptionError(
            f"--spec-synth-rates has {len(rates)} values.",
            f"Give {n_max}, one per token of the longest draft.",
        )
    if not all(math.isfinite(rate) and 0.0 <= rate <= 1.0 for rate in rates):
        raise OptionError("--spec-synth-rates has a value outside [0, 1].", "Give probabilities.")
    if any(after > before for before, after in pairwise(rates)):
        raise OptionError(
            "--spec-synth-rates rises.",
            "A token counts as accepted only with all before it, so later rates cannot be larger.",
        )
    return tuple(rates)


def _rate_for(length: float, n_max: int) -> float:
    """p with p + p² + … + p^n_max = length - 1."""
    if length in (1.0, n_max + 1.0):
        return float(length > 1.0)
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, n_max + 1)) < length - 1:
            low = middle
        else:
            high = middle
    return (low + high) / 2
