"""Rejection sampling of a draft: it keeps the target's distribution, not plain decoding's tokens.

Leviathan et al. 2023 (arXiv 2211.17192). p is the target's distribution after the whole sampler
chain, q the distribution that the drafter drew its token from. q must not depend on the token
drawn: a draft that is thrown away because of its tokens would break that.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from engine.decode.verify import Acceptance, closes, with_bonus
from engine.draft.drafter import Draft
from engine.sampling.distribution import Distribution
from engine.sampling.sampler import Rows, Sampler


def reject(draft: Draft, rows: Rows, sampler: Sampler, end_tokens: Collection[int]) -> Acceptance:
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
