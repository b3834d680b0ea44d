"""A sequence that changes with its neighbours while they share one pool of attention cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from engine.analysis.findings.rule import LOGITS, WARNING, LaneErrors, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun
from engine.options import RunOptions
from engine.trace.records import EMITTED_KINDS
from engine.trace.run_ref import same_model


def _crosstalk(run: ExaminedRun) -> Iterator[RuleHit]:
    if run.option("kv") != "unified" or len(np.unique(run.rounds["seq_id"])) < 2:
        return
    yield from _in_lane(run) if run.lane else _between_runs(run)


def _in_lane(run: ExaminedRun) -> Iterator[RuleHit]:
    """Beyond the bound, while a lane that differs in the cells alone is within it."""
    errors = LaneErrors.of(run)
    twins = [ExaminedRun(run.trace, i) for i in run.lanes if _is_twin(run, i)]
    if errors is None or not twins:
        return
    rows = run.divergence
    for seq, wrong in rows.by_sequence(errors.logits_are_wrong):
        for twin in twins:
            others = LaneErrors.of(twin)
            if others is None or others.first_wrong(seq) is not None:
                continue
            first = wrong[0]
            yield RuleHit(
                int(rows["round"][first]),
                seq,
                "With unified cells this sequence has other logits than with cells of its own.",
                f"NMSE {rows['nmse'][first]:.1e} at position {rows['pos'][first]}, lane "
                f"{twin.lane!r} is within the bound",
            )
            break


def _between_runs(run: ExaminedRun) -> Iterator[RuleHit]:
    """Another text than the same prompt had in a run with separate cells, all else equal."""
    mine = _texts(run)
    twins = [i for i in range(len(run.trace.runs)) if _is_twin(run, i)]
    found: set[int] = set()
    for other in twins:
        theirs = {
            prompt: (seq, tokens)
            for seq, (prompt, tokens, _) in _texts(ExaminedRun(run.trace, other)).items()
        }
        for seq, (prompt, tokens, rounds) in mine.items():
            if seq in found or prompt not in theirs:
                continue
            twin, expected = theirs[prompt]
            n = min(len(tokens), len(expected))
            differ = np.flatnonzero(tokens[:n] != expected[:n])
            if differ.size:
                found.add(seq)
                yield RuleHit(
                    int(rounds[differ[0]]),
                    seq,
                    f"With unified cells this sequence continues otherwise than in run {other}.",
                    f"same prompt as sequence {twin} of run {other}; token {differ[0]} after the "
                    f"prompt is {tokens[differ[0]]} instead of {expected[differ[0]]}",
                )


def _is_twin(run: ExaminedRun, other: int) -> bool:
    facts = run.trace.runs[other]
    options = facts.options
    return (
        other != run.run_id
        and ("lane" in facts) == bool(run.lane)
        and options is not None
        and options.kv == "per-seq"
        and same_model(facts.model, run.facts.model)
        and _but_cells(options) == _but_cells(run.facts.options)
    )


def _but_cells(options: RunOptions | None) -> dict[str, Any] | None:
    return asdict(options) | {"kv": None, "parallel": None} if options else None


def _texts(run: ExaminedRun) -> dict[int, tuple[tuple[int, ...], np.ndarray, np.ndarray]]:
    """Per sequence its prompt, its emitted tokens and their rounds."""
    tokens = run.tokens
    prompts = {
        seq: tuple(tokens["token_id"][rows].tolist())
        for seq, rows in tokens.by_sequence(tokens.is_text("kind", "prompt"))
    }
    return {
        seq: (prompts.get(seq, ()), tokens["token_id"][rows], tokens["round"][rows])
        for seq, rows in tokens.by_sequence(tokens.is_text("kind", *EMITTED_KINDS))
    }


RULES = (
    Rule(
        "unified-kv-crosstalk",
        WARNING,
        "Cross-talk through unified KV",
        "In one pool every query spans the cells of all sequences, the others masked. Other "
        "occupancy and other batches then change sums, or a mask is wrong.",
        "Use --kv per-seq to isolate sequences, and look whether the first difference is a near "
        "tie.",
        _crosstalk,
        LOGITS,
    ),
)
