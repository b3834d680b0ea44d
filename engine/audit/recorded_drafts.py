"""Recorded drafts of a run, and how they are made again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from engine.audit.deviations import CLEAN, TAKEN_BACK, Deviation
from engine.audit.draft_models import Candidates, DraftModel, Entries
from engine.trace.records import EMITTED_KINDS, MISSING
from engine.trace.run_ref import RunColumns
from engine.trace.store import TraceStore


@dataclass(frozen=True, slots=True)
class DraftAudit:
    """The audit's result for one drafter and sequence. round: the first wrong one, None if none is.
    what: one of engine.audit.deviations. evidence: numbers."""

    seq_id: int
    round: int | None
    drafter: str
    what: str
    evidence: str


class RecordedDraft(NamedTuple):
    """One recorded draft. pos0: tokens that the target had decoded. tops: per token the best
    candidates and their probabilities. depth: rollback depth of the previous round. seconds:
    drafting time of its round. n_drafted: tokens that were verified; of another engine's drafts
    `tokens` may lack the last of them. is_replayed: it was verified again after a restore, which
    adds a token."""

    round: int
    pos0: int
    tokens: list[int]
    tops: list[dict[int, float]]
    n_accepted: int
    depth: int
    seconds: float
    n_drafted: int = 0
    is_replayed: bool = False

    @property
    def n_decoded(self) -> int:
        """Tokens of the text that its round decoded: the newest one, accepted ones, and the
        target's choice before a replay."""
        return 1 + self.n_accepted + self.is_replayed

    @property
    def is_best(self) -> bool:
        """Whether every token is the most probable one of its row."""
        pairs = zip(self.tokens, self.tops, strict=False)
        return all(token == next(iter(top), token) for token, top in pairs)


Counts = tuple[int, int]
"""Numbers of accepted and of drafted tokens."""


def added(counts: Iterable[Counts]) -> Counts:
    accepted, drafted = zip((0, 0), *counts, strict=True)
    return sum(accepted), sum(drafted)


def sums(drafts: Iterable[RecordedDraft]) -> Counts:
    """Sum over some rounds."""
    return added((draft.n_accepted, draft.n_drafted) for draft in drafts)


def drafted_rows(tokens: RunColumns) -> dict[tuple[int, int], list[int]]:
    """Rows of drafted tokens by round and sequence, without a replay's."""
    mine = (tokens["draft_index"] != MISSING) & ~tokens.is_text("kind", "replayed")
    found: dict[tuple[int, int], list[int]] = {}
    rows = np.flatnonzero(mine)
    keys = zip(tokens["round"][rows].tolist(), tokens["seq_id"][rows].tolist(), strict=True)
    for key, row in zip(keys, rows.tolist(), strict=True):
        found.setdefault(key, []).append(row)
    return found


class RecordedDrafts:
    """The drafts of one run in a trace."""

    def __init__(self, trace: TraceStore, run_id: int) -> None:
        self._rounds = RunColumns(trace, "rounds", run_id)
        self._tokens = RunColumns(trace, "tokens", run_id)
        self._asked = RunColumns(trace, "drafts", run_id)
        self._by_round = drafted_rows(self._tokens)
        keys = zip(self._rounds["round"].tolist(), self._rounds["seq_id"].tolist(), strict=True)
        known = [key in self._by_round for key in keys]  # some record 0 where none is accepted
        self._has_draft = (self._rounds["num_draft_tokens"] > 0) | np.array(known, bool)

    @property
    def n_rounds(self) -> int:
        return int((~self._rounds.is_prompt).sum())

    @property
    def n_drafted(self) -> int:
        """Rounds with a draft, and rounds where that is unknown."""
        return int((self._rounds["num_draft_tokens"][~self._rounds.is_prompt] != 0).sum())

    def of(self, drafter: str | None) -> dict[int, list[RecordedDraft]]:
        """The verified drafts of a drafter, by sequence. None: of every drafter, in rounds with a
        known row of their own."""
        rounds = self._rounds
        if drafter is None:
            is_own = self._has_draft & (rounds["n_merged"] == MISSING)
            is_own &= (rounds["num_accepted_draft_tokens"] >= 0) & (rounds["pos0"] >= 0)
        else:
            is_own = rounds.is_text("drafter", drafter)
        found: dict[int, list[RecordedDraft]] = {}
        for seq, rows in rounds.by_sequence(~self._rounds.is_prompt):
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
        """Names of the drafters with verified drafts."""
        rows = np.flatnonzero(self._rounds["num_draft_tokens"] > 0)
        return sorted(set(self._rounds.texts("drafter", rows)) - {""})

    def starts(self, seq: int, *, plain: bool = False) -> list[int]:
        """First positions of the batches of a sequence's rounds. plain: only rounds known to be
        without a draft."""
        mine = (self._rounds["seq_id"] == seq) & ~self._rounds.is_prompt
        if plain:
            is_alone = self._rounds["n_merged"] == MISSING
            mine &= (self._rounds["num_draft_tokens"] == 0) & ~self._has_draft & is_alone
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
            bool(rounds["replay_index"][row] > 0 and rounds["num_target_tokens"][row] > 1),
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
    """Rows [n, N_TOP] of columns as probabilities by token, without missing values."""
    return [
        {i: p for i, p in zip(*pair, strict=True) if i != MISSING and math.isfinite(p)}
        for pair in zip(ids.tolist(), shares.tolist(), strict=True)
    ]


OUTCOMES = {
    "none": "a draft without accepted tokens",
    "partial": "a partly accepted draft",
    "full": "a fully accepted draft",
    "rejected": "a rejection",
}
"""Outcomes of a draft."""


def outcomes(draft: RecordedDraft) -> tuple[str, ...]:
    """The outcomes of this draft."""
    if draft.n_accepted >= draft.n_drafted:
        return ("full",)
    return ("rejected", "partial" if draft.n_accepted else "none")


Distance = Callable[[RecordedDraft, Sequence[Candidates]], float]
"""Distance between a recorded draft and what its rows would have given, from 0."""


@dataclass(frozen=True, slots=True)
class DraftedText:
    """One sequence and a drafter's drafts for it. starts: first positions of the batches of rounds.
    table: see DraftModel.table."""

    seq_id: int
    tokens: Sequence[int]
    starts: Sequence[int]
    table: torch.Tensor | None
    drafts: list[RecordedDraft]

    def entries(
        self, model: DraftModel, places: Sequence[int], deviation: Deviation, pos0: int
    ) -> Entries:
        """Entries of these positions once the target has decoded pos0 tokens."""
        tokens = []
        for place in places:
            at = place + model.ahead + deviation.token_shift
            at += deviation.round_shift if self.starts[0] <= at < pos0 else 0
            tokens.append(self.tokens[max(0, at)])
        rows = None
        if self.table is not None:
            last = min(model.newest_row(pos0), len(self.table) - 1)
            rows = self.table[[min(max(0, p + deviation.row_shift), last) for p in places]]
        return Entries(places, tokens, rows)

    def right(
        self,
        model: DraftModel,
        draft: RecordedDraft,
        n_written: int,
        tokens: Sequence[int] | None,
        n: int | None = None,
    ) -> tuple[list[Candidates], int]:
        """The candidates that a right state gives for a draft, and the position below which entries
        are in memory then; n_written: the same before. tokens, n: see DraftModel.draft."""
        end = draft.pos0 - model.ahead
        model.write(self.entries(model, range(n_written, end), CLEAN, draft.pos0))
        newest = self.entries(model, [end], CLEAN, draft.pos0)
        n = len(draft.tokens) if n is None else n
        return model.draft(newest, end + 1, tokens, n), max(n_written, end)

    def n_confirmed(self, rows: Sequence[Candidates], pos0: int) -> int:
        """Number of leading rows whose best tokens match the text after pos0 tokens and the next
        one."""
        both = [*zip(rows, self.tokens[pos0 + 1 :], strict=False)]
        return next((i for i, (row, t) in enumerate(both) if next(iter(row)) != t), len(both))

    def alone(self, model: DraftModel, *, newest: bool = True) -> set[int]:
        """Positions of entries written by passes of one row. newest: including a draft's first
        pass, not only its later ones."""
        found = set[int]()
        for last, draft in pairwise(self.drafts):
            n, end = model.n_true(last.n_accepted, len(last.tokens)), last.pos0 - model.ahead
            found.update(range(end + 1, end + n))
            if newest and end + n == draft.pos0 - model.ahead:
                found.add(end + n)
        return found

    def in_batches(self, model: DraftModel, which: str) -> DraftedText:
        """The same with other rows of their batches, see `others_of_batch`."""
        assert self.table is not None
        before = model.newest_row(0) + 1
        places = self.others_of_batch(len(self.table) - before, which)
        return replace(self, table=self.table[[*range(before), *(p + before for p in places)]])

    def others_of_batch(self, n: int, which: str, *, with_prompt: bool = True) -> list[int]:
        """For each of n positions, another one of its batch. which: see Deviation.batch.
        with_prompt: in the first batch, too."""
        of_batch = {
            "rolled": lambda start, stop: [stop - 1, *range(start, stop - 1)],
            "reversed": lambda start, stop: [*range(start, stop)][::-1],
            "last": lambda start, stop: [stop - 1] * (stop - start),
            "first": lambda start, stop: [start] * (stop - start),
            "late": lambda start, stop: [*[start] * (stop > start), *range(start, stop - 1)],
        }[which]
        bounds = [*range(1 if with_prompt else self.starts[0]), *self.starts, n]
        return [p for ends in pairwise(bounds) for p in of_batch(*ends)]


class Redrafts:
    """Makes drafts again in order, each after the entries that the earlier ones left in memory."""

    def __init__(
        self,
        model: DraftModel,
        text: DraftedText,
        deviation: Deviation,
        other: DraftedText | None = None,
        distance: Distance | None = None,
        left: Mapping[int, Entries] | None = None,
    ) -> None:
        """distance: None = shares_apart. left: further entries in memory for a draft, by its
        round."""
        self._model, self._text, self._deviation = model, text, deviation
        self._other, self._offset = other, 0
        self._apart, self._left = distance or shares_apart, left or {}
        self._end, self._before = 0, {two.round: one for one, two in pairwise(text.drafts)}

    def of(
        self, drafts: Sequence[RecordedDraft], most: float = math.inf, n_kept: int = 0
    ) -> dict[int, float]:
        """Distances by round, until their sum exceeds `most`. n_kept: positions below which entries
        are those that the model keeps (DraftModel.keep), 0 = none."""
        (self._model.go_back if n_kept else self._model.clear)()
        rounds = [draft.round for draft in self._text.drafts] if self._deviation.late else []
        at = rounds.index(drafts[0].round) if rounds else 0  # which may have lost its last tokens
        self._end = self._text.drafts[at - 1].pos0 - self._model.ahead if at else 0
        n_written, found = n_kept or self._other_text(), dict[int, float]()
        for draft in drafts:
            found[draft.round], n_written = self._draft(draft, n_written)
            if sum(found.values()) > most:
                break
        return found

    def _draft(self, draft: RecordedDraft, n_written: int) -> tuple[float, int]:
        """Distance of one draft, and the position below which entries count as written then."""
        model, deviation = self._model, self._deviation
        both = draft.pos0, draft.pos0 + draft.n_decoded
        how, then = (deviation if deviation.acts(at) else CLEAN for at in both)
        shift = 0 if how.spares else how.token_shift
        end, n_drafted = draft.pos0 - model.ahead - shift, len(draft.tokens)
        places = [*range(n_written, end), end]
        if how.again and n_written:
            places.insert(0, n_written - 1)
        if how.skips and len(places) > 1:
            del places[0]
        if how.loses and len(places) > 1:
            del places[-2]
        lacks = range(self._text.starts[0] - model.ahead, end) if how.frozen else how.lacks
        if lacks:
            places = [p for p in places[:-1] if p not in lacks] + [end]
        if how.late:
            places, self._end = [*range(n_written, min(self._end, end)), end], end
        if how.forgets:
            model.lose(end) if how.only else model.clear()
        entries = self._text.entries(model, places, how, draft.pos0)
        moved = entries.moved(self._offset - how.closes)
        before: list[Candidates] = []
        if how.early and len(places) > 1:
            model.write(moved.part(0, len(places) - 2))
            one_before = moved.part(len(places) - 2, len(places) - 1)
            before = model.draft(one_before, places[-1], None, 1)
            model.write(one_before)
        else:
            written = moved.part(0, len(places) - 1)
            if how.restarts:
                written = written.moved(-places[0])
            model.write(written)
        newest = (moved if model.has_newest else entries).part(len(places) - 1, len(places))
        if how.spares:
            newest = self._text.entries(model, [end], CLEAN, draft.pos0)
        off = self._n_before(draft, how.off) if how.off else 1
        newest = newest.moved(how.place * off)
        if (token := self._goes_on_from(draft, how)) is not None:
            newest = newest._replace(tokens=[token])
        if draft.round in self._left:
            model.write(self._left[draft.round])
        if how.window:
            model.lose(max(0, draft.pos0 - how.window))
        for one in self._text.drafts if how.overcuts else ():
            n, n_whole = (model.n_true(i, one.n_drafted) for i in (one.n_accepted, one.n_drafted))
            # of target rows those of drafted tokens are removed in every round
            if (n < n_whole or model.reads_rows) and one.pos0 < draft.pos0:
                model.lose(one.pos0 - model.ahead + n, one.pos0 - model.ahead + n - 1)
        first, in_place = draft.pos0 - model.ahead + 1 + how.step, then.n_kept is None
        first += off * bool(how.off)
        in_place |= bool(then.n_kept) and model.can_cut
        in_place |= how.place < 0 and not model.has_newest  # rows before pos0 are not removed
        tokens = list(draft.tokens)
        if how.drops > 0 and (best := model.draft(newest, first, None, 1)):
            tokens.insert(0, next(iter(best[0])))
        rows = model.draft(
            newest,
            first,
            None if how.best else tokens if how.drops >= 0 else tokens[1:],
            n_drafted + how.drops,
            in_place=in_place,
            steady=how.steady,
            stride=how.stride,
        )
        if how.drops:
            rows = rows[1:] if how.drops > 0 else [{self._text.tokens[draft.pos0]: 0.0}, *rows]
        rows[: len(before)] = before
        n_true = 0 if how.late else model.n_true(draft.n_accepted, n_drafted)
        if how.own or (how.drops and n_true):
            n_true = 1 + how.own * min(draft.n_accepted, n_drafted - 1)
        if not model.reads_rows and (how.round_shift or how.takes_back):
            n_true = 0  # the drafted tokens are assumed to be wrong
        n = end + n_true
        if not in_place and n_true:
            model.write(newest)
            n_whole = n_true - 1 + (0 if then.only else then.n_kept or 0)
            model.write_left(model.left.part(0, n_whole))
            if then.only and then.n_kept:
                model.write_part(model.left.part(n_whole, n_whole + (then.n_kept or 0)), then.only)
        elif then.n_kept:
            model.cut(n + then.n_kept)
        self._offset += how.drift
        n += (then.n_kept or 0) * then.counts
        n += then.undecoded and draft.n_accepted == n_drafted
        if model.can_cut and then.n_kept == 0:
            model.cut(draft.pos0 if not n_true else n)
        return self._apart(draft, rows), n_written + len(places) - 1 if how.late else n

    def _n_before(self, draft: RecordedDraft, of: str) -> int:
        """See Deviation.off."""
        if of == TAKEN_BACK:
            last = self._last(draft)
            return last.n_drafted - last.n_accepted if last else 0
        before = [one for one in self._text.drafts if one.pos0 < draft.pos0]
        n_kept = sum(one.n_accepted for one in before) * (of == "rejected tokens")
        return len(before) if of == "rounds" else sum(one.n_drafted for one in before) - n_kept

    def _last(self, draft: RecordedDraft) -> RecordedDraft | None:
        """The draft of the round right before."""
        last = self._before.get(draft.round)
        return last if last and draft.pos0 == last.pos0 + last.n_accepted + 1 else None

    def _goes_on_from(self, draft: RecordedDraft, how: Deviation) -> int | None:
        """The token in place of the newest one; None for the newest one."""
        last = self._last(draft)
        if how.guessed and last and last.n_accepted < len(last.tokens):
            return last.tokens[last.n_accepted if how.guessed == "rejected" else -1]
        return self._text.tokens[draft.pos0 + how.newest] if how.newest else how.token

    def _other_text(self) -> int:
        """Write another text's entries; returns the position below which they replace this
        text's."""
        other, how, model = self._other, self._deviation.other, self._model
        if other is None:
            return 0
        if how == "rows":
            self._text = replace(self._text, table=other.table)
            return 0
        latest, n_decoded = other.drafts[-1], len(other.tokens) - 1
        n = latest.pos0 - model.ahead
        n += model.n_true(latest.n_accepted, len(latest.tokens))
        if how in ("before", "gap"):
            places = range(n if how == "gap" else 0, n_decoded - model.ahead)
            model.write(other.entries(model, places, CLEAN, n_decoded))
            self._offset = n_decoded
            return 0
        model.write(other.entries(model, range(n), CLEAN, n_decoded))
        return n if how == "instead" else 0


def shares_apart(draft: RecordedDraft, rows: Sequence[Candidates]) -> float:
    """Half the sum of differences between recorded probabilities of the best tokens and those of
    the rows for the same tokens; the largest of all rows, from 0 to 1."""
    found = 0.0
    for top, row in zip(draft.tops, rows, strict=False):
        floor = min(row.values())
        logits = np.array([row.get(token, floor) for token in top])
        shares = np.array(list(top.values()))
        if len(top) > 1 and np.isfinite(logits).all():
            own = np.exp(logits - logits.max())
            difference = np.abs(own / own.sum() - shares / shares.sum()).sum() / 2
            found = max(found, float(difference))
    return found
