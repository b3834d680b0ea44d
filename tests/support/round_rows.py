"""Rows of the rounds table by hand: what rules read, with only the columns that matter."""

from __future__ import annotations

from typing import Any

from engine.analysis.findings.check import find
from engine.trace.facts import Finding
from engine.trace.store import TraceStore

SPEC = {"types": ["draft-mtp"], "n_max": 3, "n_min": 0, "p_min": 0.0}
GREEDY = {"temp": 0.0, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 42}


def new_run(store: TraceStore, lane: str = "", **facts: Any) -> int:
    """A run with options; those given replace the plain ones."""
    options = {
        "kv": "per-seq",
        "parallel": 1,
        "replay": "trust",
        "spec": SPEC,
        "sampler": GREEDY,
        **facts.pop("options", {}),
    }
    return store.begin_run({"options": options, **({"lane": lane} if lane else {}), **facts})


def add_round(store: TraceStore, number: int, **columns: Any) -> None:
    """A clean round without draft, changed by the columns given; round 0 is the prompt."""
    plain: dict[str, Any] = {
        "run_id": 0,
        "seq_id": 0,
        "num_draft_tokens": 0,
        "num_accepted_draft_tokens": 0,
        "num_emitted": 1,
        "stop_kind": "target",
        "rollback_depth": 0,
        "rollback_path": "none",
        "verify_width": 1,
        "kv_cells_duplicate": 0,
        "replay_index": 0,
    }
    if number == 0:
        plain |= {"num_draft_tokens": None, "num_accepted_draft_tokens": None}
    row = plain | columns
    row.setdefault("memory_rollback", row["rollback_depth"])
    store.rounds.append(**row, round=number)


def add_draft(store: TraceStore, number: int, drafted: int, accepted: int, **columns: Any) -> None:
    """A clean round with a draft, rolled back by its depth."""
    depth = drafted - accepted
    clean = {
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "num_emitted": accepted + 1,
        "stop_kind": "replacement" if depth else "bonus",
        "rollback_depth": depth,
        "rollback_path": "seq_rm" if depth else "none",
        "rs_idx_after": depth,
        "valid_depth": drafted,
        "verify_width": drafted + 1,
    }
    add_round(store, number, **clean | columns)


def found(store: TraceStore, rule: str) -> list[Finding]:
    return [finding for finding in find(store) if finding.rule == rule]


def serious(findings: list[Finding]) -> list[tuple[str, int, int | None]]:
    """Rule, run and round of everything that is not info."""
    return [(f.rule, f.run_id, f.round) for f in findings if f.severity != "info"]
