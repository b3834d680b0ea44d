"""The lanes of a comparison as recorded: errors, verdicts and their sentence, cost, top-k,
states."""

from __future__ import annotations

import numpy as np

from app.trace_models.shown_text import error_text
from engine.analysis.findings.run_rows import lane_kind
from engine.analysis.run_cost import RunCost
from engine.analysis.verdict import IDLE_FAULT, SUSPECT, LaneVerdict, judge_lanes, noise_of
from engine.plain_text import counted
from engine.trace.records import EMITTED_KINDS, MISSING, NOISE, PEER, PEER_NOISE, POLICY, REFERENCE
from engine.trace.run_ref import RunColumns, RunRef, comparison_of
from engine.trace.store import TraceStore
from engine.trace.token_text import line_text

_TABLES = ("divergence", "states", "rounds", "tokens")
_GROWN = 1.05
"""Growth of the number of rounds after which costs are computed again."""


def lanes_of(run: RunRef) -> tuple[RunRef, ...]:
    """The runs of the comparison that a run belongs to, reference first; () for any other run."""
    lanes = tuple(map(run.sibling, comparison_of(run.store, run.run_id)))
    return lanes if lanes and lanes[0].facts.lane == REFERENCE else ()


def run_to_show(run: RunRef) -> RunRef:
    """The run for other views: in a comparison the first lane that drafts and rolls back, if
    any."""
    policies = (lane for lane in lanes_of(run) if lane_kind(lane.facts) in (POLICY, PEER))
    return next(policies, run)


class ComparedLanes:
    """One sequence of the lanes, read from the growing trace.

    followers: runs of the lanes compared with the reference lane. Positions are those of the
    reference lane's tokens; every lane has them in the same order, a stopped lane has fewer.
    """

    def __init__(self, store: TraceStore, run_ids: tuple[int, ...], seq_id: int = 0) -> None:
        self.store, self.run_ids, self.seq_id = store, run_ids, seq_id
        self.reference, self.followers = run_ids[0], run_ids[1:]
        self.names = {run_id: store.runs[run_id].lane or "" for run_id in run_ids}
        self.verdicts: dict[int, LaneVerdict] = {}
        self.bounds: dict[int, float] = {}
        """Allowed NMSE of each lane."""
        self.costs: dict[int, RunCost] = {}
        self._costs_of = 0
        self._sizes = dict.fromkeys(_TABLES, 0)
        self._seen: set[int] = set()
        """Sequences with tokens."""
        self._read: dict[tuple[str, int, int], RunColumns] = {}
        self._token_rows: dict[int, dict[int, int]] = {}
        self._n_indexed: dict[int, int] = {}
        self.poll()

    def poll(self) -> bool:
        """Read new rows; returns whether there were any."""
        found = [table for table in _TABLES if self._has_new(table)]
        if found:
            self._read.clear()
        if found or not self.verdicts:
            self._judge()
        n, is_over = len(self.store.rounds), self.is_over
        is_last = is_over and self._costs_of != n
        if not self.costs or n > _GROWN * self._costs_of or is_last:
            self._costs_of = n
            self.costs = {run.run_id: RunCost.of(run) for run in self.runs}
        return bool(found)

    def _has_new(self, name: str) -> bool:
        table, start = self.store.tables[name], self._sizes[name]
        stop = self._sizes[name] = len(table)
        mine = np.isin(table.column("run_id", start, stop), self.run_ids)
        if name == "tokens":
            self._seen.update(np.unique(table.column("seq_id", start, stop)[mine]).tolist())
        return bool(mine.any())

    def _rows(self, table: str, run_id: int, seq_id: int | None = None) -> RunColumns:
        """A lane's rows of a table, for the sequence on show or another."""
        key = table, run_id, self.seq_id if seq_id is None else seq_id
        if key not in self._read:
            self._read[key] = RunColumns(self.store, *key)
        return self._read[key]

    def _judge(self) -> None:
        judged = judge_lanes(self.store, self.run_ids)
        self.verdicts = dict(zip(self.run_ids, judged, strict=True))
        self.bounds = {run: verdict.bound for run, verdict in self.verdicts.items()}

    @property
    def runs(self) -> tuple[RunRef, ...]:
        """The lanes, the reference lane first."""
        return tuple(RunRef(self.store, run_id) for run_id in self.run_ids)

    def is_noise(self, run_id: int) -> bool:
        """Whether a lane only measures the effect of batch widths, or a peer's rounding."""
        return lane_kind(self.store.runs[run_id]) in (NOISE, PEER_NOISE)

    def noise_of(self, run_id: int) -> list[int]:
        """The noise lanes that bound a lane."""
        return noise_of(self.store, run_id) if run_id in self.followers else []

    @property
    def seq_ids(self) -> list[int]:
        return sorted(self._seen)

    @property
    def is_over(self) -> bool:
        """Whether all lanes have ended or were stopped."""
        return self.store.runs[self.reference].stops is not None

    @property
    def n_predict(self) -> int:
        """Requested tokens, -1 without a limit."""
        options = self.store.runs[self.reference].options
        return -1 if options is None else options.n_predict

    def seq_with(self, run_id: int) -> int:
        """The sequence on show, or the first one in which the lane was compared."""
        for seq_id in (self.seq_id, *self.seq_ids):
            if self._rows("divergence", run_id, seq_id).n:
                return seq_id
        return self.seq_id

    def values(self, run_id: int, name: str) -> np.ndarray:
        """A column of the divergence table for one lane, [n positions of this lane]."""
        return self._rows("divergence", run_id)[name]

    def states(self, run_id: int, name: str) -> np.ndarray:
        """A column of the states table for one lane, [n rounds x n layers]."""
        return self._rows("states", run_id)[name]

    def rounds(self, run_id: int, name: str) -> np.ndarray:
        return self._rows("rounds", run_id)[name]

    def paths(self, run_id: int) -> list[str]:
        """The rollback path of every round of a lane."""
        codes = self.rounds(run_id, "rollback_path")
        return self.store.text_pool.decode(codes)

    @property
    def longest(self) -> int | None:
        """The lane with the most positions, None without any lane."""
        return max(self.followers, key=lambda run: len(self.values(run, "pos")), default=None)

    def positions(self) -> np.ndarray:
        """Positions compared so far in any lane: int64 [n] ascending."""
        found = [np.zeros(0, np.int64), *(self.values(run, "pos") for run in self.followers)]
        return np.unique(np.concatenate(found))

    def round_at(self, run_id: int, pos: int) -> int | None:
        """The round that computed a lane's logits for a position."""
        row = self.row_at(run_id, pos)
        return None if row is None else int(self.values(run_id, "round")[row])

    def first_pos_of_round(self, run_id: int, round_: int) -> int | None:
        """The first position that a lane chose in a round; the longest lane's for the reference."""
        run_id = run_id if run_id in self.followers else self.longest or run_id
        found = np.flatnonzero(self.values(run_id, "round") == round_)
        return int(self.values(run_id, "pos")[found[0]]) if len(found) else None

    def row_at(self, run_id: int, pos: int) -> int | None:
        """The index of a position among a lane's values."""
        found = np.flatnonzero(self.values(run_id, "pos") == pos)
        return int(found[0]) if len(found) else None

    def measure(self, run_id: int, name: str, pos: int) -> float | None:
        """One value of a lane at a position, None if not recorded.

        state_error, conv_error, cells_differ: those after the round of that position.
        """
        row = self.row_at(run_id, pos)
        if row is None:
            return None
        values = self.values(run_id, name)
        if name in ("state_error", "conv_error", "cells_differ"):
            rounds = self.values(run_id, "round")
            row = int(np.flatnonzero(rounds == rounds[row])[-1])
            if name != "cells_differ" and np.isnan(values[row]):
                return None
        return None if values[row] == MISSING else float(values[row])

    def beyond(self, run_id: int) -> np.ndarray:
        """Positions at which a lane exceeds the bound, int64 [n] ascending."""
        nmse = self.values(run_id, "nmse")
        return self.values(run_id, "pos")[~(nmse <= self.bounds[run_id])]  # NaN exceeds any bound

    def token_at(self, pos: int) -> int | None:
        """The token that the reference lane chose."""
        run_id = self.longest
        row = None if run_id is None else self.row_at(run_id, pos)
        if run_id is None or row is None:
            return None
        return int(self.values(run_id, "token_id")[row])

    def text(self, token_id: int) -> str:
        """Display text of a token, in one line; white space alone is marked."""
        return line_text(self.store.pieces.get(token_id, b""), token_id)

    def tops(self, run_id: int, pos: int) -> list[tuple[int, float]] | None:
        """A lane's most probable tokens for a position, None if not recorded."""
        row = self._token_row(run_id, pos)
        if row is None:
            return None
        tokens = self._rows("tokens", run_id)
        ids, probs = (tokens[name][row].tolist() for name in ("target_top_id", "target_top_p"))
        known = [(i, p) for i, p in zip(ids, probs, strict=True) if i != MISSING and p == p]
        return known or None

    def sentence(self, run_id: int) -> str:
        """The verdict on a lane in words, after its name."""
        verdict = self.verdicts[run_id]
        said = _in_words(verdict, self.bounds[run_id], self._undone(verdict))
        return f"{self.names[run_id]}: {said[:1].lower()}{said[1:]}"

    def _undone(self, verdict: LaneVerdict) -> str:
        """The last rollback before the first divergence, in words."""
        if verdict.after_round is None:
            return "no rollback before it"
        rounds = RunColumns(self.store, "rounds", verdict.run_id)
        mine = rounds["seq_id"] == verdict.first_seq
        row = np.flatnonzero(mine & (rounds["round"] == verdict.after_round))[:1]
        (path,) = rounds.texts("rollback_path", row)
        undone = counted(int(rounds["rollback_depth"][row[0]]), "token")
        return f"after the rollback of {undone} by {path} in round {verdict.after_round}"

    def _token_row(self, run_id: int, pos: int) -> int | None:
        """The lane's token row with its logits of a chosen token."""
        index = self._token_rows.setdefault(run_id, {})
        rows, start = self._rows("tokens", run_id), self._n_indexed.get(run_id, 0)
        if start < rows.n:
            self._n_indexed[run_id] = rows.n
            emitted = start + np.flatnonzero(rows.is_text("kind", *EMITTED_KINDS)[start:])
            index.update(zip(rows["pos"][emitted].tolist(), emitted.tolist(), strict=True))
        return index.get(pos)


def _in_words(verdict: LaneVerdict, bound: float, undone: str) -> str:
    """The verdict in words; bound: largest NMSE that counts as equal; undone: the rollback before
    the first divergence."""
    if verdict.verdict == "failed":
        return f"The lane had to stop: {verdict.error}"
    if not verdict.n_positions:
        return "No position is compared yet."
    if verdict.verdict == SUSPECT:
        where = f"position {verdict.first_pos}, round {verdict.first_round}"
        return f"Diverges first at {where}, {undone}."
    if f := verdict.fork:
        return (
            f"Free-running; first chose another token at position {f.pos}, round {f.round}, where "
            f"the reference's two highest logits differ by {error_text(f.top2_gap)}."
        )
    if verdict.verdict == "mode":
        return (
            f"Error of {verdict.mode} against the reference: worst NMSE "
            f"{error_text(verdict.worst_nmse)} at position {verdict.worst_pos}; no bound applies."
        )
    if verdict.verdict == "exact":
        exact = f"The logits of all {verdict.n_positions} positions are exact"
        return f"{exact}: {IDLE_FAULT}." if verdict.idle_faults else f"{exact}."
    return (
        f"Within the bound {error_text(bound)}: worst NMSE {error_text(verdict.worst_nmse)} "
        f"at position {verdict.worst_pos}."
    )
