"""The tooltip of a token: what it is, where it is, and what both models thought of it."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from app.trace_models.token_stream import TokenStream
from app.trace_models.token_text import MEANING, pieces_at


def token_tip(stream: TokenStream, index: int) -> str:
    """Rich text for one token of a stream."""
    row = stream.facts(index)
    kind = row["kind"]
    piece = pieces_at(stream.store, np.array([stream.rows[index]]))[0]
    lines = [f"<b>{escape(kind)}</b>: {MEANING[kind]}"]
    if stream.replayed[index]:
        lines.append(f"<b>replayed</b>: {MEANING['replayed']}")
    cells = [
        ("text", escape(repr(piece.decode("utf-8", "backslashreplace")), quote=False)),
        ("id", _whole(row["token_id"]) or "not observed"),
        ("round", _whole(row["round"])),
        ("position", _whole(row["pos"])),
        ("draft index", _whole(row["draft_index"])),
        ("target p", _real(row["target_p"])),
        ("rule p", _real(row["rule_p"])),
        ("rule q", _real(row["rule_q"])),
        ("target rank", _whole(row["target_rank"])),
        ("target entropy", _real(row["target_entropy"], " nats")),
        ("draft q", _real(row["draft_p"])),
        ("draft confidence", _real(row["draft_conf"])),
    ]
    rows = "".join(
        f"<tr><td style='padding-right:10px'>{name}</td><td>{value}</td></tr>"
        for name, value in cells
        if value
    )
    return "<br>".join(lines) + f"<table>{rows}</table>"


def token_summary(stream: TokenStream, index: int) -> str:
    """One plain line for a screen reader."""
    row: dict[str, Any] = stream.facts(index)
    replayed = ", replayed" if stream.replayed[index] else ""
    return (
        f"{stream.texts[index]!r}, {row['kind']}{replayed}, "
        f"round {_whole(row['round'])}, position {_whole(row['pos'])}"
    )


def _whole(value: int | None) -> str:
    return "" if value is None else str(value)


def _real(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.4g}{unit}"
