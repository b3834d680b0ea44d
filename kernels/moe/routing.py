"""Which experts a token goes to, where a bias of the file takes part in the choice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """How experts are chosen by biased scores, and what weights they get.

    scores: "sigmoid" or "softmax" of the logits. Chosen are the n_used experts of the largest score
    plus bias; weights are their scores without it, if `normalised` divided by
    max(their sum, 2^-14), and times `scale`. n_groups: experts stand in so many groups of
    neighbours; only those of the n_groups_used groups whose two best experts have the largest sum
    can be chosen.
    """

    n_used: int
    scores: str = "sigmoid"
    normalised: bool = True
    scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1
