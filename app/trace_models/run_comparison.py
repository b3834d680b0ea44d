"""Comparison of two runs: figures side by side, and the first token at which their texts differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from app.trace_models.run_facts import other_options, run_names
from app.trace_models.shown_text import NOT_OBSERVED, significant
from engine.analysis.run_cost import RunCost
from engine.plain_text import size_text
from engine.trace.records import EMITTED_KINDS, PHASES
from engine.trace.run_ref import RunColumns, RunRef, rows_by_sequence
from engine.trace.timings import summary
from engine.trace.token_text import line_text, pieces_at


@dataclass(frozen=True, slots=True)
class FigurePair:
    """A figure of two runs, None if not observed. unit: "", "count", "bytes" or "ms"."""

    label: str
    values: tuple[float | None, float | None]
    unit: str
    tip: str

    @property
    def ratio(self) -> float | None:
        """The first as a multiple of the second."""
        first, second = self.values
        return None if first is None or not second else first / second

    @property
    def ratio_text(self) -> str:
        """The ratio with two decimals, or in significant digits if those would be zeros."""
        ratio = self.ratio
        if ratio is None:
            return NOT_OBSERVED
        if 0.1 <= ratio < 1000 or not ratio:
            return f"{ratio:.2f}×"
        return f"{significant(ratio)}×"

    def text(self, which: int) -> str:
        """One of the values as a reader sees it."""
        value = self.values[which]
        if value is None:
            return NOT_OBSERVED
        if self.unit == "bytes":
            return size_text(round(value))
        if self.unit == "count":
            return f"{value:,.0f}"
        return f"{significant(value)} ms" if self.unit == "ms" else significant(value)


def compare_runs(first: RunRef, second: RunRef) -> list[FigurePair]:
    """The main figures of both runs at present."""
    one, two = map(_figures, (first, second))
    pairs = [
        FigurePair(label, (one[label], two[label]), unit, tip)
        for label, unit, tip in _COMPARED
        if one[label] is not None or two[label] is not None
    ]
    for phase in PHASES:
        times = one["phase_ms"][phase], two["phase_ms"][phase]
        if any(times):
            tip = "Sum after the prompt, all rounds and sequences"
            pairs.append(FigurePair(phase, times, "ms", tip))
    return pairs


_COMPARED = (
    ("tokens/s", "", "Generated tokens per second, without the prompt"),
    ("acceptance", "", "Accepted / drafted tokens"),
    ("tokens/round", "", "Mean acceptance length: 1 + accepted / rounds"),
    ("tokens", "count", "Generated, all sequences together"),
    ("rounds", "count", "Scheduler rounds, including those of the prompt"),
    ("rollbacks", "count", "Rounds of a sequence with a rollback, including restores"),
    ("restores", "count", "Those with a restored checkpoint"),
    ("bytes moved", "bytes", "State copied, restored, saved in checkpoints, after the prompt"),
    ("prompt", "ms", "Forward passes of the target over the prompt"),
)


def _figures(run: RunRef) -> dict[str, Any]:
    rounds = RunColumns(run.store, "rounds", run.run_id)["round"]
    cost, known = RunCost.of(run), summary(run.store, run.run_id)
    is_lane = "lane" in run.facts  # without drafting, which all lanes share
    undone = None if cost.n_removed is None else cost.n_removed + (cost.n_restores or 0)
    return {
        "tokens/s": None if is_lane else known["predicted_per_second"] or None,
        "acceptance": known["draft_acceptance_rate"],
        "tokens/round": known["mean_acceptance_length"],
        "tokens": known["predicted_n"],
        "rounds": int(rounds[-1]) + 1 if len(rounds) else None,
        "rollbacks": undone,
        "restores": cost.n_restores,
        "bytes moved": cost.bytes_moved,
        "prompt": known["prompt_ms"] or None,
        "phase_ms": known["phase_ms"],
    }


def setting_difference(first: RunRef, second: RunRef) -> str:
    """The options that differ, in one sentence; empty if none do or they are unknown."""
    one, two = first.facts.options, second.facts.options
    said = [
        f"{name} {', '.join(options)}"
        for name, options in zip(
            run_names(first, second),
            (other_options(two, one), other_options(one, two)),
            strict=True,
        )
        if options
    ]
    return f"Settings: {'; '.join(said)}." if said else ""


def text_difference(first: RunRef, second: RunRef) -> str:
    """Where the texts of two runs diverge, in one sentence; empty while there is no text.

    Tokens are counted from 1 within a sequence's output.
    """
    prompts = [_texts(run, ("prompt",)) for run in (first, second)]
    if all(prompts):
        shared = prompts[0].keys() & prompts[1].keys()
        # as a whole: models may tokenise a text differently
        said = [{s: b"".join(of_run[s][1]) for s in shared} for of_run in prompts]
        differing = sorted(s for s in shared if said[0][s] != said[1][s])
        if len(differing) == len(shared):
            return "The prompts differ, and therefore the texts."
        if differing:
            return f"The prompts of sequence {differing[0]} differ, and therefore the texts."
    texts = [_texts(run, EMITTED_KINDS) for run in (first, second)]
    if not all(texts):
        return ""
    names, seqs = run_names(first, second), sorted(texts[0].keys() & texts[1].keys())
    both = {seq_id: (texts[0][seq_id], texts[1][seq_id]) for seq_id in seqs}
    for seq_id, (one, two) in both.items():
        if (at := _first_unequal(one, two)) is not None:
            (i, j), (rows, pieces), (_, others) = at, one, two
            of = f" of sequence {seq_id}" if len(texts[0].keys() | texts[1].keys()) > 1 else ""
            position = first.store.tokens.column("pos")[rows[i]]
            shown = [
                f"“{line_text(piece, -1)}” in {name}"
                for piece, name in zip((pieces[i], others[j]), names, strict=True)
            ]
            where = f"token {i + 1}{of}, position {position}"
            return f"The texts differ at {where}: {', '.join(shown)}."
    lengths = [sum(len(pieces) for _, pieces in text_of.values()) for text_of in texts]
    n_same = sum(min(len(one), len(two)) for (_, one), (_, two) in both.values())
    if lengths == [n_same, n_same]:
        return f"Same text, {n_same:,} tokens."
    shorter = names[0] if lengths[0] < lengths[1] else names[1]
    return f"Same text for {n_same:,} tokens, all tokens of {shorter}."


_Text = tuple[np.ndarray, list[bytes]]
"""The tokens of a sequence: row numbers, and the bytes of each."""


def _first_unequal(one: _Text, two: _Text) -> tuple[int, int] | None:
    """Index of the first differing token of each; differently tokenised texts are compared
    bytewise."""
    pieces, others = one[1], two[1]
    i = next((i for i, (a, b) in enumerate(zip(pieces, others, strict=False)) if a != b), None)
    if i is None:
        return None
    texts = [b"".join(text[i:]) for text in (pieces, others)]
    n_bytes = min(map(len, texts))
    at = next((k for k in range(n_bytes) if texts[0][k] != texts[1][k]), None)
    if at is None:
        return None
    return _token_at(one, i, at), _token_at(two, i, at)


def _token_at(text: _Text, first: int, offset: int) -> int:
    """The token that contains a byte offset, counted from token `first`."""
    ends = np.cumsum([len(piece) for piece in text[1][first:]])
    return first + int(np.searchsorted(ends, offset, side="right"))


def _texts(run: RunRef, kinds: tuple[str, ...]) -> dict[int, _Text]:
    """A run's tokens of these kinds, by sequence."""
    rows = rows_by_sequence(run.store, run.run_id, kinds)
    return {seq_id: (found, pieces_at(run.store, found)) for seq_id, found in rows.items()}
