"""A round of one sequence: all its rows of the trace, its facts other than tokens (drafters,
rollback, batch, bytes, times) in words, and the table that lists them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from PySide6.QtCore import QModelIndex, QPersistentModelIndex, Qt
from PySide6.QtGui import QColor

from app.trace_models.run_rows import Position
from app.trace_models.shown_text import (
    NOT_OBSERVED,
    probability_text,
    significant,
    size_or_none,
    whole_text,
)
from app.widgets.plain_table import ColumnTable, TableColumn, bold
from engine.draft.registry import meaning
from engine.plain_text import counted
from engine.trace.records import PHASES
from engine.trace.run_ref import RunRef
from engine.trace.store import Table, TraceStore
from engine.trace.token_text import line_text, row_text

_PATH_TIPS = {
    "none": "No rollback was needed",
    "seq_rm": "Tokens removed, a snapshot read instead",
    "restore": "Checkpoint restored, the accepted tokens decoded again",
    "restore_depth": "Deeper than the snapshots: checkpoint restored, tokens decoded again",
    "refused": "The memory could not roll back",
}
_BYTES = (
    ("written", "state_bytes_written", "Recurrent state stored by forward passes"),
    ("copied", "state_bytes_copied", "Stored state copied unchanged to another place"),
    ("restored", "state_bytes_restored", "State restored from checkpoints"),
    ("checkpoint", "checkpoint_bytes", "Size of the checkpoint taken in this round"),
    ("held", "memory_bytes_held", "Memory of KV cells and recurrent states"),
)
_DRAWN_ROWS = 17
_OF_MEMORY = (
    *(name for _, name, _ in _BYTES),
    "kv_cells_used",
    "kv_cells_duplicate",
    "attention_pos_max",
    "recurrent_pos_max",
)


FactLine = tuple[str, str, str]
"""Label, value and tip of a row of the fact table; without a value, the heading of a section."""


def step_facts(step: Step) -> list[FactLine]:
    """All lines about a round, with sections in the order of a round's phases."""
    sections = (
        ("Draft", _draft(step)),
        ("Verification", _verification(step)),
        ("Rollback", _rollback(step)),
        ("State and cells", _memory(step.row)),
        ("Time", _times(step.row)),
    )
    lines = []
    for title, facts in sections:
        if facts:
            lines += [(title, "", ""), *facts]
    return lines


def outcome(step: Step) -> str:
    """The round's result in one sentence: tokens drafted, accepted and emitted."""
    row = step.row
    if step.n_prompt:
        chosen = "then the first token" if step.tokens else "nothing chosen yet"
        return f"{counted(step.n_prompt, 'token')} of the prompt, {chosen}."
    drafted, accepted = row["num_draft_tokens"], row["num_accepted_draft_tokens"]
    if not drafted:
        reasons = ", ".join(sorted({one["reason"] for one in step.drafts if one["reason"]}))
        return f"No draft{f' ({reasons})' if reasons else ''}, one plain token."
    emitted = whole_text(row["num_emitted"])
    counts = f"{drafted} drafted, {whole_text(accepted)} accepted, {emitted} emitted"
    judge = f" (rule {row['accept_rule']})" if row["accept_rule"] else ""
    rejected = next((one for one in step.tokens if one["kind"] == "rejected"), None)
    own = next((one for one in step.tokens if one["kind"] == "replacement"), None)
    if own is None:
        return f"{counts}{judge}."
    if own["draft_index"] is not None:  # an end token inside the draft
        ended = step.text_of(own).strip()
        return f"{counts}{judge}: the drafted “{ended}” counts as the target's own token."
    if rejected is None:
        return f"{counts}{judge}."
    said, chose = (step.text_of(one).strip() for one in (rejected, own))
    return f"{counts}{judge}: the draft has “{said}”, the target chose “{chose}”."


def _draft(step: Step) -> list[FactLine]:
    lines = []
    for one in step.drafts:
        n, raw = one["num_draft_tokens"], one["num_raw"]
        parts = [f"{whole_text(n)} {'token' if n == 1 else 'tokens'}"]
        if raw is not None and raw != n:
            parts.append(f"{raw} before trimming")
        if one["match_pos"] is not None:
            parts.append(f"match at {one['match_pos']:,}")
        if one["reason"]:
            parts.append(one["reason"])
        tip = f"{meaning(one['reason']) or 'A full draft'}; {_ms(one['draft_ms'])}"
        lines.append((one["drafter"], ", ".join(parts), tip))
        if one["block_length"] is not None:
            lines.append(_block(step, one["block_length"]))
        if one["confidence"] is not None:
            head = any(token["draft_conf"] is not None for token in step.tokens)
            of = "of its confidence head" if head else "q"
            q = probability_text(one["confidence"])
            lines.append(("confidence", q, f"Mean {of} over the draft"))
    return lines


def _block(step: Step, n: int) -> FactLine:
    """The rows of a block: the newest token at its position, and a mask token for each later
    one."""
    first = step.row["pos0"]
    where = "" if first is None else f" at {first:,}–{first + n - 1:,}"
    return (
        "block",
        f"● {'□' * (n - 1)}{where}" if n <= _DRAWN_ROWS else f"● and {n - 1:,} □{where}",
        f"{n:,} rows in one pass: ● the newest token, □ mask tokens filled by the drafter",
    )


def _verification(step: Step) -> list[FactLine]:
    row = step.row
    untold = NOT_OBSERVED if row["num_draft_tokens"] else "none: nothing drafted"
    rule = row["accept_rule"] or untold
    lines = [
        ("rule", rule, "Rule that accepted or rejected the draft"),
        ("ended by", row["stop_kind"] or NOT_OBSERVED, "The last token that was emitted"),
        ("verify width", whole_text(row["verify_width"]), "Tokens of this sequence, unpadded"),
    ]
    for one in step.ubatches:
        size = f"{one['purpose']} {whole_text(one['n_seqs'])} × {whole_text(one['n_seq_tokens'])}"
        padding = f", padding {one['n_padding']}" if one["n_padding"] else ""
        why = f", {one['reason']}" if one["reason"] else ""
        tip = f"Sequences × tokens of each, {_ms(one['ms'])}; sequences: {one['seq_ids']}"
        lines.append((f"ubatch {whole_text(one['ubatch'])}", f"{size}{padding}{why}", tip))
    return lines


def _rollback(step: Step) -> list[FactLine]:
    row = step.row
    path = row["rollback_path"]
    untold = "" if row["num_draft_tokens"] is None else "Not reported by the engine"
    derived = " (derived)" if step.is_derived("rollback_path") and path else ""
    in_memory, depth = row["memory_rollback"], row["rollback_depth"]
    deep = whole_text(depth)
    if in_memory is not None and in_memory != depth:
        deep += f", in memory {in_memory}"
    return [
        ("path", f"{path or NOT_OBSERVED}{derived}", _PATH_TIPS.get(path, untold)),
        ("depth", deep, "Drafted tokens rolled back; in memory also the padding"),
        (
            "valid depth / n_rs_seq",
            f"{whole_text(row['valid_depth'])} / {whole_text(row['n_rs_seq'])}",
            "Deepest valid rollback after this batch / number of snapshot planes",
        ),
        (
            "rs_idx",
            f"{whole_text(row['rs_idx_before'])} → {whole_text(row['rs_idx_after'])}",
            "Pending plane read by the batch → pending plane after the rollback",
        ),
        ("replays", whole_text(row["replay_index"]), "Restores and replays in this round"),
    ]


def _memory(row: TraceRow) -> list[FactLine]:
    if all(row[name] is None for name in _OF_MEMORY):
        return [("all of it", "not observed", "Not reported by the engine")]
    lines = [(label, size_or_none(row[name]), tip) for label, name, tip in _BYTES]
    used, twice = row["kv_cells_used"], row["kv_cells_duplicate"]
    attention, recurrent = row["attention_pos_max"], row["recurrent_pos_max"]
    return [
        *lines,
        ("KV cells / duplicates", f"{whole_text(used)} / {whole_text(twice)}", "Of this sequence"),
        (
            "last pos KV / state",
            f"{whole_text(attention)} / {whole_text(recurrent)}",
            "Last position of the KV cells and of the recurrent state",
        ),
    ]


def _times(row: TraceRow) -> list[FactLine]:
    spent = [(phase, row[f"{phase}_ms"]) for phase in PHASES]
    known = [(phase, ms) for phase, ms in spent if ms is not None]
    if not known:
        whole, n = row["total_ms"], row["n_merged"]
        if whole is None:
            return [("all phases", "not observed", "Not reported by the engine")]
        merged = f", {n} rounds together" if n else ""
        return [("whole round", f"{_ms(whole)}{merged}", "Its phases were not observed")]
    total = ("all phases", _ms(sum(ms for _, ms in known)), "This sequence's part")
    return [*((phase, _ms(ms), "") for phase, ms in known if ms), total]


def _ms(value: float | None) -> str:
    return NOT_OBSERVED if value is None else f"{significant(value)} ms"


class FactTable(ColumnTable):
    """A table of FactLines: labels on the left, values on the right."""

    columns = TableColumn("label", "", "", True), TableColumn("value", "", "")

    def __init__(self) -> None:
        super().__init__()
        self.muted_colour = QColor()

    def cell(self, row: int, name: str, role: int) -> Any:
        label, value, tip = self.rows[row]
        is_value = name == "value"
        if role == Qt.ItemDataRole.DisplayRole:
            return value if is_value else label
        if role == Qt.ItemDataRole.ToolTipRole:
            return f"{value}\n{tip}".strip() or None
        if role == Qt.ItemDataRole.FontRole and not value:
            return bold()
        if role == Qt.ItemDataRole.ForegroundRole and not is_value and value:
            return self.muted_colour
        return None

    def data(
        self, index: QModelIndex | QPersistentModelIndex, role: int = Qt.ItemDataRole.DisplayRole
    ) -> Any:
        if role == Qt.ItemDataRole.TextAlignmentRole and not self.rows[index.row()][1]:
            return Qt.AlignmentFlag.AlignBottom | Qt.AlignmentFlag.AlignLeft
        return super().data(index, role)


TraceRow = dict[str, Any]
"""A row by column name; None: not observed."""


@dataclass(frozen=True)
class Step:
    """The rows of one round: that of `rounds`, and the related ones of other tables.

    tokens: draft tokens in order, then the target's own, with their rows of the table; replayed
    rows repeat a token and prompt tokens are not judged, so both are only counted. drafts: one per
    drafter asked. ubatches: those whose passes decoded this sequence.
    """

    store: TraceStore
    row: TraceRow
    tokens: tuple[TraceRow, ...]
    token_rows: tuple[int, ...]
    drafts: tuple[TraceRow, ...]
    ubatches: tuple[TraceRow, ...]
    n_prompt: int
    n_replayed: int

    @property
    def round(self) -> int:
        return int(self.row["round"])

    @property
    def seq_id(self) -> int:
        return int(self.row["seq_id"])

    @cached_property
    def title(self) -> str:
        """The sequence and round."""
        return f"Round {self.round:,} · sequence {self.seq_id}"

    def is_derived(self, column: str) -> bool:
        """Whether a value of `row` was derived rather than reported by the engine."""
        columns = self.store.runs[self.row["run_id"]].columns
        states = columns.get("rounds") if isinstance(columns, dict) else None
        return isinstance(states, dict) and states.get(column) == "derived"

    def is_at(self, position: Position) -> bool:
        """Whether a position is in this round."""
        return (self.seq_id, self.round) == (position.seq_id, position.round)

    def text(self, token_id: int) -> str:
        """A token as one readable line; white space alone is described in words."""
        return line_text(self.store.pieces.get(token_id, b""), token_id)

    def text_of(self, token: TraceRow) -> str:
        """The same for an entry of `tokens`, whose id may be unknown."""
        return row_text(self.store, token)


def read_step(run: RunRef, seq_id: int, round_: int) -> Step | None:
    """Read a round of one sequence; None if the run does not have it."""
    store, run_id = run.store, run.run_id
    rows = _rows(store.rounds, run_id, round_, seq_id)
    if not len(rows):
        return None
    token_rows = _rows(store.tokens, run_id, round_, seq_id)
    kinds = store.text_pool.decode(store.tokens.column("kind")[token_rows])
    shown = [
        int(row)
        for row, kind in zip(token_rows, kinds, strict=True)
        if kind not in ("prompt", "replayed")
    ]
    passes = (store.ubatches.row(int(row)) for row in _rows(store.ubatches, run_id, round_, None))
    return Step(
        store,
        store.rounds.row(int(rows[-1])),
        tuple(store.tokens.row(row) for row in shown),
        tuple(shown),
        tuple(store.drafts.row(int(r)) for r in _rows(store.drafts, run_id, round_, seq_id)),
        tuple(one for one in passes if str(seq_id) in one["seq_ids"].split()),
        kinds.count("prompt"),
        kinds.count("replayed"),
    )


def newest_round(run: RunRef) -> tuple[int, int] | None:
    """(sequence, round) of the last row of a run, None without any."""
    table, n = run.store.rounds, len(run.store.rounds)
    rows = np.flatnonzero(table.column("run_id", 0, n) == run.run_id)
    if not len(rows):
        return None
    seq_id, round_ = (table.column(name)[rows[-1]] for name in ("seq_id", "round"))
    return int(seq_id), int(round_)


def neighbour(run: RunRef, seq_id: int, round_: int, step: int) -> int | None:
    """The next (+1) or previous (-1) round of a sequence, None beyond the ends."""
    table, n = run.store.rounds, len(run.store.rounds)
    mine = table.column("run_id", 0, n) == run.run_id
    mine &= table.column("seq_id", 0, n) == seq_id
    rounds = table.column("round", 0, n)[mine]
    others = rounds[rounds > round_] if step > 0 else rounds[rounds < round_]
    if not len(others):
        return None
    return int(others.min() if step > 0 else others.max())


def _rows(table: Table, run_id: int, round_: int, seq_id: int | None) -> np.ndarray:
    n = len(table)  # the table may grow meanwhile
    chosen = table.column("round", 0, n) == round_
    chosen &= table.column("run_id", 0, n) == run_id
    if seq_id is not None:
        chosen &= table.column("seq_id", 0, n) == seq_id
    return np.flatnonzero(chosen)
