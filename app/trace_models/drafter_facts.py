"""What the run on show tells of its drafters, read as it grows, and what trees would have done."""

from __future__ import annotations

from dataclasses import dataclass

from app.trace_models.run_rows import RunRows
from engine.analysis.draft_quality import DraftQuality, by_drafter
from engine.analysis.judged_drafts import DraftReader
from engine.analysis.tree_gain import WidthCost, width_cost
from engine.trace.run_ref import RunRef
from engine.trace.step_sums import StepSums

UNNAMED = "unnamed"
"""A drafter that another engine did not tell the name of."""


@dataclass(frozen=True, slots=True)
class TreeEstimate:
    """A tree of n_leaves against the recorded chain. pass_cost: of its verify pass; speed: tokens
    per second over those of the chain. Both None where the passes of the run do not tell."""

    n_leaves: int
    tokens_per_step: float
    pass_cost: WidthCost | None
    speed: float | None


class DrafterFacts:
    """Grows with a run. `by_name`: the drafters by name, in the order they first drafted."""

    def __init__(self, run: RunRef) -> None:
        self._pool = run.store.text_pool
        self._drafts = DraftReader(run)
        self._rounds = RunRows(run, "rounds")
        self._sums = StepSums()
        self.by_name: dict[str, DraftQuality] = {}

    def read(self) -> bool:
        """Take in what has joined the trace; whether any draft has."""
        start, stop = self._rounds.read()
        if start < stop:
            self._rounds.add_to(self._sums, start, stop)
        new = self._drafts.read()
        if new is None:
            return False
        for code, quality in by_drafter(new).items():
            name = self._pool.text(code) or UNNAMED
            self.by_name[name] = self.by_name.get(name, DraftQuality()) + quality
        return True

    def quality(self, name: str = "") -> DraftQuality:
        """Of one drafter, or without a name of all together."""
        if name:
            return self.by_name.get(name, DraftQuality())
        return sum(self.by_name.values(), DraftQuality())

    def trees(self, quality: DraftQuality) -> list[TreeEstimate]:
        """What trees would have gained; empty where no candidates are recorded."""
        now = quality.n_ranked and 1 + quality.n_ranked_accepted / quality.n_ranked
        sums, estimates = self._sums, []
        step_ms = sum(sums.step_ms.values())
        verify_ms = sums.step_ms.get("verify", 0.0)
        mean_width = sums.step_tokens / sums.n_steps if sums.n_steps else 0.0
        for tree in quality.tree_gains:
            cost = speed = None
            if step_ms and not sums.n_untimed:
                ms = sums.width_ms / sums.width_n
                cost = width_cost(sums.widths, ms, sums.width_n, mean_width, tree.n_more)
            if cost is not None:
                longer = 1 + (cost.ratio - 1) * verify_ms / step_ms
                speed = tree.tokens_per_step / now / longer
            estimates.append(TreeEstimate(tree.n_leaves, tree.tokens_per_step, cost, speed))
        return estimates
