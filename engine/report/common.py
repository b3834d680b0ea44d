"""Common report sections: model, machine, settings, findings, how to repeat a run, and the
generated text in pieces by kind."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.analysis.findings.check import with_consequences
from engine.option_fields import differing, words_of
from engine.options import RunOptions
from engine.plain_text import size_text
from engine.report.parts import CODE, Part, Remark, Section, Tokens
from engine.trace.facts import Finding, RunFacts
from engine.trace.records import GHOST_KINDS
from engine.trace.run_ref import RunColumns, RunRef

_MOST_FINDINGS = 50
_LONGEST_VALUE = 300


def shown(value: Any) -> str:
    """A value for display: numbers in few digits, "n/a" for None."""
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "n/a"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value[:50])) or "none"
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def decimals(value: Any, digits: int) -> str:
    """A number with this many decimals; "n/a" for None."""
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return f"{value:.{digits}f}" if is_number else "n/a"


def name_of(facts: RunFacts) -> str:
    """The name of a run: that of its model, else of its engine."""
    engine = facts.source.engine if facts.source else ""
    return str((facts.model or {}).get("name") or engine or "run")


def model_section(model: Any, more: Mapping[str, Any] | None = None) -> Section:
    """The model: name, size and hashes of its files, without their modification times."""
    parts: dict[str, str] = {}
    for title, identity in (("", model), ("draft ", _mapping(model).get("draft"))):
        known = _mapping(identity)
        if known:
            parts[f"{title or 'target '}model"] = shown(known.get("name"))
            if isinstance(known.get("size"), int):
                parts[f"{title}size"] = size_text(known["size"])
            parts[f"{title}sha256 of the head"] = shown(known.get("sha256"))
            if known.get("content"):
                parts[f"{title}sha256 of the tensors"] = shown(known["content"])
    parts |= {name: shown(value) for name, value in (more or {}).items()}
    return Section("Model", [parts] if parts else [])


def machine_section(environment: Any, more: Mapping[str, Any] | None = None) -> Section:
    """Hardware and versions."""
    known = {**_mapping(environment), **(more or {})}
    return Section("Machine and versions", [_each_shown(known)] if known else [])


def settings_section(options: RunOptions | None, more: Mapping[str, Any] | None = None) -> Section:
    """The options of a run that differ from their defaults, and a remark on the others."""
    known = {name: shown(value) for name, value in (more or {}).items()} | changed(options)
    parts = [known] if known else []
    return Section("Settings", [*parts, Remark("All other options have their defaults.")])


def changed(options: RunOptions | None) -> dict[str, str]:
    """The options that differ from their defaults, by name."""
    return {one.option.name: shown(value) for one, value in differing(options)}


def findings_section(
    findings: Sequence[Finding], lanes: Mapping[int, str] | None = None
) -> Section:
    """Findings, most severe first, each followed by its consequences. lanes: names of runs that are
    lanes."""
    notes = []
    for cause, following in with_consequences(findings):
        notes += [("", cause, f" {cause.suggestion}")]
        notes += [(f"follows from {cause.rule}: ", one, "") for one in following]
    parts = [
        Remark(
            f"{before}{one.rule}{_where(one, lanes or {})}: {one.message} ({one.evidence}){after}",
            one.severity,
        )
        for before, one, after in notes[:_MOST_FINDINGS]
    ]
    if len(findings) > _MOST_FINDINGS:
        parts.append(Remark(f"and {len(findings) - _MOST_FINDINGS} more"))
    return Section("Findings", parts or [Remark("Nothing was found.")])


def repeat_section(command: Sequence[str]) -> Section:
    """The command line, quoted for a shell."""
    return Section("How to repeat it", [Remark(shlex.join(command), CODE)] if command else [])


def run_command(model: Any, options: RunOptions, prompts: Sequence[str]) -> list[str]:
    """A command line for a run whose options and prompts are known; of paths only the names."""
    name = _mapping(model).get("name")
    words = ["draftscope", "run", name if isinstance(name, str) else "MODEL"]
    draft = _mapping(_mapping(model).get("draft")).get("name")
    if isinstance(draft, str):
        words += ["-md", draft]
    for text in prompts:
        words += ["-p", text]
    return [*words, *words_of(options)]


def _each_shown(values: Mapping[str, Any]) -> dict[str, str]:
    return {
        str(name).replace("_", " "): shown(value)
        for name, value in values.items()
        if not isinstance(value, dict)
    }


def _where(finding: Finding, lanes: Mapping[int, str]) -> str:
    lane = f", lane {lanes[finding.run_id]}" if finding.run_id in lanes else ""
    round_ = f", round {finding.round}" if finding.round is not None else ""
    sequence = f", sequence {finding.seq_id}" if finding.seq_id else ""
    return lane + round_ + sequence


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


_MOST_PIECES = 4000
"""Most tokens of all sequences whose text is shown."""

GeneratedText = tuple[str, list[tuple[str, str]]]
"""A sequence's prompt, and the pieces after it with their kinds (engine.trace.records)."""


def run_texts(run: RunRef) -> list[GeneratedText]:
    """For every sequence its prompt, and the tokens after it with their kinds."""
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
    """Tokens after the prompt, at most _MOST_PIECES; neighbours of one kind are joined, so that
    characters that span several tokens are whole."""
    joined: list[tuple[bytes, str]] = []
    for piece, kind in [one for one in runs if one[1] not in ("prompt", "replayed")][:_MOST_PIECES]:
        if joined and joined[-1][1] == kind:
            joined[-1] = joined[-1][0] + piece, kind
        else:
            joined.append((piece, kind))
    return [(_text(piece, kind), kind) for piece, kind in joined]


def _text(piece: bytes, kind: str) -> str:
    """The text of a piece; line feeds of ghosts are replaced, as they do not break the text's
    lines."""
    text = piece.decode("utf-8", "replace")
    return text.replace("\n", "⏎") if kind in GHOST_KINDS else text


def shown_texts(texts: Sequence[GeneratedText]) -> list[Part]:
    """Every sequence with its prompt, up to _MOST_PIECES pieces, and the meaning of the marks."""
    parts: list[Part] = []
    room = _MOST_PIECES
    for number, (prompt, pieces) in enumerate(texts):
        if room <= 0:
            parts.append(Remark(f"The texts of {len(texts) - number} more sequences are left out."))
            break
        parts.append(Tokens(f"Sequence {number}", [(prompt, "prompt"), *pieces[:room]]))
        room -= len(pieces)
    if any(kind == "accepted" for _, pieces in texts for _, kind in pieces):
        parts.append(
            Remark(
                "Accepted drafts are shaded, rejected and ignored ones struck out, the target's "
                "replacements underlined twice, its bonus tokens dotted."
            )
        )
    return parts
