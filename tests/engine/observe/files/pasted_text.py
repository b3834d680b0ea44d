"""What an import makes of a text that was pasted into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.analysis.findings.check import find, record_findings
from engine.observe.files.importing import import_file
from engine.trace.store import TraceStore

SUMS = ("predicted_n", "num_spec_steps", "draft_n", "draft_n_accepted")


def imported(tmp_path: Path, text: str) -> TraceStore:
    path = tmp_path / "pasted.txt"
    path.write_text(text)
    store = TraceStore()
    record_findings(store, import_file(store, path))
    return store


def sums(store: TraceStore) -> list[tuple[Any, ...]]:
    """Of each request."""
    return [tuple(one["told"].get(n) for n in SUMS) for one in store.runs[0]["requests"]]


def rules(store: TraceStore) -> list[str]:
    return [finding.rule for finding in find(store)]


def read(text: str, tmp_path: Path) -> TraceStore:
    path = tmp_path / "pasted.txt"
    path.write_text(text)
    store = TraceStore()
    import_file(store, path)
    assert not find(store)
    return store
