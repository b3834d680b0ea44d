"""Judging lanes by what the trace holds of them, so that an opened trace can be judged too.

The logits of a lane are never those of the reference lane: kernels add in another order for
another width of the batch. The noise lane decodes the same widths from the reference's own state,
so its worst error is what widths alone can do. A lane with a state of its own carries such errors
from round to round, and gates let them fade rather than grow: ten times the noise leaves room for
that, and wrong states are several orders above. Where the noise is (almost) nothing, as in a run
without drafts, _LEAST stands for it; float32 rounding is two orders below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.compare.lane_spec import REFERENCE
from engine.trace.records import MISSING
from engine.trace.store import Table, TraceStore

_MARGIN = 10.0
_LEAST = 1e-9
BANDS = ((0.0, "exact"), (1e-6, "<= 1e-6"), (1e-4, "<= 1e-4"))
SUSPECT = "suspect"


@dataclass(frozen=True, slots=True)
class LaneVerdict:
    """One lane in short. Positions are those of the chosen tokens, None = there is none.

    verdict: reference, exact, within (the bound), suspect, or failed when the lane had to stop
    (`error` says why). band: of the worst NMSE, whatever the bound. first_pos, first_round: where
    the NMSE is beyond the bound for the first time. after_round: the last earlier round in which
    this lane rolled back, whose state the diverging logits come from. n_forks: positions where
    the most probable token differs; first_fork the first of them. duplicates: most attention
    cells beyond one per position. state_error, conv_error: worst relative errors.
    """

    lane: str
    run_id: int
    verdict: str
    band: str
    n_positions: int
    worst_nmse: float
    worst_pos: int | None
    max_abs: float
    max_kl: float
    first_pos: int | None
    first_round: int | None
    after_round: int | None
    n_forks: int
    first_fork: int | None
    duplicates: int
    state_error: float | None
    conv_error: float | None
    error: str

    @property
    def is_beyond(self) -> bool:
        """Whether this lane fails the comparison."""
        return self.verdict in (SUSPECT, "failed")


def band(nmse: float) -> str:
    """The verdict band of an NMSE; what is not finite is suspect."""
    return next((name for limit, name in BANDS if nmse <= limit), SUSPECT)


def noise_bound(trace: TraceStore, noise_runs: Sequence[int]) -> float:
    """Largest NMSE that the noise lanes with these run ids explain."""
    worst = (_Rows(trace.divergence, run)["nmse"].max(initial=0.0) for run in noise_runs)
    return max(_LEAST, *(_MARGIN * float(nmse) for nmse in worst), 0.0)


def judge(trace: TraceStore, run_id: int, bound: float) -> LaneVerdict:
    """The verdict on one lane against an NMSE bound."""
    lane, error = trace.runs[run_id]["lane"], trace.runs[run_id].get("lane_error", "")
    rows = _Rows(trace.divergence, run_id)
    rounds = _Rows(trace.rounds, run_id)
    nmse, pos = rows["nmse"], rows["pos"]
    beyond = np.flatnonzero(~(nmse <= bound))  # NaN is beyond any bound
    forks = np.flatnonzero(rows["top1_equal"] == 0)
    worst = int(np.argmax(np.where(np.isnan(nmse), np.inf, nmse))) if nmse.size else None
    worst_nmse = 0.0 if worst is None else float(nmse[worst])
    first_round = int(rows["round"][beyond[0]]) if beyond.size else None
    undone = rounds["round"][rounds["rollback_depth"] > 0]
    earlier = undone[undone < first_round] if first_round is not None else undone[:0]
    if lane == REFERENCE:
        verdict = REFERENCE
    elif error:
        verdict = "failed"
    elif beyond.size:
        verdict = SUSPECT
    else:
        verdict = "exact" if worst_nmse == 0 else "within"
    return LaneVerdict(
        lane, run_id, verdict, band(worst_nmse), len(pos), worst_nmse,
        None if worst is None else int(pos[worst]),
        float(rows["max_abs"].max(initial=0.0)), float(rows["kl"].max(initial=0.0)),
        int(pos[beyond[0]]) if beyond.size else None, first_round,
        int(earlier[-1]) if earlier.size else None,
        len(forks), int(pos[forks[0]]) if forks.size else None,
        int(rounds["kv_cells_duplicate"].max(initial=0)),
        _largest(rows["state_error"]), _largest(rows["conv_error"]), error,
    )  # fmt: skip


class _Rows:
    """The rows of one run in a table."""

    def __init__(self, table: Table, run_id: int) -> None:
        self._table, self._n = table, len(table)
        self._mine = np.flatnonzero(table.column("run_id", 0, self._n) == run_id)

    def __getitem__(self, name: str) -> np.ndarray:
        values = self._table.column(name, 0, self._n)[self._mine]
        return values[values != MISSING] if name == "kv_cells_duplicate" else values


def _largest(values: np.ndarray) -> float | None:
    observed = values[~np.isnan(values)]
    return float(observed.max()) if observed.size else None
