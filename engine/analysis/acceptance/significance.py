"""Tails of counts: how likely a share as small as this one is by chance, exactly."""

from __future__ import annotations

import math

import numpy as np

_MOST_TERMS = 1 << 17
"""Of a sum; those beyond are far below the last digit of it."""


def binomial_at_most(k: int, n: int, p: float) -> float:
    """Probability of k or fewer of n, each with probability p."""
    if k >= n or p <= 0:
        return 1.0
    if k < 0 or p >= 1:
        return 0.0
    log_first = _log_choose(n, k) + k * math.log(p) + (n - k) * math.log1p(-p)
    x = k - np.arange(min(k, _MOST_TERMS), dtype=float)
    return _sum_down(log_first, x * (1 - p) / ((n - x + 1) * p))


def fisher_less(k: int, n: int, other_k: int, other_n: int) -> float:
    """Fisher's exact test, one-sided: probability of k or fewer of n by chance, where both groups
    together have k + other_k of n + other_n."""
    total, right = n + other_n, k + other_k
    least = max(0, right - other_n)
    log_first = _log_choose(right, k) + _log_choose(total - right, n - k) - _log_choose(total, n)
    x = k - np.arange(min(k - least, _MOST_TERMS), dtype=float)
    return _sum_down(log_first, x * (total - right - n + x) / ((right - x + 1) * (n - x + 1)))


def wilson(k: int, n: int, z: float) -> float:
    """Bound of the share k / n, the lower one for z < 0 (score interval of E. B. Wilson, 1927)."""
    if not n:
        return 0.0 if z < 0 else 1.0
    p, zz = k / n, z * z / n
    middle = p + zz / 2 + math.copysign(math.sqrt(zz * (p * (1 - p) + zz / 4)), z)
    return min(1.0, max(0.0, middle / (1 + zz)))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _sum_down(log_first: float, ratios: np.ndarray) -> float:
    """Sum of a term and of those that follow it, each `ratios` times the one before."""
    with np.errstate(divide="ignore"):
        logs = log_first + np.concatenate([[0.0], np.cumsum(np.log(np.maximum(ratios, 0.0)))])
    top = float(logs.max())
    return min(1.0, math.exp(top) * float(np.exp(logs - top).sum()))
