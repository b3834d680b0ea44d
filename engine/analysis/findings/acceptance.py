"""Acceptance rules: low by shape, inflated by repetition, or not worth its cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from engine.analysis.acceptance import shapes
from engine.analysis.findings.observed import observed_hits
from engine.analysis.findings.run_rows import Check, ExaminedRun, observed
from engine.analysis.run_cost import find_baseline
from engine.plain_text import counted
from engine.trace.facts import Finding, RunFacts
from engine.trace.records import EMITTED_KINDS, MISSING, PHASES

_LEAST_TOKENS = 32
_LEAST_PLAIN = 16
_HIGH = 0.5
_SLOWER, _SLOWER_BY_SUMS, _Z = 0.97, 0.9, 3.0
_MOST_RUNS = 64


def _shape(rule: str) -> Check:
    def check(run: ExaminedRun) -> Iterator[Finding]:
        for one in run.acceptance_shapes:
            if one.rule == rule:
                yield replace(one, evidence=one.evidence + _setting(run))

    return check


def _setting(run: ExaminedRun) -> str:
    """The temperature, on which acceptance depends."""
    temperature = run.option("sampler", "temp")
    return "" if temperature is None else f"; temperature {temperature:g}"


def _zero(run: ExaminedRun) -> Iterator[Finding]:
    """Adds facts about the drafts themselves, if known."""
    tokens = run.tokens
    drafted = tokens.is_text("kind", "accepted", "rejected") & (tokens["draft_index"] == 0)
    ids = tokens["token_id"][drafted & (tokens["token_id"] != MISSING)]
    same = ""
    if ids.size >= _LEAST_TOKENS:
        found, n = np.unique(ids, return_counts=True)
        if n.max() >= 0.9 * ids.size:
            same = f"; {n.max():,} of them start with the same token, {found[n.argmax()]}"
    for hit in _shape(shapes.ZERO)(run):
        yield Finding(hit.message, hit.evidence + same, hit.round, hit.seq_id)


def _never_drafts(run: ExaminedRun) -> Iterator[Finding]:
    """Another engine with a drafter that drafts nothing; for ours see drafter-mute."""
    facts = run.facts
    # vLLM exports these counters only with speculation enabled
    is_counted = facts.record is not None and facts.record.shape == "prometheus"
    if facts.options is not None or (run.rounds["num_draft_tokens"] > 0).any():
        return
    if not run.drafters and not is_counted:
        return
    told = facts.told or {}
    drafted = told.get("num_draft_tokens", told.get("draft_n"))
    tokens = told.get("predicted_n") or int((run.tokens["pos"] >= 0).sum())
    if drafted or tokens < _LEAST_TOKENS or (drafted is None and not run.drafters):
        return
    if _has_unread(run):
        return
    if any(one.told.get("num_draft_tokens") for one in facts.requests or ()):
        return  # unknown for others
    name = f" ({', '.join(run.drafters)})" if run.drafters else ""
    yield Finding(
        f"The server has a drafter{name}, but drafted nothing in {tokens:,.0f} tokens.",
        f"{len(facts.requests or ()):,} requests",
    )


def _has_unread(run: ExaminedRun) -> bool:
    """Whether it has unread lines, which may be about drafts."""
    return any(one.rule == "log-unread" for one in run.facts.observed_findings or ())


def _slower(run: ExaminedRun) -> Iterator[Finding]:
    """Slower than the run's own rounds without a draft, than another run without drafts, or by two
    servers' sums."""
    rounds = run.rounds
    if run.lane:
        return
    yield from observed_hits(run, "slower-than-plain")
    yield from _slower_rows(run)
    drafted, accepted = rounds["num_draft_tokens"], rounds["num_accepted_draft_tokens"]
    ms = _round_ms(run)
    timed = run.is_later & (ms > 0) & (rounds["n_merged"] == MISSING)
    steps = timed & (drafted > 0) & (accepted >= 0) & (rounds["num_emitted"] > 0)
    n = int(steps.sum())
    plain, where = ms[timed & (drafted == 0)], "rounds without a draft"
    other = find_baseline(run.trace, run.run_id) if len(plain) < _LEAST_PLAIN else None
    if other is not None:
        baseline = ExaminedRun(run.trace, other)
        its_ms = _round_ms(baseline)
        plain, where = its_ms[baseline.is_later & (its_ms > 0)], f"run {other + 1}, without drafts"
    if n < _LEAST_TOKENS or len(plain) < _LEAST_PLAIN:
        yield from _slower_by_sums(run)
        return
    per_step, step_ms = float(rounds["num_emitted"][steps].mean()), float(ms[steps].mean())
    plain_ms = float(plain.mean())
    ratio = plain_ms * per_step / step_ms
    parts = (ms[steps], step_ms, n), (plain, plain_ms, len(plain))
    error = ratio * sum(float(one.var()) / (mean**2 * size) for one, mean, size in parts) ** 0.5
    if ratio + _Z * error < 1:
        sums = n, int(drafted[steps].sum()), int(accepted[steps].sum())
        yield from _slower_hit(ratio, per_step, plain_ms, *sums, where)


def _slower_by_sums(run: ExaminedRun) -> Iterator[Finding]:
    """A server's sums with drafts against its sums without, for the same requests."""
    mine, told = _speed(run.facts), run.facts.told or {}
    drafted, accepted = told.get("draft_n"), told.get("draft_n_accepted")
    if mine is None or not drafted or not accepted:
        return
    # if unknown, count every round: each emits one token that was not drafted
    n = int(told.get("num_spec_steps") or max(told["predicted_n"] - 1 - accepted, 1))
    same = _requests(run.facts)
    for other in sorted(run.trace.runs, reverse=True)[:_MOST_RUNS]:
        theirs = run.trace.runs[other]
        speed = None if other == run.run_id else _speed(theirs)
        if speed is None or (theirs.told or {}).get("draft_n") or _requests(theirs) != same:
            continue
        if mine < _SLOWER_BY_SUMS * speed:
            where = f"run {other + 1}, without drafts"
            sums = n, int(drafted), int(accepted)
            yield from _slower_hit(mine / speed, 1 + accepted / n, 1e3 / speed, *sums, where)
        return


def _slower_rows(run: ExaminedRun) -> Iterator[Finding]:
    """Table rows against the only row without acceptance."""
    requests = run.facts.requests or []
    if run.facts.record is None or run.facts.record.shape != "benchmark" or _has_unread(run):
        return
    speeds = [one.told.get("predicted_per_second") for one in requests]
    rates = [one.told.get("draft_acceptance_rate") for one in requests]
    means = [one.told.get("mean_acceptance_length") for one in requests]
    plain = [i for i, two in enumerate(zip(rates, means, strict=True)) if two == (None, None)]
    if len(plain) != 1 or not (without := speeds[plain[0]]):
        return
    for i, (speed, rate) in enumerate(zip(speeds, rates, strict=True)):
        if speed and rate is not None and rate >= _HIGH and speed < _SLOWER_BY_SUMS * without:
            yield Finding(
                f"In row {i + 1} {rate:.0%} of the drafted tokens are accepted, but its tokens "
                f"per second are only {speed / without:.2f} times those of row {plain[0] + 1}, "
                "which has no acceptance rate.",
                f"{speed:g} tokens per second, there {without:g}",
                seq_id=i,
            )


def _speed(facts: RunFacts) -> float | None:
    """Tokens per second reported by another engine, over several requests if all were in one slot
    in sequence; None without a report of sufficient length."""
    told, requests = facts.told or {}, facts.requests or []
    per_second, n = told.get("predicted_per_second"), told.get("predicted_n")
    if not n or n < 2 * _LEAST_TOKENS:
        return None
    times = [one.told.get("predicted_ms") or 0.0 for one in requests]
    slots = {one.slot for one in requests}
    if not per_second and all(times) and len(slots) == 1 and None not in slots:
        per_second = 1e3 * n / sum(times)
    return per_second or None


def _requests(facts: RunFacts) -> list[object]:
    """The requests, their model and engine."""
    asked = [(one.prompt, one.messages) for one in facts.requests or ()]
    model = facts.model or {}
    return [facts.source.engine if facts.source else None, model.get("name"), *asked]


def _slower_hit(
    ratio: float, per_step: float, plain_ms: float, n: int, drafted: int, accepted: int, where: str
) -> Iterator[Finding]:
    """ratio: speed with drafts over speed without. per_step: tokens per step. plain_ms: time per
    token without drafts. n: steps."""
    if accepted < _HIGH * drafted or ratio > _SLOWER:
        return
    step_ms = plain_ms * per_step / ratio
    needed = step_ms / plain_ms - 1
    break_even = needed * n / drafted
    yield Finding(
        f"{accepted / drafted:.0%} of the drafted tokens are accepted, but rounds with drafts "
        f"give only {ratio:.2f} times the tokens per second of decoding without drafts.",
        f"{step_ms:.2f} ms for {per_step:.2f} tokens with a draft of {drafted / n:.1f}, "
        f"{plain_ms:.2f} ms for one in {where}; break-even is at {needed:.2f} accepted tokens per "
        "draft, "
        + (f"an acceptance of {break_even:.2f}" if break_even <= 1 else "more than are drafted"),
    )


def _round_ms(run: ExaminedRun) -> np.ndarray:
    """Time of each round, 0 where unknown: float64 [n]."""
    phases = sum(np.nan_to_num(run.rounds[f"{phase}_ms"]) for phase in PHASES)
    return np.where(np.isfinite(run.rounds["total_ms"]), run.rounds["total_ms"], phases)


_LONGEST = 32
"""Longest repeated n-gram searched for, tokens."""
_LEAST_LOOP, _LEAST_TIMES, _LEAST_ROUNDS = 64, 4, 8
"""Shorter ones may be a table, a banner or a list of zeros."""
_BLANK = -1
"""Id used for every white-space token."""


_Loop = tuple[int, int, int, bool]
"""first, stop, period, blank: tokens first .. stop - 1 repeat the `period` tokens before them;
blank: all are white space."""


def _repeats(run: ExaminedRun) -> Iterator[Finding]:
    if not run.drafts:
        return
    tokens = run.tokens
    emitted = tokens.is_text("kind", *EMITTED_KINDS)
    for seq, rows in tokens.by_sequence(emitted):
        ids, numbers = _identities(run, rows), tokens["round"][rows]
        loop = _first_loop(ids, np.isin(ids, list(_blanks(run, ids))))
        if loop is None:
            continue
        first, stop, period, blank = loop
        start, last = int(numbers[first]), int(numbers[stop - 1])
        if last - start + 1 < _LEAST_ROUNDS:
            continue
        what = "white space"
        if not blank:
            what = f"the same {counted(period, 'token')}"
        goes_on = stop == len(ids)
        yield Finding(
            f"From round {start} {'on' if goes_on else f'to {last}'} the text repeats {what} "
            f"({stop - first} tokens): acceptance there says nothing about the drafter. Before "
            f"that: {_figures(run, seq, 0, start)}.",
            f"{'in the loop' if goes_on else f'rounds {start} to {last}'}: "
            f"{_figures(run, seq, start, last + 1)}; {len(ids) - (stop - first)} of {len(ids)} "
            "tokens are outside of it",
            start,
            seq,
        )


def _identities(run: ExaminedRun, rows: np.ndarray) -> np.ndarray:
    """A number for each token, its id, or one per text if the id is unknown: int64 [n]."""
    ids = run.tokens["token_id"][rows].astype(np.int64)
    return np.where(ids == MISSING, -2 - run.tokens["text"][rows].astype(np.int64), ids)


def _blanks(run: ExaminedRun, ids: np.ndarray) -> Iterator[int]:
    """Ids of white-space tokens."""
    for one in np.unique(ids).tolist():
        piece = run.trace.pieces.get(one, b"")
        if one < 0:
            piece = run.trace.text_pool.decode(np.array([-2 - one]))[0].encode()
        if piece and not piece.strip():
            yield one


def _first_loop(ids: np.ndarray, is_blank: np.ndarray) -> _Loop | None:
    """The first long repetition, with the shortest period if several start together; None without
    any."""
    found = []
    blank = np.where(is_blank, _BLANK, ids)
    for first, stop in _stretches((blank[1:] == _BLANK) & (blank[:-1] == _BLANK)):
        found.append((first + 1, stop + 1, 1, True))
    for period in range(1, min(_LONGEST, len(ids) // _LEAST_TIMES) + 1):
        for first, stop in _stretches(ids[period:] == ids[:-period]):
            if stop - first >= (_LEAST_TIMES - 1) * period:
                found.append((first + period, stop + period, period, False))
    return min(found, key=lambda loop: (loop[0] - loop[2], loop[2]), default=None)


def _stretches(same: np.ndarray) -> Iterator[tuple[int, int]]:
    """Start and end of long runs of True."""
    if np.count_nonzero(same) < _LEAST_LOOP:
        return
    edges = np.flatnonzero(np.diff(same.astype(np.int8), prepend=0, append=0))
    for first, stop in edges.reshape(-1, 2).tolist():
        if stop - first >= _LEAST_LOOP:
            yield first, stop


def _figures(run: ExaminedRun, seq: int, first: int, stop: int) -> str:
    """Acceptance and tokens per round of a sequence in rounds first .. stop - 1."""
    rounds = run.rounds
    here = (rounds["seq_id"] == seq) & run.is_later & observed(rounds["num_accepted_draft_tokens"])
    here &= (rounds["round"] >= first) & (rounds["round"] < stop)
    drafted, accepted, emitted = (
        int(rounds[name][here].sum())
        for name in ("num_draft_tokens", "num_accepted_draft_tokens", "num_emitted")
    )
    if not drafted:
        return "no drafts"
    return (
        f"acceptance {accepted / drafted:.3f} ({accepted} of {drafted}), "
        f"{emitted / int(here.sum()):.2f} tokens per round"
    )


CHECKS: dict[str, Check] = {
    rule: _shape(rule)
    for rule in (
        shapes.ONE_SLOT,
        shapes.ZERO_FROM,
        shapes.AFTER_PARTIAL,
        shapes.WITH_DEPTH,
        shapes.FIRST_ONLY,
        shapes.CLIFF,
        shapes.ALWAYS,
    )
} | {
    shapes.ZERO: _zero,
    "never-drafts": _never_drafts,
    "slower-than-plain": _slower,
    "degenerate-repetition": _repeats,
}
