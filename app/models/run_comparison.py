"""The figures of two runs side by side, and the first token at which their texts differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from app.models.number_text import NOT_OBSERVED, format_bytes, significant
from app.models.token_text import line_text
from engine.trace.baseline import find_baseline, speed
from engine.trace.records import EMITTED_KINDS, MISSING, PHASES
from engine.trace.store import TraceStore
from engine.trace.timings import summary

_MOVED = ("state_bytes_copied", "state_bytes_restored", "checkpoint_bytes")
_RESTORES = ("restore", "restore_depth")
_UNDONE = ("seq_rm", *_RESTORES)


@dataclass(frozen=True, slots=True)
class FigurePair:
    """A figure of two runs, None where it was not observed. unit: "", "count", "bytes" or "ms"."""

    label: str
    values: tuple[float | None, float | None]
    unit: str
    tip: str

    @property
    def ratio(self) -> float | None:
        """The first as a multiple of the second."""
        first, second = self.values
        return None if first is None or not second else first / second

    def text(self, which: int) -> str:
        """One of the values as a reader sees it."""
        value = self.values[which]
        if value is None:
            return NOT_OBSERVED
        if self.unit == "bytes":
            return format_bytes(round(value))
        if self.unit == "count":
            return f"{value:,.0f}"
        return f"{significant(value)} ms" if self.unit == "ms" else significant(value)


def compare_runs(store: TraceStore, first: int, second: int) -> list[FigurePair]:
    """The figures that people compare, of both runs as they are now."""
    one, two = _figures(store, first), _figures(store, second)
    pairs = [
        FigurePair(label, (one[label], two[label]), unit, tip)
        for label, unit, tip in _COMPARED
        if one[label] is not None or two[label] is not None
    ]
    for phase in PHASES:
        times = one["phase_ms"][phase], two["phase_ms"][phase]
        if any(times):
            tip = "Sum behind the prompt, all rounds and sequences"
            pairs.append(FigurePair(phase, times, "ms", tip))
    return pairs


_COMPARED = (
    ("tokens/s", "", "Generated tokens per second, without the prompt"),
    ("net speed-up", "", "Against the plain run of the same prompt that each is measured by"),
    ("acceptance", "", "Accepted of all drafted tokens"),
    ("tokens/step", "", "Mean acceptance length: 1 + accepted / steps"),
    ("tokens", "count", "Generated, all sequences together"),
    ("rounds", "count", "Scheduler rounds, those of the prompt too"),
    ("rollbacks", "count", "Rounds of a sequence that undid tokens in memory, restores too"),
    ("restores", "count", "Those of them that put a checkpoint back"),
    ("bytes moved", "bytes", "State copied unchanged, restored, and saved in checkpoints"),
    ("prompt", "ms", "Forward passes of the target over the prompt"),
)


def _figures(store: TraceStore, run_id: int) -> dict[str, Any]:
    table = store.rounds
    n = len(table)
    mine = table.column("run_id", 0, n) == run_id
    rounds = table.column("round", 0, n)[mine]
    paths = table.column("rollback_path", 0, n)[mine]

    def n_of(names: tuple[str, ...]) -> int | None:
        if not paths.any():  # another engine's, that does not tell how it rolls back
            return None
        return int(np.isin(paths, [store.text_pool.find(name) for name in names]).sum())

    moved = np.concatenate([table.column(name, 0, n)[mine] for name in _MOVED])
    moved = moved[moved != MISSING]
    known = summary(store, run_id)
    baseline = find_baseline(store, run_id)
    per_second = known["predicted_per_second"] or None
    return {
        "tokens/s": per_second,
        "net speed-up": per_second
        and (None if baseline is None else per_second / speed(store, baseline)),
        "acceptance": known["draft_acceptance_rate"],
        "tokens/step": known["mean_acceptance_length"],
        "tokens": known["predicted_n"],
        "rounds": int(rounds[-1]) + 1 if len(rounds) else None,
        "rollbacks": n_of(_UNDONE),
        "restores": n_of(_RESTORES),
        "bytes moved": int(moved.sum()) if len(moved) else None,
        "prompt": known["prompt_ms"] or None,
        "phase_ms": known["phase_ms"],
    }


def text_difference(store: TraceStore, first: int, second: int) -> str:
    """Where the texts of two runs part, in one sentence; empty while there is no text.

    Tokens are counted from 1 in what a sequence generated.
    """
    prompts, texts = (
        (_tokens(store, first, kinds), _tokens(store, second, kinds))
        for kinds in (("prompt",), EMITTED_KINDS)
    )
    if prompts[0].keys() != prompts[1].keys() or any(
        not np.array_equal(ids, prompts[1][seq_id][0]) for seq_id, (ids, _) in prompts[0].items()
    ):
        return "The prompts differ, so the texts do too."
    if not texts[0] or not texts[1]:
        return ""
    several = len(texts[0].keys() | texts[1].keys()) > 1
    n_same = 0
    for seq_id in sorted(texts[0].keys() & texts[1].keys()):
        (one, at), (two, _) = (text[seq_id] for text in texts)
        n = min(len(one), len(two))
        parted = np.flatnonzero(one[:n] != two[:n])
        if len(parted):
            i = int(parted[0])
            where = f"token {i + 1}{f' of sequence {seq_id}' if several else ''}"
            said = [
                f"“{_text(store, int(ids[i]))}” in run {run_id}"
                for ids, run_id in ((one, first), (two, second))
            ]
            return f"The texts differ at {where}, position {at[i]}: {', '.join(said)}."
        n_same += n
    lengths = [sum(len(ids) for ids, _ in text.values()) for text in texts]
    if lengths == [n_same, n_same]:
        return f"Same text, {n_same:,} tokens."
    shorter = first if lengths[0] < lengths[1] else second
    return f"Same text for {n_same:,} tokens, all that run {shorter} has."


def _tokens(
    store: TraceStore, run_id: int, kinds: tuple[str, ...]
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Ids and positions of a run's tokens of these kinds, int64 [n] each, by sequence."""
    table = store.tokens
    n = len(table)
    codes = [store.text_pool.find(kind) for kind in kinds]
    mine = (table.column("run_id", 0, n) == run_id) & np.isin(table.column("kind", 0, n), codes)
    seq_ids, ids, at = (table.column(name, 0, n)[mine] for name in ("seq_id", "token_id", "pos"))
    return {
        seq_id: (ids[seq_ids == seq_id], at[seq_ids == seq_id])
        for seq_id in np.unique(seq_ids).tolist()
    }


def _text(store: TraceStore, token_id: int) -> str:
    return line_text(store.pieces.get(token_id, b""), token_id)
