"""The audit of drafts: sampled ones are made again from the text alone, and compared.

A drafter with a wrong state costs acceptance and leaves the text right, so nothing else shows it.
Drafts that differ are made again under one hypothesis after the other (`Deviation`), until one of
them gives what was recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.audit.draft_models import Candidates, DraftModel, Entries, draft_model
from engine.audit.lookups import audit_lookups
from engine.audit.recorded_drafts import (
    AHEAD,
    BEHIND,
    DIFFERS,
    JUDGED,
    KEPT,
    LAYERS,
    NOT_JUDGED,
    OTHER,
    SHIFTED,
    DraftAudit,
    RecordedDraft,
    RecordedDrafts,
)
from engine.draft.registry import model_drafters
from engine.machine.device import read
from engine.model.taps import TargetRows
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.options import RunOptions
    from engine.session import Session

_EXACT = ("f32", "blocks")
_TOLERANCE, _ROUNDED = 1e-3, 0.02
"""Shares by which a draft may differ in exact compute modes, where rounding makes up to 4e-6, and
in the others, up to 0.01."""
_TARGET_TOLERANCE, _TARGET_ROUNDED = 1e-2, 0.5
"""The same of logarithms of the target's probabilities, whose rows drafts are made from."""
_FEW, _FEW_PER, _MOST, _MOST_PER = 4, 8, 32, 48
FEW_DRAFTS = 2
"""Drafts of a sequence that are made again where there is little time."""
_N_REPLAYED = 16
_N_LOOKED, _LEAST_P = 64, 1e-12
_MOST_COUNTED = 8
_EXPLAINS, _PERSISTS = 0.25, 4


@dataclass(frozen=True, slots=True)
class Deviation:
    """A hypothesis about what a drafter's memory has instead of the text's entries, those that a
    draft needs in order, the newest one last.

    n_kept: drafted entries that stay after each round, None = all; counts: they are taken for the
    text's. token_shift, row_shift: entries have the token, the row of this many positions on;
    round_shift: the same of tokens decoded in rounds. batch: which row of its batch every token
    has, or "rolled". skips: the first entry of each round is missing; closes: the others take its
    place. loses: the last but one is missing. again: the one before the first is written again.
    undecoded: the last token of a draft that is accepted whole is missing. place, step: the newest
    and the drafted entries, or only these, are this many positions on. newest: its token is that of
    this many positions on; takes_back: it is noticed then. steady: all drafted tokens are paired
    with one row. drift: positions that entries are moved by in each round. other: another text is
    "instead" of the beginning, "before" this one, "next to" it in the same positions, leaves a
    "gap", or there are its "rows".
    """

    what: str
    about: str
    n_kept: int | None = 0
    counts: bool = False
    token_shift: int = 0
    row_shift: int = 0
    round_shift: int = 0
    batch: str = ""
    skips: bool = False
    closes: bool = False
    loses: bool = False
    again: bool = False
    undecoded: bool = False
    place: int = 0
    step: int = 0
    newest: int = 0
    takes_back: bool = False
    steady: bool = False
    drift: int = 0
    since_prompt: bool = False
    other: str = ""

    @property
    def is_of_rows(self) -> bool:
        """Whether it means nothing for a drafter that reads no rows."""
        return bool(self.row_shift or self.batch or self.steady or self.other == "rows")


CLEAN = Deviation(JUDGED, "")
DEVIATIONS = (
    Deviation(AHEAD, "one drafted token counts as the text's", n_kept=1, counts=True),
    Deviation(AHEAD, "two drafted tokens count as the text's", n_kept=2, counts=True),
    Deviation(AHEAD, "the last token of a draft counts as decoded, and is not", undecoded=True),
    Deviation(AHEAD, "the first token that it has to decode in each round is missing", skips=True),
    Deviation(AHEAD, "the same, and the others are in its place", skips=True, closes=True),
    Deviation(AHEAD, "positions in its memory run ahead by one in each round", drift=1),
    Deviation(AHEAD, "drafts are made one position too far", place=1, step=1),
    Deviation(AHEAD, "drafted tokens are decoded one position too far", step=1),
    Deviation(BEHIND, "drafts are made one position too early", place=-1, step=-1),
    Deviation(BEHIND, "drafted tokens are decoded one position too early", step=-1),
    Deviation(BEHIND, "one token decoded in each round is missing", loses=True),
    Deviation(BEHIND, "one token is decoded twice in each round", again=True),
    Deviation(BEHIND, "drafts go on from the token before the newest", newest=-1),
    Deviation(BEHIND, "drafts go on from the token before the newest", newest=-1, takes_back=True),
    Deviation(KEPT, "all drafted tokens stay in memory", n_kept=None),
    Deviation(KEPT, "one drafted token of each round stays in memory", n_kept=1),
    Deviation(SHIFTED, "rows of one position before", row_shift=-1),
    Deviation(SHIFTED, "rows of one position after", row_shift=1),
    Deviation(SHIFTED, "rows of each batch, moved around by one", batch="rolled"),
    Deviation(SHIFTED, "the last row of its batch for every token", batch="last"),
    Deviation(SHIFTED, "the first row of its batch for every token", batch="first"),
    Deviation(SHIFTED, "one and the same row for all drafted tokens", steady=True),
    Deviation(SHIFTED, "tokens of one position before", token_shift=-1),
    Deviation(SHIFTED, "tokens of one position after", token_shift=1),
    Deviation(SHIFTED, "tokens of one position after, since the prompt", round_shift=1),
)
_LAYERS = Deviation(LAYERS, "rows of its layers in another order")
_OTHERS = tuple(
    Deviation(OTHER, about, other=how)
    for how, about in (
        ("instead", "its text is in the place of the beginning"),
        ("before", "its text comes before this one"),
        ("gap", "positions go on from those of its text"),
        ("beside", "its text is in the same positions"),
        ("rows", "tokens are paired with its rows"),
    )
)


Distance = Callable[[RecordedDraft, Sequence[Candidates]], float]
"""How far a recorded draft is from what its rows would have given, from 0."""


@dataclass(frozen=True, slots=True)
class DraftedText:
    """One sequence and the drafts of one drafter for it. starts: positions that batches of rounds
    begin at. table: see DraftModel.table."""

    seq_id: int
    tokens: Sequence[int]
    starts: Sequence[int]
    table: torch.Tensor | None
    drafts: list[RecordedDraft]

    def entries(
        self, model: DraftModel, places: Sequence[int], deviation: Deviation, pos0: int
    ) -> Entries:
        """Entries of these positions, where the target has decoded pos0 tokens."""
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

    def in_batches(self, model: DraftModel, which: str) -> DraftedText:
        """The same with other rows of their batches. which: see Deviation.batch."""
        assert self.table is not None
        of_batch = {
            "rolled": lambda start, stop: [stop - 1, *range(start, stop - 1)],
            "last": lambda start, stop: [stop - 1] * (stop - start),
            "first": lambda start, stop: [start] * (stop - start),
        }[which]
        before = model.newest_row(0) + 1
        bounds = [0, *self.starts, len(self.table) - before]
        places = [p + before for ends in pairwise(bounds) for p in of_batch(*ends)]
        return replace(self, table=self.table[[*range(before), *places]])


def audit_drafts(
    session: Session,
    options: RunOptions,
    run_id: int,
    trace: TraceStore,
    texts: Mapping[int, Sequence[int]],
    target_rows: Callable[[int], TargetRows],
    has_time: Callable[[float, int], bool] | None = None,
) -> Iterator[DraftAudit]:
    """What is wrong with the states of the drafters of a run that has ended; one entry per
    sequence and drafter.

    texts: prompt and emitted tokens of each sequence, or their beginnings. target_rows: the
    target's rows of such a text, all but perhaps the last, as a pass over it gives them: hidden and
    the taps that `engine.audit.draft_models.taps_of` names. It is asked only for drafters that read
    rows. has_time: whether there is time for this many seconds of drafting, as in the run, and for
    the entries of this many tokens; then FEW_DRAFTS are made again at most, and nothing is looked
    up. Raises what the models' passes raise.
    """
    recorded = RecordedDrafts(trace, run_id)
    for drafter in model_drafters():
        if drafter in options.spec.types:
            audit = _DrafterAudit(session, options, recorded, drafter, texts, target_rows)
            yield from audit.few(has_time) if has_time else audit.all()
    if has_time is None:
        yield from audit_lookups(session, options, run_id, trace, texts)


class _DrafterAudit:
    """The audit of one drafter of a run."""

    def __init__(
        self,
        session: Session,
        options: RunOptions,
        recorded: RecordedDrafts,
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
        is_exact = session.compute in _EXACT
        self._tolerance = _TOLERANCE if is_exact else _ROUNDED
        self._target_tolerance = _TARGET_TOLERANCE if is_exact else _TARGET_ROUNDED
        self._drafted = {}
        for seq, drafts in recorded.of(drafter).items():
            reached = [draft for draft in drafts if draft.pos0 < len(texts.get(seq, ()))]
            if reached:
                self._drafted[seq] = reached

    def all(self) -> Iterator[DraftAudit]:
        """What is to be said of each sequence that it drafted for."""
        n = self._recorded.n_rounds
        n_samples = max(2, min(_FEW, n // _FEW_PER), min(_MOST, n // _MOST_PER))
        for seq in self._drafted:
            yield self._judge(self._text(seq), -(-n_samples // len(self._drafted)))

    def few(self, has_time: Callable[[float, int], bool]) -> Iterator[DraftAudit]:
        """The same of as many sequences as there is time for, FEW_DRAFTS of each."""
        for seq, drafts in self._drafted.items():
            for n in range(FEW_DRAFTS, 0, -1):
                sampled = _sampled(drafts, n)
                if has_time(sum(draft.seconds for draft in sampled), sampled[-1].pos0):
                    yield self._judge(self._text(seq), n)
                    break

    def _text(self, seq: int) -> DraftedText:
        rows = self._target_rows(seq) if self._model.reads_rows else None
        table, starts = self._model.table(rows), self._recorded.starts(seq)
        return DraftedText(seq, self._texts[seq], starts, table, self._drafted[seq])

    @torch.inference_mode()
    def _judge(self, text: DraftedText, n: int) -> DraftAudit:
        sampled = _sampled(text.drafts, n)
        distances = self._from_the_text(text, sampled)
        wrong = [d for d in sampled if distances[d.round] > self._tolerance]
        about = f"{len(sampled)} of {len(text.drafts)} drafts made again"
        if wrong and self._recorded.is_named(self._drafter, text.seq_id):
            why = "the drafter's own checks have found what is wrong"
            return DraftAudit(text.seq_id, None, self._drafter, NOT_JUDGED, f"{why}; {about}")
        if wrong and (why := self._not_judged(text, wrong[0])):
            return DraftAudit(text.seq_id, None, self._drafter, NOT_JUDGED, f"{why}; {about}")
        if wrong:
            # once more, in the widths of the run
            window = window_around(text.drafts, wrong[0])
            clean = Replay(self._model, text, CLEAN).of(window)
            differ = [draft for draft in window if clean[draft.round] > self._tolerance]
            if wrong[0] in differ and not self._is_tipped(differ, window):
                return self._wrong(text, differ[0], wrong, len(sampled), window, clean)
        most = max(distances.values(), default=0.0)
        about += f"; the shares of their best tokens differ by {most:.1e} at most"
        return DraftAudit(text.seq_id, None, self._drafter, JUDGED, about)

    def _is_tipped(self, differ: Sequence[RecordedDraft], window: Sequence[RecordedDraft]) -> bool:
        """Whether rounding may have tipped a choice inside the models, of experts or of integers:
        it does so in some drafts, and a wrong state stays."""
        since = len(window) - window.index(differ[0])
        return self._tolerance == _ROUNDED and _PERSISTS * len(differ) < max(since, _PERSISTS + 1)

    def _wrong(
        self,
        text: DraftedText,
        first: RecordedDraft,
        wrong: Sequence[RecordedDraft],
        n_sampled: int,
        window: Sequence[RecordedDraft],
        clean: Mapping[int, float],
    ) -> DraftAudit:
        deviation = self._cause(text, window, sum(clean.values()))
        if deviation.what == DIFFERS:  # as a whole; perhaps it is plain where it begins
            start = window[: window.index(first) + 1]
            deviation = self._cause(text, start, self._tolerance)
        amount = f"{clean[first.round]:.2g} of the shares of the best tokens"
        differ = f"{len(wrong)} of {n_sampled} drafts made again differ"
        cost = "" if self._draws else self._cost(text, wrong[:_MOST_COUNTED])
        evidence = deviation.about, f"{differ}, by {amount} in round {first.round}", cost
        said = "; ".join(filter(None, evidence))
        return DraftAudit(text.seq_id, first.round, self._drafter, deviation.what, said)

    def _from_the_text(
        self, text: DraftedText, sampled: Sequence[RecordedDraft]
    ) -> dict[int, float]:
        """Distances of drafts by their rounds; the context is written once for all of them."""
        self._model.clear()
        n, found = 0, {}
        for draft in sampled:
            rows = self._right(text, draft, n, draft.tokens)
            found[draft.round], n = shares_apart(draft, rows), draft.pos0 - self._model.ahead
        return found

    def _right(
        self, text: DraftedText, draft: RecordedDraft, n_written: int, tokens: Sequence[int] | None
    ) -> list[Candidates]:
        """What a right state says in the place of a draft. tokens: see DraftModel.draft."""
        model, end = self._model, draft.pos0 - self._model.ahead
        model.write(text.entries(model, range(n_written, end), CLEAN, draft.pos0))
        newest = text.entries(model, [end], CLEAN, draft.pos0)
        return model.draft(newest, end + 1, tokens, len(draft.tokens))

    def _cause(self, text: DraftedText, window: Sequence[RecordedDraft], clean: float) -> Deviation:
        """The hypothesis that gives the recorded drafts of a window, those that are right
        included. clean: sum of their distances from the right ones."""
        best, cause = _EXPLAINS * clean, Deviation(DIFFERS, "")
        for guess, its_text, other in self._guesses(text, window[0]):
            replay = Replay(self._model, its_text, guess, other)
            found = sum(replay.of(window, best).values())
            if found < best:
                best, cause = found * _EXPLAINS, guess
                if other is not None:
                    cause = replace(guess, about=f"sequence {other.seq_id}: {guess.about}")
        return cause

    def _guesses(
        self, text: DraftedText, first: RecordedDraft
    ) -> Iterator[tuple[Deviation, DraftedText, DraftedText | None]]:
        model = self._model
        for deviation in DEVIATIONS:
            if model.reads_rows or not deviation.is_of_rows:
                which = deviation.batch
                yield deviation, text.in_batches(model, which) if which else text, None
        for order in model.orders:
            rows = model.table(self._target_rows(text.seq_id), order)
            yield _LAYERS, replace(text, table=rows), None
        for seq, drafts in self._drafted.items():
            if seq != text.seq_id and drafts[0].round <= first.round:
                other = self._text(seq)
                for deviation in _OTHERS:
                    if model.reads_rows or not deviation.is_of_rows:
                        yield deviation, text, other

    def _not_judged(self, text: DraftedText, draft: RecordedDraft) -> str:
        """Why a draft cannot be judged: it was made from other rows than a pass over the text
        gives, because the target had a wrong state."""
        if not self._model.reads_rows:
            return ""
        known = self._recorded.target_tops(text.seq_id)
        # those after it, too: what a replay gave drafters is not what the trace has
        first, last = max(1, draft.pos0 - _N_LOOKED), draft.pos0 + 1 + len(draft.tokens)
        places = [place for place in range(first, last + 1) if place in known]
        if not places:
            return ""
        hidden = self._target_rows(text.seq_id).hidden
        places = [place for place in places if place <= len(hidden)]
        hidden = hidden[[place - 1 for place in places]]
        rows = read(torch.log_softmax(self._session.model.logits_of(hidden), -1))[0]
        for row, place in zip(rows, places, strict=True):
            top = known[place]
            apart = [abs(row[token] - math.log(p)) for token, p in top.items() if p > _LEAST_P]
            if max(apart, default=0.0) > self._target_tolerance:
                return f"the target's own logits at position {place} are not those of the text"
        return ""

    def _cost(self, text: DraftedText, wrong: Sequence[RecordedDraft]) -> str:
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


class Replay:
    """Drafts one after the other, each after what the ones before left in memory."""

    def __init__(
        self,
        model: DraftModel,
        text: DraftedText,
        deviation: Deviation,
        other: DraftedText | None = None,
        distance: Distance | None = None,
    ) -> None:
        """distance: None = shares_apart."""
        self._model, self._text, self._deviation = model, text, deviation
        self._other, self._offset = other, 0
        self._apart = distance or shares_apart

    def of(self, drafts: Sequence[RecordedDraft], most: float = math.inf) -> dict[int, float]:
        """Distances by round, until their sum is more than `most`."""
        self._model.clear()
        n_written, found = self._other_text(), {}
        for draft in drafts:
            found[draft.round], n_written = self._draft(draft, n_written)
            if sum(found.values()) > most:
                break
        return found

    def _draft(self, draft: RecordedDraft, n_written: int) -> tuple[float, int]:
        """Distance of one draft, and positions below which entries count as written then."""
        model, how = self._model, self._deviation
        end, n_drafted = draft.pos0 - model.ahead - how.token_shift, len(draft.tokens)
        places = [*range(n_written, end), end]
        if how.again and n_written:
            places.insert(0, n_written - 1)
        if how.skips and len(places) > 1:
            del places[0]
        if how.loses and len(places) > 1:
            del places[-2]
        entries = self._text.entries(model, places, how, draft.pos0)
        moved = entries.moved(self._offset - how.closes)
        model.write(moved.part(0, len(places) - 1))
        newest = (moved if model.has_newest else entries).part(len(places) - 1, len(places))
        newest = newest.moved(how.place)
        if how.newest:
            newest = newest._replace(tokens=[self._text.tokens[draft.pos0 + how.newest]])
        first, in_place = draft.pos0 - model.ahead + 1 + how.step, how.n_kept is None
        in_place |= bool(how.n_kept) and model.can_cut
        rows = model.draft(
            newest, first, draft.tokens, n_drafted, in_place=in_place, steady=how.steady
        )
        n_true = model.n_true(draft.n_accepted, n_drafted)
        if not model.reads_rows and (how.round_shift or how.takes_back):
            n_true = 0  # what was drafted is taken for wrong
        n = end + n_true
        if not in_place and n_true:
            model.write(newest)
            model.write(model.left.part(0, n_true - 1 + (how.n_kept or 0)))
        elif how.n_kept:
            model.cut(n + how.n_kept)
        self._offset += how.drift
        n += (how.n_kept or 0) * how.counts
        n += how.undecoded and draft.n_accepted == n_drafted
        if model.can_cut and how.n_kept == 0:
            model.cut(draft.pos0 if not n_true else n)
        return self._apart(draft, rows), n

    def _other_text(self) -> int:
        """Write what memory has of another text; positions below which it is in the place of this
        one's."""
        other, how, model = self._other, self._deviation.other, self._model
        if other is None:
            return self._text.starts[0] if self._deviation.since_prompt else 0
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


def window_around(
    drafts: Sequence[RecordedDraft], suspect: RecordedDraft
) -> Sequence[RecordedDraft]:
    """The drafts before a suspect, and some after it."""
    at = next(i for i, draft in enumerate(drafts) if draft.round == suspect.round)
    return drafts[max(0, at + 1 - _N_REPLAYED) : at + 1 + _N_REPLAYED // 2]


def _sampled(drafts: Sequence[RecordedDraft], n: int) -> list[RecordedDraft]:
    """n drafts in order: the first after a rollback of each depth, the last, the first of all, and
    others in equal distances."""
    by_depth: dict[int, int] = {}
    for i, draft in enumerate(drafts):
        by_depth.setdefault(draft.depth, i)
    rolled_back = [i for depth, i in by_depth.items() if depth]
    spread = np.linspace(0, len(drafts) - 1, min(n, len(drafts))).round().astype(int).tolist()
    wanted = [*rolled_back[: max(1, n // 2)], len(drafts) - 1, 0, *spread]
    return [drafts[i] for i in sorted(list(dict.fromkeys(wanted))[:n])]


def shares_apart(draft: RecordedDraft, rows: Sequence[Candidates]) -> float:
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
