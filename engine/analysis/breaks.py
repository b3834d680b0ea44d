"""Break rules: conditions on new rows of the trace that pause a run.

A rule is one line of text:

   depth >= 4              a round undid at least four drafted tokens
   path = restore          a rollback took this path; restore includes restore_depth
   divergence > 1e-4       NMSE of a lane against the reference lane, noise lanes excluded
   acceptance(20) < 0.5    accepted / drafted tokens of a sequence's last 20 steps
   finding                 a finding was raised; `finding = RULE` waits for that one
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from engine.errors import OptionError
from engine.trace.records import MISSING, NOISE, ROLLBACK_PATHS
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

KINDS = ("depth", "path", "divergence", "acceptance", "finding")
EXAMPLES = ("depth >= 4", "path = restore", "divergence > 1e-4", "acceptance(20) < 0.5", "finding")
"""One rule of each kind."""
MOST_STEPS = 1000
"""Longest window of an acceptance rule, steps."""

_FORMS = {
    "depth": re.compile(r"depth\s*>=\s*(?P<value>\d{1,4})"),
    "path": re.compile(r"path\s*==?\s*(?P<name>\w+)"),
    "divergence": re.compile(r"divergence\s*>\s*(?P<value>[0-9.]+(?:e[+-]?\d{1,3})?)"),
    "acceptance": re.compile(r"acceptance\s*\(\s*(?P<steps>\d{1,6})\s*\)\s*<\s*(?P<value>[0-9.]+)"),
    "finding": re.compile(r"finding(?:\s*==?\s*(?P<name>[\w-]+))?"),
}


@dataclass(frozen=True, slots=True)
class BreakRule:
    """One condition. value: bound of depth, divergence and acceptance. name: a path or a finding's
    rule, empty for any. steps: window of an acceptance rule."""

    kind: str
    value: float = 0.0
    name: str = ""
    steps: int = 0

    @classmethod
    def parse(cls, text: str) -> BreakRule:
        """Parse a rule. Raises OptionError that explains the syntax."""
        line = text.strip()
        kind = next((kind for kind in KINDS if line.lower().startswith(kind)), "")
        if not kind:
            raise OptionError(
                f"Break rule {line!r} does not start with a known condition.",
                f"Start it with one of {', '.join(KINDS)}.",
            )
        example = EXAMPLES[KINDS.index(kind)]
        found = _FORMS[kind].fullmatch(line.lower())
        if found is None:
            raise OptionError(f"Break rule {line!r} cannot be read.", f"Write it like: {example}")
        parts = found.groupdict(default="")
        try:
            rule = cls(
                kind,
                float(parts.get("value") or 0),
                parts.get("name", ""),
                int(parts.get("steps") or 0),
            )
        except ValueError as error:
            raise OptionError(
                f"Break rule {line!r} has no number.", f"Write it like: {example}"
            ) from error
        rule._check(line)
        return rule

    def __str__(self) -> str:
        """The rule as `parse` reads it."""
        if self.kind == "depth":
            return f"depth >= {self.value:.0f}"
        if self.kind == "divergence":
            return f"divergence > {self.value:g}"
        if self.kind == "acceptance":
            return f"acceptance({self.steps}) < {self.value:g}"
        return f"{self.kind} = {self.name}" if self.name else self.kind

    def _check(self, line: str) -> None:
        if self.kind == "depth" and self.value < 1:
            raise OptionError(f"Break rule {line!r} stops at every round.", "Use a depth from 1.")
        if self.kind == "path" and self.name not in ROLLBACK_PATHS:
            raise OptionError(
                f"Break rule {line!r} names no rollback path.",
                f"Choose from {', '.join(ROLLBACK_PATHS)}.",
            )
        if self.kind == "acceptance":
            if not 1 <= self.steps <= MOST_STEPS:
                raise OptionError(
                    f"Break rule {line!r} has {self.steps} steps.", f"Use 1 to {MOST_STEPS}."
                )
            if not 0.0 < self.value <= 1.0:
                raise OptionError(
                    f"Break rule {line!r} has a rate outside (0, 1].", "Give a share, such as 0.5."
                )


@dataclass(frozen=True, slots=True)
class BreakHit:
    """Where a rule matched. number: the observed value, formatted. round and seq_id are None for a
    finding about the whole run."""

    rule: BreakRule
    run: RunRef
    round: int | None
    seq_id: int | None
    number: str

    def __str__(self) -> str:
        places = [
            f"{name} {value}"
            for name, value in (("round", self.round), ("sequence", self.seq_id))
            if value is not None
        ]
        return f"{self.rule}: {', '.join([*places, self.number])}"


class BreakWatch:
    """Checks rows added to a trace since its creation, each row once."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store
        self._n_rounds, self._n_divergence = len(store.rounds), len(store.divergence)
        self._n_findings = len(store.findings)
        self._steps: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(
            lambda: deque(maxlen=MOST_STEPS)
        )
        self._low: set[tuple[BreakRule, tuple[int, int]]] = set()

    def check(self, rules: Iterable[BreakRule]) -> BreakHit | None:
        """The first rule of the list that matches a row since the last call, or None.

        An acceptance rule matches when the rate falls below its bound, and again only after the
        rate has recovered.
        """
        store, rules = self._store, tuple(rules)
        rounds = range(self._n_rounds, len(store.rounds))
        divergence = range(self._n_divergence, len(store.divergence))
        findings = range(self._n_findings, len(store.findings))
        self._n_rounds, self._n_divergence = rounds.stop, divergence.stop
        self._n_findings = findings.stop
        rates = list(self._fallen(rounds, [rule for rule in rules if rule.kind == "acceptance"]))
        for rule in rules:
            hits: Iterator[BreakHit]
            if rule.kind in ("depth", "path"):
                hits = self._in_rounds(rule, rounds)
            elif rule.kind == "divergence":
                hits = self._in_divergence(rule, divergence)
            elif rule.kind == "finding":
                hits = self._in_findings(rule, findings)
            else:
                hits = iter([hit for hit in rates if hit.rule == rule])
            if (hit := next(hits, None)) is not None:
                return hit
        return None

    def _in_rounds(self, rule: BreakRule, rows: range) -> Iterator[BreakHit]:
        table = self._store.rounds
        if rule.kind == "depth":
            depths = table.column("rollback_depth", rows.start, rows.stop)
            for i in np.flatnonzero((depths != MISSING) & (depths >= rule.value)).tolist():
                row = table.row(rows.start + i)
                number = f"depth {row['rollback_depth']}"
                if row["n_rs_seq"] is not None:
                    sign = ">" if row["rollback_depth"] > row["n_rs_seq"] else "≤"
                    number += f" {sign} n_rs_seq {row['n_rs_seq']}"
                yield self._hit(rule, row, number)
            return
        paths = (rule.name, "restore_depth") if rule.name == "restore" else (rule.name,)
        for i, path in enumerate(table.texts("rollback_path", rows.start, rows.stop)):
            if path in paths:
                row = table.row(rows.start + i)
                yield self._hit(rule, row, f"path {path}, depth {row['rollback_depth']}")

    def _in_divergence(self, rule: BreakRule, rows: range) -> Iterator[BreakHit]:
        table = self._store.divergence
        nmse = table.column("nmse", rows.start, rows.stop)
        # NaN comes from logits that are not finite
        for i in np.flatnonzero(~(nmse <= rule.value)).tolist():
            row = table.row(rows.start + i)
            if row["lane"].partition(",")[0] == NOISE:
                continue
            size = "not finite" if row["nmse"] is None else f"{row['nmse']:.3g}"
            number = f"NMSE {size} in lane {row['lane']} at position {row['pos']}"
            yield self._hit(rule, row, number)

    def _in_findings(self, rule: BreakRule, rows: range) -> Iterator[BreakHit]:
        for i in rows:
            row = self._store.findings.row(i)
            if rule.name in ("", row["rule"]):
                number = f"{row['severity']} {row['rule']} ({row['evidence']})"
                yield self._hit(rule, row, number)

    def _fallen(self, rows: range, rules: list[BreakRule]) -> Iterator[BreakHit]:
        """Add the drafts of these rounds, and yield a hit where a rate has fallen below a bound."""
        table = self._store.rounds
        drafted = table.column("num_draft_tokens", rows.start, rows.stop)
        for i in np.flatnonzero(drafted > 0).tolist():
            row = table.row(rows.start + i)
            key = (row["run_id"], row["seq_id"])
            steps = self._steps[key]
            steps.append((row["num_draft_tokens"], row["num_accepted_draft_tokens"] or 0))
            for rule in rules:
                if len(steps) < rule.steps:
                    continue
                last = [steps[-1 - i] for i in range(rule.steps)]
                rate = sum(accepted for _, accepted in last) / sum(n for n, _ in last)
                if rate >= rule.value:
                    self._low.discard((rule, key))
                elif (rule, key) not in self._low:
                    self._low.add((rule, key))
                    number = f"acceptance {rate:.3g} of the last {rule.steps} steps"
                    yield self._hit(rule, row, number)

    def _hit(self, rule: BreakRule, row: dict[str, int | None], number: str) -> BreakHit:
        run_id = row["run_id"]
        assert run_id is not None
        return BreakHit(rule, RunRef(self._store, run_id), row["round"], row["seq_id"], number)
