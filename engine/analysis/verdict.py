"""The verdict on each lane, computed from the trace alone, so that an opened trace gets one too.

Two words describe a lane, and only the second one judges:

- The *band* names the size of its worst NMSE and nothing else: exact (0), <= 1e-6, <= 1e-4,
  > 1e-4, or not finite.
- The *verdict* compares that error with what the lane is allowed:
  reference  what the others are measured against
  exact      all logits equal bit by bit
  within     no more than batch shapes explain (the bound)
  suspect    beyond the bound, or other attention cells: look for a wrong state
  failed     the lane had to stop; its error says why
  forked     a free lane emitted another token where its logits, within, explain that: a near tie
  mode       a reference lane of another compute mode or of other types of states; its band is
             the distance of that mode
  agrees     a peer lane within what its rounding explains

The bound is MARGIN times the worst row of the noise lane, which decodes other widths than the
reference lane and never rolls back (engine.compare.lanes); it has not met everything, and wrong
states are orders above. Below LEAST nothing is asked, as float32 rounds; states in a shorter type
come to more (least_of_types). Where ties can tip, its texts decoded afresh in other batches (fact
noise_check) meet those that its jitter resolves: FEW_TIPPED rows of another lane may be beyond the
bound, up to MARGIN times the worst of these rows. Where that or the bound is UNLIKE, or ties may
tip all rows, they may be any: rows that have nothing in common differ by 2, and a wrong state
spoils all that follow. A noise lane beyond the ceiling of rounding
(engine.analysis.noise_ceiling) is suspect itself, as is one whose texts decoded afresh have other
logits than token by token; then the bound of the others is the ceiling.

A fork is not a fault if the lane's logits give its token when the reference samples from them, and
if at temperature 0 the two best logits were nearer than noise moves them: twice its bound on one.
Otherwise the lane is suspect, as it is beyond its bound.

A peer lane is judged by noise lanes of its own alone, which round as it does; so are they. Where
rounding tips experts of a model that has learnt nothing, MARGIN times their worst row is more than
any mistake costs: the bound stays below UNLIKE, unless they are beyond it themselves.

Lanes that roll back in llama.cpp are measured against llama.cpp's own plain lane, and judged by its
noise lane: the kernels are the same, so a smaller margin (fact lane_margin) does.

Lanes of another compute mode or of other types of states are measured against that mode's own
reference lane and judged by that mode's noise, so a rollback is right or wrong whatever the mode
costs. How far the mode itself is from the reference lane is in the row of its reference lane.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from engine.analysis.noise_ceiling import FEW_TIPPED, least_of_types, rows_beyond
from engine.trace.facts import CheckedBatch, NoiseCheckFacts, RunFacts, WrongRow
from engine.trace.records import EMITTED_KINDS, NOISE, PEER, PEER_NOISE, POLICY, REFERENCE
from engine.trace.run_ref import RunColumns
from engine.trace.store import TraceStore

MARGIN = 10.0
LEAST = 1e-9
UNLIKE = 1.0
"""NMSE of logits that are all zero."""
BANDS = ((0.0, "exact"), (1e-6, "<= 1e-6"), (1e-4, "<= 1e-4"), (math.inf, "> 1e-4"))
NOT_FINITE = "not finite"
SUSPECT, FAILED = "suspect", "failed"


@dataclass(frozen=True, slots=True)
class LaneFork:
    """The first token at which a free lane differs from the reference lane.

    round: the lane's round that chose the token. after_round: the last earlier round that rolled
    this sequence back. top2_gap: between the reference's two largest logits there. explained:
    whether noise alone can cause it.
    """

    seq_id: int
    pos: int
    round: int
    after_round: int | None
    token_id: int
    reference_id: int
    top2_gap: float
    explained: bool = True


IDLE_FAULT = "its fault never had an effect; try longer drafts or other texts"


@dataclass(frozen=True, slots=True)
class LaneVerdict:
    """Summary of one lane. Positions are those of the chosen tokens, None = none.

    verdict and band: see the module; `error` of a failed lane. first_pos, first_round, first_seq:
    where the NMSE first exceeds the bound, cells differ, or a fork is unexplained. after_round: the
    last earlier round that rolled that sequence back, whose state the diverging logits come from.
    n_forks: positions where the most probable token differs; first_fork the first of them.
    duplicates: most attention cells beyond one per position. state_error, conv_error: worst
    relative errors. bound: allowed NMSE, infinite for reference lanes. types: of states, if not
    f32. fork: of a free lane, the first unexplained one, else the first.
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
    first_seq: int | None = None
    bound: float = math.inf
    compute: str = ""
    types: str = ""
    fork: LaneFork | None = None

    @property
    def mode(self) -> str:
        """Compute mode, and types of states other than f32."""
        return " with ".join(filter(None, (self.compute, self.types)))

    @property
    def idle_faults(self) -> str:
        """Faults of a lane that equals the reference bit by bit, so they never took effect."""
        differs = self.verdict != "exact" or self.state_error or self.conv_error or self.duplicates
        return "" if differs else ", ".join(re.findall(r"\bfault=([\w-]+)", self.lane))

    @property
    def is_beyond(self) -> bool:
        """Whether this lane fails the comparison."""
        return self.verdict in (SUSPECT, FAILED)


def band(nmse: float) -> str:
    """The band of an NMSE."""
    if not math.isfinite(nmse):
        return NOT_FINITE
    return next(name for limit, name in BANDS if nmse <= limit)


def types_text(facts: RunFacts) -> str:
    """Types of a run's states as text, such as "states in bf16, gates in f16"; empty for f32."""
    named = _state_types(facts)
    what = {"s": "states", "r": "windows", "gates": "gates"}
    found = {text: named.get(name) or "f32" for name, text in what.items()}
    return ", ".join(f"{text} in {type}" for text, type in found.items() if type != "f32")


def _state_types(facts: RunFacts) -> dict[str, str]:
    return asdict(facts.options.state_types) if facts.options else {}


def noise_bound(trace: TraceStore, noise_runs: Sequence[int]) -> float:
    """Largest NMSE explained by the noise lanes with these run ids, all of one compute mode."""
    found = _largest_of_noise(trace, noise_runs, "nmse")
    least = max([LEAST, *(least_of_types(_state_types(trace.runs[run])) for run in noise_runs)])
    return max(least, min([found, *(_ceiling(trace, run) for run in noise_runs)]))


def is_beyond(trace: TraceStore, run_id: int, nmse: np.ndarray, bound: float) -> np.ndarray:
    """Rows of a lane above its bound and not explained by ties, bool [n]. nmse: [n]; NaN is
    above."""
    beyond: np.ndarray = ~(nmse <= bound)
    checks = [check for run in noise_of(trace, run_id) if (check := trace.runs[run].noise_check)]
    share = max((check.share for check in checks), default=0.0)
    afresh = (one for check in checks for one in check.batches if not one.first)
    fresh = max((one.worst or 0.0 for one in afresh), default=0.0)
    limit = max(bound, MARGIN * fresh)
    most = math.inf if limit >= UNLIKE or share == 1 else limit
    if share > 0 and beyond.sum() <= FEW_TIPPED and (nmse < most).all():
        return np.zeros_like(beyond)
    return beyond


def _ceiling(trace: TraceStore, noise_run: int) -> float:
    """Largest NMSE allowed by this noise lane, infinite without a ceiling. Ties that flip a few of
    its rows flip them in other lanes too."""
    check = trace.runs[noise_run].noise_check
    if check is None:
        return math.inf
    nmse = RunColumns(trace, "divergence", noise_run)["nmse"]
    if rows_beyond(nmse, check.ceiling, check.share).size or not check.share:
        return check.ceiling
    return max(UNLIKE, float(nmse.max(initial=0.0)))


def failed_checks(check: NoiseCheckFacts | None) -> list[CheckedBatch]:
    """Texts of a noise check whose logits differed when they were decoded again."""
    return [one for one in check.batches if one.first] if check else []


def first_row(failed: Sequence[CheckedBatch]) -> WrongRow:
    """The first wrong row of checks that failed."""
    return next(one.first for one in failed if one.first)


def _largest_of_noise(trace: TraceStore, noise_runs: Sequence[int], column: str) -> float:
    worst = [
        (MARGIN if (margin := trace.runs[run].lane_margin) is None else margin)
        * float(RunColumns(trace, "divergence", run)[column].max(initial=0.0))
        for run in noise_runs
    ]
    found = max(worst, default=0.0)
    return 0.0 if math.isnan(found) else found  # a wrong noise lane explains nothing


def judge_lanes(
    trace: TraceStore, run_ids: Sequence[int], bound: float | None = None
) -> list[LaneVerdict]:
    """Verdicts on the lanes with these run ids.

    bound: allowed NMSE; None = what the noise lanes with the same reference explain, for a peer
    lane its own. Reference lanes have no bound.
    """
    return [judge(trace, run, bound_of(trace, run, bound)) for run in run_ids]


def bound_of(trace: TraceStore, run_id: int, bound: float | None = None) -> float:
    """The bound that `judge_lanes` applies to a lane."""
    facts = trace.runs[run_id]
    if facts.lane_kind == REFERENCE:
        return math.inf
    if bound is not None:
        return bound
    if facts.lane_tolerance is not None:  # a peer lane of an older trace
        return facts.lane_tolerance
    found = noise_bound(trace, noise_of(trace, run_id))
    return min(found, max(UNLIKE, found / MARGIN)) if _is_of_peer(facts) else found


def noise_against(trace: TraceStore, leader: int | None) -> float:
    """Largest NMSE explained by the noise lanes of a leading lane."""
    return noise_bound(trace, _noise_of(trace, leader, NOISE))


def noise_of(trace: TraceStore, run_id: int) -> list[int]:
    """The noise lanes that a lane is judged by."""
    facts = trace.runs[run_id]
    kind = PEER_NOISE if _is_of_peer(facts) else NOISE
    return _noise_of(trace, facts.lane_against, kind)


def _is_of_peer(facts: RunFacts) -> bool:
    return facts.lane_kind in (PEER, PEER_NOISE)


def _noise_of(trace: TraceStore, leader: int | None, kind: str) -> list[int]:
    return [
        run
        for run, facts in list(trace.runs.items())
        if facts.lane_kind == kind and facts.lane_against == leader
    ]


def judge(trace: TraceStore, run_id: int, bound: float) -> LaneVerdict:
    """The verdict on one lane against an NMSE bound."""
    facts = trace.runs[run_id]
    error = facts.lane_error or ""
    rows, rounds = (RunColumns(trace, name, run_id) for name in ("divergence", "rounds"))
    nmse, pos = rows["nmse"], rows["pos"]
    beyond = np.flatnonzero(is_beyond(trace, run_id, nmse, bound))
    if not beyond.size:  # cells are counted exactly: noise cannot add one
        beyond = np.flatnonzero(rows["cells_differ"] > 0)
    differs = np.flatnonzero(rows["top1_equal"] == 0)
    worst = int(np.argmax(np.where(np.isnan(nmse), np.inf, nmse))) if nmse.size else None
    worst_nmse = 0.0 if worst is None else float(nmse[worst])
    first = int(beyond[0]) if beyond.size else None
    first_pos = None if first is None else int(pos[first])
    first_round = None if first is None else int(rows["round"][first])
    first_seq = None if first is None else int(rows["seq_id"][first])
    if first is None and (failed := failed_checks(facts.noise_check)):
        first_seq, first_pos = failed[0].seq_id, first_row(failed).pos + 1
    forks = _forks(trace, run_id, rows, rounds) if facts.lane_free else []
    fork = next((f for f in forks if not f.explained), forks[0] if forks else None)
    if fork and not fork.explained and (first_pos is None or fork.pos < first_pos):
        first_pos, first_round, first_seq = fork.pos, fork.round, fork.seq_id
    return LaneVerdict(
        facts.lane or "",
        run_id,
        _verdict(trace, run_id, error, first_pos, worst_nmse, fork),
        band(worst_nmse),
        len(pos),
        worst_nmse,
        None if worst is None else int(pos[worst]),
        float(rows["max_abs"].max(initial=0.0)),
        float(rows["kl"].max(initial=0.0)),
        first_pos,
        first_round,
        _undone_before(rounds, first_seq, first_round),
        len(differs),
        int(pos[differs[0]]) if differs.size else None,
        int(rounds["kv_cells_duplicate"].max(initial=0)),
        _largest(rows["state_error"]),
        _largest(rows["conv_error"]),
        error,
        first_seq,
        bound,
        facts.compute or "",
        types_text(facts),
        fork,
    )


def _verdict(
    trace: TraceStore,
    run_id: int,
    error: str,
    first_pos: int | None,
    worst: float,
    fork: LaneFork | None,
) -> str:
    facts = trace.runs[run_id]
    kind = facts.lane_kind or (REFERENCE if facts.lane == REFERENCE else POLICY)
    if kind == REFERENCE and facts.lane_against is None:
        return REFERENCE
    if error:
        return FAILED
    if first_pos is not None:
        return SUSPECT
    if kind == REFERENCE:
        return "mode"
    if fork is not None:
        return "forked"
    if worst == 0:
        return "exact"
    return "agrees" if kind == PEER else "within"


def _forks(trace: TraceStore, run_id: int, rows: RunColumns, rounds: RunColumns) -> list[LaneFork]:
    """The first token of each sequence that the lane emitted and that differs from the reference's
    choice at the same position."""
    tokens = RunColumns(trace, "tokens", run_id)
    emitted = tokens.is_text("kind", *EMITTED_KINDS)
    keys = zip(tokens["seq_id"][emitted].tolist(), tokens["pos"][emitted].tolist(), strict=True)
    own = dict(zip(keys, tokens["token_id"][emitted].tolist(), strict=True))
    columns = (rows[name].tolist() for name in ("seq_id", "pos", "token_id", "round", "top2_gap"))
    found: dict[int, LaneFork] = {}
    for seq_id, pos, expected, number, gap in zip(*columns, strict=True):
        token = own.get((seq_id, pos), expected)
        if token != expected and seq_id not in found:
            after = _undone_before(rounds, seq_id, number)
            explained = _is_explained(trace, run_id, seq_id, gap)
            found[seq_id] = LaneFork(seq_id, pos, number, after, token, expected, gap, explained)
    return list(found.values())


def _is_explained(trace: TraceStore, run_id: int, seq_id: int, gap: float) -> bool:
    """Whether noise may have made a sequence fork at this gap between the two best logits."""
    facts = trace.runs[run_id]
    known = [fork for fork in facts.lane_forks or () if fork.seq_id == seq_id]
    if any(not fork.follows for fork in known):
        return False
    noise = noise_of(trace, run_id)
    by_mode = any(fork.by_mode for fork in known)
    options = facts.options
    if not noise or by_mode or options is None or options.sampler.temp > 0:
        return True  # then the gap says nothing
    return bool(gap <= 2 * _largest_of_noise(trace, noise, "max_abs"))


def _undone_before(rounds: RunColumns, seq_id: int | None, number: int | None) -> int | None:
    """The last round before `number` that rolled a sequence back."""
    if number is None:
        return None
    undone = (rounds["rollback_depth"] > 0) & (rounds["seq_id"] == seq_id)
    earlier = rounds["round"][undone & (rounds["round"] < number)]
    return int(earlier[-1]) if earlier.size else None


def _largest(values: np.ndarray) -> float | None:
    observed = values[~np.isnan(values)]
    return float(observed.max()) if observed.size else None


_POINTS = 64


def state_drift(trace: TraceStore, run_id: int) -> list[dict[str, Any]]:
    """An object per sequence and recurrent layer of a lane, [] without states.

    pos: last positions of at most 64 spans of rounds; state_error, conv_error: the largest relative
    error within each, None if the layer has no such part. rejected: tokens that the lane had rolled
    back in the sequence so far.
    """
    rows, rounds = RunColumns(trace, "states", run_id), RunColumns(trace, "rounds", run_id)
    found = []
    for seq in np.unique(rows["seq_id"]).tolist():
        mine = rounds["seq_id"] == seq
        undone = np.cumsum(np.maximum(rounds["memory_rollback"][mine], 0))
        for layer in np.unique(rows["layer"]).tolist():
            here = np.flatnonzero((rows["seq_id"] == seq) & (rows["layer"] == layer))
            spans = np.array_split(here, min(_POINTS, len(here)))
            last = np.array([span[-1] for span in spans], np.int64)
            behind = np.searchsorted(rounds["round"][mine], rows["round"][last], side="right")
            found.append(
                {
                    "seq_id": seq,
                    "layer": layer,
                    "pos": rows["pos"][last].tolist(),
                    "rejected": [int(undone[i - 1]) if i else 0 for i in behind.tolist()],
                    **{
                        name: [_largest(rows[name][span]) for span in spans]
                        for name in ("state_error", "conv_error")
                    },
                }
            )
    return found
