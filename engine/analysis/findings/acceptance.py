"""Rules about low acceptance: the shapes of engine.analysis.acceptance and what usually makes each,
servers that draft nothing, and drafts that cost more time than they save."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from engine.analysis.acceptance import shapes
from engine.analysis.baseline import find_baseline
from engine.analysis.findings.rule import ACCEPTANCE, INFO, WARNING, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun
from engine.trace.facts import RunFacts
from engine.trace.records import MISSING, PHASES

_LEAST_TOKENS = 32
_LEAST_PLAIN = 16
_HIGH = 0.5
_SLOWER, _SLOWER_BY_SUMS, _Z = 0.97, 0.9, 3.0
_MOST_RUNS = 64


def _shape(rule: str) -> Callable[[ExaminedRun], Iterator[RuleHit]]:
    def check(run: ExaminedRun) -> Iterator[RuleHit]:
        for one in run.acceptance_shapes:
            if one.rule == rule:
                yield RuleHit(one.round, one.seq_id, one.message, one.evidence + _setting(run))

    return check


def _setting(run: ExaminedRun) -> str:
    """The temperature, on which acceptance depends."""
    temperature = run.option("sampler", "temp")
    return "" if temperature is None else f"; temperature {temperature:g}"


def _zero(run: ExaminedRun) -> Iterator[RuleHit]:
    """With what the drafts themselves are, where they are known."""
    tokens = run.tokens
    drafted = tokens.is_text("kind", "accepted", "rejected") & (tokens["draft_index"] == 0)
    ids = tokens["token_id"][drafted & (tokens["token_id"] != MISSING)]
    same = ""
    if ids.size >= _LEAST_TOKENS:
        found, n = np.unique(ids, return_counts=True)
        if n.max() >= 0.9 * ids.size:
            same = f"; {n.max():,} of them begin with the same token, {found[n.argmax()]}"
    for hit in _shape(shapes.ZERO)(run):
        yield RuleHit(hit.round, hit.seq_id, hit.message, hit.evidence + same)


def _never_drafts(run: ExaminedRun) -> Iterator[RuleHit]:
    """Another engine that has a drafter and drafts nothing; our own says why (drafter-mute)."""
    facts = run.facts
    # vLLM has these counters only where speculation is on
    is_counted = facts.record is not None and facts.record.shape == "prometheus"
    if facts.options is not None or (run.rounds["num_draft_tokens"] > 0).any():
        return
    if not run.drafters and not is_counted:
        return
    told = facts.told or {}
    drafted = told.get("num_draft_tokens", told.get("draft_n"))
    tokens = told.get("predicted_n") or int((run.tokens["pos"] >= 0).sum())
    if drafted or tokens < _LEAST_TOKENS:
        return
    if any(one.told.get("num_draft_tokens") for one in facts.requests or ()):
        return  # of others it is not known
    name = f" ({', '.join(run.drafters)})" if run.drafters else ""
    yield RuleHit(
        None,
        None,
        f"The server has a drafter{name} and drafted nothing in {tokens:,.0f} tokens.",
        f"{len(facts.requests or ()):,} requests",
    )


def _slower(run: ExaminedRun) -> Iterator[RuleHit]:
    """By the run's own rounds without a draft, by another run without drafts, or by two servers'
    sums."""
    rounds = run.rounds
    if run.lane:
        return
    drafted, accepted = rounds["num_draft_tokens"], rounds["num_accepted_draft_tokens"]
    ms = _round_ms(run)
    timed = run.is_later & (ms > 0) & (rounds["n_merged"] == MISSING)
    steps = timed & (drafted > 0) & (accepted >= 0) & (rounds["num_emitted"] > 0)
    n = int(steps.sum())
    if n < _LEAST_TOKENS:
        yield from _slower_by_sums(run)
        return
    plain, where = ms[timed & (drafted == 0)], "rounds without a draft"
    other = find_baseline(run.trace, run.run_id) if len(plain) < _LEAST_PLAIN else None
    if other is not None:
        baseline = ExaminedRun(run.trace, other)
        its_ms = _round_ms(baseline)
        plain, where = its_ms[baseline.is_later & (its_ms > 0)], f"run {other + 1}, without drafts"
    if len(plain) < _LEAST_PLAIN:
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


def _slower_by_sums(run: ExaminedRun) -> Iterator[RuleHit]:
    """One server's sums with drafts against its sums without, of the same requests."""
    mine, told = _speed(run.facts), run.facts.told or {}
    drafted, accepted = told.get("draft_n"), told.get("draft_n_accepted")
    if mine is None or not drafted or not accepted:
        return
    # without their number, all rounds are counted: each has one token that was not drafted
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


def _speed(facts: RunFacts) -> float | None:
    """Tokens per second as another engine reported them; None without a report of some length."""
    told = facts.told or {}
    per_second, n = told.get("predicted_per_second"), told.get("predicted_n")
    return per_second if per_second and n and n >= 2 * _LEAST_TOKENS else None


def _requests(facts: RunFacts) -> list[object]:
    """What was asked of which model of which engine."""
    asked = [(one.prompt, one.messages) for one in facts.requests or ()]
    model = facts.model or {}
    return [facts.source.engine if facts.source else None, model.get("name"), *asked]


def _slower_hit(
    ratio: float, per_step: float, plain_ms: float, n: int, drafted: int, accepted: int, where: str
) -> Iterator[RuleHit]:
    """ratio: speed with drafts over speed without. per_step: tokens of a step. plain_ms: time of
    one token without. n: steps."""
    if accepted < _HIGH * drafted or ratio > _SLOWER:
        return
    step_ms = plain_ms * per_step / ratio
    needed = step_ms / plain_ms - 1
    break_even = needed * n / drafted
    yield RuleHit(
        None,
        None,
        f"{accepted / drafted:.0%} of the drafted tokens are accepted, and rounds with drafts "
        f"still give only {ratio:.2f} times the tokens per second of decoding without.",
        f"{step_ms:.2f} ms for {per_step:.2f} tokens with a draft of {drafted / n:.1f}, "
        f"{plain_ms:.2f} ms for one in {where}; break-even is at {needed:.2f} accepted tokens a "
        "draft, "
        + (f"an acceptance of {break_even:.2f}" if break_even <= 1 else "more than are drafted"),
    )


def _round_ms(run: ExaminedRun) -> np.ndarray:
    """Time of each round, 0 where unknown: float64 [n]."""
    phases = sum(np.nan_to_num(run.rounds[f"{phase}_ms"]) for phase in PHASES)
    return np.where(np.isfinite(run.rounds["total_ms"]), run.rounds["total_ms"], phases)


def _rule(
    rule_id: str,
    title: str,
    means: str,
    suggestion: str,
    check: Callable[[ExaminedRun], Iterator[RuleHit]] | None = None,
    severity: str = WARNING,
) -> Rule:
    part = ACCEPTANCE if severity == WARNING else ""
    return Rule(rule_id, severity, title, means, suggestion, check or _shape(rule_id), part)


RULES = (
    _rule(
        shapes.ZERO,
        "Acceptance at chance",
        "The drafter knows nothing of the text: its first token is right no more often than by "
        "chance.",
        "Usual causes: hidden rows that are NaN, zero, of another layer or of the wrong side of "
        "the norm; a head or draft model with missing weights or another vocabulary; drafts "
        "verified one position off. The same token every time means dead weights or rows, "
        "sensible text an offset. Drafts that are looked up find nothing in a text that does not "
        "repeat.",
        _zero,
    ),
    _rule(
        shapes.ONE_SLOT,
        "One slot without acceptance",
        "At equal settings one slot or sequence is at chance, and the others are not.",
        "Usual causes: the drafter's state of that slot was never set, is another slot's, or is "
        "read by index in the batch instead of sequence; a buffer with room for one sequence. Send "
        "the same prompt to each slot.",
    ),
    _rule(
        shapes.ZERO_FROM,
        "Acceptance ends",
        "From one place on drafts are no better than chance.",
        "Usual causes at a position: the drafter's context, window or ring is full, or rows of a "
        "later ubatch are not kept. At a time: its state was lost by a context shift, a cleared "
        "sequence or a failed copy. Compare the place with the drafter's context length and the "
        "batch sizes, and look what the log says there.",
    ),
    _rule(
        shapes.AFTER_PARTIAL,
        "Acceptance is lost after a rejection",
        "The round after a partial acceptance, or after any rejection, is drafted from something "
        "stale; a full acceptance mends it.",
        "Usual causes: the row of the batch's last token is taken instead of the last accepted "
        "one's, the drafter's state was not rolled back, or the number of rows is left from the "
        "draft before. Take row k of the verify batch for k accepted tokens, and cut the drafter's "
        "memory there.",
    ),
    _rule(
        shapes.WITH_DEPTH,
        "Acceptance falls with context depth",
        "Acceptance goes down steadily as the context grows, more than easy and hard text explain.",
        "Usual causes: the drafter's positions drift from the target's, its window is shorter than "
        "the text, its RoPE scaling is another, or rejected tokens pile up in its memory. Compare "
        "positions of drafter and target after some hundred tokens.",
    ),
    _rule(
        shapes.FIRST_ONLY,
        "Only the first drafted token is accepted",
        "What is drafted after the drafter's own token is never right.",
        "Usual causes: later steps read the row of the first one, a hidden row from the wrong side "
        "of the norm, a position that is not advanced, or a head that was trained for one token. "
        "Draft one token (n_max 1) until it is mended.",
    ),
    _rule(
        shapes.CLIFF,
        "Acceptance falls off within the draft",
        "Up to an index of the draft tokens are accepted as usual, from it on hardly any.",
        "Usual causes: a buffer, mask or block for that many steps, or a row that is not advanced "
        "from there on. Set n_max to the index named, and look for what has that size.",
    ),
    _rule(
        shapes.ALWAYS,
        "Everything is accepted",
        "Not one drafted token was rejected.",
        "Usual causes: the text repeats itself, the drafter is the target itself, or drafts are "
        "not compared with the target's choice. Compare the text with a run without speculation.",
        severity=INFO,
    ),
    _rule(
        "never-drafts",
        "Speculation is on and drafts nothing",
        "The server has a drafter, and no draft was verified.",
        "Usual causes: the draft file or head could not be loaded, the request's settings forbid "
        "drafts (grammar, images, several answers), p_min or n_min is never met, no n-gram recurs. "
        "Look in the server's log for a line that speculation is off.",
        _never_drafts,
    ),
    _rule(
        "slower-than-plain",
        "Slower although drafts are accepted",
        "A round with a draft takes longer than the rounds without that would give as many tokens.",
        "Usual causes: verification of several tokens is dear (experts, several sequences, CPU, "
        "restored checkpoints), or the drafter is. Draft fewer tokens, use a smaller drafter or a "
        "policy without restores; `draftscope tune` looks for the best n_max.",
        _slower,
    ),
)
