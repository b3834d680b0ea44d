"""What a trace has of the drafts of a run, and what their audit says of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.trace.records import EMITTED_KINDS, MISSING
from engine.trace.round_rows import RoundRows
from engine.trace.run_columns import RunColumns
from engine.trace.store import TraceStore

AHEAD, BEHIND, KEPT, SHIFTED, LAYERS, OTHER, DIFFERS = (
    "ahead",
    "behind",
    "rejected-kept",
    "shifted",
    "wrong-layers",
    "other-text",
    "differs",
)
"""What may be wrong with a drafter's state; DIFFERS: no hypothesis gives the recorded drafts."""

JUDGED, NOT_JUDGED = "judged", "not-judged"
"""Nothing is wrong, or it cannot be known."""


@dataclass(frozen=True, slots=True)
class DraftAudit:
    """What the audit says of one drafter's drafts for one sequence. round: the first wrong one,
    None where nothing is wrong. what: one of the above. evidence: the numbers after it."""

    seq_id: int
    round: int | None
    drafter: str
    what: str
    evidence: str


class RecordedDraft(NamedTuple):
    """One recorded draft. pos0: tokens that the target had decoded. tops: per token the best
    candidates and their shares. depth: tokens undone in the round before. seconds: what all
    drafting of its round took. n_drafted: tokens that were verified; of another engine's drafts
    `tokens` may lack the last of them."""

    round: int
    pos0: int
    tokens: list[int]
    tops: list[dict[int, float]]
    n_accepted: int
    depth: int
    seconds: float
    n_drafted: int = 0


class RecordedDrafts:
    """What a trace says of the drafts of one run."""

    def __init__(self, trace: TraceStore, run_id: int) -> None:
        self._rounds = RunColumns(trace, "rounds", run_id)
        self._tokens = RunColumns(trace, "tokens", run_id)
        self._asked = RunColumns(trace, "drafts", run_id)
        self._is_prompt = RoundRows.select(trace.rounds, run_id, None).is_prompt[: self._rounds.n]
        tokens = self._tokens
        mine = (tokens["draft_index"] != MISSING) & ~tokens.is_text("kind", "replayed")
        self._by_round: dict[tuple[int, int], list[int]] = {}
        rows = np.flatnonzero(mine)
        keys = zip(tokens["round"][rows].tolist(), tokens["seq_id"][rows].tolist(), strict=True)
        for key, row in zip(keys, rows.tolist(), strict=True):
            self._by_round.setdefault(key, []).append(row)

    @property
    def n_rounds(self) -> int:
        return int((~self._is_prompt).sum())

    def of(self, drafter: str | None) -> dict[int, list[RecordedDraft]]:
        """The drafts of a drafter that were verified, by sequence. None: of every drafter, those of
        rounds that are known by themselves."""
        rounds = self._rounds
        if drafter is None:
            is_own = (rounds["num_draft_tokens"] > 0) & (rounds["n_merged"] == MISSING)
            is_own &= (rounds["num_accepted_draft_tokens"] >= 0) & (rounds["pos0"] >= 0)
        else:
            is_own = rounds.is_text("drafter", drafter)
        found: dict[int, list[RecordedDraft]] = {}
        for seq, rows in rounds.by_sequence(~self._is_prompt):
            depths = [0, *rounds["rollback_depth"][rows[:-1]].tolist()]
            drafts = [
                self._draft(row, seq, depth)
                for row, depth in zip(rows.tolist(), depths, strict=True)
                if is_own[row]
            ]
            if drafts:
                found[seq] = drafts
        return found

    def drafters(self) -> list[str]:
        """Names of the drafters whose drafts were verified."""
        rows = np.flatnonzero(self._rounds["num_draft_tokens"] > 0)
        return sorted(set(self._rounds.texts("drafter", rows)) - {""})

    def starts(self, seq: int) -> list[int]:
        """Positions that the batches of a sequence's rounds begin at."""
        mine = (self._rounds["seq_id"] == seq) & ~self._is_prompt
        found: list[int] = self._rounds["pos0"][mine].tolist()
        return found

    def _draft(self, row: int, seq: int, depth: int) -> RecordedDraft:
        rounds, tokens = self._rounds, self._tokens
        number = int(rounds["round"][row])
        rows = self._by_round.get((number, seq), [])
        ids = tokens["token_id"][rows].tolist()
        if MISSING in ids:
            rows = rows[: ids.index(MISSING)]
        tops = _tops(tokens["draft_top_id"][rows], tokens["draft_top_p"][rows])
        return RecordedDraft(
            number,
            int(rounds["pos0"][row]),
            ids[: len(rows)],
            tops,
            int(rounds["num_accepted_draft_tokens"][row]),
            depth,
            float(np.nan_to_num(rounds["draft_ms"][row])) / 1e3,
            max(0, int(rounds["num_draft_tokens"][row])),
        )

    def is_named(self, drafter: str, seq: int) -> bool:
        """Whether the drafter's own checks have counted wrong rows or tokens."""
        asked = self._asked
        wrong = (asked["num_wrong_rows"] > 0) | (asked["num_wrong_tokens"] > 0)
        return bool((wrong & (asked["seq_id"] == seq) & asked.is_text("drafter", drafter)).any())

    def target_tops(self, seq: int) -> dict[int, dict[int, float]]:
        """The target's most probable tokens at each emitted one's position, with probabilities."""
        tokens = self._tokens
        rows = np.flatnonzero((tokens["seq_id"] == seq) & tokens.is_text("kind", *EMITTED_KINDS))
        ids, probs = tokens["target_top_id"][rows], tokens["target_top_p"][rows]
        return dict(zip(tokens["pos"][rows].tolist(), _tops(ids, probs), strict=True))


def _tops(ids: np.ndarray, shares: np.ndarray) -> list[dict[int, float]]:
    """Rows [n, N_TOP] of columns as shares by token; what was not observed is left out."""
    return [
        {i: p for i, p in zip(*pair, strict=True) if i != MISSING and math.isfinite(p)}
        for pair in zip(ids.tolist(), shares.tolist(), strict=True)
    ]
