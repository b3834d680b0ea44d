"""Recorded rounds played again under other settings: speed, acceptance, where the time goes.

A walker goes through each text from its begin. Where it is, a rule chooses the draft from what
was recorded there; the text says how much of it is right; the measured costs say how long the round
takes; and the next round begins after what was accepted. `ASSUMPTIONS` tells what that leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.analysis.what_if.costs import RoundCosts
from engine.analysis.what_if.positions import Positions, confidence_scale, survival_of
from engine.analysis.what_if.recorded import RecordedRounds
from engine.analysis.what_if.rules import FIXED, NO_DRAFTER, RuleInputs, RuleSpec, Setting

ASSUMPTIONS = (
    "inside accepted tokens the drafter would have gone on as recorded",
    "where a longer draft than recorded is needed, it is right as often as recorded drafts are",
    "a draft, a pass and undoing cost by their lengths alone what they did on average",
    "what was not measured costs what lies between, and drafting in proportion to its steps",
)
_PIECE = 512
"""A longer text is walked through in pieces, which begin where recorded rounds did."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Settings played in texts: [m settings, n texts] each, but for `settings`.

    tokens: emitted after the first. rounds; drafted: tokens verified; accepted; *_ms: milliseconds
    in all. rest: sampling, saving, undoing, and what no phase counts.
    """

    settings: tuple[Setting, ...]
    tokens: np.ndarray
    rounds: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    draft_ms: np.ndarray
    verify_ms: np.ndarray
    rest_ms: np.ndarray

    @property
    def total_ms(self) -> np.ndarray:
        """Time of each setting in each text."""
        return self.draft_ms + self.verify_ms + self.rest_ms

    def tokens_per_second(self, texts: np.ndarray | None = None) -> np.ndarray:
        """Of each setting over all texts, or some (indices); float [m], NaN without times."""
        return 1e3 * _sum(self.tokens, texts) / _nonzero(_sum(self.total_ms, texts))

    def acceptance(self, texts: np.ndarray | None = None) -> np.ndarray:
        """Accepted over verified drafted tokens: [m], NaN where nothing is drafted."""
        return _sum(self.accepted, texts) / _nonzero(_sum(self.drafted, texts))

    def tokens_per_round(self, texts: np.ndarray | None = None) -> np.ndarray:
        """Tokens over rounds: [m]."""
        return _sum(self.tokens, texts) / _nonzero(_sum(self.rounds, texts))


def simulate(
    rounds: RecordedRounds, costs: RoundCosts | None, rule: RuleSpec, settings: Sequence[Setting]
) -> Outcomes:
    """Play the recorded texts under some settings of a rule.

    costs: None leaves all times 0, and speeds NaN. The longest draft among the settings should not
    exceed rounds.n_max: longer ones are accepted by chance.
    """
    m = len(settings)
    n_max = int(max((setting.get("n_max", 0) for setting in settings), default=0))
    places = Positions.of(rounds, n_max)
    begins, ends, text = _pieces(places, in_pieces=rule is FIXED)
    of = np.repeat(np.arange(m), len(begins))
    timed = costs or RoundCosts.free()
    inputs = RuleInputs(places, timed, survival_of(rounds), confidence_scale(rounds), of)
    has_floor = np.array([setting.get("p_min", 0) > 0 for setting in settings], bool)[of]
    chooser = rule.make(inputs, settings)
    table = _Prices(timed, max(n_max, places.confidence.shape[1]) + 1)
    at, end, text_of = np.tile(begins, m), np.tile(ends, m), np.tile(text, m)
    length = end - at
    sums = {name: np.zeros(len(of)) for name in _SUMS}
    walkers = np.flatnonzero(at < end)
    while len(walkers):
        here = at[walkers]
        verified, steps = chooser.choose(walkers, here)
        if places.is_independent:
            left = length[walkers] - sums["tokens"][walkers].astype(np.int64)
            room = np.where(places.ends_at_limit[text_of[walkers]], left - 1, _PIECE)
            verified, steps = np.minimum(verified, room), np.minimum(steps, room)
        else:
            left, room = end[walkers] - here, places.limit[here]
        accepted = np.minimum(places.right[here], verified)
        tokens = np.minimum(accepted + 1, left)
        chooser.learn(walkers, verified, accepted)
        begins = here == places.begins[text_of[walkers]]
        by_step = has_floor[walkers] | begins | (steps >= room)
        draft, verify, rest = table.of(verified, steps, accepted, by_step)
        draft = draft + timed.reading_ms * (begins & (steps > 0))
        sums["tokens"][walkers] += tokens
        sums["rounds"][walkers] += 1
        sums["drafted"][walkers] += verified
        sums["accepted"][walkers] += accepted
        sums["draft_ms"][walkers] += draft
        sums["verify_ms"][walkers] += verify
        sums["rest_ms"][walkers] += rest
        at[walkers] = here + (1 if places.is_independent else tokens)
        walkers = walkers[tokens < left]
    n_texts = len(places.begins)
    cell = of * n_texts + text_of
    totals = {
        name: np.bincount(cell, values, m * n_texts).reshape(m, n_texts)
        for name, values in sums.items()
    }
    return Outcomes(tuple(settings), **totals)


_SUMS = ("tokens", "rounds", "drafted", "accepted", "draft_ms", "verify_ms", "rest_ms")


class _Prices:
    """Times of rounds, ms, from tables by small numbers."""

    def __init__(self, costs: RoundCosts, most: int) -> None:
        number = np.arange(most + 2)
        by_step = costs.draft_by_step or costs.draft
        # all steps at once and one by one; the last number is NO_DRAFTER
        self._draft = np.array([[*costs.draft(number), 0.0], [*by_step(number), 0.0]])
        self._draft[:, 0] = costs.draft_0
        self._verify = costs.verify(number)
        self._rest = costs.sample(number) + costs.other
        self._save, self._undo = costs.save(number), costs.undo(number)
        self._plain_rest = max(costs.plain_ms - float(self._verify[1]), 0.0)
        self._plain_verify = costs.plain_ms - self._plain_rest

    def of(
        self, verified: np.ndarray, steps: np.ndarray, accepted: np.ndarray, by_step: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Drafting, verifying and the rest of rounds, [n] each."""
        width, plain = verified + 1, steps == NO_DRAFTER
        rest = self._rest[width] + self._save[width] * (verified > 0)
        rest = rest + self._undo[accepted + 1] * (accepted < verified)
        return (
            self._draft[by_step.astype(np.int64), steps],
            np.where(plain, self._plain_verify, self._verify[width]),
            np.where(plain, self._plain_rest, rest),
        )


def _pieces(places: Positions, *, in_pieces: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Begin, end and text of what is walked through by itself: whole texts, unless they are long
    and the rule remembers nothing."""
    begins, ends, texts = [], [], []
    for text, (begin, end) in enumerate(
        zip(places.begins.tolist(), places.ends.tolist(), strict=True)
    ):
        cuts = [begin]
        if in_pieces and end - begin > 2 * _PIECE:
            for wanted in range(begin + _PIECE, end - _PIECE, _PIECE):
                found = np.flatnonzero(places.is_begin[wanted : wanted + _PIECE])
                if len(found):
                    cuts.append(wanted + int(found[0]))
        cuts = sorted(set(cuts))
        begins += cuts
        ends += [*cuts[1:], end]
        texts += [text] * len(cuts)
    return np.array(begins, np.int64), np.array(ends, np.int64), np.array(texts, np.int64)


def _sum(values: np.ndarray, texts: np.ndarray | None) -> np.ndarray:
    found: np.ndarray = (values if texts is None else values[:, texts]).sum(1)
    return found


def _nonzero(values: np.ndarray) -> np.ndarray:
    return np.where(values > 0, values, np.nan)
