"""The report on one run, from its trace alone, so that an opened trace has one too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.findings.check import recorded
from engine.report.common import (
    decimals,
    findings_section,
    machine_section,
    model_section,
    name_of,
    repeat_section,
    run_command,
    settings_section,
    shown,
)
from engine.report.headline import headline
from engine.report.parts import Facts, Note, Part, Plot, Report, Section, Table, Tokens
from engine.size_text import size_text
from engine.trace.records import GHOST_KINDS, PHASES
from engine.trace.run_columns import RunColumns
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from engine.trace.timings import acceptance, summary, timings

_MOST_PIECES = 4000
"""Tokens of all sequences whose text is shown."""


def run_report(run: RunRef, environment: Mapping[str, Any], command: Sequence[str] = ()) -> Report:
    """environment: of this machine; what the run's facts tell of theirs goes before it.

    command: the words it was started with; without them a command is made of its options.
    """
    store, facts = run.store, run.facts
    figures = summary(store, run.run_id)
    texts = _texts(run)
    options = facts.get("options")
    if not command and options:
        command = run_command(facts.get("model"), options, [text for text, _ in texts])
    known = {key: shown(facts[key]) for key in ("error", "chat", "stops") if facts.get(key)}
    mine = [one for one in recorded(store) if one.run_id == run.run_id]
    return Report(
        f"Speculative decoding of {name_of(facts)}",
        headline(figures),
        [
            Section("Figures", [Facts(_figures(figures) | known)]),
            Section("Drafts", list(_drafts(figures))),
            Section("Time", list(_time(figures))),
            Section("Sequences", [_sequences(store, run.run_id)] if len(texts) > 1 else []),
            findings_section(mine),
            Section("Text", _shown_texts(texts)),
            settings_section(options),
            model_section(facts.get("model"), _of_model(facts)),
            machine_section(
                facts.get("environment") or environment,
                {
                    name: facts[name]
                    for name in ("device", "compute", "threads")
                    if facts.get(name) is not None
                },
            ),
            repeat_section(command),
        ],
    )


def _figures(figures: Mapping[str, Any]) -> dict[str, str]:
    return {
        "generated tokens": shown(figures["predicted_n"]),
        "tokens per second": decimals(figures["predicted_per_second"], 1),
        "prompt tokens": shown(figures["prompt_n"]),
        "prompt tokens per second": decimals(figures["prompt_per_second"], 1),
        "steps with a draft": shown(figures["num_spec_steps"]),
        "drafted": shown(figures.get("draft_n", 0)),
        "accepted": shown(figures.get("draft_n_accepted", 0)),
        "acceptance": decimals(figures["draft_acceptance_rate"], 3),
        "mean length of a step": decimals(figures["mean_acceptance_length"], 2),
    }


def _drafts(figures: Mapping[str, Any]) -> list[Part]:
    rates = figures.get("acceptance_per_position") or {}
    positions = max((len(values or ()) for values in rates.values()), default=0)
    parts: list[Part] = []
    names = {"unconditional": "of all steps", "conditional": "of those accepted so far"}
    if positions:
        parts.append(
            Plot(
                "columns",
                "Acceptance by position in the draft",
                [str(i + 1) for i in range(positions)],
                {title: rates.get(key) or [] for key, title in names.items()},
                "rate",
            )
        )
    histogram = figures.get("acceptance_histogram") or []
    if sum(histogram):
        parts.append(_counts("Steps by accepted tokens", histogram))
    depths = figures.get("rollback_depth_histogram") or []
    if sum(depths):
        parts.append(_counts("Rounds by tokens rolled back", depths))
    return parts


def _counts(title: str, counts: Sequence[int]) -> Plot:
    return Plot("columns", title, [str(i) for i in range(len(counts))], {"n": list(counts)})


def _time(figures: Mapping[str, Any]) -> list[Part]:
    spent = {phase: figures["phase_ms"].get(phase) for phase in PHASES}
    known = {phase: ms for phase, ms in spent.items() if ms}
    if not known:
        return []
    return [
        Plot(
            "bars",
            "Time behind the prompts by phase",
            list(known),
            {"time": list(known.values())},
            "ms",
        )
    ]


def _sequences(store: TraceStore, run_id: int) -> Table:
    ids = np.unique(RunColumns(store, "rounds", run_id)["seq_id"]).tolist()
    rows = []
    for seq_id in ids[:200]:
        timed, fared = timings(store, run_id, seq_id), acceptance(store, run_id, seq_id)
        rows.append(
            [
                str(seq_id),
                shown(timed["prompt_n"]),
                shown(timed["predicted_n"]),
                decimals(timed["predicted_per_second"], 1),
                decimals(fared["draft_acceptance_rate"], 3),
                decimals(fared["mean_acceptance_length"], 2),
            ]
        )
    heads = ["sequence", "prompt", "generated", "tokens/s", "acceptance", "mean length"]
    return Table(heads, rows)


def _texts(run: RunRef) -> list[tuple[str, list[tuple[str, str]]]]:
    """Of every sequence: its prompt, and its tokens behind it with their kinds."""
    store = run.store
    table = RunColumns(store, "tokens", run.run_id)
    found = []
    for _, rows in table.by_sequence(np.ones(table.n, bool)):
        kinds = table.texts("kind", rows)
        own = table.texts("text", rows)
        ids = table["token_id"][rows].tolist()
        runs: list[tuple[bytes, str]] = []
        for token, kind, text in zip(ids, kinds, own, strict=True):
            piece = text.encode() if text else store.pieces.get(token, b"")
            runs.append((piece, kind))
        prompt = b"".join(piece for piece, kind in runs if kind == "prompt")
        found.append((prompt.decode("utf-8", "replace"), _joined(runs)))
    return found


def _joined(runs: Sequence[tuple[bytes, str]]) -> list[tuple[str, str]]:
    """Tokens behind the prompt, at most _MOST_PIECES; neighbours of a kind are one piece, so that
    characters of several tokens are whole."""
    joined: list[tuple[bytes, str]] = []
    for piece, kind in [one for one in runs if one[1] not in ("prompt", "replayed")][:_MOST_PIECES]:
        if joined and joined[-1][1] == kind:
            joined[-1] = joined[-1][0] + piece, kind
        else:
            joined.append((piece, kind))
    return [(_text(piece, kind), kind) for piece, kind in joined]


def _text(piece: bytes, kind: str) -> str:
    """Lines that were never written do not break those that were."""
    text = piece.decode("utf-8", "replace")
    return text.replace("\n", "⏎") if kind in GHOST_KINDS else text


def _shown_texts(texts: Sequence[tuple[str, list[tuple[str, str]]]]) -> list[Part]:
    parts: list[Part] = []
    room = _MOST_PIECES
    for number, (prompt, pieces) in enumerate(texts):
        if room <= 0:
            parts.append(Note(f"The texts of {len(texts) - number} more sequences are left out."))
            break
        parts.append(Tokens(f"Sequence {number}", [(prompt, "prompt"), *pieces[:room]]))
        room -= len(pieces)
    if any(kind == "accepted" for _, pieces in texts for _, kind in pieces):
        parts.append(
            Note(
                "Accepted drafts are shaded, rejected and ignored ones struck out, the target's "
                "replacements underlined twice, its bonus tokens dotted."
            )
        )
    return parts


def _of_model(facts: Mapping[str, Any]) -> dict[str, Any]:
    known = {"architecture": facts.get("architecture")}
    for name in ("weight_bytes", "memory_bytes", "snapshot_bytes"):
        if facts.get(name) is not None:
            known[name.replace("_bytes", "")] = size_text(facts[name])
    return {name: value for name, value in known.items() if value is not None}
