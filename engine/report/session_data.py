"""Data of a session page: the contents that its script shows for every run, as JSON.

A column is a list; {"all": value} if all rows are equal; {"of": texts, "at": [index]} for texts.
None = not observed. Numbers have few digits, as in the window's tables: the trace has all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

import numpy as np

from engine.analysis.findings.check import recorded
from engine.analysis.verdict import bound_of, is_beyond, judge
from engine.errors import OptionError
from engine.report.common import changed, name_of
from engine.report.run import headline
from engine.trace.facts import Finding, RunFacts
from engine.trace.records import (
    GHOST_KINDS,
    MISSING,
    PEER,
    PEER_NOISE,
    REFERENCE,
    SLOT_STATES,
    TABLES,
    TOKEN_KINDS,
    Column,
)
from engine.trace.run_ref import RunColumns, RunRef
from engine.trace.store import TraceStore
from engine.trace.timings import summary
from engine.trace.token_text import MEANING, display_text, pieces_at

MOST_TOKENS = 500_000
"""Most rows of the tokens table on a page."""
_MOST_CANDIDATES = 16_000
"""Rows of the tokens table up to which a page includes each token's most probable alternatives."""
_MOST_SLOTS = 256
"""Most snapshot planes of a sequence on a page."""
_LONGEST_TEXT = 4000
_DIGITS = 4
_UNUSED = ("run_id", "lane")
_OF_TOKENS = (
    "seq_id",
    "round",
    "pos",
    "draft_index",
    "draft_p",
    "draft_conf",
    "target_p",
    "rule_p",
    "rule_q",
    "target_rank",
    "target_entropy",
)
_SPENT = "spent"
"""A plane recorded as stale under a policy that refuses to read it, as in the window."""
SHOWN_STATES = (*SLOT_STATES, _SPENT)
NOT_OBSERVED = len(SHOWN_STATES)


def session_data(runs: Sequence[RunRef]) -> dict[str, Any]:
    """Everything that the page shows of these runs. Raises OptionError for too many tokens."""
    n_tokens = _n_tokens(runs)
    if n_tokens > MOST_TOKENS:
        raise OptionError(
            f"The runs have {n_tokens:,} rows of tokens, but a page can hold only {MOST_TOKENS:,}.",
            "Choose some of the runs (--run).",
        )
    pieces = _TokenTexts()
    has_candidates = n_tokens <= _MOST_CANDIDATES
    found = [_run(run, pieces, has_candidates) for run in runs]
    return {
        "kinds": list(TOKEN_KINDS),
        "ghosts": list(GHOST_KINDS),
        "meaning": MEANING,
        "states": list(SHOWN_STATES),
        "about": {
            table: {column.name: column.about for column in columns}
            for table, columns in TABLES.items()
            if table in ("rounds", "tokens", "drafts")
        },
        "pieces": pieces.texts,
        "candidates": has_candidates,
        "runs": found,
    }


def fits(runs: Sequence[RunRef]) -> bool:
    """Whether these runs fit on a page."""
    return _n_tokens(runs) <= MOST_TOKENS


def _n_tokens(runs: Sequence[RunRef]) -> int:
    return sum(RunColumns(run.store, "tokens", run.run_id).n for run in runs)


class _TokenTexts:
    """Distinct token texts; `texts` in the order of their numbers."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[tuple[bytes, int], int] = {}

    def number(self, piece: bytes, token_id: int) -> int:
        key = piece, -1 if piece else token_id
        if key not in self._numbers:
            self._numbers[key] = len(self.texts)
            self.texts.append(display_text(piece, token_id)[:_LONGEST_TEXT])
        return self._numbers[key]


def _run(run: RunRef, pieces: _TokenTexts, has_candidates: bool) -> dict[str, Any]:
    store, run_id, facts = run.store, run.run_id, run.facts
    rounds = RunColumns(store, "rounds", run_id)
    drafts = RunColumns(store, "drafts", run_id)
    known = changed(facts.options)
    known |= {
        name: str(value)
        for name, value in facts.pick("device", "compute", "architecture", "error").items()
        if value is not None
    }
    return {
        "id": run_id,
        "drafters": "" if facts.lane or not facts.options else ", ".join(facts.options.spec.types),
        "model": name_of(facts),
        "lane": facts.lane,
        "headline": headline(summary(store, run_id), has_speed=not facts.lane),
        "settings": known,
        "rounds": _columns(rounds, "rounds"),
        "drafts": _columns(drafts, "drafts"),
        "tokens": _tokens(run, pieces, has_candidates),
        "ring": _ring(run),
        "divergence": _divergence(run),
        "findings": [_finding(one) for one in recorded(store) if one.run_id == run_id],
    }


def _finding(one: Finding) -> dict[str, Any]:
    names = "rule", "severity", "message", "evidence", "suggestion"
    said = {name: getattr(one, name) for name in names}
    return {"round": one.round, "seq": one.seq_id, **said}


def _columns(table: RunColumns, name: str) -> dict[str, Any]:
    """The number of rows, and all columns that are not empty."""
    found = {
        column.name: _column(table, column)
        for column in TABLES[name]
        if column.name not in _UNUSED and column.kind != "tops"
    }
    empty = {"all": None}, {"all": ""}
    return {"n": table.n, **{key: value for key, value in found.items() if value not in empty}}


def _column(table: RunColumns, column: Column, rows: np.ndarray | None = None) -> Any:
    values = table[column.name] if rows is None else table[column.name][rows]
    if not len(values):
        return []
    if column.kind == "text":
        at = np.arange(table.n) if rows is None else rows
        codes, indices = np.unique(values, return_inverse=True)
        firsts = at[np.unique(values, return_index=True)[1]]
        texts = [text[:_LONGEST_TEXT] for text in table.texts(column.name, firsts)]
        return {"all": texts[0]} if len(codes) == 1 else {"of": texts, "at": indices.tolist()}
    return _alike(_numbers(values))


def _numbers(values: np.ndarray) -> list[Any]:
    """Numbers in few digits, None if not observed or not finite."""
    if values.dtype.kind == "f":
        kept = [float(f"{one:.{_DIGITS}g}") for one in values.tolist()]
        return [(int(one) if one.is_integer() else one) if isfinite(one) else None for one in kept]
    return [None if one == MISSING else one for one in values.tolist()]


def _alike(values: list[Any]) -> Any:
    if len(values) > 1 and all(one == values[0] for one in values):
        return {"all": values[0]}
    return values


def _tokens(run: RunRef, pieces: _TokenTexts, has_candidates: bool) -> dict[str, Any]:
    """The tokens in reading order, by sequence. A token that was decoded again after a restore is
    marked; its second row is omitted."""
    store = run.store
    table = RunColumns(store, "tokens", run.run_id)
    kinds = np.array([_code(store, kind) for kind in TOKEN_KINDS])
    kind = np.full(table.n, len(TOKEN_KINDS) - 1)
    for number, code in enumerate(kinds.tolist()):
        kind[table["kind"] == code] = number
    order = np.argsort(table["seq_id"], kind="stable")
    again, kept = _replayed(table, kind, order)
    rows_of_store = np.flatnonzero(store.tokens.column("run_id") == run.run_id)[: table.n][kept]
    ids = np.maximum(table["token_id"][kept], -1).tolist()
    texts = pieces_at(store, rows_of_store)
    by_name = {column.name: column for column in TABLES["tokens"]}
    found: dict[str, Any] = {
        "n": len(kept),
        "kind": _alike(kind[kept].tolist()),
        "piece": [pieces.number(text, one) for text, one in zip(texts, ids, strict=True)],
        "again": np.flatnonzero(np.isin(kept, again)).tolist(),
        "id": _alike([None if one < 0 else one for one in ids]),
    }
    for name in _OF_TOKENS:
        found[name] = _column(table, by_name[name], kept)
    if has_candidates:
        for name in ("target_top", "draft_top"):
            ids_and_ps = table[f"{name}_id"][kept].tolist(), table[f"{name}_p"][kept].tolist()
            found[name] = [
                _candidates(store, pieces, *pair) for pair in zip(*ids_and_ps, strict=True)
            ]
    return {key: value for key, value in found.items() if value != {"all": None}}


def _code(store: TraceStore, text: str) -> int:
    return store.text_pool.find(text)


def _replayed(
    table: RunColumns, kind: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens that were decoded again, and all rows shown, both int64 [n]."""
    is_ghost = np.isin(kind, [TOKEN_KINDS.index(one) for one in GHOST_KINDS])
    is_again = kind == TOKEN_KINDS.index("replayed")
    origins: dict[tuple[int, int], int] = {}
    marked, hidden = [], set()
    seqs, positions, ids = table["seq_id"], table["pos"], table["token_id"]
    if is_again.any():
        for row in order.tolist():
            key = int(seqs[row]), int(positions[row])
            if not is_again[row]:
                if not is_ghost[row]:
                    origins[key] = row
            elif key in origins and ids[origins[key]] == ids[row]:
                marked.append(origins[key])
                hidden.add(row)
    kept = np.array([row for row in order.tolist() if row not in hidden], np.int64)
    return np.array(marked, np.int64), kept


def _candidates(
    store: TraceStore, pieces: _TokenTexts, ids: list[int], ps: list[float]
) -> list[Any] | None:
    """Numbers of texts and probabilities in turn; None without any."""
    found = [
        (pieces.number(store.pieces.get(one, b""), one), float(f"{p:.3g}"))
        for one, p in zip(ids, ps, strict=True)
        if one != MISSING and p == p
    ]
    return [value for pair in found for value in pair] or None


def ring_images(run: RunRef) -> Iterator[tuple[int, int, np.ndarray]]:
    """Per sequence: its number, its first round, and the state of its planes after each round from
    there on, uint8 [planes, rounds]: an index into SHOWN_STATES, or NOT_OBSERVED."""
    store = run.store
    table = RunColumns(store, "memory", run.run_id)
    if not table.n:
        return
    names = {store.text_pool.find(state): number for number, state in enumerate(SLOT_STATES)}
    if not reads_stale(run.facts):
        names[store.text_pool.find("stale")] = SHOWN_STATES.index(_SPENT)
    codes, indices = np.unique(table["state"], return_inverse=True)
    states = np.array([names.get(code, NOT_OBSERVED) for code in codes.tolist()], np.uint8)[indices]
    for seq_id, rows in table.by_sequence(table["slot"] < _MOST_SLOTS):
        slots, rounds = table["slot"][rows], table["round"][rows]
        first = int(rounds.min())
        n_rounds = min(int(rounds.max()) - first + 1, MOST_TOKENS)
        image = np.full((int(slots.max()) + 1, n_rounds), NOT_OBSERVED, np.uint8)
        fits = rounds - first < n_rounds
        image[slots[fits], rounds[fits] - first] = states[rows[fits]]
        yield seq_id, first, image


def _ring(run: RunRef) -> list[dict[str, Any]]:
    """Per sequence the number of its planes and the names of the states that they ever had."""
    return [
        {
            "seq": seq_id,
            "planes": len(image),
            "states": [SHOWN_STATES[i] for i in np.unique(image) if i != NOT_OBSERVED],
        }
        for seq_id, _, image in ring_images(run)
    ]


def reads_stale(facts: RunFacts) -> bool:
    """Whether a run may have read stale planes: this engine refuses to, except with the fault
    stale-plane; true also for other engines and for unknown options, where it cannot be known."""
    is_ours = facts.source is None or facts.source.engine in (None, "draftscope")
    if facts.options is None or not is_ours or facts.lane_kind in (PEER, PEER_NOISE):
        return True
    return "stale-plane" in facts.options.faults


def _divergence(run: RunRef) -> dict[str, Any] | None:
    """The distance of a lane from its reference, and its verdict; None for any other run."""
    store, run_id, facts = run.store, run.run_id, run.facts
    if not facts.lane or facts.lane == REFERENCE:
        return None
    table = RunColumns(store, "divergence", run_id)
    bound = bound_of(store, run_id)
    found = judge(store, run_id, bound)
    names = ("seq_id", "round", "pos", "nmse", "max_abs", "kl", "top1_equal", "rank")
    by_name = {column.name: column for column in TABLES["divergence"]}
    beyond = np.flatnonzero(is_beyond(store, run_id, table["nmse"], bound))
    return {
        "n": table.n,
        **{name: _column(table, by_name[name]) for name in names},
        "bound": bound if np.isfinite(bound) else None,
        "verdict": found.verdict,
        "band": found.band,
        "beyond": beyond.tolist(),
        "first": [found.first_seq, found.first_round, found.first_pos],
    }


def chosen_runs(store: TraceStore, run_ids: Sequence[int] = ()) -> Iterator[RunRef]:
    """Runs of a trace: run_ids, or all that the user has not deleted. Raises OptionError for a run
    that the trace does not have."""
    for run_id in run_ids:
        if run_id not in store.runs:
            raise OptionError(
                f"The trace has no run {run_id}.", f"It has those from 0 to {len(store.runs) - 1}."
            )
    for run_id, facts in list(store.runs.items()):
        is_deleted = facts.library is not None and facts.library.deleted
        if run_id in run_ids if run_ids else not is_deleted:
            yield RunRef(store, run_id)
