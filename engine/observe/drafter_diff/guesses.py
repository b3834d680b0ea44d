"""Guesses of a mistake in wrong drafts, tested by making the drafts again: everywhere, and in the
scopes that the wrong drafts suggest."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from time import thread_time
from typing import Any

import torch

from engine.audit.deviations import CLEAN, Deviation
from engine.audit.draft_models import BlockModel, Candidates, DraftModel, Entries, StepwiseModel
from engine.audit.recorded_drafts import Distance, DraftedText, RecordedDraft, Redrafts
from engine.observe.drafter_diff.candidate_mistakes import Change
from engine.observe.drafter_diff.operations import Changes, in_place, in_rows
from engine.observe.drafter_diff.records import FEW, STAGES, UNEXPLAINED, Drafts

Rows = Mapping[int, Sequence[Candidates]]
"""Candidates of drafts, by round."""
GOES_ON = Deviation("", "", best=True)
"""A step continues from the best token of the previous one, whatever was drafted."""
ROUNDED = 0.05
"""Probability of the best tokens that another engine's rounding may move."""
EXPLAINS, _EXPLAINS_SCOPED = 0.34, 0.1
"""Share of the distance from right drafts that a mistake may leave to count as the cause, which
must give most drafts; a scoped mistake less."""
_NEAR_FIRST, _NEAR = 0.5, 0.03
"""Share of the first wrong drafts that a mistake may leave to be tried further, and a share so
small that no part is tried."""
_MOST_SCOPED, _MOST_SHOWN, _MOST_PROBED, _STRETCH = 4000, 4, 8, 5
"""Most drafts made again to try scoped mistakes, wrong drafts that must show one, drafts of which
the most wrong one is tried first, and drafts from the first wrong one on of which a mistake must
give a part before it is tried on all."""
_SECONDS, _SECONDS_UNSURE, _OF_SCOPES, _LEAST_OF_TWO = 40.0, 15.0, 0.45, 0.25
"""CPU seconds for trying mistakes in parts, after all others, and if so few are wrong that only one
that gives all of them counts; the share of them for scoped ones, and the least for two mistakes at
once. Drafts of a large model are slow."""
_NOTHING, _LONGEST, _INSIDE = 1e-9, 64, 0.9
_HALF = 0.7
"""Share of the distance from right drafts that one of two mistakes may leave."""
CHANCE = 0.1
"""Expected number of mistakes that give by chance what the assumed cause gives."""
_WIDTHS = ("alone", "joined", "later")
_SECONDS_EQUAL, _MOST_EQUAL = 3.0, 4
"""CPU seconds for finding other mistakes that give all drafts; how many of them are reported."""
_NUMBER = re.compile(r"-?[\d.]+(?:e[-+]?\d+)?")


Scope = tuple[str, Collection[int] | None, Collection[int] | None]
"""Where a mistake is made: words after a sentence; positions of newest tokens, and drafted tokens
from 0, None = all."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A mistake. about: a sentence. deviation, text, model: what is replayed; change: of the
    candidates, None for none; left: entries in memory at a draft beyond the text's, by round;
    changes: replacements of attributes of the model or its parts; during: of PHASES, when they
    apply. steps: drafted tokens that show it, None = all; its places in the text are the
    deviation's."""

    stage: str
    about: str
    deviation: Deviation
    text: DraftedText
    model: DraftModel
    change: Change | None = None
    left: Mapping[int, Entries] = field(default_factory=dict)
    changes: Changes = ()
    during: str = ""
    steps: Collection[int] | None = None

    def within(self, scope: Scope, right: DraftedText) -> Guess | None:
        """The same mistake in a scope alone, None if impossible. right: the text with its own rows,
        used elsewhere."""
        words, places, steps = scope
        text, model, changes, during = self.text, self.model, self.changes, self.during
        if self.left or self.deviation.lacks:
            return None
        if steps is not None and self.change is None:
            if not changes or during not in ("", "draft"):
                return None
            text, during = right, "draft"
            if isinstance(model, BlockModel):
                changes = in_rows(changes, steps, model.n_block, model.first)
            if not changes:
                return None
        if places is not None and text.table is not None and text.table is not right.table:
            assert right.table is not None
            first = model.newest_row(0)
            inside = [at - first in places for at in range(len(right.table))]
            table = torch.where(torch.tensor(inside)[:, None], text.table, right.table)
            text = replace(text, table=table)
        about, deviation = f"{self.about[:-1]}{words}.", replace(self.deviation, places=places)
        made = replace(self, about=about, text=text, deviation=deviation, steps=steps)
        return replace(made, changes=changes, during=during)

    def together(self, other: Guess, right: Guess) -> Guess | None:
        """Both mistakes at once, None if they change the same thing. right: a draft without any."""
        parts: dict[str, Any] = {}
        for name in ("deviation", "text", "model", "change", "left", "changes", "during", "steps"):
            both = [getattr(one, name) for one in (self, other)]
            own, by_value = getattr(right, name), name not in ("text", "model")
            changed = [x for x in both if x is not own and not (by_value and x == own)]
            if len(changed) == 2:
                return None
            parts[name] = changed[0] if changed else own
        stage = min(self.stage, other.stage, key=STAGES.index)
        about = f"{self.about} In addition: {other.about[0].lower()}{other.about[1:]}"
        return Guess(stage, about, **parts)

    @property
    def is_scoped(self) -> bool:
        """Whether it is limited to some places."""
        return self.steps is not None or self.deviation.places is not None

    @property
    def goes_by_drafts(self) -> bool:
        """Whether memory may depend on earlier drafts, not only on the text."""
        own = replace(self.deviation, what="", about="", places=None, best=False)
        own = replace(own, row_shift=0, token_shift=0, lacks=(), window=0, spares=False)
        return bool(self.left) or own != Deviation("", "")

    def drafts_alone(self, right: DraftedText) -> bool:
        """Whether memory is right, and drafts are made wrongly from it."""
        is_right = self.text is right and replace(self.deviation, places=None) in (CLEAN, GOES_ON)
        is_right = is_right and not self.left
        return is_right and (self.during == "draft" or not self.changes)

    def acts(self, pos0: int, step: int = 0) -> bool:
        """Whether it applies to a draft after pos0 tokens, at this step."""
        return self.deviation.acts(pos0) and (self.steps is None or step in self.steps)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which it is applied."""
        model, changes = self.model, self.changes
        if changes and (self.during or self.is_scoped):
            changes = tuple(
                (model, name, partial(own, getattr(model, name)))
                for name, own, when in (
                    ("write", self._write, ("", "write", *_WIDTHS)),
                    ("write_left", self._write_left, ("draft",)),
                    ("draft", self._draft, ("", "draft", *_WIDTHS)),
                )
                if self.during in when
            )
        with in_place(changes):
            yield

    def _write(self, own: Callable[[Entries], None], entries: Entries) -> None:
        """DraftModel.write, with the changes where the mistake applies."""
        start, before, inside = 0, self.model.newest_row(0), self._of_width()
        acting = [self.deviation.acts(at - before) and inside(at) for at in entries.positions]
        for acts, some in groupby(acting):
            stop = start + len([*some])
            with in_place(self.changes if acts else ()):
                own(entries.part(start, stop))
            start = stop

    def _write_left(self, own: Callable[[Entries], None], entries: Entries) -> None:
        """DraftModel.write_left, likewise: it writes a draft's later steps."""
        for i, at in enumerate(entries.positions):
            acts = self.acts(at - i - 1 + self.model.ahead, i + 1)
            with in_place(self.changes if acts else ()):
                own(entries.part(i, i + 1))

    def _draft(self, own: Callable[..., Any], newest: Entries, *more: Any, **options: Any) -> Any:
        """DraftModel.draft, likewise."""
        changes, model, steps, (at,) = self.changes, self.model, self.steps, newest.positions
        if self.during in _WIDTHS:
            steps = range(1, _LONGEST) if self.during != "joined" else ()
            steps = {*steps, *[0] * self._of_width()(at)}
        in_block = self.during in _WIDTHS and not isinstance(model, StepwiseModel)
        if in_block or not self.deviation.acts(at + model.ahead):
            changes = ()
        if steps is not None and changes and isinstance(model, StepwiseModel):
            step = model.at_step

            def stepping(given: list[Entries], handed: list[Entries], *more: int) -> Any:
                with in_place(self.changes if len(handed) in steps else ()):
                    return step(given, handed, *more)

            by_step = partial(StepwiseModel.step_by_step, model)
            changes = ((model, "at_step", stepping), (model, "_draft", by_step))
        with in_place(changes):
            return own(newest, *more, **options)

    def _of_width(self) -> Callable[[int], bool]:
        """Whether the changes apply to entries written at a position."""
        if self.during not in _WIDTHS:
            return lambda at: True
        alone = self.text.alone(self.model, newest=self.during != "later")
        return lambda at: (at in alone) != (self.during == "joined")


_Tried = tuple[Guess, float, bool]
"""A guess, the share that it may leave, and whether it is one of many parts."""


class Trials:
    """Trials of guesses on the drafts of a text.

    rows: candidates of right drafts, and the same if each step continues from the best token of the
    previous one. apart: the distance of drafts under a guess's choice of candidates.
    """

    def __init__(
        self,
        model: DraftModel,
        text: DraftedText,
        rows: tuple[Rows, Rows],
        apart: Callable[[Guess | None], Distance],
    ) -> None:
        self._model, self._text, self._rows, self._apart = model, text, rows, apart
        self._right = Guess("", "", CLEAN, text, model)

    def rows(self, guess: Guess) -> Rows:
        """The rows that a guess about the choice of candidates chooses from."""
        return self._rows[guess.deviation.best]

    def clean(self, drafts: Drafts) -> float:
        """The distance of right drafts."""
        apart, rows = self._apart(None), self._rows[0]
        return sum(apart(draft, rows[draft.round]) for draft in drafts)

    def left(
        self, guess: Guess, drafts: Drafts, most: float = math.inf, n_kept: int = 0
    ) -> dict[int, float]:
        """The distance that a guess leaves, by round, until it exceeds `most`. n_kept: see
        Redrafts.of."""
        apart = self._apart(guess)
        right = (guess.text is self._text and guess.model is self._model) and not guess.left
        is_choice = guess.change is not None and not guess.changes and right
        if not (is_choice and replace(guess.deviation, places=None) in (CLEAN, GOES_ON)):
            how = guess.model, guess.text, guess.deviation
            with guess.applied():
                return Redrafts(*how, distance=apart, left=guess.left).of(drafts, most, n_kept)
        found, rows = dict[int, float](), self.rows(guess)
        for draft in drafts:
            found[draft.round] = apart(draft, rows[draft.round])
            if sum(found.values()) > most:
                break
        return found

    def best(
        self,
        guesses: Iterable[_Tried],
        window: Drafts,
        more: Drafts,
        wrong: Drafts,
        probes: Drafts,
        scopes: Sequence[Scope],
        *,
        is_sure: bool = True,
    ) -> tuple[Guess | None, dict[int, float]]:
        """The guess that gives most of a window of drafts, and the distance that it leaves.

        guesses: with the share that each may leave, and whether it is one of many parts. more: the
        window and later drafts. probes: the first wrong one, or two if rounding may have flipped
        one, up to their first wrong tokens. scopes: suggested by the wrong drafts. Each guess is
        tried everywhere, on a few drafts first, then in each scope on the first probe alone, after
        right ones; those that give it are tried on more, until _MOST_SCOPED drafts are made again
        or the time is over. is_sure: enough drafts are wrong that there is a cause, whether it is
        found or not.
        """
        started, seconds = thread_time(), _SECONDS if is_sure else _SECONDS_UNSURE
        until = started + _OF_SCOPES * seconds
        best, left, clean, drafts = None, dict[int, float](), self.clean(window), self._text.drafts
        tried_all, half, half_left, in_parts = list[Guess](), None, _HALF * clean, False
        at, most, n_made, is_idle = drafts.index(wrong[0]), clean, 0, False
        n_tried, n_given, unclear = 0, 0, dict[str, str]()
        n_wrong = sum(self.clean([draft]) > 0 for draft in more)
        near = {i for one in wrong[:_MOST_SHOWN] for i in (drafts.index(one),)}
        shown = [drafts[i] for i in sorted({i - 1 for i in near if i} | near)]
        stretch = drafts[max(0, at - 1) : at + _STRETCH]
        # a wrong draft from right memory shows best in the most wrong one
        leads = (
            [*drafts[max(0, at - 1) : at], probes[0]],
            [max(wrong[:_MOST_PROBED], key=lambda one: self.clean([one]))],
        )
        n_kept, groups = self._keep(leads[0][0]), [_alike(scopes, lead) for lead in leads]

        def gives(guess: Guess, some: Drafts, n_kept: int = 0, share: float = _NEAR_FIRST) -> bool:
            """Whether it leaves at most this share of the distance of some drafts."""
            nonlocal n_made, is_idle
            whole = self.clean(some)
            found = self.left(guess, some, share * whole, n_kept)
            n_made += len(found) if guess.is_scoped and guess.change is None else 0
            total = sum(found.values())
            is_idle = abs(total - whole) <= _NOTHING
            return total <= share * whole

        def is_over() -> bool:
            """Whether enough was tried in scopes; guesses that give a part everywhere are all
            tried."""
            return guess is not half and (n_made > _MOST_SCOPED or thread_time() > until)

        def is_exact(guess: Guess, limit: float) -> bool:
            """Whether nothing is left. Makes it the best one if it leaves less than the others."""
            nonlocal best, left, most, half, half_left
            limit = min(most, limit)
            found = self.left(guess, window, max(limit, half_left * (best is None)))
            total = sum(found.values())
            if len(found) == len(window) and total < half_left and not guess.is_scoped:
                half, half_left = guess, total
            if total <= _NOTHING and len(more) > len(window) == len(found):
                # several may give these few
                total = min(sum(self.left(guess, more).values()), limit * EXPLAINS)
            # of many parts some give a few drafts by chance
            is_unclear = n_by_chance(n_tried, [n_given / max(1, n_tried)] * n_wrong) >= CHANCE
            if total <= _NOTHING and is_unclear:
                unclear.setdefault(_NUMBER.sub("", guess.about), guess.about)
                return False
            n_mended = sum(found.get(one.round, 1.0) <= ROUNDED for one in wrong)
            is_shown = len(found) == len(window) < 2 * n_right(found) and n_mended >= FEW
            if is_shown and total < limit:
                best, left, most = guess, found, total * EXPLAINS
            return best is guess and total <= _NOTHING

        guesses = iter(guesses)
        for guess, share, is_part in guesses:
            if is_part and not in_parts:
                in_parts, started = True, thread_time()
                until = started + _OF_SCOPES * seconds
            if is_part and (most < _NEAR * clean or thread_time() - started > seconds):
                continue
            alone = guess.drafts_alone(self._text) and guess.model is self._model
            tried_all += [] if is_part else [guess]
            if is_part:
                n_before = n_kept * alone
                is_likely = any(gives(guess, [one], n_before) for one in probes)
                n_tried, n_given = n_tried + 1, n_given + is_likely
                is_likely = is_likely and gives(guess, wrong[:_MOST_SHOWN], n_before)
            else:  # wrong memory may come from all earlier drafts
                is_likely = guess.change is not None or guess.goes_by_drafts
                is_likely = is_likely or gives(guess, stretch, share=_HALF)
            if is_likely and is_exact(guess, share * clean):
                return self._with_equals(guess, guesses, more, probes[0]), left
            if is_part and (is_idle or guess.is_scoped):
                continue  # it does not change the first wrong drafts, or only some rows
            for alike in groups[alone] if guess.model is self._model else ():
                one = guess.within(alike[0], self._text)
                kept = 0 if alike[0][1] and 0 in alike[0][1] else n_kept
                some = leads[alone][-1:] if guess.deviation is CLEAN else leads[alone]
                is_likely = one is not None and not is_over() and gives(one, some, kept)
                n_tried, n_given = n_tried + 1, n_given + is_likely
                if not is_likely or one is None:
                    continue
                tried = set[str]()
                for scope in alike:
                    one, places = guess.within(scope, self._text), scope[1]
                    inside = [places is None or draft.pos0 in places for draft in window]
                    n_inside = sum(places is None or draft.pos0 in places for draft in wrong)
                    if alone and n_inside < _INSIDE * len(wrong):
                        continue  # everything else would be right
                    key = repr(inside) if alone else scope[0]
                    if one is None or key in tried or is_over():
                        continue
                    tried.add(key)
                    if gives(one, shown) and is_exact(one, _EXPLAINS_SCOPED * clean):
                        return best, left
        if unclear:
            which = " Or: ".join([*unclear.values()][:_MOST_EQUAL])
            about = f"Too few drafts are wrong to be sure of the cause. It may be: {which}"
            equal = dict.fromkeys((draft.round for draft in window), 0.0)
            return replace(self._right, stage=UNEXPLAINED, about=about), equal
        if best is None and half is not None:
            left_s = max(started + seconds - thread_time(), _LEAST_OF_TWO * seconds)
            return self._with_another(half, half_left, tried_all, window, scopes, left_s)
        return best, left

    def _with_equals(
        self, best: Guess, guesses: Iterator[_Tried], more: Drafts, probe: RecordedDraft
    ) -> Guess:
        """A guess that gives all drafts, with the others that do: those of its stage, and one of
        each other."""
        until, equal = thread_time() + _SECONDS_EQUAL, dict[str, str]()
        shape = _NUMBER.sub("", best.about)
        for guess, *_ in guesses:
            if thread_time() > until or len(equal) == _MOST_EQUAL:
                break
            alike = _NUMBER.sub("", guess.about) if guess.stage == best.stage else guess.stage
            if alike in equal:
                continue
            first = [] if guess.goes_by_drafts else [[probe]]
            if all(
                sum(self.left(guess, some, _NOTHING).values()) <= _NOTHING
                for some in (*first, more)
            ):
                equal[alike if alike != shape else guess.about] = guess.about
        if not equal:
            return best
        others = " Or: ".join(equal.values())
        return replace(best, about=f"{best.about} These would give the same drafts: {others}")

    def _with_another(
        self,
        half: Guess,
        most: float,
        guesses: Sequence[Guess],
        window: Drafts,
        scopes: Sequence[Scope],
        seconds: float,
    ) -> tuple[Guess | None, dict[int, float]]:
        """A guess that gives a part of the drafts, combined with the one that gives most of the
        rest; None if there is none within the time. most: the distance that the first leaves."""
        until = thread_time() + seconds
        rows, best, left = dict[int, Sequence[Candidates]](), None, dict[int, float]()

        def keep(draft: RecordedDraft, own: Sequence[Candidates]) -> float:
            rows[draft.round] = own
            return 0.0

        how = half.model, half.text, half.deviation
        with half.applied():
            Redrafts(*how, distance=keep, left=half.left).of(window)
        rest = [n for n, distance in self.left(half, window).items() if distance > ROUNDED]
        n_tried, seen, given = 0, Counter[int](), Counter[int]()

        def is_shown() -> bool:
            """Whether it is unlikely that one of those tried gives the rest by chance."""
            shares = (given[n] / seen[n] for n in rest if left.get(n, math.inf) <= ROUNDED)
            return n_by_chance(n_tried, shares) < CHANCE

        longest = max(len(draft.tokens) for draft in window)
        steps = [
            (f", only in drafted token {i}{way}", None, which)
            for i in range(longest)
            for way, which in (("", {i}), (" and later", range(i, _LONGEST)))
        ]
        for guess in guesses:
            if thread_time() > until:
                break
            of_choice = guess.change is not None and not guess.changes
            ways = [("", None, None), *scopes, *steps] if of_choice else [("", None, None)]
            for scope in ways if guess.deviation is CLEAN or not of_choice else ():
                one = guess.within(scope, self._text) if scope[0] else guess
                both = one and half.together(one, self._right)
                if both is None:
                    continue
                if of_choice:
                    apart = self._apart(one)
                    found = {draft.round: apart(draft, rows[draft.round]) for draft in window}
                else:
                    found = self.left(both, window, EXPLAINS * most)
                total = sum(found.values())
                n_tried += 1
                seen.update([*found])
                given.update(n for n, distance in found.items() if distance <= ROUNDED)
                is_most = len(found) == len(window) < 2 * n_right(found)
                if is_most and total < EXPLAINS * most:
                    best, left, most = both, found, total / EXPLAINS - _NOTHING
                if is_most and total <= _NOTHING and is_shown():
                    return best, left
        return (best, left) if is_shown() else (None, {})

    def _keep(self, draft: RecordedDraft) -> int:
        """Let the model keep the right memory of a draft; returns the position below which it
        is."""
        model, n = self._model, max(0, draft.pos0 - self._model.ahead)
        model.clear()
        model.write(self._text.entries(model, range(n), CLEAN, draft.pos0))
        model.keep()
        return n


def _alike(scopes: Sequence[Scope], lead: Drafts) -> list[list[Scope]]:
    """Scopes that are the same from the first of these drafts to the last."""
    found: dict[str, list[Scope]] = {}
    start, stop = lead[0].pos0 + len(lead) - 1, lead[-1].pos0 + 1
    for scope in scopes:
        _, places, steps = scope
        inside = [at for at in range(start, stop) if places is None or at in places]
        if inside:
            found.setdefault(repr((inside, steps)), []).append(scope)
    return [*found.values()]


def n_by_chance(n: int, shares: Iterable[float]) -> float:
    """Expected number of n mistakes that give all of some drafts by chance; shares: of the mistakes
    tried, by draft, that give it."""
    return n * math.prod(shares)


def n_right(left: Mapping[int, float]) -> int:
    """Number of drafts with nothing left."""
    return sum(distance <= ROUNDED for distance in left.values())
