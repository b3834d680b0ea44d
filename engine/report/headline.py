"""The figures of a run in one line, or in three."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_POSITIONS = 8
"""Of a draft, shown in a line."""


def headline(totals: Mapping[str, Any]) -> str:
    """Figures of a run in one line, as far as they are known."""
    line = f"{totals['predicted_n']} tokens"
    if totals["predicted_per_second"]:
        line += f", {totals['predicted_per_second']:.1f} tokens/s"
    if totals.get("draft_n"):
        line += f"; {totals['draft_n_accepted']} of {totals['draft_n']} drafted tokens accepted"
        if totals["draft_acceptance_rate"] is not None:
            line += f" ({totals['draft_acceptance_rate']:.3f})"
        if totals["mean_acceptance_length"] is not None:
            line += f", mean length {totals['mean_acceptance_length']:.2f}"
    return line


def figure_lines(totals: Mapping[str, Any]) -> Iterator[str]:
    """The headline; prompt and times of the phases; acceptance by position (given that the token
    before was accepted) and rounds by rollback depth. What is not known is left out."""
    yield headline(totals)
    parts = []
    if totals.get("prompt_n") is not None:
        took = f" in {totals['prompt_ms']:.0f} ms" if totals.get("prompt_ms") else ""
        cached = f", {totals['cache_n']} from the cache" if totals.get("cache_n") else ""
        parts.append(f"prompt: {totals['prompt_n']} tokens{took}{cached}")
    phases = (totals.get("phase_ms") or {}).items()
    if times := [f"{name} {ms:.0f} ms" for name, ms in phases if ms and ms >= 0.5]:
        parts.append(f"rounds: {', '.join(times)}")
    if parts:
        yield "; ".join(parts)
    if not totals.get("draft_n"):
        yield "drafts: none, plain decoding"
        return
    parts = []
    if rates := (totals.get("acceptance_per_position") or {}).get("conditional"):
        shown = ["-" if rate is None else f"{rate:.2f}" for rate in rates[:_POSITIONS]]
        more = " …" if len(rates) > _POSITIONS else ""
        parts.append(f"acceptance by position: {' '.join(shown)}{more}")
    depths = enumerate(totals.get("rollback_depth_histogram") or ())
    if found := [f"{depth} ({n})" for depth, n in depths if n]:
        more = " …" if len(found) > _POSITIONS else ""
        parts.append(f"rollback depth (rounds): {' '.join(found[:_POSITIONS])}{more}")
    if parts:
        yield "; ".join(parts)
