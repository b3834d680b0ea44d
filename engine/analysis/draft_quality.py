"""What a run tells of its drafters, each by itself: sums that grow with the drafts read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.analysis.calibration import Calibration
from engine.analysis.judged_drafts import ACCEPTED, BEYOND, UNKNOWN, JudgedDrafts
from engine.analysis.survival import Survival
from engine.analysis.tree_gain import TreeGain, tree_gains
from engine.trace.records import N_TOP
from engine.trace.step_sums import joint_counts


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """Sums over the drafts of one drafter or of several; those of two can be added.

    counts[d, a]: steps that drafted d and accepted a tokens, int64 [K + 1, K + 1]. ranks[i, r]:
    rejections at index i by the rank r of the target's token among the candidates, 0 where it is
    not among them, int64 [K, N_TOP + 1]. n_ranked, n_ranked_accepted: steps whose candidates are
    recorded, rejected or not, and the tokens accepted in them. n_untold: steps of which the trace
    lacks tokens.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros((1, 1), np.int64))
    calibration: Calibration = field(
        default_factory=lambda: Calibration.of(np.zeros(0), np.zeros(0, bool))
    )
    ranks: np.ndarray = field(default_factory=lambda: np.zeros((0, N_TOP + 1), np.int64))
    n_ranked: int = 0
    n_ranked_accepted: int = 0
    n_untold: int = 0

    @classmethod
    def of(cls, drafts: JudgedDrafts, steps: np.ndarray) -> DraftQuality:
        """Of some steps, bool [s]."""
        mine = steps[drafts.step] & drafts.is_judged
        confidence = drafts.confidence[mine]
        rejected = steps[drafts.rejected_step]
        rank, index = drafts.rank[rejected], drafts.rejected_index[rejected]
        known = rank != UNKNOWN
        ranks = np.zeros((int(index.max(initial=-1)) + 1, N_TOP + 1), np.int64)
        np.add.at(ranks, (index[known], rank[known]), 1)
        has_candidates = np.zeros(len(steps), bool)
        has_candidates[drafts.step[mine][np.isfinite(confidence)]] = True
        has_candidates[drafts.rejected_step[rejected][~known]] = False
        return cls(
            joint_counts(drafts.n_drafted[steps], drafts.n_accepted[steps]),
            Calibration.of(confidence, drafts.fate[mine] == ACCEPTED),
            ranks,
            int(has_candidates.sum()),
            int(drafts.n_accepted[has_candidates].sum()),
            int((steps & ~drafts.is_told).sum()),
        )

    def __add__(self, other: DraftQuality) -> DraftQuality:
        return DraftQuality(
            _sum(self.counts, other.counts),
            self.calibration + other.calibration,
            _sum(self.ranks, other.ranks),
            self.n_ranked + other.n_ranked,
            self.n_ranked_accepted + other.n_ranked_accepted,
            self.n_untold + other.n_untold,
        )

    @property
    def n_steps(self) -> int:
        """Drafts verified."""
        return int(self.counts.sum())

    @property
    def tokens_per_step(self) -> float | None:
        """1 + accepted over all drafts; None without one."""
        if not self.n_steps:
            return None
        return 1 + float(np.arange(len(self.counts)) @ self.counts.sum(0)) / self.n_steps

    @property
    def survival(self) -> Survival:
        """How far the drafts come."""
        return Survival.of(self.counts)

    @property
    def n_rejections(self) -> int:
        """Rejections whose target's token and candidates are known."""
        return int(self.ranks.sum())

    @property
    def by_rank(self) -> np.ndarray:
        """Rejections by the rank of the target's token, from 1; the last one: not among the
        candidates. int64 [N_TOP + 1]."""
        total = self.ranks.sum(0)
        return np.append(np.delete(total, BEYOND), total[BEYOND])

    @property
    def tree_gains(self) -> list[TreeGain]:
        """What trees would have gained; empty where no candidates are recorded."""
        return tree_gains(self.ranks[:, 1:], self.n_ranked, self.n_ranked_accepted)


def by_drafter(drafts: JudgedDrafts) -> dict[int, DraftQuality]:
    """Of each drafter by itself, by its code in the store's texts."""
    return {
        int(code): DraftQuality.of(drafts, drafts.drafter == code)
        for code in np.unique(drafts.drafter)
    }


def _sum(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Two tables added from the corner that both begin in."""
    shape = tuple(max(sizes) for sizes in zip(one.shape, other.shape, strict=True))
    total = np.zeros(shape, np.int64)
    for part in (one, other):
        total[tuple(slice(0, n) for n in part.shape)] += part
    return total
