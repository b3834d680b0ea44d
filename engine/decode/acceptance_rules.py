"""The rules that accept a draft: matching, rejection sampling, and acceptance by chance.

Rejection sampling keeps the target's distribution, not plain decoding's tokens (Leviathan et al.
2023, arXiv 2211.17192). p is the target's distribution after the whole sampler chain, q the
distribution that the drafter drew its token from. q must not depend on the token drawn: a draft
that is thrown away because of its tokens would break that.

Synthetic acceptance keeps drafted tokens by chance, for benchmarks: it shows what a drafter of a
given quality would gain. Its output is invalid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from engine.decode.verify import Acceptance, closes, match, with_bonus
from engine.draft.drafter import Draft
from engine.sampling.distribution import Distribution
from engine.sampling.sampler import RowDistribution, Sampler


def reject(
    draft: Draft, rows: RowDistribution, sampler: Sampler, end_tokens: Collection[int]
) -> Acceptance:
    """Accept each drafted token with probability min(1, p / q); arguments as for `match`.

    The first token that is not accepted is replaced by one drawn from `residual`, and behind a
    draft that is accepted whole the target draws one more. A draft without q was certain of its
    tokens. With a temperature of 0 both are certain and the outcome is that of `match`.
    """
    found = Acceptance([])
    for i, drafted in enumerate(draft.tokens):
        p, q = rows(i), draft.q[i] if draft.q else Distribution.certain(drafted)
        found.judged_p.append(p.of(drafted))
        found.judged_q.append(q.of(drafted))
        if sampler.uniform() * q.of(drafted) < p.of(drafted):
            found.tokens.append(drafted)
            sampler.accept(drafted)
            if not closes(i, drafted, draft, end_tokens):
                continue
        else:
            found.tokens.append(sampler.draw(residual(p, q)))
        found.own_p = [p.of(found.tokens[-1])]
        return found
    return with_bonus(found, rows, sampler)


def residual(p: Distribution, q: Distribution) -> Distribution:
    """The positive part of p - q, normalised: what acceptance left of p."""
    missing = p.probs - np.array([q.of(token) for token in p.ids])
    # equal distributions reject nothing but by rounding, and then p itself is right
    return Distribution.of_weights(p.ids, np.maximum(missing, 0)) if (missing > 0).any() else p


AcceptanceRule = Callable[[Draft, RowDistribution, Sampler, Collection[int]], Acceptance]

RULES: dict[str, AcceptanceRule] = {"match": match, "rejection": reject}
"""The keys are those of engine.options.ACCEPT_RULES."""


_STREAM = 1  # beside the seed: other numbers than the sampler draws


class SyntheticAcceptance:
    """Decides for every sequence with random numbers of its own, seeded like its sampler.

    One number decides a round, so that drafts of other lengths have the same luck in it: runs of
    several lengths can be compared. rates: as engine.options.acceptance_rates gives them.
    """

    def __init__(self, rates: Sequence[float], seed: int) -> None:
        self._rates, self._seed = rates, seed
        self._random: dict[int, np.random.Generator] = {}

    def accept(
        self,
        seq_id: int,
        draft: Draft,
        rows: RowDistribution,
        sampler: Sampler,
        end_tokens: Collection[int],
    ) -> Acceptance:
        """As engine.decode.verify.match, but chance decides. It never accepts an end token."""
        n, luck = 0, self._random.setdefault(seq_id, _luck(self._seed)).random()
        for token, rate in zip(draft.tokens, self._rates, strict=False):
            if token in end_tokens or luck >= rate:
                break
            n += 1
        return keep(draft, n, rows, sampler)


def accepted_by_chance(rates: Sequence[float], seed: int, n: int) -> np.ndarray:
    """How many tokens of a full draft SyntheticAcceptance keeps in each of the first n rounds of a
    sequence, int64 [n]."""
    luck = _luck(seed).random(n)
    found: np.ndarray = (luck[:, None] < np.array(rates)).sum(1)
    return found


def _luck(seed: int) -> np.random.Generator:
    return np.random.default_rng((seed, _STREAM))


def keep(draft: Draft, n: int, rows: RowDistribution, sampler: Sampler) -> Acceptance:
    """The first n drafted tokens, and one that the target samples behind them."""
    n_judged = min(n + 1, len(draft.tokens))
    unknown = [math.nan] * n_judged
    found = Acceptance(draft.tokens[:n], unknown, list(unknown))
    for token in found.tokens:
        sampler.accept(token)
    return with_bonus(found, rows, sampler)
