"""What there is to say about a lane of a comparison in one line."""

from __future__ import annotations

from app.models.error_text import error_text
from engine.trace.verdict import SUSPECT, LaneVerdict


def verdict_sentence(verdict: LaneVerdict, bound: float) -> str:
    """The verdict in words; bound: largest NMSE that counts as the same."""
    if verdict.verdict == "failed":
        return f"The lane had to stop: {verdict.error}"
    if not verdict.n_positions:
        return "Nothing is compared yet."
    if verdict.verdict == SUSPECT:
        where = f"position {verdict.first_pos}, round {verdict.first_round}"
        after = verdict.after_round
        why = "no rollback before it" if after is None else f"after the rollback of round {after}"
        return f"Diverges first at {where}, {why}."
    if f := verdict.fork:
        return (
            f"Free-running; chose another token first at position {f.pos}, round {f.round}, where "
            f"the reference's two best logits lie {error_text(f.top2_gap)} apart."
        )
    if verdict.verdict == "mode":
        return (
            f"Distance of {verdict.compute} from the reference: worst NMSE "
            f"{error_text(verdict.worst_nmse)} at position {verdict.worst_pos}; no bound applies."
        )
    if verdict.verdict == "exact":
        return f"The logits of all {verdict.n_positions} positions are exact."
    return (
        f"Within the bound {error_text(bound)}: worst NMSE {error_text(verdict.worst_nmse)} "
        f"at position {verdict.worst_pos}."
    )
