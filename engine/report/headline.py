"""The figures of a run in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
