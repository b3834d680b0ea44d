"""Rules about runs of other engines, reprocessed prompts, and rescored tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import partial

import numpy as np

from engine.analysis.findings.run_rows import Check, ExaminedRun, observed
from engine.trace.facts import ChangedToken, Finding, RescoredSequence
from engine.trace.prompt_reuse import PromptReuseRecord, ReuseSource, WhyProcessed


def observed_hits(run: ExaminedRun, rule: str) -> Iterator[Finding]:
    """The first reported finding of a rule for each sequence of a run."""
    found: dict[int | None, Finding] = {}
    for one in run.facts.observed_findings or ():
        if one.rule == rule:
            found.setdefault(one.seq_id, one)
    yield from found.values()


def _checkpoint_boundary(run: ExaminedRun) -> Iterator[Finding]:
    for record in run.facts.prompt_reuse or ():
        wrong = [one for one in record.created if one.n_tokens != one.state_tokens]
        if wrong:
            first = wrong[0]
            yield Finding(
                f"A context checkpoint is stored for {first.n_tokens:,} tokens, and was saved "
                f"after {first.state_tokens:,} of the prompt.",
                f"{len(wrong)} of {len(record.created)} checkpoints saved for this prompt of "
                f"{record.n_prompt:,} tokens",
                seq_id=record.seq_id,
            )


def _checkpoint_invalidated(run: ExaminedRun) -> Iterator[Finding]:
    for record in run.facts.prompt_reuse or ():
        lost = [at for at in record.usable if at > record.n_reused]
        if not lost:
            continue
        at = max(lost)
        times = _times_processed(run, record, at - 1)
        yield Finding(
            f"{at - record.n_reused:,} tokens were processed again, because a usable context "
            f"checkpoint at {at:,} was erased.",
            f"the texts have {record.n_common:,} tokens in common; erased: "
            f"{', '.join(f'{n:,}' for n in sorted(lost))}; processed {times} times by now",
            seq_id=record.seq_id,
        )


def _times_processed(run: ExaminedRun, record: PromptReuseRecord, token: int) -> int:
    """How often a token has been processed in this run and the runs before it that found the same
    text in the slot, back to the first one."""
    times = 1
    for run_id in range(run.run_id - 1, -1, -1):
        earlier = [r for r in run.trace.runs[run_id].prompt_reuse or () if r.slot == record.slot]
        if len(earlier) != 1:
            break
        parts = [p for p in earlier[0].parts if p.start <= token < p.stop]
        times += len(parts)
        if earlier[0].n_common <= token:
            break
    return times


def _rollback_twice(run: ExaminedRun) -> Iterator[Finding]:
    for record in run.facts.prompt_reuse or ():
        state = record.state_tokens
        if record.source is not ReuseSource.ROLLBACK or state is None or not record.depth:
            continue
        if record.n_reused - state == record.depth:
            yield Finding(
                f"The recurrent state was rolled back by {record.depth:,} tokens twice.",
                f"the prompt continues at token {record.n_reused:,}, the state has {state:,}, KV "
                f"cells {record.cell_tokens} tokens; {record.n_held:,} were in memory before",
                seq_id=record.seq_id,
            )


def _drafter_carried(run: ExaminedRun) -> Iterator[Finding]:
    for record in run.facts.prompt_reuse or ():
        carried = {name: n for name, n in record.drafters.items() if n > record.n_reused}
        for name, n in carried.items():
            yield Finding(
                f"{name} has {n:,} tokens of the slot's earlier text, of which only "
                f"{record.n_reused:,} are in this prompt.",
                f"slot {record.slot}; {n - record.n_reused:,} tokens are of another prompt",
                seq_id=record.seq_id,
            )
            break


_LEAST_AGAIN = 32
"""Fewer tokens are not reported."""


def _processed_again(run: ExaminedRun) -> Iterator[Finding]:
    """From a server's log or replies, else from our own engine's records."""
    said = list(observed_hits(run, "prompt-processed-again"))
    yield from said
    named = {hit.seq_id for hit in said}
    if run.facts.prompt_reuse is None:
        yield from (hit for hit in _repeated(run) if hit.seq_id not in named)
    for record in () if named else run.facts.prompt_reuse or ():
        lost = [part for part in record.parts if part.why in _LOST]
        n = sum(part.stop - part.start for part in lost)
        if n < max(_LEAST_AGAIN, record.n_common // 4):
            continue
        held = ", ".join(f"{at:,}" for at, _ in record.held) or "none"
        yield Finding(
            f"{record.n_common:,} of the prompt's {record.n_prompt:,} tokens were in memory, "
            f"{record.n_reused:,} were reused and {n:,} processed again, because "
            f"{lost[0].why.sentence}.",
            f"memory had {record.n_held:,} tokens, context checkpoints at {held}",
            seq_id=record.seq_id,
        )


def _repeated(run: ExaminedRun) -> Iterator[Finding]:
    """Requests to a server that repeat the messages of an earlier one but reused little of its
    prompt. Only the server knows why."""
    known: dict[str, tuple[int, int]] = {}
    for number, one in enumerate(run.facts.requests or ()):
        if not one.messages:
            continue
        cached, processed = (one.told.get(name) for name in ("cache_n", "prompt_n"))
        keys, digest = [], hashlib.sha256()
        for message in one.messages:
            digest.update(json.dumps(message, sort_keys=True).encode())
            keys.append(digest.hexdigest())
        if cached is None or processed is None:
            continue
        n = int(cached + processed)
        earlier = next((known[key] for key in reversed(keys) if key in known), None)
        known[keys[-1]] = number, n
        if earlier is None or one.settings.get("cache_prompt") is False:
            continue
        again = min(earlier[1], n) - int(cached)
        if again < max(2 * _LEAST_AGAIN, earlier[1] // 2):
            continue
        yield Finding(
            f"Request {number + 1} starts with the messages of request {earlier[0] + 1}, whose "
            f"prompt had {earlier[1]:,} tokens, but only {int(cached):,} of its {n:,} tokens were "
            "reused.",
            f"about {again:,} tokens processed again; the server's log shows why",
            seq_id=next(iter(one.seq_ids), None),
        )


_LOST = (
    WhyProcessed.BEHIND_CHECKPOINT,
    WhyProcessed.NO_CHECKPOINT,
    WhyProcessed.EVICTED,
    WhyProcessed.OFF,
)


TEXT_CHANGED = "text-changed"


def _text_changed(run: ExaminedRun) -> Iterator[Finding]:
    """The first token of each sequence that differs from the target's choice."""
    rescored = run.facts.rescored
    if rescored is None:
        return
    for sequence in rescored.sequences:
        changed = sequence.changed
        if changed is None:
            continue
        drafted = (run.rounds["num_draft_tokens"] > 0).any()
        yield Finding(
            ("Speculation changed the text: " if drafted else "The text is not the target's: ")
            + f"the token at position {changed.pos} is "
            + ("not what the target chooses" if sequence.greedy else "not one that it can sample")
            + " there.",
            "; ".join(_evidence(run, sequence, changed, rescored.noise)),
            changed.round,
            sequence.seq_id,
        )


def _evidence(
    run: ExaminedRun, sequence: RescoredSequence, changed: ChangedToken, noise: float | None
) -> Iterator[str]:
    yield (
        f"{sequence.n_changed} of {sequence.n_tokens} tokens; the first, "
        f"{changed.kind} {changed.token_id} of rank {changed.rank}, "
        f"p {changed.p:.3g}, for {changed.best_id}, p {changed.best_p:.3g}"
    )
    measured = f", noise changes such a gap by up to {noise:.2g}" if noise is not None else ""
    yield (
        f"its logit {changed.gap:.3g} below the best, top-2 gap {changed.top2_gap:.3g}{measured}"
    )
    rounds, seq_id, number = run.rounds, sequence.seq_id, changed.round
    mine = rounds["seq_id"] == seq_id
    undone = np.flatnonzero(mine & (rounds["rollback_depth"] > 0) & (rounds["round"] < number))
    if len(undone):
        last = undone[-1:]
        (path,) = rounds.texts("rollback_path", last)
        depth = f"depth {rounds['rollback_depth'][last[0]]}"
        by = f" by {path}" if path else ""
        yield f"after the rollback of round {rounds['round'][last[0]]}, {depth}{by}"
    else:
        yield "no rollback before it"
    width = rounds["verify_width"][mine & (rounds["round"] == number)]
    if len(width) and observed(width).all():
        yield f"chosen in a pass of width {width[0]}"


CHECKS: dict[str, Check] = {
    rule: partial(observed_hits, rule=rule)
    for rule in (
        "counters-contradict",
        "counters-differ",
        "log-of-another-run",
        "log-lines-missing",
        "log-unread",
        "not-recorded",
        "stream-cut",
        "stream-unreadable",
    )
} | {
    "prompt-processed-again": _processed_again,
    "checkpoint-boundary": _checkpoint_boundary,
    "checkpoint-invalidated": _checkpoint_invalidated,
    "rollback-twice": _rollback_twice,
    "drafter-carried": _drafter_carried,
    TEXT_CHANGED: _text_changed,
}
