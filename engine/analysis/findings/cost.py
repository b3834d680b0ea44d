"""Cost rules, and model files that change while in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from engine.analysis.findings.run_rows import POLICY, Check, ExaminedRun
from engine.gguf.part_file import WRITTEN
from engine.plain_text import size_text
from engine.trace.facts import FileChangeFacts, Finding

_MIN_ROUNDS = 8
_SERIAL = 0.5
_DOMINATES = 0.25
_OF_CHECKPOINTS = ("save", "restore", "replay")
_OF_TARGET = ("verify", "rollback", *_OF_CHECKPOINTS)


def _concurrency_lost(run: ExaminedRun) -> Iterator[Finding]:
    if run.kind not in ("", POLICY):
        return
    shared, n_seqs = np.unique(run.rounds["round"][run.is_later], return_counts=True)
    shared = shared[n_seqs > 1]
    if len(shared) < _MIN_ROUNDS:
        return
    ubatches = run.ubatches
    verify = ubatches.is_text("purpose", "verify") & np.isin(ubatches["round"], shared)
    together = np.unique(ubatches["round"][verify & (ubatches["n_seqs"] > 1)])
    serial = np.setdiff1d(np.unique(ubatches["round"][verify]), together)
    if len(serial) < _SERIAL * len(shared):
        return
    rows = np.flatnonzero(verify & np.isin(ubatches["round"], serial))
    reasons = Counter(ubatches.texts("reason", rows)).most_common()
    yield Finding(
        f"In {len(serial)} of {len(shared)} rounds of several sequences, each ubatch had one.",
        "reasons of the splits: " + ", ".join(f"{name} {n}" for name, n in reasons),
        round=int(serial[0]),
    )


def _checkpoint_dominates(run: ExaminedRun) -> Iterator[Finding]:
    if "lane_margin" in run.facts:  # a llama.cpp lane: its times include a pipe
        return
    rounds = run.rounds
    restored = rounds.is_text("rollback_path", "restore", "restore_depth")
    if restored.sum() < _MIN_ROUNDS:
        return
    ms = {name: float(np.nansum(rounds[f"{name}_ms"][run.is_later])) for name in _OF_TARGET}
    share = sum(ms[name] for name in _OF_CHECKPOINTS) / max(sum(ms.values()), 1e-9)
    if share > _DOMINATES:
        saved = rounds["checkpoint_bytes"]
        yield Finding(
            f"Checkpoints take {share:.0%} of the target's time.",
            ", ".join(f"{name} {ms[name]:.1f} ms" for name in _OF_CHECKPOINTS)
            + f", verify {ms['verify']:.1f} ms; {int((saved > 0).sum())} saved with up to "
            f"{size_text(saved.max())}, {int(restored.sum())} rounds restored",
            round=int(rounds["round"][np.argmax(restored)]),
        )


def _planes_exceed_weights(run: ExaminedRun) -> Iterator[Finding]:
    planes, weights = run.facts.snapshot_bytes, run.facts.weight_bytes
    if planes and weights and planes > weights:
        yield Finding(
            f"Snapshots take {planes / weights:.1f} times the memory of the weights.",
            f"{size_text(planes)} of snapshots for n_rs_seq {run.facts.n_rs_seq} and "
            f"{run.option('parallel')} sequences, {size_text(weights)} of weights",
        )


def _mapped_changed(run: ExaminedRun) -> Iterator[Finding]:
    found = [one for one in _changes(run) if _is_harmful(one)]
    if found:
        yield Finding(
            f"The file {_names(found)} changed{_when(found[0])}: later figures are meaningless.",
            "weights are mapped from the file",
            round=found[0].round,
        )


def _file_differs(run: ExaminedRun) -> Iterator[Finding]:
    found = [one for one in _changes(run) if not _is_harmful(one)]
    if found:
        yield Finding(
            f"The file {_names(found)} on the disk is no longer the one that this run used.",
            f"{found[0].change}{_when(found[0])}; the run used the weights of the earlier file",
            round=found[0].round,
        )


def _changes(run: ExaminedRun) -> list[FileChangeFacts]:
    return run.facts.file_changes or []


def _is_harmful(one: FileChangeFacts) -> bool:
    return one.mapped and one.change == WRITTEN


def _names(found: list[FileChangeFacts]) -> str:
    return ", ".join(dict.fromkeys(one.file for one in found))


def _when(one: FileChangeFacts) -> str:
    for number, text in ((one.round, "at"), (one.after, "after")):
        if number is not None:
            return f" {text} round {number}"
    return ""


CHECKS: dict[str, Check] = {
    "concurrency-lost": _concurrency_lost,
    "checkpoint-dominates": _checkpoint_dominates,
    "planes-exceed-weights": _planes_exceed_weights,
    "model-file-changed": _mapped_changed,
    "model-file-differs": _file_differs,
}
