"""A range of rounds of a run as a subject of its own, and its figures in words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.trace_models.number_text import NOT_OBSERVED, significant, size_or_none, whole_text
from engine.analysis.run_cost import RunCost
from engine.trace.records import PHASES
from engine.trace.run_columns import RunColumns
from engine.trace.run_ref import RunRef
from engine.trace.timings import joint_counts, per_position

_MOST_RATES = 8


@dataclass(frozen=True, slots=True)
class RunRange:
    """Rounds first to last of a run, both included; last None: to its end."""

    run: RunRef
    first: int = 0
    last: int | None = None

    @property
    def title(self) -> str:
        if self.last is None:
            return "Whole run"
        if self.first == self.last:
            return f"Round {self.first:,}"
        return f"Rounds {self.first:,}–{self.last:,}"


def range_figures(chosen: RunRange) -> dict[str, str]:
    """Figures of the rounds after the prompts, in words, by label."""
    run = chosen.run
    rows = RunColumns(run.store, "rounds", run.run_id)
    number = rows["round"]
    inside = (number >= chosen.first) & ~rows.is_prompt
    if chosen.last is not None:
        inside &= number <= chosen.last
    steps = inside & rows.is_step
    drafted = rows["num_draft_tokens"][steps]
    accepted = np.clip(rows["num_accepted_draft_tokens"][steps], 0, drafted)
    emitted = int(np.maximum(rows["num_emitted"][inside], 0).sum())
    depth = np.maximum(rows["rollback_depth"][inside], 0)
    cost = RunCost.of(run, chosen.first, chosen.last)
    counts = per_position(joint_counts(drafted, accepted))
    rates = counts["acceptance_per_position"]["unconditional"]
    n_drafted, n_accepted = int(drafted.sum()), int(accepted.sum())
    share = significant(n_accepted / n_drafted) if n_drafted else NOT_OBSERVED
    n_rows = int(inside.sum())
    found = {
        "rounds": f"{len(cost.rounds):,}",
        "tokens": f"{emitted:,}",
        "accepted": f"{n_accepted:,} of {n_drafted:,}",
        "acceptance": share,
        **{
            f"  position {i}": NOT_OBSERVED if rate is None else f"{rate:.2f}"
            for i, rate in enumerate(rates[:_MOST_RATES])
        },
        "tokens a round": significant(emitted / n_rows if n_rows else None),
        "ms a round": significant(cost.per_round()),
    }
    found |= {f"  {phase}": significant(cost.per_round(phase)) for phase in PHASES}
    undone = [n for n in (cost.n_restores, cost.n_removed, cost.n_refused) if n is not None]
    deepest = int(depth.max(initial=0))
    found |= {
        "rollbacks": f"{sum(undone):,}" if undone else NOT_OBSERVED,
        "  deepest": f"{deepest}" if undone else NOT_OBSERVED,
        "restores": whole_text(cost.n_restores),
        "replayed": whole_text(cost.n_replayed),
        "passes": whole_text(cost.n_passes),
        "bytes moved": size_or_none(cost.bytes_moved),
        "bytes written": size_or_none(cost.bytes_written),
    }
    return found
