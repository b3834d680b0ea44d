"""Drafts of any engine made again by the drafter at hand: which are not its own, and at which stage
they went wrong.

The target decodes the text once for the rows that the drafter reads. Every draft is made again from
these; if recorded ids differ by more than rounding, drafts are made again with one stage after the
other changed, until they match. If nothing gives all of them, the change that gives most is named,
and otherwise the stage that the wrong drafts themselves suggest: after which rounds, from which
token on, and whether wrong tokens were as good as the right ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise, repeat
from typing import Any

import numpy as np
import torch

from engine.audit.draft_models import Candidates, draft_model
from engine.audit.recorded_drafts import (
    Counts,
    DraftedText,
    RecordedDraft,
    RecordedDrafts,
    shares_apart,
)
from engine.draft.drafter import width_at
from engine.draft.model_drafter import N_CANDIDATES
from engine.draft.registry import model_drafters
from engine.errors import OptionError
from engine.gguf.binary import check_cancelled, never
from engine.model.families import FAMILIES
from engine.model.tensors import DRAFT_MTP
from engine.observe.drafter_diff.candidate_mistakes import N_BEFORE, OfText
from engine.observe.drafter_diff.draft_ends import DraftEnd, ends_words, wrong_ends
from engine.observe.drafter_diff.guesses import EXPLAINS, ROUNDED, Guess, Rows, Trials, n_right
from engine.observe.drafter_diff.mistakes import Mistakes
from engine.observe.drafter_diff.records import (
    CANDIDATES,
    FEW,
    ROWS,
    STATE,
    Cause,
    Drafts,
    n_equal,
    place_of,
)
from engine.observe.drafter_diff.sides import LONGEST_TEXT, DraftSide
from engine.observe.drafter_diff.target_choices import TargetChoices
from engine.observe.drafter_diff.target_rows import TextRows
from engine.observe.drafter_diff.wrong_drafts import (
    EXACT_TIE,
    SHARES_EXACT,
    SHARES_TIE,
    TIE,
    Ranks,
    as_drawn,
    gap,
    is_clear,
    logits_scale,
    ranked,
    same_logits,
    scopes_of,
    shape_of,
    stage_of,
    wrong_steps,
)
from engine.observe.rescoring.identity import is_observed
from engine.options import RunOptions, SpecOptions
from engine.session import Session

_MOST_DRAFTS, _MOST_WALKED, _MOST_REPLAYED, _MOST_VERIFIED = 96, 48, 32, 64
_SHARE, _SHARE_ROUNDED, _SHARE_AFTER, _SHARE_VAGUE = 0.05, 0.15, 0.25, 0.3
"""Share of drafts that must be wrong: if both round alike, otherwise, of those after a rejection,
and if no mistake, or one that gives a part of anything, explains them."""
_EXACT = ("f32", "blocks")
_EXPLAINS_PART, _EXPLAINS_VAGUE = 0.3, 0.1
"""As EXPLAINS, for one of a module's many parts, and for what gives a part of anything."""
_ROWS_APART = 0.1
"""Share of a row's square that another engine's rounding may change."""
_TINY = 1e-30
_SENT_AGAIN, _ONE_TOKEN = 0.6, 0.95
_SHOWS_DRAWN = 8
"""Drafts that must each be among the ten best: a few of another model may be by chance."""


class Redrafter:
    """Makes the drafts of one side again. Raises OptionError for a drafter that is not at hand."""

    @torch.inference_mode()
    def __init__(
        self,
        session: Session,
        side: DraftSide,
        cancelled: Callable[[], bool] = never,
        others: Sequence[DraftSide] = (),
    ) -> None:
        """others: sequences of its run."""
        self._session, self._cancelled = session, cancelled
        self.drafter = drafter_for(session, side)
        facts = side.run.facts
        is_exact = not is_observed(facts) and {facts.compute, session.compute} <= {*_EXACT}
        self._tie = EXACT_TIE if is_exact else TIE
        self._share = _SHARE if is_exact else _SHARE_ROUNDED
        drafts = side.drafts
        if len(side.drafters) > 1:
            store, number = side.run.store, side.run.run_id
            own = RecordedDrafts(store, number).of(self.drafter).get(side.seq_id, ())
            mine = {draft.round for draft in own}
            drafts = [draft for draft in drafts if draft.round in mine]
        side = replace(side, text=side.text[:LONGEST_TEXT], drafts=drafts)
        self._side = side
        longest = min(64, max((draft.n_drafted for draft in side.drafts), default=1))
        recorded = side.run.facts.options
        n_max = max(longest, recorded.spec.n_max if recorded else 0)
        self._tree = recorded.spec.tree if recorded else ()
        self._options = RunOptions(spec=SpecOptions(types=(self.drafter,), n_max=min(n_max, 64)))
        n_ctx = 3 * len(side.text) + 64 * (longest + 2)
        self._model = draft_model(session, self._options, self.drafter, n_ctx)
        loaded = session.drafts.get(self.drafter)
        config: Any = getattr(loaded, "config", None)
        taps = tuple(getattr(config, "taps", ()) or ())
        self._target = TextRows(session.model, side.text, taps, cancelled)
        self._stood_in: set[int] = set()
        self._best: dict[int, list[int]] = {}
        self._rows: dict[int, list[Candidates]] = {}
        self._ranks: Ranks = {}
        self._above: Counter[tuple[int, int]] = Counter()
        self._drafts = [d for d in map(self._padded, side.drafts) if d is not None]
        starts = [at for at in side.starts if 0 <= at < len(side.text)] or [side.n_prompt]
        table = self._model.table(self._target.rows)
        self._text = DraftedText(side.seq_id, side.text, starts, table, self._drafts)
        of_text = self._model, self._text, self._target, n_ctx, side.shown, others
        self._mistakes = Mistakes(session, *of_text, in_trees=bool(self._tree))
        hidden = self._target.rows.hidden
        self.choices = TargetChoices(
            session, side, hidden, self._share, is_exact and facts.compute == session.compute
        )

    def _padded(self, draft: RecordedDraft) -> RecordedDraft | None:
        """A draft with a stand-in for the rejected token if its id is unknown: the text's own,
        which it was not."""
        tokens, text, n = list(draft.tokens), self._side.text, self._session.config.n_vocab
        at = draft.pos0 + 1 + len(tokens)
        if draft.pos0 >= len(text) or any(not 0 <= token < n for token in tokens):
            return None
        if len(tokens) < draft.n_drafted and self._side.knows_all:
            return draft._replace(n_drafted=len(tokens))
        if len(tokens) < draft.n_drafted:
            if len(tokens) != draft.n_accepted or at >= len(text) - 1:
                return draft if tokens else None
            tokens.append(text[at])
            self._stood_in.add(draft.round)
        return draft._replace(tokens=tokens)

    def rows_cause(self, handed: np.ndarray) -> Cause | None:
        """Whether the rows handed over, float32 [n, n_embd], differ from the target's."""
        own = self._target.rows.hidden[: len(handed)].flatten(1).numpy()
        found = handed[: len(own)]
        if found.shape != own.shape:
            return Cause(ROWS, self._side.name, "The drafter gets rows of another width.")
        scale = np.maximum(np.square(own).sum(1), _TINY)
        apart = np.square(found - own).sum(1) / scale
        wrong = np.flatnonzero(~(apart < _ROWS_APART))
        if len(wrong) < FEW:
            return None
        about = f"Of the target's rows that the drafter gets, {self._target.about(found, wrong)}."
        size = f"{len(wrong)} of {len(own)} rows"
        return Cause(ROWS, self._side.name, about, f"position {wrong[0]}", size)

    @torch.inference_mode()
    def ends_cause(self) -> Cause | None:
        """Whether drafts end by another rule than a probability below p_min."""
        side, options = self._side, self._side.run.facts.options
        spec = options.spec if options is not None else None
        if spec is None or not (spec.p_min or spec.n_min):
            return None
        if spec.verify_max is not None or spec.adapt != "none" or spec.tree:
            return None  # which end drafts, too
        plain = [RecordedDraft(-1, at, [], [], 0, 0, 0.0) for at in side.plain]
        drafts = sorted([*self._drafts[:_MOST_DRAFTS], *plain], key=lambda draft: draft.pos0)
        last = len(side.text) - spec.n_max - 2
        drafts = [one for one in drafts if side.n_prompt <= one.pos0 < last]
        ends = self._ends(drafts, spec.n_max)
        if not (wrong := wrong_ends(ends, spec.p_min, spec.n_min)):
            return None
        about, n_left = ends_words(ends, wrong, spec.p_min, spec.n_min)
        for guess in self._mistakes.of_parts(CANDIDATES) if n_left else ():
            with guess.applied():
                n = len(wrong_ends(self._ends(drafts, spec.n_max), spec.p_min, spec.n_min))
            if n < n_left:
                about, n_left = f"Drafts end by another confidence: {guess.about}", n
            if not n:
                break
        size = f"{len(wrong)} of {len(ends)} drafts end otherwise, {n_left} with this cause"
        return Cause(CANDIDATES, side.name, about, f"position {wrong[0]}", size)

    def _ends(self, drafts: Drafts, n_max: int) -> list[DraftEnd]:
        """The ends of drafts with right tokens."""
        n, found = 0, list[DraftEnd]()
        self._model.clear()
        for draft in drafts:
            check_cancelled(self._cancelled)
            rows, n = self._text.right(self._model, draft, n, None, n_max)
            length = len(draft.tokens)
            if rows and draft.tokens == [next(iter(row)) for row in rows[:length]]:
                width = min(map(len, rows))
                logits = np.array([[*row.values()][:width] for row in rows])
                sure = getattr(self._model, "sure", ())[: len(rows)]
                found.append(DraftEnd(draft.pos0, length, logits, sure))
        return found

    # -- right drafts --------------------------------------------------------------------------

    @torch.inference_mode()
    def cause(self) -> Cause | None:
        """Why recorded drafts are not the drafter's own; None if they are, within rounding."""
        if not self._drafts:
            return None
        sampled = self._drafts[:_MOST_DRAFTS]
        apart = self._from_the_text(sampled)
        wrong = [draft for draft in sampled if apart[draft.round] > 0]
        if len(wrong) < FEW or not self._is_persistent(sampled, wrong):
            return None
        first, window = wrong[0], self._window(wrong)
        exact = self._tie is EXACT_TIE
        limit = SHARES_EXACT if exact else SHARES_TIE
        self._same = same_logits(wrong, self._rows, self._ranks, limit)
        rows = self._rows, self._right(sampled, own=True)
        self._trials = Trials(self._model, self._text, rows, self._apart)
        is_many = len(wrong) >= _SHARE_VAGUE * len(sampled)
        # if rounding changes the target's own tokens, many drafts may differ, too
        is_sure = exact or (is_many and not self.choices.is_near_choice)
        n_wrong = self._trials.clean(window)
        are_right = not any(rank for draft in wrong for rank, _ in self._ranks[draft.round])
        if are_right and (not exact or logits_scale(sampled, self._rows, limit) is not None):
            return self._other_shares(sampled, wrong, limit)
        seen = None if are_right else self._one_token(wrong) or self._sent_again(wrong)
        sure = is_sure and not seen
        guess, left = self._best_guess(window, wrong, n_wrong, vague=is_many, sure=sure)
        if seen and (guess is None or guess.change or n_right(left) < len(window)):
            guess = None  # a part of such drafts may be given by anything
        if are_right and guess is None:
            return self._other_shares(sampled, wrong, limit)
        if not (seen or guess or (is_sure and n_wrong)):
            return None  # rounding of another mode, or of passes of other widths, changes some
        recorded, mended = self._walk(window[0].pos0)
        gains = mended[0] * recorded[1] > recorded[0] * mended[1]
        if not (seen or guess or exact or gains):
            return None  # no draft is known to be better: rows with hardly any certainty
        shape = shape_of(sampled, wrong, self._ranks)
        token = next(iter(wrong_steps(self._ranks, first)), 0)
        size = f"{len(wrong)} of {len(sampled)} drafts are not what {self.drafter} computes{shape}"
        explains = bool(seen or guess)
        if guess is None and seen:
            stage, about = seen
        elif guess is None:
            model = self._model
            kinds = model.reads_rows, not model.has_newest
            stage, about = stage_of(wrong, self._ranks, shape, *kinds, self._same)
            family = FAMILIES[self._session.config.architecture]
            if self.drafter == DRAFT_MTP and family.peer_drafts:
                about += f" Of llama.cpp, {family.peer_drafts}."
        else:
            stage, about = guess.stage, guess.about
            size += f"; with this cause, {n_right(left)} of {len(window)} are reproduced"
        place = f"{place_of(first)}, drafted token {token}"
        return Cause(stage, self._side.name, about, place, size, recorded, mended, explains)

    @torch.inference_mode()
    def mended(self, cause: Cause) -> Cause:
        """A known cause, with acceptance as recorded and of right drafts."""
        if not self._drafts:
            return cause
        recorded, mended = self._walk(self._drafts[0].pos0)
        return replace(cause, recorded=recorded, mended=mended)

    def _other_shares(self, sampled: Drafts, wrong: Drafts, tie: float) -> Cause | None:
        """Right tokens whose recorded probabilities differ from their candidates'."""
        if (scale := logits_scale(sampled, self._rows, tie)) is not None:
            how = f"those at a temperature of about {1 / scale:.2g}, also for p_min"
        elif self._tie is EXACT_TIE:
            how = "different, as with another set of candidates or another scale"
        else:
            return None
        about = f"Drafted tokens are right, but their probabilities are {how}."
        size = f"{len(wrong)} of {len(sampled)} drafts"
        return Cause(CANDIDATES, self._side.name, about, place_of(wrong[0]), size)

    def _one_token(self, wrong: Drafts) -> tuple[str, str] | None:
        """Stage and sentence if wrong drafts consist of one token."""
        (token, n), *_ = Counter(token for draft in wrong for token in draft.tokens).most_common(1)
        n_all = sum(len(draft.tokens) for draft in wrong)
        n_own = sum(self._best[draft.round].count(token) for draft in wrong)
        if n < max(_ONE_TOKEN * n_all, 2 * FEW, 2 * n_own):
            return None
        is_late = self._drafts.index(wrong[0]) >= FEW
        where = f", from position {wrong[0].pos0} on" * is_late
        about = f"All drafts consist only of token {self._side.shown(token)}"
        return ROWS, f"{about}{where}: rows or logits are NaN or zeros."

    def _sent_again(self, wrong: Drafts) -> tuple[str, str] | None:
        """The same if most wrong drafts equal a right one of an earlier round."""
        drafts, rounds = self._drafts, {draft.round for draft in wrong}
        at = {draft.round: i for i, draft in enumerate(drafts)}
        for back, which in ((1, "the round before"), (2, "two rounds before")):
            n = 0
            for draft in wrong:
                first = at[draft.round]
                while first >= back and n_equal(drafts[first], drafts[first - back]) is None:
                    first -= back
                n += drafts[first].round not in rounds
            if n >= max(FEW, _SENT_AGAIN * len(wrong)):
                about = f"The draft of {which} is sent again"
                return STATE, f"{about}: {n} of {len(wrong)} wrong drafts are."
        return None

    def _window(self, wrong: Drafts) -> Drafts:
        first, fifth = (self._drafts.index(wrong[min(len(wrong) - 1, i)]) for i in (0, 4))
        start = max(0, first - 16)
        return self._drafts[start : min(fifth + 13, start + _MOST_REPLAYED, _MOST_DRAFTS)]

    def _is_persistent(self, sampled: Drafts, wrong: Drafts) -> bool:
        rounds = {draft.round for draft in wrong}
        after = [later for last, later in pairwise(sampled) if last.n_accepted < last.n_drafted]
        n_after = sum(draft.round in rounds for draft in after)
        return len(wrong) >= self._share * len(sampled) or (
            n_after >= FEW and n_after >= _SHARE_AFTER * len(after)
        )

    def _apart(self, guess: Guess | None) -> Callable[[RecordedDraft, Sequence[Candidates]], float]:
        """Number of draft tokens that differ from those of their rows, up to one for each, and the
        difference of probabilities if they are known."""

        def apart(draft: RecordedDraft, rows: Sequence[Candidates]) -> float:
            own = rows = self._of_branch(draft, rows)
            change = guess.change if guess and guess.deviation.acts(draft.pos0) else None
            if guess is not None and change is not None:
                known = [*self._side.text[max(0, draft.pos0 + 1 - N_BEFORE) : draft.pos0 + 1]]
                drafted = [] if isinstance(change, OfText) else draft.tokens
                rows = [
                    change(row, [*known, *drafted[:i]][-N_BEFORE:])
                    if guess.acts(draft.pos0, i)
                    else row
                    for i, row in enumerate(rows)
                ]
            found = 0.0
            n_known = len(draft.tokens) - (draft.round in self._stood_in)
            for i, row in enumerate(rows[: len(draft.tokens)]):
                if not row:
                    found += 1
                    continue
                best, is_apart = gap(row, draft.tokens[i], self._tie)
                if i < n_known:
                    found += is_apart
                elif best == draft.tokens[i] and is_clear(row, self._tie):
                    found += 1  # it would have drafted the token that was not drafted
            both = zip(own, draft.tokens, strict=False)
            acts = change is not None and any(
                not row or gap(row, t, self._tie)[1] for row, t in both
            )
            if not acts and any(len(top) > 1 for top in draft.tops):
                shares = [shares_apart(draft, one) for one in (own, rows) if all(one)]
                found += max(0.0, min(shares, default=0.0) - ROUNDED)
            return found

        return apart

    def _of_branch(self, draft: RecordedDraft, rows: Sequence[Candidates]) -> Sequence[Candidates]:
        """Rows whose best token is that of the judged branch, if its tree has it."""
        if not self._tree:
            return rows
        found = [*rows]
        for i, (row, token) in enumerate(zip(rows, draft.tokens, strict=False)):
            if token in [*row][: width_at(self._tree, i)]:
                found[i] = {token: row[token]} | row
        return found

    def _from_the_text(self, drafts: Drafts) -> dict[int, float]:
        """Distances by round of drafts, each made from a right state."""
        apart, found = self._apart(None), {}
        self._rows = self._right(drafts, own=False)
        for draft in drafts:
            rows = self._of_branch(draft, self._rows[draft.round])
            found[draft.round] = apart(draft, rows)
            self._best[draft.round] = [next(iter(row)) for row in rows if row]
            known = draft.tokens[: len(draft.tokens) - (draft.round in self._stood_in)]
            pairs = [pair for pair in zip(rows, known, strict=False) if pair[0]]
            ranks = [ranked(*pair, self._tie) for pair in pairs]
            self._ranks[draft.round] = ranks
            for i, ((row, _), (rank, _)) in enumerate(zip(pairs, ranks, strict=True)):
                self._above.update((i, token) for token in [*row][:rank])
        return found

    def _right(self, drafts: Drafts, *, own: bool) -> dict[int, list[Candidates]]:
        """Candidates of right drafts by round. own: each step continues from its best token."""
        self._model.clear()
        n, found = 0, dict[int, list[Candidates]]()
        for draft in drafts:
            check_cancelled(self._cancelled)
            tokens = None if own else draft.tokens
            known = self._rows.get(draft.round, []) if own else []
            if known and [next(iter(row), -1) for row in known] == draft.tokens:
                found[draft.round] = known
            else:
                found[draft.round], n = self._text.right(self._model, draft, n, tokens)
        return found

    def _walk(self, pos0: int) -> tuple[Counts, Counts]:
        """Accepted and drafted tokens over a stretch of text: recorded, and with right drafts of
        the same maximal length in the rounds that these would make."""
        text, drafts = self._side.text, [d for d in self._drafts if d.pos0 >= pos0]
        n_max = max(draft.n_drafted for draft in self._side.drafts)
        stretch = drafts[:_MOST_WALKED]
        stop = stretch[-1].pos0 + stretch[-1].n_decoded
        recorded = sum(d.n_accepted for d in stretch), sum(d.n_drafted for d in stretch)
        self._model.clear()
        at, n, accepted, drafted = stretch[0].pos0, 0, 0, 0
        while at < min(stop, len(text) - 1):
            check_cancelled(self._cancelled)
            draft = stretch[0]._replace(pos0=at, tokens=[])
            limit = min(n_max, len(text) - at - 1)
            rows, n = self._text.right(self._model, draft, n, None, limit)
            right = self._text.n_confirmed(rows, at)
            accepted, drafted, at = accepted + right, drafted + len(rows), at + right + 1
        return recorded, (accepted, drafted)

    def _best_guess(
        self, window: Drafts, wrong: Drafts, clean: float, *, vague: bool, sure: bool
    ) -> tuple[Guess | None, dict[int, float]]:
        """The mistake that gives the recorded drafts, and the distance that it leaves. vague: many
        drafts are wrong; sure: too many for rounding alone."""
        sampled = self._drafts[:_MOST_DRAFTS]
        at = sampled.index(window[0])
        more = sampled[at : at + _MOST_VERIFIED]
        scopes = scopes_of(sampled, wrong, self._ranks)[1:]
        best, left = self._trials.best(
            self._guesses(window, more, wrong),
            window,
            more,
            wrong,
            [*map(self._probe, wrong[: 1 if self._tie is EXACT_TIE else 2])],
            scopes,
            is_sure=sure,
        )
        # sampling leaves the candidates as they are, and shows everywhere
        is_drawn = self._same is not False and vague and len(window) >= _SHOWS_DRAWN
        if best or not is_drawn or shape_of(sampled, wrong, self._ranks):
            return best, left
        for drawn in self._mistakes.drawn():
            found = self._trials.left(drawn, window)
            is_near = sum(found.values()) < _EXPLAINS_VAGUE * clean
            if is_near and (seen := as_drawn(self._picks(self._trials.rows(drawn), window))):
                return replace(drawn, about=f"{drawn.about[:-1]}: {seen}."), found
        return None, left

    def _probe(self, wrong: RecordedDraft) -> RecordedDraft:
        """A wrong draft up to its first wrong token, if that token is its own."""
        n = next((i for i, (rank, _) in enumerate(self._ranks[wrong.round], 1) if rank), 0)
        if not n or wrong.round in self._stood_in:
            return wrong
        return wrong._replace(tokens=wrong.tokens[:n], tops=wrong.tops[:n])

    def _guesses(
        self, window: Drafts, more: Drafts, wrong: Drafts
    ) -> Iterator[tuple[Guess, float, bool]]:
        """See Trials.best."""
        for guess, share in chain(
            zip(self._mistakes.all(more, wrong), repeat(EXPLAINS)),
            zip(self._mistakes.of_parts(wrong=wrong), repeat(_EXPLAINS_PART)),
            zip(self._mistakes.vague((window, self._best, self._above)), repeat(_EXPLAINS_VAGUE)),
        ):
            check_cancelled(self._cancelled)
            if not self._same or guess.stage == CANDIDATES:  # else all before the choice is right
                yield guess, share, share == _EXPLAINS_PART

    def _picks(self, rows: Rows, window: Drafts) -> list[tuple[Candidates, int]]:
        """Rows with the tokens drafted from them, if these are among the best."""
        known = {d.round: d.tokens[: len(d.tokens) - (d.round in self._stood_in)] for d in window}
        pairs = [pair for n, own in known.items() for pair in zip(rows[n], own, strict=False)]
        return [pair for pair in pairs if pair[1] in [*pair[0]][:N_CANDIDATES]]


def drafter_for(session: Session, side: DraftSide) -> str:
    """The loaded drafter that a run used. Raises OptionError if there is none."""
    able = [name for name in model_drafters() if name in session.drafters]
    if not able:
        raise OptionError(
            "No drafter is given to compute drafts again.",
            "Name its file with -md, or a model with an MTP head.",
        )
    named = [name for name in able if name in side.drafters]
    return (named or [name for name in able if name in session.drafts] or able)[0]
