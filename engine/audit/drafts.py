"""The audit of drafts: sampled ones are made again from the text alone, and compared.

A drafter with a wrong state costs acceptance and leaves the text right, so nothing else shows it.
Drafts that differ are made again under one hypothesis after the other (`Deviation`), until one of
them gives what was recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.audit.draft_models import Candidates, DraftModel, Entries, draft_model
from engine.draft.registry import model_drafters
from engine.model.taps import TargetRows
from engine.trace.records import EMITTED_KINDS, MISSING
from engine.trace.round_rows import RoundRows
from engine.trace.run_columns import RunColumns
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.options import RunOptions
    from engine.session import Session

AHEAD, BEHIND, KEPT, SHIFTED, OTHER, DIFFERS = (
    "ahead",
    "behind",
    "rejected-kept",
    "shifted",
    "other-text",
    "differs",
)
"""What may be wrong with a drafter's state; DIFFERS: no hypothesis gives the recorded drafts."""

JUDGED, NOT_JUDGED = "judged", "not-judged"
"""Nothing is wrong, or it cannot be known."""

_TOLERANCE = {"f32": 1e-3}
_ROUNDED = 0.1
_LEAST_SAMPLES, _MOST_SAMPLES, _ROUNDS_PER_SAMPLE = 6, 48, 16
_N_REPLAYED = 24
_N_LOOKED = 8
_MOST_COUNTED = 8
_EXPLAINS = 0.25


@dataclass(frozen=True, slots=True)
class DraftAudit:
    """What the audit says of one drafter's drafts for one sequence. round: the first wrong one,
    None where nothing is wrong. what: one of the above. evidence: the numbers behind it."""

    seq_id: int
    round: int | None
    drafter: str
    what: str
    evidence: str


class _Draft(NamedTuple):
    """One recorded draft. pos0: tokens that the target had decoded. tops: per token the best
    candidates and their shares. depth: tokens undone in the round before."""

    round: int
    pos0: int
    tokens: list[int]
    tops: list[dict[int, float]]
    n_accepted: int
    depth: int


@dataclass(frozen=True, slots=True)
class Deviation:
    """A hypothesis about a drafter's memory.

    token_shift, row_shift: entries have the token, the row of so many positions on. n_kept: drafted
    entries that stay in memory after each round, None = all; counts: they are taken for the text's.
    n_lost: newest entries that are missing; for_good: they never come. place, newest: the draft is
    made so many positions on, goes on from a token so many positions on. other: memory has another
    text, too: "instead" of the beginning, "before" it, in the same positions ("beside"), or only
    its "rows".
    """

    what: str
    about: str
    token_shift: int = 0
    row_shift: int = 0
    n_kept: int | None = 0
    counts: bool = False
    n_lost: int = 0
    for_good: bool = False
    place: int = 0
    newest: int = 0
    other: str = ""


_CLEAN = Deviation(JUDGED, "")
DEVIATIONS = (
    Deviation(AHEAD, "one drafted token counts as the text's", n_kept=1, counts=True),
    Deviation(AHEAD, "two drafted tokens count as the text's", n_kept=2, counts=True),
    Deviation(AHEAD, "drafts are made one position too far", place=1),
    Deviation(BEHIND, "drafts are made one position too early", place=-1),
    Deviation(BEHIND, "the newest token decoded is missing", n_lost=1),
    Deviation(BEHIND, "one token decoded in each round is missing", n_lost=1, for_good=True),
    Deviation(BEHIND, "drafts go on from the token before the newest", newest=-1),
    Deviation(KEPT, "all drafted tokens stay in memory", n_kept=None),
    Deviation(KEPT, "the first drafted token beyond the text stays in memory", n_kept=1),
    Deviation(SHIFTED, "rows of one position before", row_shift=-1),
    Deviation(SHIFTED, "rows of one position after", row_shift=1),
    Deviation(SHIFTED, "tokens of one position before", token_shift=-1),
    Deviation(SHIFTED, "tokens of one position after", token_shift=1),
)
_OTHERS = tuple(
    Deviation(OTHER, about, other=how)
    for how, about in (
        ("instead", "its text is in the place of the beginning"),
        ("before", "its text comes before this one"),
        ("beside", "its text is in the same positions"),
        ("rows", "tokens are paired with its rows"),
    )
)


@dataclass(frozen=True, slots=True)
class _Text:
    """One sequence and the drafts of one drafter for it. table: see DraftModel.table."""

    seq_id: int
    tokens: Sequence[int]
    table: torch.Tensor | None
    drafts: list[_Draft]

    def entries(
        self,
        model: DraftModel,
        start: int,
        stop: int,
        token_shift: int = 0,
        row_shift: int = 0,
        newest_row: int | None = None,
    ) -> Entries:
        """Entries of these positions. newest_row: the last that there is, None = of the text."""
        places = range(max(0, start), stop)
        tokens = [self.tokens[max(0, p + model.ahead + token_shift)] for p in places]
        rows = None
        if self.table is not None:
            last = len(self.table) - 1 if newest_row is None else newest_row
            rows = self.table[[min(max(0, p + row_shift), last) for p in places]]
        return Entries(places, tokens, rows)


def audit_drafts(
    session: Session,
    options: RunOptions,
    run_id: int,
    trace: TraceStore,
    texts: Mapping[int, Sequence[int]],
    target_rows: Callable[[int], TargetRows],
) -> list[DraftAudit]:
    """What is wrong with the states of the drafters of a run that has ended; one entry per
    sequence and drafter.

    texts: prompt and emitted tokens of each sequence. target_rows: the target's rows of a
    sequence's text, all but perhaps the last, as a pass over the text gives them: hidden and the
    taps that `engine.audit.draft_models.taps_of` names. It is asked only for drafters that read
    rows. Raises what the models' passes raise.
    """
    recorded = _RecordedDrafts(trace, run_id)
    found: list[DraftAudit] = []
    for drafter in model_drafters():
        if drafter in options.spec.types:
            audit = _DrafterAudit(session, options, recorded, drafter, texts, target_rows)
            found += audit.all()
    return found


class _RecordedDrafts:
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

    def of(self, drafter: str) -> dict[int, list[_Draft]]:
        """The drafts of a drafter that were verified, by sequence."""
        rounds = self._rounds
        is_own = rounds.is_text("drafter", drafter)
        found: dict[int, list[_Draft]] = {}
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

    def _draft(self, row: int, seq: int, depth: int) -> _Draft:
        rounds, tokens = self._rounds, self._tokens
        number = int(rounds["round"][row])
        rows = self._by_round.get((number, seq), [])
        ids, shares = tokens["draft_top_id"][rows], tokens["draft_top_p"][rows]
        tops = [
            {i: p for i, p in zip(*pair, strict=True) if i != MISSING and math.isfinite(p)}
            for pair in zip(ids.tolist(), shares.tolist(), strict=True)
        ]
        return _Draft(
            number,
            int(rounds["pos0"][row]),
            tokens["token_id"][rows].tolist(),
            tops,
            int(rounds["num_accepted_draft_tokens"][row]),
            depth,
        )

    def first_named(self, drafter: str, seq: int) -> float:
        """The first round in which the drafter's own checks counted wrong rows or tokens."""
        asked = self._asked
        wrong = (asked["num_wrong_rows"] > 0) | (asked["num_wrong_tokens"] > 0)
        rows = np.flatnonzero(wrong & (asked["seq_id"] == seq) & asked.is_text("drafter", drafter))
        return float(asked["round"][rows[0]]) if rows.size else math.inf

    def target_p(self, seq: int) -> dict[int, tuple[int, float]]:
        """The target's probability of each emitted token, by its position, with the token."""
        tokens = self._tokens
        rows = np.flatnonzero((tokens["seq_id"] == seq) & tokens.is_text("kind", *EMITTED_KINDS))
        columns = (tokens[name][rows].tolist() for name in ("pos", "token_id", "target_p"))
        return {pos: (token, p) for pos, token, p in zip(*columns, strict=True)}


class _DrafterAudit:
    """The audit of one drafter of a run."""

    def __init__(
        self,
        session: Session,
        options: RunOptions,
        recorded: _RecordedDrafts,
        drafter: str,
        texts: Mapping[int, Sequence[int]],
        target_rows: Callable[[int], TargetRows],
    ) -> None:
        self._session, self._recorded, self._drafter = session, recorded, drafter
        self._texts, self._target_rows = texts, target_rows
        n_left = (2 * _N_REPLAYED + 2) * (options.spec.n_max + 2)
        n_ctx = 2 * max(map(len, texts.values())) + n_left
        self._model = draft_model(session, options, drafter, n_ctx)
        self._draws = options.spec.accept == "rejection" and options.sampler.temp > 0
        self._tolerance = _TOLERANCE.get(session.compute, _ROUNDED)
        self._drafted = recorded.of(drafter)

    @torch.inference_mode()
    def all(self) -> list[DraftAudit]:
        """What is to be said of each sequence that it drafted for."""
        if not self._drafted:
            return []
        n = self._recorded.n_rounds // _ROUNDS_PER_SAMPLE
        n_each = -(-min(max(n, _LEAST_SAMPLES), _MOST_SAMPLES) // len(self._drafted))
        return [self._judge(self._text(seq), n_each) for seq in self._drafted]

    def _text(self, seq: int) -> _Text:
        rows = self._target_rows(seq) if self._model.reads_rows else None
        return _Text(seq, self._texts[seq], self._model.table(rows), self._drafted[seq])

    def _judge(self, text: _Text, n: int) -> DraftAudit:
        sampled = _sampled(text.drafts, n)
        distances = self._from_the_text(text, sampled)
        named = self._recorded.first_named(self._drafter, text.seq_id)
        wrong = [d for d in sampled if d.round < named and distances[d.round] > self._tolerance]
        about = f"{len(sampled)} of {len(text.drafts)} drafts made again"
        if wrong and (why := self._not_judged(text, wrong[0])):
            return DraftAudit(text.seq_id, None, self._drafter, NOT_JUDGED, f"{why}; {about}")
        if wrong:
            # once more, in the widths of the run
            window = _window(text.drafts, wrong[0])
            clean = _Replay(self._model, text, _CLEAN).of(window)
            first = next((d for d in window if clean[d.round] > self._tolerance), None)
            if first is not None and clean[wrong[0].round] > self._tolerance:
                return self._wrong(text, first, wrong, len(sampled), window, clean)
        most = max(distances.values(), default=0.0)
        about += f"; the shares of their best tokens differ by {most:.1e} at most"
        return DraftAudit(text.seq_id, None, self._drafter, JUDGED, about)

    def _wrong(
        self,
        text: _Text,
        first: _Draft,
        wrong: Sequence[_Draft],
        n_sampled: int,
        window: Sequence[_Draft],
        clean: Mapping[int, float],
    ) -> DraftAudit:
        deviation = self._cause(text, window, sum(clean.values()))
        evidence = [
            deviation.about,
            f"{len(wrong)} of {n_sampled} drafts made again differ, by "
            f"{clean[first.round]:.2g} of the shares of the best tokens in round {first.round}",
            "" if self._draws else self._cost(text, wrong[:_MOST_COUNTED]),
        ]
        said = "; ".join(filter(None, evidence))
        return DraftAudit(text.seq_id, first.round, self._drafter, deviation.what, said)

    def _from_the_text(self, text: _Text, sampled: Sequence[_Draft]) -> dict[int, float]:
        """Distances of drafts by their rounds; the context is written once for all of them."""
        self._model.clear()
        n, found = 0, {}
        for draft in sampled:
            end = draft.pos0 - self._model.ahead
            rows = self._right(text, draft, n, draft.tokens)
            found[draft.round], n = _distance(draft, rows), end
        return found

    def _right(
        self, text: _Text, draft: _Draft, n_written: int, tokens: Sequence[int] | None
    ) -> list[Candidates]:
        """What a right state says in the place of a draft. tokens: see DraftModel.draft."""
        model = self._model
        end = draft.pos0 - model.ahead
        model.write(text.entries(model, n_written, end))
        return model.draft(text.entries(model, end, end + 1), end + 1, tokens, len(draft.tokens))

    def _cause(self, text: _Text, window: Sequence[_Draft], clean: float) -> Deviation:
        """The first hypothesis that gives the recorded drafts of a window, those that are right
        included. clean: sum of their distances from the right ones."""
        best, cause = _EXPLAINS * clean, Deviation(DIFFERS, "")
        for guess, other in self._guesses(text, window[0]):
            found = sum(_Replay(self._model, text, guess, other).of(window).values())
            if found < best:
                best, cause = found * _EXPLAINS, guess
                if other is not None:
                    cause = replace(guess, about=f"sequence {other.seq_id}: {guess.about}")
        return cause

    def _guesses(self, text: _Text, first: _Draft) -> Iterator[tuple[Deviation, _Text | None]]:
        has_rows = self._model.reads_rows
        for deviation in DEVIATIONS:
            if has_rows or not deviation.row_shift:
                yield deviation, None
        for seq, drafts in self._drafted.items():
            if seq != text.seq_id and drafts[0].round <= first.round:
                for deviation in _OTHERS:
                    if has_rows or deviation.other != "rows":
                        yield deviation, self._text(seq)

    def _not_judged(self, text: _Text, draft: _Draft) -> str:
        """Why a draft cannot be judged: it was made from other rows than a pass over the text
        gives, because the target had a wrong state."""
        if not self._model.reads_rows:
            return ""
        known = self._recorded.target_p(text.seq_id)
        places = [p for p in range(max(1, draft.pos0 - _N_LOOKED), draft.pos0 + 1) if p in known]
        if not places:
            return ""
        hidden = self._target_rows(text.seq_id).hidden[[p - 1 for p in places]]
        shares = torch.softmax(self._session.model.logits_of(hidden), -1)
        for row, place in zip(shares, places, strict=True):
            token, p = known[place]
            if abs(float(row[token]) - p) > self._tolerance:
                return f"the target's own logits at position {place} are not those of the text"
        return ""

    def _cost(self, text: _Text, wrong: Sequence[_Draft]) -> str:
        """Accepted tokens of wrong drafts, and of right ones in their places."""
        n_right = 0
        for draft in wrong:
            self._model.clear()
            rows = self._right(text, draft, 0, None)
            for row, token in zip(rows, text.tokens[draft.pos0 + 1 :], strict=False):
                if next(iter(row)) != token:
                    break
                n_right += 1
        n_drafted = sum(len(draft.tokens) for draft in wrong)
        n_accepted = sum(draft.n_accepted for draft in wrong)
        return f"{n_accepted} of {n_drafted} tokens accepted, {n_right} with a right state"


class _Replay:
    """Drafts one after the other, each behind what the ones before left in memory."""

    def __init__(
        self, model: DraftModel, text: _Text, deviation: Deviation, other: _Text | None = None
    ) -> None:
        self._model, self._text, self._deviation, self._other = model, text, deviation, other
        self._offset = 0

    def of(self, drafts: Sequence[_Draft]) -> dict[int, float]:
        """Distances by round."""
        model, deviation, found = self._model, self._deviation, {}
        model.clear()
        written = self._other_text()
        for draft in drafts:
            end = draft.pos0 - model.ahead - deviation.token_shift
            stop = end - deviation.n_lost
            self._write(written, stop, draft)
            written = end if deviation.for_good else max(written, stop)
            newest = self._entries(end, end + 1, draft)
            newest = newest.moved(deviation.place)
            if deviation.newest:
                newest = newest._replace(tokens=[self._text.tokens[draft.pos0 + deviation.newest]])
            first = draft.pos0 - model.ahead + 1 + deviation.place
            n, in_place = len(draft.tokens), deviation.n_kept is None
            rows = model.draft(newest, first, draft.tokens, n, in_place=in_place)
            found[draft.round] = _distance(draft, rows)
            n_true = model.n_true(draft.n_accepted, n)
            if deviation.n_kept:
                self._write(written, end + n_true, draft)
                left = model.left.part(n_true - 1, n_true - 1 + deviation.n_kept)
                model.write(left)
                written = end + n_true + deviation.counts * len(left.tokens)
            elif in_place:
                written = end + n_true
        return found

    def _other_text(self) -> int:
        """Write what memory has of another text; entries of this one that count as written."""
        other, how = self._other, self._deviation.other
        if other is None:
            return 0
        if how == "rows":
            self._text = replace(self._text, table=other.table)
            return 0
        latest = other.drafts[-1]
        n_true = self._model.n_true(latest.n_accepted, len(latest.tokens))
        n = latest.pos0 - self._model.ahead + n_true
        self._model.write(other.entries(self._model, 0, n))
        self._offset = n if how == "before" else 0
        return n if how == "instead" else 0

    def _write(self, start: int, stop: int, draft: _Draft) -> None:
        self._model.write(self._entries(start, stop, draft))

    def _entries(self, start: int, stop: int, draft: _Draft) -> Entries:
        shifts, newest = self._deviation, self._model.newest_row(draft.pos0)
        found = self._text.entries(
            self._model, start, stop, shifts.token_shift, shifts.row_shift, newest
        )
        return found.moved(self._offset)


def _window(drafts: Sequence[_Draft], suspect: _Draft) -> Sequence[_Draft]:
    """The drafts before a suspect, and some behind it."""
    at = next(i for i, draft in enumerate(drafts) if draft.round == suspect.round)
    return drafts[max(0, at + 1 - _N_REPLAYED) : at + 1 + _N_REPLAYED // 2]


def _sampled(drafts: Sequence[_Draft], n: int) -> list[_Draft]:
    """n drafts in order: the first behind a rollback of each depth, the first of all, the last, and
    others in equal distances."""
    by_depth: dict[int, int] = {}
    for i, draft in enumerate(drafts):
        by_depth.setdefault(draft.depth, i)
    rolled_back = [i for depth, i in by_depth.items() if depth]
    spread = np.linspace(0, len(drafts) - 1, min(n, len(drafts))).round().astype(int).tolist()
    wanted = [*rolled_back[: max(1, n // 2)], 0, len(drafts) - 1, *spread]
    return [drafts[i] for i in sorted(list(dict.fromkeys(wanted))[:n])]


def _distance(draft: _Draft, rows: Sequence[Candidates]) -> float:
    """Half the sum of differences between recorded shares of the best tokens and those that the
    rows give the same tokens, of the row where it is largest; from 0 to 1."""
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
