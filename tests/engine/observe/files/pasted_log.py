"""What an import makes of a log, and parts of logs."""

from __future__ import annotations

from typing import Any

from engine.analysis.findings.check import find, record_findings
from engine.observe.files.log_run import fill_log
from engine.trace.store import TraceStore


def read(text: str | bytes) -> TraceStore:
    store = TraceStore()
    record_findings(store, fill_log(store, text, "pasted.log"))
    return store


def sums(store: TraceStore, run: int = 0) -> tuple[Any, ...]:
    summary = store.runs[run]["summary"]
    names = ("predicted_n", "draft_n", "draft_n_accepted", "num_spec_steps")
    return tuple(summary.get(name) for name in names)


def told(store: TraceStore, *names: str, run: int = 0) -> list[tuple[Any, ...]]:
    """Figures of each request."""
    return [tuple(one["told"].get(name) for name in names) for one in store.runs[run]["requests"]]


def rules(store: TraceStore) -> list[str]:
    return [finding.rule for finding in find(store)]


COUNTS = ("prompt_n", "predicted_n", "draft_n", "draft_n_accepted", "num_spec_steps")
TIMES = (
    "{head}prompt eval time =     120.50 ms /    40 tokens (    3.01 ms per token)\n"
    "{head}       eval time =    2000.00 ms /   101 tokens (   19.80 ms per token)\n"
)


def with_times(rest: str, head: str = "1.02.003.004 I slot print_timing: id  1 | task 7 | ") -> str:
    return TIMES.format(head=head) + rest.format(head=head)


ROWS = "  {name:<18} pred={p:>4} draft={d:>4} acc={a:>4} rate={r} tok/s={s}\n"
