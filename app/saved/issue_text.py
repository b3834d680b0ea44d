"""A round of a run as Markdown, for an issue report: what ran, how, and the numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from app.trace_models.position import Position
from app.trace_models.run_notes import FACT
from engine.trace.cell_text import escape_piece
from engine.trace.facts import RunFacts
from engine.trace.run_ref import RunRef
from engine.trace.store import Table, TraceStore
from engine.trace.timings import summary

_TOKEN_COLUMNS = ("pos", "kind", "token_id", "draft_index", "draft_p", "target_p", "target_rank")
_SEVERITIES = ("error", "warning", "info")
_MOST_FINDINGS = 20
_OF_OTHERS = ("requests", "told_timings", "observed_findings", "columns")
"""Facts of other engines' runs that hold prompts, or stand elsewhere in the report."""


def round_in_question(run: RunRef, cursor: Position | None) -> tuple[int, int] | None:
    """Round and sequence that a report is about: the cursor's, that of the gravest finding, or
    the last one; None for a run without rounds."""
    if cursor is not None and cursor.run == run:
        return cursor.round, cursor.seq_id
    store, run_id = run.store, run.run_id
    findings = [f for f in _rows(store.findings, run_id=run_id) if f["round"] is not None]
    findings.sort(key=lambda f: _SEVERITIES.index(f["severity"]))
    if findings and findings[0]["severity"] != "info":
        return findings[0]["round"], findings[0]["seq_id"] or 0
    rounds = _rows(store.rounds, run_id=run_id)
    return (rounds[-1]["round"], rounds[-1]["seq_id"]) if rounds else None


def issue_text(run: RunRef, cursor: Position | None, environment: Mapping[str, str]) -> str:
    """Environment, model, effective options, figures, one round, and findings as Markdown.

    environment: of this machine; that of an opened trace is its own and takes precedence.
    """
    store, run_id, facts = run.store, run.run_id, run.facts
    model = facts.model
    known = {"model", "options", "environment", "summary", FACT, *_OF_OTHERS}
    parts = [
        "### Environment",
        _bullets(facts.environment or environment),
        "### Model",
        _bullets(_mapping(model)) if model else "not recorded",
        "### Run",
        _bullets({k: v for k, v in facts.items() if k not in known}),
        "### Options in effect",
        _block(facts.pick("options")["options"] or _asked(facts)),
        "### Figures",
        _block(facts.summary or summary(store, run_id)),
    ]
    place = round_in_question(run, cursor)
    if place is not None:
        parts += [f"### Round {place[0]}, sequence {place[1]}", _round(store, run_id, *place)]
    parts += ["### Findings", _findings(store, run_id)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _asked(facts: RunFacts) -> list[Any]:
    """What requests to another engine set, without their prompts."""
    return [request.settings for request in facts.requests or ()]


def _round(store: TraceStore, run_id: int, number: int, seq_id: int) -> str:
    key = {"run_id": run_id, "round": number, "seq_id": seq_id}
    rounds = _rows(store.rounds, **key)
    numbers = {
        name: value
        for row in rounds
        for name, value in row.items()
        if name not in key and value not in (None, "")
    }
    tokens = [
        [*(row[name] for name in _TOKEN_COLUMNS), _piece(store, row)]
        for row in _rows(store.tokens, **key)
    ]
    table = _table([*_TOKEN_COLUMNS, "text"], tokens) if tokens else ""
    return "\n\n".join(part for part in (_bullets(numbers), table) if part)


def _findings(store: TraceStore, run_id: int) -> str:
    rows = _rows(store.findings, run_id=run_id)
    lines = [
        f"- **{row['severity']}** {row['rule']}"
        + (f", round {row['round']}" if row["round"] is not None else "")
        + f": {_line(row['message'])} ({_line(row['evidence'])})"
        for row in rows[:_MOST_FINDINGS]
    ]
    if len(rows) > _MOST_FINDINGS:
        lines.append(f"- and {len(rows) - _MOST_FINDINGS} more")
    return "\n".join(lines) or "none"


def _rows(table: Table, **key: int) -> list[dict[str, Any]]:
    n = len(table)
    chosen = np.ones(n, bool)
    for name, value in key.items():
        chosen &= table.column(name, 0, n) == value
    return [table.row(i) for i in np.flatnonzero(chosen).tolist()]


def _piece(store: TraceStore, row: dict[str, Any]) -> str:
    """The bytes of a row of tokens: those it tells itself, else those of its id."""
    piece = row["text"].encode() or store.pieces.get(row["token_id"], b"")
    text = escape_piece(piece).replace("`", "\\x60").replace("|", "\\|")
    return f"`{text}`" if text else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _bullets(values: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name}: {_shown(value)}" for name, value in values.items())


def _table(header: list[str], rows: list[list[Any]]) -> str:
    body = [[*(_shown(cell) for cell in row[:-1]), row[-1]] for row in rows]
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _block(value: Any) -> str:
    return f"```json\n{json.dumps(value, ensure_ascii=False, indent=1, default=str)}\n```"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return _line(str(value))


def _line(text: str) -> str:
    """One line that cannot break a list, a table or a code block."""
    return " ".join(text.split()).replace("|", "\\|").replace("```", "'''")
