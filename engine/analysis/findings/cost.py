"""Rules about what speculation costs: time of checkpoints, bytes of planes, lost concurrency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from engine.analysis.findings.rule import INFO, WARNING, Rule, RuleHit
from engine.analysis.findings.run_rows import POLICY, ExaminedRun

_MIN_ROUNDS = 8
_SERIAL = 0.5
_DOMINATES = 0.25
_OF_CHECKPOINTS = ("save", "restore", "replay")
_OF_TARGET = ("verify", "rollback", *_OF_CHECKPOINTS)


def _concurrency_lost(run: ExaminedRun) -> Iterator[RuleHit]:
    if run.kind not in ("", POLICY):
        return
    shared, n_seqs = np.unique(run.rounds["round"][run.is_later], return_counts=True)
    shared = shared[n_seqs > 1]
    ubatches = run.ubatches
    verify = ubatches.is_text("purpose", "verify") & np.isin(ubatches["round"], shared)
    together = np.unique(ubatches["round"][verify & (ubatches["n_seqs"] > 1)])
    serial = np.setdiff1d(np.unique(ubatches["round"][verify]), together)
    if len(shared) < _MIN_ROUNDS or len(serial) < _SERIAL * len(shared):
        return
    rows = np.flatnonzero(verify & np.isin(ubatches["round"], serial))
    reasons = Counter(ubatches.texts("reason", rows)).most_common()
    yield RuleHit(
        int(serial[0]),
        None,
        f"In {len(serial)} of {len(shared)} rounds of several sequences each ubatch held one.",
        "reasons of the splits: " + ", ".join(f"{name} {n}" for name, n in reasons),
    )


def _checkpoint_dominates(run: ExaminedRun) -> Iterator[RuleHit]:
    if "lane_margin" in run.facts:  # a lane of llama.cpp: its times contain those of a pipe
        return
    rounds = run.rounds
    restored = rounds.is_text("rollback_path", "restore", "restore_depth")
    if restored.sum() < _MIN_ROUNDS:
        return
    ms = {name: float(np.nansum(rounds[f"{name}_ms"][run.is_later])) for name in _OF_TARGET}
    share = sum(ms[name] for name in _OF_CHECKPOINTS) / max(sum(ms.values()), 1e-9)
    if share > _DOMINATES:
        saved = rounds["checkpoint_bytes"]
        yield RuleHit(
            int(rounds["round"][np.argmax(restored)]),
            None,
            f"Checkpoints take {share:.0%} of the target's time.",
            ", ".join(f"{name} {ms[name]:.1f} ms" for name in _OF_CHECKPOINTS)
            + f", verify {ms['verify']:.1f} ms; {int((saved > 0).sum())} saved with up to "
            f"{saved.max()} bytes, {int(restored.sum())} rounds restored",
        )


def _planes_exceed_weights(run: ExaminedRun) -> Iterator[RuleHit]:
    planes, weights = run.facts.snapshot_bytes, run.facts.weight_bytes
    if planes and weights and planes > weights:
        yield RuleHit(
            None,
            None,
            f"Snapshots take {planes / weights:.1f} times the memory of the weights.",
            f"{planes} bytes of snapshots for n_rs_seq {run.facts.n_rs_seq} and "
            f"{run.option('parallel')} sequences, {weights} bytes of weights",
        )


RULES = (
    Rule(
        "concurrency-lost",
        WARNING,
        "Concurrency lost",
        "Sequences run at the same time but are decoded one after the other, so that N of them "
        "are hardly faster than one.",
        "Use --split equal and an -ub above the sum of the verify batches; where the reason is "
        "padding beyond the snapshots, raise --n-rs-seq to the longest draft or leave --rollback "
        "checkpoint.",
        _concurrency_lost,
    ),
    Rule(
        "checkpoint-dominates",
        INFO,
        "Checkpoints dominate",
        "Saving, restoring and decoding accepted tokens again costs as much as verification.",
        "Use a policy with snapshots (--rollback ring or replay), keep checkpoints on the device, "
        "or draft less.",
        _checkpoint_dominates,
    ),
    Rule(
        "planes-exceed-weights",
        INFO,
        "More memory in snapshots than in weights",
        "Every snapshot holds all recurrent layers of a sequence, (1 + n_rs_seq) times the "
        "number of sequences.",
        "Lower --n-rs-seq or --spec-draft-n-max, or use --rollback replay, which logs tokens "
        "instead of states.",
        _planes_exceed_weights,
    ),
)
