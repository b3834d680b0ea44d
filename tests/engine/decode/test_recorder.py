"""Rows that wait for one another are those that do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine import run as engine_run
from engine.decode import recorder
from engine.errors import RollbackRefusedError
from engine.run import Run
from engine.trace.records import PHASES, TABLES
from tests.support.golden_runs import decode, options_of, prompt_of, session

NAME = "qwen35-c-v2x-mtp-f32"
OPTIONS = options_of(30, "draft-mtp", "ngram-simple", parallel=2)


def started() -> Run:
    return session(NAME).start([prompt_of(NAME)] * 3, OPTIONS)


def assert_same_rows(ours: Run, theirs: Run) -> None:
    for name, columns in TABLES.items():
        if name == "findings":  # they speak of measured times
            continue
        one, other = ours.trace.tables[name], theirs.trace.tables[name]
        assert len(one) == len(other)
        for column in columns:
            if column.kind == "text":
                assert one.texts(column.name) == other.texts(column.name)
            elif not column.name.endswith("ms"):
                np.testing.assert_array_equal(one.column(column.name), other.column(column.name))
    assert ours.trace.pieces == theirs.trace.pieces


def test_a_run_that_goes_on_records_what_single_steps_record() -> None:
    stepped, advanced = started(), started()
    while stepped.step():
        pass
    while advanced.advance(60):
        pass
    assert len(advanced.trace.rounds) > 20
    assert_same_rows(advanced, stepped)


def test_every_row_is_there_behind_an_advance_and_a_step() -> None:
    run, twin = started(), started()
    for call in (lambda: run.advance(0), run.step, lambda: run.advance(0), run.step):
        call()
        twin.step()
        assert_same_rows(run, twin)


def test_rows_of_whole_rounds_outlive_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    run, twin = started(), started()
    real, calls = Run.step, []

    def step(self: Run) -> bool:
        calls.append(1)
        if len(calls) == 4:
            raise RollbackRefusedError("Refused.", "Try again.")
        return real(self)

    for _ in range(3):
        twin.step()
    monkeypatch.setattr(Run, "step", step)
    with pytest.raises(RollbackRefusedError):
        run.advance(60)
    assert_same_rows(run, twin)


def test_a_run_that_is_over_does_not_advance() -> None:
    run = started()
    run.stop()
    assert not run.advance()
    assert len(run.trace.rounds) == 0


def test_an_advance_ends_before_logits_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    n_steps, twin, run = 3, started(), started()
    for _ in range(n_steps):
        assert twin.step()
    monkeypatch.setattr(engine_run, "LOOK_BYTES", 1)
    for _ in range(n_steps):
        assert run.advance(60)
        assert not run._scheduler.bytes_waiting
    assert_same_rows(run, twin)


def test_an_interruption_while_facts_are_worked_out_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C may come anywhere; rows whose facts were being worked out are then written in full."""
    left, work_out = 3, recorder.all_target_facts

    def interrupted(asked: list[object]) -> object:
        nonlocal left
        left -= bool(asked)
        if left == 0:
            left = -1
            raise KeyboardInterrupt
        return work_out(asked)

    monkeypatch.setattr(recorder, "all_target_facts", interrupted)
    run = session("qwen35-a-f32").start([prompt_of("qwen35-a-f32")], options_of(20))
    with pytest.raises(KeyboardInterrupt):
        all(iter(run.step, False))
    assert run.trace.runs[run.run_id]["stops"] == ["stopped"]
    assert len(run.trace.tokens)


def test_a_round_takes_its_phases_and_what_lies_between() -> None:
    prompt = prompt_of(NAME)
    run = decode(session(NAME), [prompt, prompt], replace(options_of(16, "draft-mtp"), parallel=2))
    rounds = run.trace.rounds
    total = rounds.column("total_ms")
    phases = sum(np.nan_to_num(rounds.column(f"{phase}_ms")) for phase in PHASES)
    assert np.all(total >= phases)
    numbers, ends = rounds.column("round"), rounds.column("t_ms")
    by_round = np.bincount(numbers, weights=total)
    end = np.array([ends[numbers == number][0] for number in range(len(by_round))])
    np.testing.assert_allclose(np.cumsum(by_round), end, rtol=1e-5)
    assert np.bincount(numbers).max() == 2, "the time of a round is divided among its sequences"


def test_files_are_looked_at_in_rounds_that_are_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int | None] = []
    run = started()
    monkeypatch.setattr(recorder, "LOOK_S", 0)
    monkeypatch.setattr(
        type(run.files), "note", lambda files, facts, round_, after=None: noted.append(round_)
    )
    while run.advance(60):
        pass
    numbers = sorted({*run.trace.rounds.column("round").tolist()})
    assert noted == [*numbers, None] and len(numbers) > 3
