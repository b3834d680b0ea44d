"""Wrong drafts: the distance of their tokens from right candidates, what they have in common, and
the stage and scopes that this suggests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from statistics import fmean

import numpy as np

from engine.audit.draft_models import Candidates
from engine.audit.recorded_drafts import OUTCOMES, DraftedText, RecordedDraft, outcomes
from engine.draft.model_drafter import N_CANDIDATES
from engine.observe.drafter_diff.guesses import Rows, Scope
from engine.observe.drafter_diff.records import (
    BLOCK,
    CANDIDATES,
    FEW,
    ROWS,
    STATE,
    UNEXPLAINED,
    Drafts,
)
from engine.sampling.distribution import softmax

Ranks = dict[int, list[tuple[int, float]]]
"""By round, for each drafted token: how many right candidates are better, 0 if none is within
rounding, and the lead of the best over the second, relative to the tenth's distance."""
_AS_CLEAR, _NEAR = 0.6, 0.9
"""Evidence that wrong tokens are chosen, not computed, wrongly: the lead of the best candidate over
the second, relative to that of right drafts; share of them among the best."""
_SHOWS, _STRAY, _SCALED, _CHANCE = 5, 0.05, 0.05, 0.03
"""Right drafts that show that a mistake needs a condition that they lack; share of them that may be
wrong all the same; least distance of a factor of logits from 1; greatest probability that wrong
drafts are in some rounds or tokens alone by chance, for these to be named."""

TIE, EXACT_TIE = (0.05, 0.5), (0.005, 0.05)
"""How far below the best logit a draft may be by rounding: relative to the tenth's, and absolute;
less for runs of this engine in modes that round alike."""
SHARES_TIE, SHARES_EXACT = 0.02, 0.003
"""Greatest difference of two probabilities within rounding."""
_TEMPS = (0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
_MOST_SIGMAS, _LEAST_SIGMA = 1.8, 0.5


def gap(row: Candidates, token: int, tie: tuple[float, float]) -> tuple[int, float]:
    """The best token, and 0 if `token` is as good within rounding, else 1."""
    best, value = next(iter(row.items()))
    if token == best:
        return best, 0.0
    # NaN logits are never as good, and among equal ones any would be
    is_near = value - row.get(token, float("-inf")) <= least(row, tie)
    return best, float(not (is_near and _spread(row)))


def is_clear(row: Candidates, tie: tuple[float, float]) -> bool:
    """Whether the best token is clearly ahead of the second."""
    best, *second = list(row.values())[:2]
    return not second or best - second[0] > least(row, tie)


def least(row: Candidates, tie: tuple[float, float]) -> float:
    """The least clear lead of a logit."""
    return min(tie[0] * _spread(row), tie[1])


def _spread(row: Candidates) -> float:
    values = list(row.values())
    return values[0] - values[min(N_CANDIDATES, len(values)) - 1]


def ranked(row: Candidates, token: int, tie: tuple[float, float]) -> tuple[int, float]:
    """See Ranks."""
    ids, values, spread = [*row], [*row.values()], _spread(row)
    rank = (ids.index(token) if token in row else len(row)) if gap(row, token, tie)[1] else 0
    if rank and len(ids) < N_CANDIDATES:
        rank = N_CANDIDATES  # with so few any is near
    return rank, (values[0] - values[1]) / spread if spread > 0 else 1.0


def wrong_steps(ranks: Ranks, draft: RecordedDraft) -> list[int]:
    """Wrong tokens of a draft, from 0."""
    return [i for i, (rank, _) in enumerate(ranks[draft.round]) if rank]


def as_drawn(picks: Sequence[tuple[Candidates, int]]) -> str:
    """Evidence that tokens were sampled from the ten best of their rows: best, second and further
    ones as often as a temperature predicts. Empty without any."""
    if any(len(row) < N_CANDIDATES for row, _ in picks):
        return ""  # with so few candidates any choice looks sampled
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
    return f"{n} of {len(ranks)} are the best ones; {n_first} are expected at temperature {temp:g}"


POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_LONGEST_PASS, _NO_END, _NEWEST = 16, 1 << 30, ", only in the newest row"
_MOSTLY = 0.6
_EVERY = {2: "second", 3: "third", 4: "fourth", 5: "fifth", 8: "eighth"}


def scopes_of(drafts: Drafts, wrong: Drafts, ranks: Ranks, least: int = 1) -> list[Scope]:
    """Scopes of a mistake suggested by counts over rounds, everywhere first: after one outcome, in
    all rows of such a round or in the newest alone; from a position, if `least` right drafts come
    before it, or up to one; and within each of these, from a drafted token on or in one alone. With
    `least` 1, for trials, also those of `_whens`."""
    first, last = drafts.index(wrong[0]), drafts.index(wrong[-1])
    share, end, words = _outcome(drafts, wrong)
    if first >= _SHOWS and len(wrong) > share * (len(drafts) - first):
        end = ""  # from there on all are wrong, whatever came before
    if not end and first >= _SHOWS:
        before = [set(outcomes(draft)) for draft in drafts[:first]]
        end = next((one for one in OUTCOMES if one in before[-1].difference(*before[:-1])), "")
        since = "from the first one on that comes " if least == _SHOWS else ""
        words = f", only {since}after {OUTCOMES[end]}" if end else ""
    rounds = _outcomes_of(drafts)
    found: list[Scope] = [("", None, None)]
    found += _in_rounds(drafts, words, rounds[end]) if end else []
    if first < _SHOWS and len(drafts) - 1 - last >= max(_SHOWS, last + 1) and not end:
        words = f", only up to position {wrong[-1].pos0}"
        found.append((words, range(wrong[-1].pos0 + 1), None))
    elif first >= least and not end:
        for draft in drafts[max(0, first - _SHOWS) : first][::-1]:
            words = f", only from about position {draft.pos0 + 1} on"
            found.append((words, range(draft.pos0 + 1, _NO_END), None))
        words = f", only from position {wrong[0].pos0} on"
        found.append((words, range(wrong[0].pos0, _NO_END), None))
    steps = Counter(step for draft in wrong for step in wrong_steps(ranks, draft))
    step, n_longer = min(steps, default=0), 0
    if len(steps) == 1:
        n_longer = sum(len(ranks[draft.round]) > step + 1 for draft in wrong)
    ways: list[tuple[str, Collection[int]]] = []
    if n_longer < FEW and step:
        # the first wrong one may be later than the first affected one
        starts = range(1, step + 1) if least < _SHOWS else sorted({1, step})
        ways += [(f", only from drafted token {i} on", range(i, _NO_END)) for i in starts]
    alone = {step} if n_longer >= FEW else set[int]()
    if steps and least < _SHOWS:  # later ones, or those that read it, may be wrong because of it
        alone |= {step, max(steps, key=lambda step: steps[step])}
    for i in sorted(alone):
        which = f", only in drafted token {i}" if i else ", only in the first token of drafts"
        ways.append((which, {i}))
    whole = [*found]
    for words, own in ways:
        found += [(said + words, places, own) for said, places, _ in whole]
    if least < _SHOWS:
        for words, places in whens(drafts, {drafts.index(draft) for draft in wrong}, end):
            if places & {first, first - 1, first - 2}:
                found += _in_rounds(drafts, words, places)
    return found


def _in_rounds(drafts: Drafts, words: str, which: set[int]) -> list[Scope]:
    """Scopes of all rows of drafts at some indices, and of the newest ones alone."""
    starts = {i: drafts[i - 1].pos0 + 1 if i else drafts[0].pos0 for i in which}
    every = {at for i, start in starts.items() for at in range(start, drafts[i].pos0 + 1)}
    newest = {drafts[i].pos0 for i in which}
    return [(words, every, None), (f"{_NEWEST}{words}", newest, None)]


def _outcomes_of(drafts: Drafts) -> dict[str, set[int]]:
    """Indices of drafts after each of OUTCOMES."""
    after = {end: set[int]() for end in OUTCOMES}
    for i, draft in enumerate(drafts[:-1]):
        for end in outcomes(draft):
            after[end].add(i + 1)
    return after


def whens(
    drafts: Drafts, wrong: Collection[int], shown: str = ""
) -> Iterator[tuple[str, set[int]]]:
    """Subsets of rounds to which a mistake may be limited, whatever wrong drafts suggest: words,
    and indices of their drafts; those supported by most right drafts first. wrong: indices of wrong
    drafts; shown: an outcome that already is a scope."""
    found, after, first = dict[str, set[int]](), _outcomes_of(drafts), min(wrong)
    for end, places in after.items():
        if end != shown:
            found[f", only after {OUTCOMES[end]}"] = places
            found[f", only after {OUTCOMES[end]}, twice in a row"] = {
                i for i in places if i - 1 in places
            }
            found[f", only after {OUTCOMES[end]}, never twice in a row"] = {
                i for i in places if i - 1 not in wrong
            }
        found[f", but not after {OUTCOMES[end]}"] = {*range(1, len(drafts))} - places
    for n in sorted({draft.n_accepted for draft in drafts} - {0}):
        what = f"draft of which {n} token{'s were' if n > 1 else ' was'} accepted"
        found[f", only after a {what}"] = {
            i + 1 for i, draft in enumerate(drafts[:-1]) if draft.n_accepted == n
        }
    for every, nth in _EVERY.items():
        places = {*range(first % every, len(drafts), every)}
        if len(places & {*wrong}) > _MOSTLY * len([i for i in places if i >= first]):
            found[f", only in every {nth} round"] = places
    yield from sorted(found.items(), key=lambda one: sum(i < first for i in one[1]))


def _outcome(drafts: Drafts, wrong: Drafts) -> tuple[float, str, str]:
    """The one of OUTCOMES that all wrong drafts follow, the share of its drafts that is wrong, and
    in words how many; else empty."""
    are_wrong, shown = {drafts.index(draft) for draft in wrong}, [(0.0, "", "")]
    for end, places in _outcomes_of(drafts).items():
        n, n_else = len(places & are_wrong), len(are_wrong - places)
        others = len(drafts) - len(places)
        if others - n_else >= _SHOWS and n_else <= _STRAY * min(others, len(wrong)):
            but = f" but {n_else}" if n_else else ""
            about = f", only after {OUTCOMES[end]} ({n} of {len(places)}){but}"
            shown.append((n / len(places), end, about))
    return max(shown, key=lambda one: one[0])


def shape_of(drafts: Drafts, wrong: Drafts, ranks: Ranks) -> str:
    """When drafts are wrong, in words; empty if anywhere, or possibly by chance."""
    shape, lengths = "", [len(ranks[draft.round]) for draft in wrong]
    for words, places, steps in scopes_of(drafts, wrong, ranks, _SHOWS):
        n, n_wrong = (sum(places is None or d.pos0 in places for d in x) for x in (drafts, wrong))
        by_place = math.comb(n, n_wrong) / math.comb(len(drafts), n_wrong)
        inside = [sum(steps is None or i in steps for i in range(n)) / n for n in lengths if n]
        is_shown = (places is None or by_place < _CHANCE) and (
            steps is None or math.prod(inside) < _CHANCE
        )
        shape = words if is_shown and _NEWEST not in words else shape
    return shape


def same_logits(wrong: Drafts, rows: Rows, ranks: Ranks, tie: float) -> bool | None:
    """Whether the recorded probabilities of the best candidates match the right rows where the
    first wrong token of a draft was chosen, whatever their ids: then the choice is wrong, and
    everything before it right. rows: by round, of teacher-forced drafts. None if too few are
    known."""
    found = []
    for draft in wrong:
        step = next(iter(wrong_steps(ranks, draft)), len(draft.tops))
        for own, shares in _logits_and_shares(draft, rows[draft.round], step, step + 1):
            found.append(np.abs(softmax(own) - shares).sum() / 2)
    return None if len(found) < FEW else float(np.quantile(found, _NEAR)) < tie


def logits_scale(drafts: Drafts, rows: Rows, tie: float) -> float | None:
    """The factor of right logits that gives the recorded probabilities of all candidates; None if
    there is none, or it is 1."""
    known = [
        pair
        for draft in drafts
        for pair in _logits_and_shares(draft, rows[draft.round], 0, len(draft.tokens))
    ]
    ratios = [
        np.log(shares[0] / shares[1]) / (own[0] - own[1])
        for own, shares in known
        if shares[1] > 0 and own[0] - own[1] > tie
    ]
    if len(ratios) < _SHOWS:
        return None
    scale = float(np.median(ratios))
    apart = [np.abs(softmax(own * scale) - shares).sum() / 2 for own, shares in known]
    is_it = float(np.quantile(apart, _NEAR)) < tie and abs(scale - 1) > _SCALED
    return scale if is_it else None


def _logits_and_shares(
    draft: RecordedDraft, rows: Sequence[Candidates], start: int, stop: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Right logits, and recorded probabilities of the best tokens, both from the best on."""
    for top, row in zip(draft.tops[start:stop], rows[start:stop], strict=False):
        shares, logits = np.sort([*top.values()])[::-1], np.array([*row.values()])
        if 1 < len(shares) <= len(logits) and shares.sum() > 0:
            yield logits[: len(shares)], shares / shares.sum()


def places_of(text: DraftedText) -> dict[str, Collection[int]]:
    """Named subsets of a text where its rows may be wrong."""
    n, drafts = text.starts[0], text.drafts
    found: dict[str, Collection[int]] = {
        "the prompt": range(n),
        "decoded tokens": range(n, len(text.tokens)),
        "accepted tokens": [d.pos0 + 1 + i for d in drafts for i in range(d.n_accepted)],
        "tokens that were not drafted": [draft.pos0 for draft in drafts],
    }
    for size in POWERS:
        if size < n:
            found[f"the prompt except its last {size} tokens"] = range(n - size)
            found[f"the first {size} tokens"] = range(size)
            found[f"the prompt's last {size} tokens"] = range(n - size, n)
    for every, nth in _EVERY.items():
        for first in (0, every - 1):
            found[f"every {nth} token from {first} on"] = range(first, len(text.tokens), every)
    return {where: places for where, places in found.items() if places}


def in_passes(text: DraftedText, ahead: int) -> dict[str, Collection[int]]:
    """The first and the last entries of passes of some size over a text's prompt, with names.
    ahead: see DraftModel."""
    n = text.starts[0]
    return {
        f"the {which} of every {size} tokens of the prompt": range(at + ahead, n, size)
        for size in sorted({*range(2, _LONGEST_PASS + 1), *POWERS} - {1})
        for which, at in (("first", 0), ("last", size - 1))
        if size <= n
    }


def stage_of(
    wrong: Drafts,
    ranks: Ranks,
    shape: str,
    reads_rows: bool,
    in_blocks: bool,
    same: bool | None = None,
) -> tuple[str, str]:
    """The stage that wrong drafts suggest if nothing gives them, and a sentence. same: see
    `same_logits`."""
    apart = [ranks[draft.round][at] for draft in wrong for at in wrong_steps(ranks, draft)]
    right = [lead for own in ranks.values() for rank, lead in own if not rank]
    n_near = sum(rank < N_CANDIDATES for rank, _ in apart)
    is_near = apart and right and n_near >= _NEAR * len(apart)
    is_chosen = is_near and fmean(lead for _, lead in apart) >= _AS_CLEAR * fmean(right)
    when = f"{shape}, and right elsewhere" if shape else " everywhere"
    if len(wrong) < _SHOWS and not same and not shape:
        stage, what, when = UNEXPLAINED, "too few drafts are wrong to find the cause", ""
    elif same or (same is None and is_chosen and "drafted token" not in shape):
        stage, what = CANDIDATES, "the choice among right candidates is wrong"
        if same:
            what += ", whose recorded probabilities are right"
    elif "drafted token" in shape and in_blocks:
        stage, what = BLOCK, "later rows of a block read wrong inputs"
    elif "drafted token" in shape:
        stage, what = STATE, "one step of a draft passes a wrong row or token to the next one"
    elif in_blocks and "after" not in shape:
        stage, what = BLOCK, "its block, or the rows that it reads, are wrong"
    elif reads_rows and not in_blocks and "after" not in shape:
        stage, what = ROWS, "the rows or other inputs that it reads are wrong"
    else:
        stage, what = STATE, "its memory, or its inputs from the last round, are wrong"
    return stage, f"{what[0].upper()}{what[1:]}{when}; no single change reproduces its drafts."
