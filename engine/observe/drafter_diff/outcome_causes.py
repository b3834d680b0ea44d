"""What two runs tell of what became of their drafts by their records alone: the rule, the sampler
and the counts. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from engine.audit.recorded_drafts import RecordedDraft
from engine.observe.drafter_diff.records import (
    COUNTING,
    FEW,
    RULE,
    Cause,
    Counts,
    miscounting,
    n_common,
    place_of,
    sums,
)
from engine.observe.drafter_diff.sides import DraftSide

_SHARE = 0.05


def _confirmed(side: DraftSide) -> list[tuple[RecordedDraft, int]]:
    """Drafts but the last, with how many of their tokens the text confirms, where that is known."""
    judged = ((draft, side.n_confirmed(draft)) for draft in side.drafts[:-1])
    return [(draft, n) for draft, n in judged if n is not None]


def rule_cause(side: DraftSide) -> Cause | None:
    """Whether fewer drafted tokens were accepted than the text confirms."""
    known = _confirmed(side)
    short = [(draft, n) for draft, n in known if draft.n_accepted < n != side.advance(draft)]
    if len(short) < FEW or len(short) < _SHARE * len(known):
        return None
    n = max(draft.n_accepted for draft, _ in known)
    if side.run.facts.synthetic or side.run.facts.draft_accept:
        about = "Drafted tokens are accepted by chance or by a script, not by the target."
    elif side.draws:  # what acceptance leaves of p has none of a token with p < q
        about = (
            "Replacements are drawn from p, not from the residual p - q: some were just rejected."
        )
    elif all(draft.n_accepted == n - 1 == draft.n_drafted - 1 for draft, n in short):
        about = "The last token of a draft is never accepted, though the text has it there."
    elif all(draft.n_accepted == n for draft, _ in short):
        about = f"No more than {n} drafted token{'s' * (n != 1)} are ever accepted."
    else:
        about = "Drafted tokens are rejected that the target chose itself: a stricter rule."
    size, recorded = f"{len(short)} of {len(known)} rounds", sums(draft for draft, _ in known)
    mended = sum(n for _, n in known), recorded[1]
    return Cause(RULE, side.name, about, place_of(short[0][0]), size, recorded, mended)


def sampler_cause(a: DraftSide, b: DraftSide) -> Cause | None:
    """Whether the two were sampled in other ways, and their texts part."""
    settings = a.setting, b.setting
    temps = [float(one.get("temperature", 0.0) or 0.0) for one in settings]
    is_drawn = all(settings) and max(temps) > 0
    names = [n for n in settings[0] if is_drawn and n in settings[1] and _differ(n, *settings)]
    # at temperature 0 rules without loss all accept the best token
    lossless = all(side.rule is not None and side.rule.is_lossless for side in (a, b))
    counts = not (all(settings) and max(temps) <= 0 and lossless)
    rules = [side.rule.text if side.rule and counts else "" for side in (a, b)]
    said = [f"{name} {settings[0][name]} in A, {settings[1][name]} in B" for name in names]
    if all(rules) and rules[0] != rules[1]:
        said.append(f"rule {rules[0]} in A, {rules[1]} in B")
    if not said:
        return None
    at = n_common(a, b)
    place = f"the texts part at position {at}" if at < min(len(a.text), len(b.text)) else ""
    return Cause(RULE, "", f"The sampler or the rule differs: {'; '.join(said)}.", place)


def _differ(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two settings are other ones; servers keep them in single precision."""
    try:
        return not math.isclose(float(one[name]), float(other[name]), rel_tol=1e-6, abs_tol=1e-9)
    except (TypeError, ValueError):
        return bool(one[name] != other[name])


def counting_cause(side: DraftSide) -> Cause | None:
    """Whether accepted tokens are counted that the text does not confirm, or counters disagree with
    the rounds."""
    judged = _confirmed(side)
    wrong = [
        (draft, n)
        for draft, n in judged
        if draft.n_accepted > n or draft.n_accepted < n == side.advance(draft)
    ]
    recorded = sums(draft for draft, _ in judged)
    mended = sum(min(n, draft.n_drafted) for draft, n in judged), recorded[1]
    again = [(one, other) for one, other in pairwise(side.drafts) if one.pos0 == other.pos0]
    if len(again) >= FEW:
        replays = {id(two) for _, two in again}
        about = "Replays of accepted tokens after a restore are counted as rounds of their own."
        mended = sums(one for one in side.drafts if id(one) not in replays)
        size = f"{len(again)} of {len(side.drafts)} rounds"
        place = place_of(again[0][1])
        return Cause(COUNTING, side.name, about, place, size, side.counts, mended)
    rounds = [(_true(side, draft), (draft.n_accepted, draft.n_drafted)) for draft in side.drafts]
    if beyond := miscounting(side):
        more = all(one.n_drafted > len(one.tokens) for one in beyond)
        about = f"{'more' if more else 'fewer'} drafted tokens than its rounds have"
        about = _way_of(rounds) or about
        size, place = f"{len(beyond)} of {len(side.drafts)} rounds", place_of(beyond[0])
        mended = _added(true for true, _ in rounds)
        return Cause(COUNTING, side.name, f"It counts {about}.", place, size, side.counts, mended)
    if len(wrong) >= FEW and len(wrong) >= _SHARE * len(judged):
        about, place = _miscounted(rounds), place_of(wrong[0][0])
        size = f"{len(wrong)} of {len(judged)} rounds"
        return Cause(COUNTING, side.name, about, place, size, recorded, mended)
    return _by_counters(side)


def _true(side: DraftSide, draft: RecordedDraft) -> Counts:
    """Accepted and drafted tokens of a round as the text and ids show, else as they are counted."""
    accepted = side.advance(draft)
    n = len(draft.tokens) if side.knows_all else max(draft.n_drafted, len(draft.tokens))
    return min(draft.n_accepted, n) if accepted is None else accepted, n


def _ways(a: int, d: int) -> dict[str, Counts]:
    """What a round with a accepted and d drafted tokens may be counted as."""
    is_cut, again, replays = a < d, a * (a < d), "tokens of replays after a rejection"
    return {
        "the target's own token of a round as an accepted one": (a + 1, d),
        "the target's own token after a rejection as an accepted one": (a + is_cut, d),
        "the target's own token of a round as drafted and accepted": (a + 1, d + 1),
        "the newest token of a round as a drafted one": (a, d + 1),
        "what was judged as drafted: accepted tokens and the first rejected": (a, min(a + 1, d)),
        "no drafted tokens of rounds in which none was accepted": (a, d if a else 0),
        f"{replays} again, as drafted and accepted": (a + again, d + again),
        f"{replays}, with the target's own, again": (a + again + is_cut, d + again + is_cut),
        f"{replays} again, as drafted ones": (a, d + again),
        f"{replays} again, as accepted ones": (a + again, d),
        "fewer accepted tokens than its rounds have, one for any number": (min(a, 1), d),
        "accepted tokens of drafts alone that were accepted whole": (a - again, d),
        "rejected tokens as accepted ones": (d - a, d),
        "all drafted tokens as accepted": (d, d),
        "drafts, not their tokens": (a, min(d, 1)),
        "accepted and drafted tokens twice": (2 * a, 2 * d),
    }


def _way_of(rounds: Sequence[tuple[Counts, Counts]]) -> str:
    """In which way rounds, as they were and as they are counted, are counted; empty for none."""
    known = [(_ways(*true), true, own) for true, own in rounds]
    for which in _ways(0, 0):
        n_apart = sum(ways[which] != true for ways, true, _ in known)
        n = sum(ways[which] == own for ways, _, own in known)
        if n_apart >= FEW and n >= 0.9 * len(known):
            return which
    return ""


def _added(counts: Iterable[Counts]) -> Counts:
    accepted, drafted = zip(*counts, strict=True)
    return sum(accepted), sum(drafted)


def _miscounted(rounds: Sequence[tuple[Counts, Counts]]) -> str:
    """A sentence on rounds whose counts of accepted tokens are not what came of their drafts."""
    if about := _way_of(rounds):
        return f"It counts {about}."
    counted, right = [own[0] for _, own in rounds], [true[0] for true, _ in rounds]
    for by, which in ((1, "before"), (-1, "after")):
        moved = [right[i - by] == n for i, n in enumerate(counted) if 0 <= i - by < len(right)]
        if moved.count(True) >= 0.9 * len(moved):
            return f"Its counts of accepted tokens are those of the round {which}."
    if all(n <= own for n, own in zip(counted, right, strict=True)):
        return "It counts fewer accepted tokens than its rounds go on by."
    return "It counts tokens that it did not draft as accepted drafted tokens."


def _by_counters(side: DraftSide) -> Cause | None:
    stated = [side.counters.get(name) for name in ("draft_n_accepted", "draft_n")]
    if not all(isinstance(one, int | float) and one >= 0 for one in stated):
        return None
    theirs, (accepted, drafted) = tuple(int(one or 0) for one in stated), side.counts
    beyond = theirs[0] - accepted, theirs[1] - drafted
    if max(map(abs, beyond)) < FEW or max(map(abs, beyond)) < 0.02 * max(drafted, 1):
        return None
    ways = [_ways(draft.n_accepted, draft.n_drafted) for draft in side.drafts]
    what = "other tokens than its rounds have"
    for which in [*_ways(0, 0)][::-1]:
        added = _added(one[which] for one in ways)
        if max(abs(added[0] - theirs[0]), abs(added[1] - theirs[1])) <= 1:
            what = which
    about, place = f"Its counters count {what}.", "sums at the end of the request"
    size = f"{theirs[0]} of {theirs[1]} by its counters, {accepted} of {drafted} by its rounds"
    counts = (theirs[0], theirs[1]), (accepted, drafted)
    return Cause(COUNTING, side.name, about, place, size, *counts)
