"""The schema is a promise to every reader of the CSV files."""

from __future__ import annotations

import re

from engine.trace import records


def test_names_are_unique_snake_case_and_kinds_are_known() -> None:
    for table, columns in records.TABLES.items():
        names = [column.name for column in columns]
        assert len(set(names)) == len(names), table
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in [table, *names])
        assert {column.kind for column in columns} <= {"int", "real", "text", "tops"}
        assert names[0] == "run_id", table


def test_tables_hold_the_columns_of_the_design() -> None:
    rounds = [column.name for column in records.TABLES["rounds"]]
    for name in (
        "t_ms",
        "pos0",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "num_emitted",
        "stop_kind",
        "accept_rule",
        "rollback_depth",
        "rollback_path",
        "n_rs_seq",
        "valid_depth",
        "rs_idx_before",
        "rs_idx_after",
        "kv_cells_used",
        "kv_cells_duplicate",
        "state_bytes_copied",
        "checkpoint_bytes",
    ):
        assert name in rounds
    assert [f"{phase}_ms" for phase in records.PHASES] == [
        name for name in rounds if name.endswith("_ms") and name not in ("t_ms", "total_ms")
    ]


def test_kinds_that_are_emitted_and_ghosts_are_token_kinds_and_apart() -> None:
    emitted, ghosts = set(records.EMITTED_KINDS), set(records.GHOST_KINDS)
    assert emitted | ghosts < set(records.TOKEN_KINDS)
    assert not emitted & ghosts


def test_missing_cannot_be_an_observation() -> None:
    assert records.MISSING < -(2**30)
