"""What the tables of a run must add up to, whatever it did, and what an export must bring back."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.options import RunOptions
from engine.run import Run
from engine.trace.export import export_csv
from engine.trace.records import EMITTED_KINDS, MISSING
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore


def check_run(run: Run, options: RunOptions) -> None:
    """Raises AssertionError for tables that contradict the output, or each other."""
    _check_tokens(run, options)
    _check_rounds(run)
    _check_passes(run)


def _check_tokens(run: Run, options: RunOptions) -> None:
    table = run.trace.tokens
    mine = table.column("run_id") == run.run_id
    kinds = np.array(table.texts("kind"))
    emitted = mine & np.isin(kinds, EMITTED_KINDS)
    seqs, ids = table.column("seq_id"), table.column("token_id")
    positions = table.column("pos")
    for result in run.results():
        own = emitted & (seqs == result.seq_id)
        assert ids[own].tolist() == result.tokens, "the table of tokens has another text"
        first = len(result.prompt_tokens)
        wanted = list(range(first, first + len(result.tokens)))
        assert positions[own].tolist() == wanted, "positions have a gap"
        assert result.stop in ("end", "limit", "context"), f"it ends by {result.stop!r}"
        if options.n_predict > 0:
            assert len(result.tokens) <= options.n_predict, "more tokens than asked for"
            if result.stop == "limit":
                assert len(result.tokens) == options.n_predict, "the limit was not reached"


def _check_rounds(run: Run) -> None:
    table = run.trace.rounds
    mine = table.column("run_id") == run.run_id
    names = ("draft_tokens", "accepted_draft_tokens", "target_tokens", "emitted")
    columns = [table.column(f"num_{name}")[mine] for name in names]
    columns.append(table.column("rollback_depth")[mine])
    drafted, accepted, own, emitted, depth = (
        np.where(column == MISSING, 0, column) for column in columns
    )
    assert (accepted <= drafted).all(), "more accepted than drafted"
    assert (depth <= drafted).all(), "more undone than drafted"
    # an end token within a draft leaves the rest of what was accepted out of the text
    assert (emitted <= accepted + own).all(), "more emitted than accepted and the target's own"
    assert emitted.sum() == sum(len(r.tokens) for r in run.results()), "rounds lack tokens"
    seqs = table.column("seq_id")[mine]
    rounds = table.column("round")[mine]
    for seq in np.unique(seqs):
        assert (np.diff(rounds[seqs == seq]) > 0).all(), "two rounds of a sequence are one"
    for name in ("kv_cells_duplicate", "cache_wrong", "sampler_wrong"):
        values = table.column(name)[mine]
        assert np.isin(values, (0, MISSING)).all(), f"{name} is not 0"


def _check_passes(run: Run) -> None:
    gaps = run.trace.ubatches.column("pos_gap")
    assert np.isin(gaps, (0, MISSING)).all(), "a pass has a gap in its positions"


def check_export(store: TraceStore, folder: Path) -> None:
    """Raises AssertionError unless an export has everything when it is opened."""
    export_csv(store, folder)
    check_same(open_trace(folder), store)


def check_same(found: TraceStore, wanted: TraceStore) -> None:
    """Raises AssertionError unless all tables that were exported came back with every value."""
    assert found.runs.keys() == wanted.runs.keys(), "it lacks runs"
    for name, table in wanted.tables.items():
        other = found.tables[name]
        assert len(other) == len(table), f"{len(other)} rows of {name}, of {len(table)} exported"
        for column in table.columns:
            what = f"{name}.{column.name}"
            if column.kind == "text":
                assert other.texts(column.name) == table.texts(column.name), what
            else:  # numbers are written with nine digits
                values = (one.column(column.name) for one in (other, table))
                np.testing.assert_allclose(*values, rtol=1e-8, err_msg=what)
