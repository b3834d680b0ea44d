"""Details of all lanes at one position: their most probable tokens, then their errors."""

from __future__ import annotations

from dataclasses import dataclass

from app.trace_models.compared_lanes import ComparedLanes
from app.trace_models.shown_text import (
    EXACT,
    NOT_OBSERVED,
    NOT_RECORDED,
    error_text,
    probability_text,
)
from engine.trace.records import N_TOP

BELOW = "below"
"""Precedes the length of a lane's recorded top list in the cell of a token that is not in it."""
_MEASURES = (
    ("max_abs", "max |Δ|", "Largest difference of a logit against the reference lane"),
    ("nmse", "NMSE", "Mean squared difference of the logits over their mean square"),
    ("kl", "KL, nats", "KL(reference || lane) of the softmaxes"),
    ("top1_equal", "top-1", "Whether both have the same most probable token"),
    ("rank", "rank", "Rank of the chosen token among the lane's logits, from 1"),
    ("state_error", "state", "Worst layer's relative error of its state after this round"),
    ("conv_error", "window", "The same for convolution windows"),
    ("cells_differ", "cells", "KV cells in one lane only, or duplicates"),
)


@dataclass(frozen=True, slots=True)
class DetailCell:
    """A lane's cell of one row. sign: the difference as one character."""

    text: str
    bar: float | None = None
    differs: bool = False
    best: bool = False


DetailRow = tuple[str, str, tuple[DetailCell, ...]]
"""A token or a measure, its tooltip, and a cell for each lane."""


def detail_rows(lanes: ComparedLanes, pos: int) -> list[DetailRow]:
    """The rows of one position: tokens by the reference's probability, then the measures.

    A token is marked where a lane's rank differs from the reference lane's: with an arrow and the
    rank, or as missing from the most probable ones.
    """
    tops = {run_id: lanes.tops(run_id, pos) for run_id in lanes.run_ids}
    ranks = {
        run_id: {token: i for i, (token, _) in enumerate(found or ())}
        for run_id, found in tops.items()
    }
    of_reference = ranks[lanes.reference]
    others: dict[int, float] = {}
    for found in tops.values():
        for token, p in found or ():
            others[token] = max(p, others.get(token, 0.0))
    tokens = sorted(
        others, key=lambda token: (of_reference.get(token, N_TOP), -others[token], token)
    )
    chosen = lanes.token_at(pos)
    rows = []
    for token in tokens:
        cells = []
        for run_id in lanes.run_ids:
            found = tops[run_id]
            if found is None:
                cells.append(DetailCell(NOT_RECORDED))
                continue
            compared = run_id != lanes.reference and bool(of_reference)
            rank, expected = ranks[run_id].get(token), of_reference.get(token)
            differs = compared and rank != expected
            if rank is None:
                text, bar = f"{BELOW} {len(found)}", None
            else:
                arrow = ""
                if differs:
                    arrow = "▲" if expected is None or rank < expected else "▼"
                bar = found[rank][1]
                text = f"{arrow} {probability_text(bar)}".strip()
            cells.append(DetailCell(text, bar, differs, rank == 0))
        tip = f"token {token}" + (", chosen by the reference lane" if token == chosen else "")
        mark = "› " if token == chosen else ""
        rows.append((f"{mark}{lanes.text(token)}", tip, tuple(cells)))
    rows += [
        (label, tip, tuple(_measure(lanes, run_id, name, pos) for run_id in lanes.run_ids))
        for name, label, tip in _MEASURES
    ]
    return rows


def _measure(lanes: ComparedLanes, run_id: int, name: str, pos: int) -> DetailCell:
    if run_id == lanes.reference:
        return DetailCell(NOT_OBSERVED)
    if lanes.row_at(run_id, pos) is None:
        return DetailCell(NOT_RECORDED)
    value = lanes.measure(run_id, name, pos)
    if value is None:
        if name in ("max_abs", "nmse", "kl"):  # a difference that is not a number
            return DetailCell(error_text(float("nan")), differs=True)
        return DetailCell(NOT_RECORDED)
    if name == "nmse":
        beyond = not value <= lanes.bounds[run_id]
        return DetailCell(f"✗ {error_text(value)}" if beyond else error_text(value), differs=beyond)
    if name == "top1_equal":
        return DetailCell("same" if value else "≠ other", differs=not value)
    if name == "rank":
        return DetailCell(f"{int(value):,}", differs=False)
    if name == "cells_differ":
        return DetailCell(f"{int(value):,}" if value else EXACT, differs=value > 0)
    return DetailCell(error_text(value))
