"""Wrong drafts: how far their tokens are from right candidates, what they have in common, and the
stage that this points to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from engine.audit.draft_models import Candidates
from engine.audit.recorded_drafts import OUTCOMES, RecordedDraft, outcomes
from engine.draft.model_drafter import N_CANDIDATES
from engine.observe.drafter_diff.records import BLOCK, CANDIDATES, ROWS, STATE

Ranks = dict[int, list[tuple[int, float]]]
"""By round, of each drafted token: how many right candidates are better, 0 where none is but for
rounding, and how far the best is above the second, of its distance to the tenth."""
_AS_CLEAR, _NEAR = 0.6, 0.9
"""Where wrong tokens are to be chosen, not computed, otherwise: the lead of the best candidate over
the second, of what it is where drafts are right; share of them that is among the best."""
_SHOWS = 5
"""Right drafts that show that a mistake needs something that they have not."""

TIE, EXACT_TIE = (0.05, 0.5), (0.005, 0.05)
"""How far below the best logit a drafted one may lie by rounding: of the distance to the tenth, and
in all; of runs of this engine in modes that round alike, less."""
SHARES_TIE = 0.02
"""How far apart two probabilities are alike but for rounding."""
_TEMPS = (0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
_MOST_SIGMAS, _LEAST_SIGMA = 1.8, 0.5


def gap(row: Candidates, token: int, tie: tuple[float, float]) -> tuple[int, float]:
    """The best token, and 0 where `token` is as good but for rounding, else 1."""
    best, value = next(iter(row.items()))
    if token == best:
        return best, 0.0
    return best, float(value - row.get(token, float("-inf")) > least(row, tie))


def is_clear(row: Candidates, tie: tuple[float, float]) -> bool:
    """Whether the best token is clear of the second."""
    best, *second = list(row.values())[:2]
    return not second or best - second[0] > least(row, tie)


def least(row: Candidates, tie: tuple[float, float]) -> float:
    """What a better logit has to be apart by."""
    return min(tie[0] * _spread(row), tie[1])


def _spread(row: Candidates) -> float:
    values = list(row.values())
    return values[0] - values[min(N_CANDIDATES, len(values)) - 1]


def ranked(row: Candidates, token: int, tie: tuple[float, float]) -> tuple[int, float]:
    """See Ranks."""
    ids, values, spread = [*row], [*row.values()], _spread(row)
    rank = (ids.index(token) if token in row else len(row)) if gap(row, token, tie)[1] else 0
    if rank and len(ids) < N_CANDIDATES:
        rank = N_CANDIDATES  # of so few any is near
    return rank, (values[0] - values[1]) / spread if spread > 0 else 1.0


def _wrong_steps(ranks: Ranks, draft: RecordedDraft) -> list[int]:
    return [i for i, (rank, _) in enumerate(ranks[draft.round]) if rank]


def first_step(wrong: Sequence[RecordedDraft], ranks: Ranks) -> int:
    """The first token that is wrong in any of these drafts, from 0."""
    return min((step for draft in wrong for step in _wrong_steps(ranks, draft)), default=0)


def as_drawn(picks: Sequence[tuple[Candidates, int]]) -> str:
    """What shows that tokens were drawn from the ten best of their rows: as many of them best,
    second and further down as a temperature makes likely. Empty where none does."""
    if any(len(row) < N_CANDIDATES for row, _ in picks):
        return ""  # of so few candidates any choice looks drawn
    logits = np.array([[*row.values()][:N_CANDIDATES] for row, _ in picks])
    ranks = np.array([[*row].index(token) for row, token in picks])
    found = []
    for temp in _TEMPS:
        probs = np.exp((logits - logits[:, :1]) / temp)
        probs /= probs.sum(1, keepdims=True)
        logs = np.log(probs)
        means = (probs * logs).sum(1)
        spread = math.sqrt(float((probs * np.square(logs - means[:, None])).sum()))
        worst = abs(float((logs[range(len(ranks)), ranks] - means).sum())) / max(spread, 1e-9)
        for group in (slice(0, 1), slice(1, 2), slice(2, 4)):
            share = probs[:, group].sum(1)
            n = int(((ranks >= group.start) & (ranks < group.stop)).sum())
            sigma = max(math.sqrt(float((share * (1 - share)).sum())), _LEAST_SIGMA)
            worst = max(worst, abs(n - float(share.sum())) / sigma)
        found.append((worst, temp, round(float(probs[:, 0].sum()))))
    worst, temp, n_first = min(found)
    if worst > _MOST_SIGMAS:
        return ""
    n = int((ranks == 0).sum())
    return f"{n} of {len(ranks)} are the best ones, where {temp:g} makes {n_first} likely"


def shape_of(drafts: Sequence[RecordedDraft], wrong: Sequence[RecordedDraft], ranks: Ranks) -> str:
    """What all wrong drafts have and right ones have not, as far as it shows."""
    found, rounds = "", {draft.round for draft in wrong}
    for end, after in OUTCOMES.items():
        others = [two for one, two in pairwise(drafts) if end not in outcomes(one)]
        n_right = sum(two.round not in rounds for two in others)
        if len(others) == n_right >= _SHOWS and drafts[0].round not in rounds:
            found = f", only after {after}"
            break
    if first := first_step(wrong, ranks):
        found += f", only from drafted token {first} on"
    if not found and drafts.index(wrong[0]) >= _SHOWS:
        found = f", only from position {wrong[0].pos0} on"
    return found


def stage_of(
    wrong: Sequence[RecordedDraft], ranks: Ranks, shape: str, reads_rows: bool, in_blocks: bool
) -> tuple[str, str]:
    """The stage that wrong drafts point to where nothing gives them, and a sentence."""
    apart = [ranks[draft.round][at] for draft in wrong for at in _wrong_steps(ranks, draft)]
    right = [lead for own in ranks.values() for rank, lead in own if not rank]
    n_near = sum(rank < N_CANDIDATES for rank, _ in apart)
    is_near = apart and right and n_near >= _NEAR * len(apart)
    if "drafted token" in shape and in_blocks:
        stage, what = BLOCK, "what later rows of a block read"
    elif "drafted token" in shape:
        stage, what = STATE, "what one step of a draft hands on to the next one"
    elif is_near and _mean([lead for _, lead in apart]) >= _AS_CLEAR * _mean(right):
        stage, what = CANDIDATES, "the choice among right candidates"
    elif in_blocks and not shape:
        stage, what = BLOCK, "its block, or the rows that it reads"
    elif reads_rows and not in_blocks:
        stage, what = ROWS, "the rows that it reads, or what it reads with them"
    else:
        stage, what = STATE, "its memory, or what it was given to go on from"
    return stage, f"No change of one stage gives its drafts; most likely it is {what}{shape}."


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
