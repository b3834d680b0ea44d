"""The audit of drafts: a sample of them is made again from the text alone, and compared.

A drafter with a wrong state lowers acceptance and leaves the text right, so nothing else shows it.
Differing drafts are made again under one hypothesis after the other (`Deviation`), until one of
them reproduces the recorded ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from engine.audit.deviations import (
    CLEAN,
    DEVIATIONS,
    DIFFERS,
    JUDGED,
    LAYERS,
    NOT_JUDGED,
    OTHER,
    Deviation,
)
from engine.audit.draft_models import draft_model
from engine.audit.lookups import audit_lookups
from engine.audit.recorded_drafts import (
    DraftAudit,
    DraftedText,
    RecordedDraft,
    RecordedDrafts,
    Redrafts,
    shares_apart,
)
from engine.draft.registry import model_drafters
from engine.machine.device import read
from engine.model.layers import TargetRows
from engine.options import RunOptions
from engine.session import Session
from engine.trace.store import TraceStore

_EXACT = ("f32", "blocks")
_TOLERANCE, _ROUNDED = 1e-3, 0.02
"""Probability by which a draft may differ in exact compute modes, where rounding makes up to 4e-6,
and in the others, up to 0.01."""
_TARGET_TOLERANCE, _TARGET_ROUNDED = 1e-2, 0.5
"""The same for log-probabilities of the target, whose rows drafts are made from."""
_FEW, _FEW_PER, _MOST, _MOST_PER = 4, 8, 32, 48
FEW_DRAFTS = 2
"""Drafts per sequence that are made again if time is short."""
_N_REPLAYED = 16
_N_LOOKED, _LEAST_P = 64, 1e-12
_MOST_COUNTED = 8
_EXPLAINS, _PERSISTS = 0.25, 4


_LAYERS = Deviation(LAYERS, "rows of its layers in another order")
_OTHERS = tuple(
    Deviation(OTHER, about, other=how)
    for how, about in (
        ("instead", "its text replaces the start"),
        ("before", "its text comes before this one"),
        ("gap", "positions continue from those of its text"),
        ("beside", "its text is at the same positions"),
        ("rows", "tokens are paired with its rows"),
    )
)


def audit_drafts(
    session: Session,
    options: RunOptions,
    run_id: int,
    trace: TraceStore,
    texts: Mapping[int, Sequence[int]],
    target_rows: Callable[[int], TargetRows],
    has_time: Callable[[float, int], bool] | None = None,
) -> Iterator[DraftAudit]:
    """What is wrong with the drafter states of a finished run; one entry per sequence and drafter.

    texts: prompt and emitted tokens of each sequence, or a prefix. target_rows: computes the
    target's rows of such a text, except perhaps the last: hidden and the taps that
    `engine.audit.draft_models.taps_of` names. Called only for drafters that read rows. has_time:
    whether there is time for this many seconds of drafting, as in the run, and for the entries of
    this many tokens; then at most FEW_DRAFTS are made again, and lookups are skipped. Raises what
    the models' passes raise.
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
        """The results of all sequences that it drafted for."""
        n = self._recorded.n_rounds
        n_samples = max(2, min(_FEW, n // _FEW_PER), min(_MOST, n // _MOST_PER))
        for seq in self._drafted:
            yield self._judge(self._text(seq), -(-n_samples // len(self._drafted)))

    def few(self, has_time: Callable[[float, int], bool]) -> Iterator[DraftAudit]:
        """The results of as many sequences as there is time for, FEW_DRAFTS of each."""
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
        about = f"{len(sampled)} of {len(text.drafts)} drafts computed again"
        if wrong and self._recorded.is_named(self._drafter, text.seq_id):
            why = "the drafter's own checks found the cause"
            return DraftAudit(text.seq_id, None, self._drafter, NOT_JUDGED, f"{why}; {about}")
        if wrong and (why := self._not_judged(text, wrong[0])):
            return DraftAudit(text.seq_id, None, self._drafter, NOT_JUDGED, f"{why}; {about}")
        if wrong:
            # again, with the run's batch widths
            at = text.drafts.index(wrong[0]) + 1
            window = text.drafts[max(0, at - _N_REPLAYED) : at + _N_REPLAYED // 2]
            clean = Redrafts(self._model, text, CLEAN).of(window)
            differ = [draft for draft in window if clean[draft.round] > self._tolerance]
            if wrong[0] in differ and not self._is_tipped(differ, window):
                return self._wrong(text, differ[0], wrong, len(sampled), window, clean)
        most = max(distances.values(), default=0.0)
        about += f"; the probabilities of their best tokens differ by at most {most:.1e}"
        return DraftAudit(text.seq_id, None, self._drafter, JUDGED, about)

    def _is_tipped(self, differ: Sequence[RecordedDraft], window: Sequence[RecordedDraft]) -> bool:
        """Whether rounding may have flipped a choice inside the models, of experts or of integers:
        that happens in some drafts, but a wrong state persists."""
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
        if deviation.what == DIFFERS:  # the whole text; its beginning may be clear
            start = window[: window.index(first) + 1]
            deviation = self._cause(text, start, self._tolerance)
        amount = f"{clean[first.round]:.2g} in the probabilities of the best tokens"
        differ = f"{len(wrong)} of {n_sampled} recomputed drafts differ"
        cost = "" if self._draws else self._cost(text, wrong[:_MOST_COUNTED])
        evidence = deviation.about, f"{differ}, by {amount} in round {first.round}", cost
        said = "; ".join(filter(None, evidence))
        return DraftAudit(text.seq_id, first.round, self._drafter, deviation.what, said)

    def _from_the_text(
        self, text: DraftedText, sampled: Sequence[RecordedDraft]
    ) -> dict[int, float]:
        """Distances of drafts by round; the context is written once for all of them."""
        self._model.clear()
        n, found = 0, {}
        for draft in sampled:
            rows, n = text.right(self._model, draft, n, draft.tokens)
            found[draft.round] = shares_apart(draft, rows)
        return found

    def _cause(self, text: DraftedText, window: Sequence[RecordedDraft], clean: float) -> Deviation:
        """The hypothesis that reproduces the recorded drafts of a window, including right ones.
        clean: sum of their distances from the right drafts."""
        best, cause = _EXPLAINS * clean, Deviation(DIFFERS, "")
        for guess, its_text, other in self._guesses(text, window[0]):
            replay = Redrafts(self._model, its_text, guess, other)
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
        """Why a draft cannot be judged: the target had a wrong state, so its rows were not those of
        the text."""
        if not self._model.reads_rows:
            return ""
        known = self._recorded.target_tops(text.seq_id)
        # later ones, too: a replay's rows for drafters are not in the trace
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
        """Accepted tokens of the wrong drafts, and of the right ones in their places."""
        n_right = 0
        for draft in wrong:
            self._model.clear()
            rows, _ = text.right(self._model, draft, 0, None)
            n_right += text.n_confirmed(rows, draft.pos0)
        n_drafted = sum(len(draft.tokens) for draft in wrong)
        n_accepted = sum(draft.n_accepted for draft in wrong)
        return f"{n_accepted} of {n_drafted} tokens accepted, {n_right} with a right state"


def _sampled(drafts: Sequence[RecordedDraft], n: int) -> list[RecordedDraft]:
    """n drafts in order: the first with another token than the most probable one, as on a branch of
    a tree, the first after a rollback of each depth, the last, the first of all, and evenly spaced
    ones."""
    by_depth: dict[int, int] = {}
    for i, draft in enumerate(drafts):
        by_depth.setdefault(draft.depth, i)
    rolled_back = [i for depth, i in by_depth.items() if depth]
    spread = np.linspace(0, len(drafts) - 1, min(n, len(drafts))).round().astype(int).tolist()
    aside = (i for i, draft in enumerate(drafts) if not draft.is_best)
    wanted = [*islice(aside, 1), *rolled_back[: max(1, n // 2)], len(drafts) - 1, 0, *spread]
    return [drafts[i] for i in sorted(list(dict.fromkeys(wanted))[:n])]
