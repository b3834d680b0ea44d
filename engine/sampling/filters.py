"""Filters that drop candidates: typical, top-p, min-p.

Each takes the logits that are left, float64 [k], the largest first, and says which to keep as
bool [k]; at least one is kept. Probabilities are a softmax over what is left.
"""

from __future__ import annotations

import numpy as np

from engine.sampling.distribution import softmax


def typical(logits: np.ndarray, mass: float) -> np.ndarray:
    """The tokens whose surprise is nearest to the entropy, until their sum exceeds `mass`.

    Locally typical sampling (arXiv 2202.00666).
    """
    probs = softmax(logits)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probs)
    entropy = (probs[probs > 0] * surprise[probs > 0]).sum()
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(probs[order]), mass, side="right")) + 1
    kept = np.zeros(len(logits), bool)
    kept[order[:n_kept]] = True
    return kept


def top_p(logits: np.ndarray, mass: float) -> np.ndarray:
    """The most probable tokens until their sum reaches `mass` (arXiv 1904.09751)."""
    n_kept = int(np.searchsorted(np.cumsum(softmax(logits)), mass)) + 1
    return np.arange(len(logits)) < n_kept


def min_p(logits: np.ndarray, share: float) -> np.ndarray:
    """The tokens with at least this share of the best one's probability (arXiv 2407.01082)."""
    return np.exp(logits - logits[0]) >= share
