"""Acceptance shapes that a broken drafter produces and a weak one does not.

Every shape is a rate near chance where another group of the same run has a good one, and is
reported only if such uneven counts are unlikely by chance (binomial tail or Fisher's exact test,
level divided by the number of places examined). A low rate alone is never enough: hard text, long
drafts and weak drafters cause it too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from engine.analysis.acceptance.counts import (
    DraftCounts,
    binomial_at_most,
    fisher_less,
    fitted,
    wilson,
)
from engine.trace.facts import Finding
from engine.trace.records import MISSING

ZERO, ONE_SLOT, ZERO_FROM, AFTER_PARTIAL, WITH_DEPTH, FIRST_ONLY, CLIFF, ALWAYS = (
    "acceptance-zero",
    "acceptance-one-slot",
    "acceptance-zero-from",
    "acceptance-after-partial",
    "acceptance-falls-with-depth",
    "acceptance-first-only",
    "acceptance-cliff",
    "acceptance-always",
)
LEAST = 32
"""Fewer drafts than this are not judged."""
_CHANCE = 0.03
"""Rate of first tokens that a drafter without any knowledge may reach."""
_WEAK = 0.12
"""Rate that a weak drafter still reaches on hard text."""
_LEVEL, _STRICT = 1e-3, 1e-5
_LEAST_LOOKUPS = 192
_LEAST_ALWAYS = 400
_Z = 3.0
_BINS = 64
_STEPS = 3
_LEAST_REQUESTS, _LEAST_SUMS = 12, 3
_MOST_SLOPES = 64
"""Number of sequences of a run tested for a slope, longest first."""


def shapes(counts: DraftCounts) -> Iterator[Finding]:
    """Findings on the drafts of one drafter, the likeliest explanation of each part."""
    if counts.looks_up:
        yield from _zero(counts)
        return
    if found := list(_zero(counts)):
        yield from found
        return
    # without slots, the last requests may be at chance, but not single ones
    if not counts.is_by_round and (found := list(_zero_from(counts))):
        yield from found
        return
    if counts.unit == "row":
        for one in counts.by_sequence():
            zero = list(_zero(one, int(one.seq[0])))
            yield from zero or _one_row(one, counts)
    slots = list(_one_slot(counts))
    yield from (shape for shape, _ in slots)
    for _, low in slots:
        counts = counts.only(counts.slot != low)
    if counts.n.sum() < LEAST:
        return
    if found := list(_zero_from(counts)):
        yield from found
        return
    if not (found := list(_after_partial(counts))):
        found = list(_with_depth(counts))
    yield from found
    yield from _cliff(counts)
    yield from _always(counts)


# -- the whole ---------------------------------------------------------------------------------


def _zero(counts: DraftCounts, row: int | None = None) -> Iterator[Finding]:
    """Zero acceptance of all drafts, or of one row of a table."""
    n, k = int(counts.n.sum()), int(counts.first.sum())
    if n < LEAST or not _is_zero(n, k) or (counts.looks_up and (k or n < _LEAST_LOOKUPS)):
        return
    where = "" if row is None else f"In row {row + 1} "
    yield Finding(
        f"{where}{_first(counts)}{_passed(counts)}: not more than by chance.",
        f"{_tokens(counts)}; a drafter that is right {_WEAK:.0%} of the time would be as bad once "
        f"in {1 / max(binomial_at_most(k, n, _WEAK), 1e-12):,.0f} runs of this length",
        seq_id=row,
        rule=ZERO,
    )


def _one_row(row: DraftCounts, every: DraftCounts) -> Iterator[Finding]:
    """A table row with almost no acceptance while the others do well."""
    n, k = int(row.drafted.sum()), int(row.accepted.sum())
    if n < 3 * LEAST or k > _CHANCE * n:
        return
    others = every.only(every.seq != row.seq[0])
    n_others, k_others = int(others.drafted.sum()), int(others.accepted.sum())
    if k_others < 0.4 * n_others:
        return
    if fisher_less(k, n, k_others, n_others) < _STRICT:
        number = int(row.seq[0])
        yield Finding(
            f"In row {number + 1} {_tokens(row)} were accepted, in the others {_tokens(others)}.",
            f"{len(others.n):,} other rows",
            seq_id=number,
            rule=ONE_SLOT,
        )


def _is_zero(n: int, k: int, level: float = _LEVEL) -> bool:
    return k <= _CHANCE * n and binomial_at_most(k, n, _WEAK if k else 0.15) < level


# -- slots and sequences -----------------------------------------------------------------------


def _one_slot(counts: DraftCounts) -> Iterator[tuple[Finding, int]]:
    """Slots at chance while others are not, with slot number."""
    slots, at = np.unique(counts.slot, return_inverse=True)
    if len(slots) < 2 or len(np.unique(counts.setting)) > 1:
        return
    n = np.bincount(at, counts.n).astype(np.int64)
    k = np.bincount(at, counts.first).astype(np.int64)
    low = (n >= LEAST) & (k <= 0.1 * n)
    others = ~low & (n >= LEAST)
    if not low.any() or not others.any():
        return
    other_n, other_k = int(n[others].sum()), int(k[others].sum())
    share = wilson(other_k, other_n, -_Z)
    if other_k < 0.4 * other_n:
        return
    for i in np.flatnonzero(low):
        n_low, k_low = int(n[i]), int(k[i])
        level = _STRICT / len(slots)
        if (
            binomial_at_most(k_low, n_low, 0.4 * share) > level
            or fisher_less(k_low, n_low, other_k, other_n) > level
        ):
            continue
        mine = at == i
        seqs = np.unique(counts.seq[mine])
        is_one = len(seqs) == 1 and np.array_equal(seqs, slots[i : i + 1])
        kind = "sequence" if is_one else "slot" if counts.unit != "interval" else "engine"
        what = f"{kind} {slots[i]}"
        shape = Finding(
            f"In {what} {_first(counts.only(mine))}{_passed(counts)}, in the others "
            f"{_first(counts.only(others[at]))}.",
            f"{what}: {_tokens(counts.only(mine))}; others: {_tokens(counts.only(others[at]))}",
            int(counts.at[mine][0]) if counts.is_by_round else None,
            int(seqs[0]) if len(seqs) == 1 else None,
            rule=ONE_SLOT,
        )
        yield shape, int(slots[i])


# -- along the run -----------------------------------------------------------------------------


def _zero_from(counts: DraftCounts) -> Iterator[Finding]:
    """At chance from a round or position on, in all sequences or in single ones."""
    by_time = np.arange(len(counts.n))
    places = {"round": (by_time, _change(counts, by_time))}
    if (counts.pos != MISSING).all():
        by_pos = np.lexsort((counts.at, counts.pos))
        places["position"] = by_pos, _change(counts, by_pos)
    kind, (order, best) = max(places.items(), key=lambda item: item[1][1][1])
    if best[0]:
        yield _zero_from_shape(counts, order, best[0], kind, None)
        return
    n_sequences = len(np.unique(counts.seq))
    if n_sequences == 1:
        return
    order = np.argsort(counts.seq, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(counts.seq[order])), len(order) - 1)
    failing = counts.seq[order[_may_fail(counts, order, ends)]]
    for mine in counts.only(np.isin(counts.seq, failing)).by_sequence(2 * _least(counts)):
        order = np.arange(len(mine.n))
        if start := _change(mine, order, n_sequences)[0]:
            yield _zero_from_shape(mine, order, start, "round", int(mine.seq[0]))


def _may_fail(counts: DraftCounts, order: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Rows in this order after which all drafts to the end of their part may be at chance, if there
    are enough of them. ends: the last row of each part."""
    n, k = counts.n[order].cumsum(), counts.first[order].cumsum()
    lengths = np.diff(ends, prepend=-1)
    n_after = np.repeat(n[ends], lengths) - n
    k_after = np.repeat(k[ends], lengths) - k
    return np.flatnonzero((n_after >= LEAST) & (k_after <= _CHANCE * n_after))


def _least(counts: DraftCounts) -> int:
    """Minimum number of rows on either side of a change."""
    return 1 if counts.is_by_round else _LEAST_SUMS


def _change(counts: DraftCounts, order: np.ndarray, n_looks: int = 1) -> tuple[int, float]:
    """Row in this order from which drafts fail, and the log-likelihood gained over a constant rate;
    0 for none."""
    least = _least(counts)
    if len(order) < 2 * least or not _may_fail(counts, order, np.array([len(order) - 1])).size:
        return 0, 0.0
    n, k = counts.n[order].cumsum(), counts.first[order].cumsum()
    n_all, k_all = int(n[-1]), int(k[-1])
    gains = _log_likelihood(n, k) + _log_likelihood(n_all - n, k_all - k)
    split = int(np.argmax(gains))
    gain = float(gains[split] - _log_likelihood(np.array(n_all), np.array(k_all)))
    n_before, k_before = int(n[split]), int(k[split])
    n_after, k_after = n_all - n_before, k_all - k_before
    share = k_before / n_before
    if (
        n_after < LEAST
        or not least <= split + 1 <= len(n) - least
        or share < 0.2
        or k_after > _CHANCE * n_after
        or share < 5 * k_after / n_after
        or binomial_at_most(k_after, n_after, _WEAK) > _LEVEL / (10 * n_looks)
        or fisher_less(k_after, n_after, k_before, n_before) > _STRICT / (len(n) * n_looks)
    ):
        return 0, 0.0
    if counts.is_by_round:  # the same sequences must have done well before, not others
        rows = order[: split + 1]
        rows = rows[np.isin(counts.seq[rows], counts.seq[order[split + 1 :]])]
        if counts.first[rows].sum() < 0.2 * len(rows) or len(rows) < LEAST // 2:
            return 0, 0.0
    return split + 1, gain


def _zero_from_shape(
    counts: DraftCounts, order: np.ndarray, start: int, kind: str, seq: int | None
) -> Finding:
    row = order[start]
    before, after = counts.only(order[:start]), counts.only(order[start:])
    at, pos = int(counts.at[row]), int(counts.pos[row])
    where = f"position {pos:,}" if kind == "position" else f"round {at:,}"
    if not counts.is_by_round:
        where = f"{pos:,} prompt tokens" if kind == "position" else f"{counts.unit} {at + 1:,}"
    elif kind == "round" and pos != MISSING and len(np.unique(counts.seq)) == 1:
        where += f" (position {pos:,})"
    of = "" if seq is None else f"In sequence {seq}, from"
    return Finding(
        f"{of or 'From'} {where} on {_first(after)}{_passed(counts)}, before it {_first(before)}.",
        f"from there on {_tokens(after)}; before {_tokens(before)}",
        at if counts.is_by_round else None,
        seq,
        rule=ZERO_FROM,
    )


def _after_partial(counts: DraftCounts) -> Iterator[Finding]:
    """Near chance in the round after a partial acceptance, or after any rejection."""
    if not counts.is_by_round:
        return
    order = np.lexsort((counts.at, counts.seq))
    seq, right = counts.seq[order], counts.first[order] > 0
    drafted, accepted = counts.drafted[order], counts.accepted[order]
    has_before = np.concatenate([[False], seq[1:] == seq[:-1]])
    full = np.roll(accepted == drafted, 1)
    partial = np.roll((accepted > 0) & (accepted < drafted), 1) & has_before
    rejected = ~full & has_before
    # failures cluster in hard text, so the round before the previous one matters too
    first_of = rejected & np.roll(has_before & full, 1)
    for low, other, sharp, what in (
        (partial, has_before & ~partial, partial, "a partial acceptance"),
        (rejected, has_before & full, first_of, "a rejection"),
    ):
        n, k = int(low.sum()), int(right[low].sum())
        n_other, k_other = int(other.sum()), int(right[other].sum())
        n_sharp, k_sharp = int(sharp.sum()), int(right[sharp].sum())
        if (
            n < LEAST // 2
            or n_other < LEAST // 2
            or n_sharp < 5
            or k > 0.25 * n
            or k_sharp > 0.35 * n_sharp
            or k_other < 0.35 * n_other
        ):
            continue
        share = wilson(k_other, n_other, -2)
        if (
            binomial_at_most(k, n, 0.6 * share) > _STRICT
            or fisher_less(k, n, k_other, n_other) > _STRICT
            or fisher_less(k_sharp, n_sharp, k_other, n_other) > 0.01
        ):
            continue
        rows = order[low]
        yield Finding(
            f"After {what} {_share(k, n)} drafts{_by(counts)} had their first token accepted, "
            f"otherwise {_share(k_other, n_other)}.",
            f"rounds after it: {_tokens(counts.only(rows))}; in all {_tokens(counts)}",
            int(counts.at[rows].min()),
            rule=AFTER_PARTIAL,
        )
        return


def _with_depth(counts: DraftCounts) -> Iterator[Finding]:
    """Steady decline with position: a slope that explains more than a few steps would, as easy and
    hard text produce them. It must be in at least half of the long sequences: replies that turn
    from code to prose change suddenly, and one of many looks steady by chance."""
    has_pos = bool((counts.pos != MISSING).all())
    if not has_pos:
        if not counts.is_by_round:
            return
        counts = replace(counts, pos=counts.at)
    sequences = [counts]
    if counts.is_by_round:
        sequences = list(counts.by_sequence(most=_MOST_SLOPES))
    falls = [fall for one in sequences if (fall := _fall(one)) is not None]
    if not falls:
        return
    clear = [
        (gain, seq)
        for seq, gain, over_steps, begin, end in falls
        if gain > 12 and over_steps > -2 and begin >= 0.3 and end <= 0.5 * begin
    ]
    n_down = sum(end < begin for *_, begin, end in falls)
    if not clear or 2 * len(clear) < len(falls) or n_down < 0.9 * len(falls):
        return
    _, steepest = max(clear, key=lambda one: one[0])
    mine = next(one for one in sequences if one.seq[0] == steepest)
    order = np.argsort(mine.pos, kind="stable")
    parts = [mine.only(part) for part in np.array_split(order, 4)]
    n_sequences = len(np.unique(counts.seq)) if counts.is_by_round else 1
    several = n_sequences > 1
    yield Finding(
        f"The longer the context, the fewer drafted tokens{_by(counts)} are accepted: "
        f"{_tokens(parts[0])} in the first quarter, {_tokens(parts[-1])} in the last.",
        "by quarters "
        + ", ".join(
            f"{part.accepted.sum() / part.drafted.sum():.2f} ("
            f"{_PLACES[counts.is_by_round + (not has_pos)]} {part.pos.min():,} to "
            f"{part.pos.max():,})"
            for part in parts
        )
        + (f"; {len(clear)} of {n_sequences} sequences" if several else ""),
        int(mine.at[0]) if counts.is_by_round else None,
        steepest if several else None,
        rule=WITH_DEPTH,
    )


_PLACES = "prompts of", "positions", "rounds"
_Fall = tuple[int, float, float, float, float]
"""A logistic slope of acceptance over positions: the sequence; its log-likelihood minus that of a
constant, and of the best three steps; the fitted rates at both ends."""


def _fall(counts: DraftCounts) -> _Fall | None:
    """The slope of one sequence, or over requests; None if there are too few."""
    least = 3 * LEAST if counts.is_by_round else _LEAST_REQUESTS
    if len(counts.n) < least or counts.pos.min() == counts.pos.max():
        return None
    order = np.argsort(counts.pos, kind="stable")
    x, k = counts.pos[order].astype(float), counts.accepted[order].astype(float)
    n = np.minimum(k + counts.n[order], counts.drafted[order])  # judged tokens
    p, _, likelihood = fitted(x, k, n)
    spread = 1.0
    if not counts.is_by_round:  # requests vary by more than their counts
        spread = max(1.0, float(((k - n * p) ** 2 / (n * p * (1 - p))).sum() / (len(n) - 2)))
    edge = max(1, len(p) // 20)
    return (
        int(counts.seq[0]),
        (likelihood - float(_log_likelihood(n.sum(), k.sum()))) / spread,
        likelihood - _best_steps(n, k) if counts.is_by_round else 0.0,
        float(p[edge]),
        float(p[-1 - edge]),
    )


def _best_steps(n: np.ndarray, k: np.ndarray) -> float:
    """Log-likelihood of the best piecewise-constant rate over bins."""
    edges = np.linspace(0, len(n), min(_BINS, len(n) // 8) + 1).astype(int)
    n, k = (np.concatenate([[0.0], one.cumsum()])[edges] for one in (n, k))
    best = _log_likelihood(n, k)
    for _ in range(_STEPS - 1):
        part = _log_likelihood(
            np.maximum(n[:, None] - n[None, :], 0), np.maximum(k[:, None] - k[None, :], 0)
        )
        part[n[:, None] < n[None, :]] = -np.inf
        best = np.maximum(best, (part + best[None, :]).max(axis=1))
    return float(best[-1])


def _log_likelihood(n: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Log-likelihood of k successes in n at their own rate."""
    with np.errstate(divide="ignore", invalid="ignore"):
        wins = np.where(k > 0, k * np.log(k / n), 0.0)
        losses = np.where(n > k, (n - k) * np.log1p(-k / n), 0.0)
    return np.asarray(wins + losses)


# -- along the draft ---------------------------------------------------------------------------


def _cliff(counts: DraftCounts) -> Iterator[Finding]:
    """The first draft index at which acceptance falls far more than at any earlier one."""
    reached, passed = counts.survival.judged, counts.survival.accepted
    shares = [k / n if n else math.nan for n, k in zip(reached, passed, strict=True)]
    for i in range(1, len(reached)):
        n, k = int(reached[i]), int(passed[i])
        n_before, k_before = int(reached[i - 1]), int(passed[i - 1])
        if n < LEAST // 2 or n_before < LEAST:
            return
        share, usual = k / n, k_before / n_before
        drop = share / usual if usual else 1.0
        before = shares[i - 1] / shares[i - 2] if i > 1 and shares[i - 2] else 1.0
        level = _LEVEL / i
        at_chance = _is_zero(n, k, level) and binomial_at_most(k, n, 0.35 * usual) < 0.01
        falls = (
            drop < 0.35
            and drop < 0.6 * before
            and binomial_at_most(k, n, 0.45 * wilson(k_before, n_before, -2)) < level
        )
        if usual < 0.15 or not (at_chance or falls):
            continue
        evidence = "by index, of those whose predecessors were accepted: " + ", ".join(
            f"{a:,} of {b:,}" for a, b in list(zip(passed, reached, strict=True))[: i + 4]
        )
        if i == 1 and k <= 0.05 * n:
            what = f"Only the first token of drafts{_by(counts)} is ever accepted"
            said = f"{_share(k_before, n_before)} times, the second {_share(k, n)} times"
            yield Finding(f"{what}: {said}.", evidence, rule=FIRST_ONLY)
        else:
            yield Finding(
                f"Acceptance{_by(counts)} falls off after {i} drafted token{'s' * (i > 1)}: index "
                f"{i - 1} is accepted in {_share(k_before, n_before)}, index {i} in "
                f"{_share(k, n)}.",
                evidence,
                rule=CLIFF,
            )
        return


def _always(counts: DraftCounts) -> Iterator[Finding]:
    drafted, accepted = int(counts.drafted.sum()), int(counts.accepted.sum())
    if accepted == drafted >= _LEAST_ALWAYS:
        yield Finding(
            f"All of {drafted:,} drafted tokens{_by(counts)} were accepted.",
            f"{int(counts.n.sum()):,} drafts without a rejection",
            rule=ALWAYS,
        )


# -- words -------------------------------------------------------------------------------------


def _share(k: int, n: int) -> str:
    return f"{k:,} of {n:,}"


def _first(counts: DraftCounts) -> str:
    """Accepted first tokens if counted, else all tokens; of averages these."""
    n = int(counts.n.sum())
    if counts.is_estimate:
        return f"{counts.accepted.sum() / max(n, 1):.2f} tokens of each of about {n:,} drafts"
    if not counts.has_first:
        return _tokens(counts)
    return f"{_share(int(counts.first.sum()), n)} drafts"


def _passed(counts: DraftCounts) -> str:
    """The matching noun phrase."""
    if not counts.has_first:
        return f"{_by(counts)} were accepted"
    return f"{_by(counts)} had their first token accepted"


def _tokens(counts: DraftCounts) -> str:
    return f"{_share(int(counts.accepted.sum()), int(counts.drafted.sum()))} drafted tokens"


def _by(counts: DraftCounts) -> str:
    return f" of {counts.drafter}" if counts.drafter else ""
