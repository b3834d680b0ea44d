"""Tails of counts: how likely a share as small as this one is by chance, exactly."""

from __future__ import annotations

import math
from typing import NamedTuple

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


class Logistic(NamedTuple):
    """A fit of the log odds of success over x. slope: of x itself, error: its standard error.
    begin, end: the shares at the least and the largest x."""

    slope: float
    error: float
    begin: float
    end: float


def logistic(x: np.ndarray, k: np.ndarray, n: np.ndarray) -> Logistic | None:
    """Logistic regression of k successes of n at each x, float [m]; None where x does not vary."""
    if not len(x) or x.min() == x.max():
        return None
    p, (slope, error), _ = fitted(x, k, n)
    return Logistic(slope, error, float(p[np.argmin(x)]), float(p[np.argmax(x)]))


def fitted(
    x: np.ndarray, k: np.ndarray, n: np.ndarray
) -> tuple[np.ndarray, tuple[float, float], float]:
    """Shares at each x by a logistic regression (Newton's method), the slope with its standard
    error, and the log-likelihood. x has to vary."""
    scale = float(x.std())
    design = np.stack([np.ones_like(x), (x - x.mean()) / scale])
    weights = np.zeros(2)
    for _ in range(25):
        p = 1 / (1 + np.exp(-(weights @ design)))
        curve = design * (n * p * (1 - p)) @ design.T + 1e-6 * np.eye(2)
        weights = np.clip(weights + np.linalg.solve(curve, design @ (k - n * p)), -20, 20)
    p = np.clip(1 / (1 + np.exp(-(weights @ design))), 1e-9, 1 - 1e-9)
    error = math.sqrt(float(np.linalg.inv(curve)[1, 1])) / scale
    likelihood = float((k * np.log(p) + (n - k) * np.log1p(-p)).sum())
    return p, (float(weights[1]) / scale, error), likelihood


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _sum_down(log_first: float, ratios: np.ndarray) -> float:
    """Sum of a term and of those that follow it, each `ratios` times the one before."""
    with np.errstate(divide="ignore"):
        logs = log_first + np.concatenate([[0.0], np.cumsum(np.log(np.maximum(ratios, 0.0)))])
    top = float(logs.max())
    return min(1.0, math.exp(top) * float(np.exp(logs - top).sum()))
