"""The generated text of a run for a report: pieces, each with its kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.report.parts import Part, Remark, Tokens
from engine.trace.records import GHOST_KINDS
from engine.trace.run_columns import RunColumns
from engine.trace.run_ref import RunRef

_MOST_PIECES = 4000
"""Tokens of all sequences whose text is shown."""

GeneratedText = tuple[str, list[tuple[str, str]]]
"""A sequence's prompt, and the pieces after it with their kinds (engine.trace.records)."""


def run_texts(run: RunRef) -> list[GeneratedText]:
    """Of every sequence: its prompt, and its tokens after it with their kinds."""
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
    """Tokens after the prompt, at most _MOST_PIECES; neighbours of a kind are one piece, so that
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


def shown_texts(texts: Sequence[GeneratedText]) -> list[Part]:
    """Every sequence with its prompt, as far as there is room, and what the marks mean."""
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
