"""Synthetic acceptance: drafted tokens are kept by chance, not by the target's choice.

For benchmarks only: it shows what a drafter of a given quality would gain. The output is invalid.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from engine.decode.verify import Acceptance, with_bonus
from engine.draft.drafter import Draft
from engine.sampling.sampler import Rows, Sampler

_STREAM = 1  # beside the seed: other numbers than the sampler draws


class SyntheticAcceptance:
    """Decides for every sequence with random numbers of its own, seeded like its sampler.

    rates: as engine.options.acceptance_rates gives them.
    """

    def __init__(self, rates: Sequence[float], seed: int) -> None:
        before = (1.0, *rates[:-1])
        self._conditional = [
            rate / given if given else 0.0 for rate, given in zip(rates, before, strict=True)
        ]
        self._seed = seed
        self._random: dict[int, np.random.Generator] = {}

    def accept(
        self, seq_id: int, draft: Draft, rows: Rows, sampler: Sampler, end_tokens: Collection[int]
    ) -> Acceptance:
        """As engine.decode.verify.match, but chance decides. It never accepts an end token."""
        random = self._random.setdefault(seq_id, np.random.default_rng((self._seed, _STREAM)))
        n = 0
        for token, rate in zip(draft.tokens, self._conditional, strict=False):
            if token in end_tokens or random.random() >= rate:
                break
            n += 1
        return keep(draft, n, rows, sampler)


def keep(draft: Draft, n: int, rows: Rows, sampler: Sampler) -> Acceptance:
    """The first n drafted tokens, and one that the target samples behind them."""
    n_judged = min(n + 1, len(draft.tokens))
    unknown = [math.nan] * n_judged
    found = Acceptance(draft.tokens[:n], unknown, list(unknown))
    for token in found.tokens:
        sampler.accept(token)
    return with_bonus(found, rows, sampler)
