"""Threads of small models by a trial, with a clock that the test moves."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from engine import files, threads
from engine.batch import Span
from engine.memory.hybrid import HybridMemory
from engine.model import info
from engine.options import RunOptions
from engine.session import Session
from engine.threads import choose_threads, fastest, kept_file, timed
from resources import DEMO_TARGET


class Passes:
    """A model whose passes take what the test says, and their clock."""

    def __init__(self, seconds: dict[int, list[float]]) -> None:
        self.now, self.turns = 0.0, []
        self._left = {n: list(each) for n, each in seconds.items()}

    def run(self, n: int) -> None:
        self.turns.append(n)
        left = self._left[n]
        self.now += left.pop(0) if len(left) > 1 else left[0]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: [0.05, 0.002], 2: [0.05, 0.001]}, {1: 0.002, 2: 0.001}),  # the first pass records
        ({1: [0.01, 0.004, 0.002, 0.009], 2: [0.01, 0.004]}, {1: 0.002, 2: 0.004}),
        ({1: [0.004], 2: [0.7]}, {}),  # a machine with other work: no turns to choose by
        ({1: [0.04], 2: [0.05]}, {}),  # three turns of each are too few
    ],
)
def test_the_least_of_turns_within_the_budget(seconds, expected) -> None:
    passes = Passes(seconds)
    found, _ = timed([1, 2], passes.run, lambda: passes.now)
    assert found == pytest.approx(expected)
    assert passes.turns[:4] == [1, 2, 1, 2][: len(passes.turns)]
    longest = max(max(each) for each in seconds.values())
    assert passes.now <= threads._BUDGET_S + longest + 1e-9


QUIET = {1: [0.05, 0.0003, 0.00031], 2: [0.05, 0.00028, 0.0003]}


@pytest.mark.parametrize(
    ("seconds", "n_switches", "is_quiet"),
    [
        (QUIET, 0, True),
        (QUIET, 3, True),  # one in eight passes
        (QUIET, 4, False),
        ({1: [0.05, 0.00097], 2: [0.05, 0.02659, 0.06, 0.041]}, 0, False),
        ({1: [0.05, 0.00098, 0.001], 2: [0.05, 0.0006, 0.0009]}, 0, False),
        ({1: [0.004], 2: [0.7]}, 0, False),  # used up
    ],
)
def test_a_trial_that_other_work_disturbed_is_not_kept(seconds, n_switches, is_quiet) -> None:
    passes = Passes(seconds)
    counts = iter((700, 700 + n_switches))
    found = timed([1, 2], passes.run, lambda: passes.now, lambda: next(counts))
    assert found[1] is is_quiet


def test_the_processor_says_when_it_was_taken_away() -> None:
    assert 0 <= threads.n_interrupted() <= threads.n_interrupted()


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({}, 1),
        ({1: 2.0, 2: 1.95}, 1),  # not clearly faster
        ({1: 2.0, 2: 1.5}, 2),
        ({1: 2.0, 2: 1.5, 4: 1.5}, 2),
        ({1: 1.0, 2: 3.0}, 1),
    ],
)
def test_another_number_must_be_clearly_faster(times, expected) -> None:
    assert fastest(times, 1) == expected


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two cores, a folder of its own, and a log of the trials, in which two threads win."""
    trials = []

    def trial(candidates, run, now):
        trials.append(candidates)
        run(2)
        return {1: 0.002, 2: 0.001}, threads.n_interrupted() == 0

    monkeypatch.setenv("DRAFTSCOPE_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(threads, "ALL", 2)
    monkeypatch.setattr(threads, "timed", trial)
    monkeypatch.setattr(threads, "n_interrupted", lambda: 0)
    before = torch.get_num_threads()
    yield trials
    torch.set_num_threads(before)
    threads._times.clear()


@pytest.fixture(scope="module")
def demo() -> Session:
    return Session.open(DEMO_TARGET, compute="blocks")


def test_a_choice_is_kept_and_a_number_that_is_asked_for_counts(machine, demo) -> None:
    choose_threads(None, demo.info, demo.model)
    assert torch.get_num_threads() == 2
    assert threads.chosen_by() == (
        "2, chosen by measurement (ms a token: 2.00 with 1, 1.00 with 2)"
    )
    choose_threads(1, demo.info, demo.model)
    assert (torch.get_num_threads(), threads.chosen_by()) == (1, "")
    choose_threads(None, demo.info, demo.model)
    assert torch.get_num_threads() == 2
    assert machine == [[1, 2]]  # once
    run = demo.start([demo.prompt("a")], RunOptions())
    assert run.trace.runs[run.run_id].threads == 2
    assert run.trace.runs[run.run_id].threads_chosen == threads.chosen_by()


def test_a_disturbed_choice_is_for_now_and_the_next_opening_tries_again(
    machine, demo, monkeypatch
) -> None:
    monkeypatch.setattr(threads, "n_interrupted", lambda: 900)
    choose_threads(None, demo.info, demo.model)
    assert (torch.get_num_threads(), kept_file().exists()) == (2, False)
    monkeypatch.setattr(threads, "n_interrupted", lambda: 0)
    for _ in range(2):
        choose_threads(None, demo.info, demo.model)
    assert len(machine) == 2
    assert kept_file().exists()


@pytest.mark.parametrize("damage", ["[]", "{", '{"times": {"KEY": {"1": 0.1, "2": -1}}}'])
def test_what_is_kept_is_not_trusted(machine, demo, damage) -> None:
    choose_threads(None, demo.info, demo.model)
    (key,) = json.loads(kept_file().read_text())["times"]
    kept_file().write_text(damage.replace("KEY", key))
    choose_threads(None, demo.info, demo.model)
    assert len(machine) == 2


def test_no_trial_where_it_could_change_results_or_takes_long(machine, demo, monkeypatch) -> None:
    exact = Session.open(DEMO_TARGET, compute="f32")
    choose_threads(None, exact.info, exact.model)
    assert (torch.get_num_threads(), machine) == (1, [])
    monkeypatch.setattr(info, "SMALL_MODEL", 1)
    choose_threads(None, demo.info, demo.model)
    assert (torch.get_num_threads(), machine) == (2, [])  # large: all of them


def test_a_folder_that_cannot_be_written_costs_another_trial(machine, demo, tmp_path) -> None:
    (tmp_path / "threads.json").mkdir()
    for _ in range(2):
        choose_threads(None, demo.info, demo.model)
    assert len(machine) == 2


def test_so_does_a_disk_without_room(machine, demo, monkeypatch) -> None:
    def full(_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "synced", full)
    for _ in range(2):
        choose_threads(None, demo.info, demo.model)
    assert len(machine) == 2


@pytest.mark.parametrize("compute", threads.MODES)
@pytest.mark.thinned(4)
def test_bits_do_not_depend_on_the_number_of_threads(compute) -> None:
    model, found = Session.open(DEMO_TARGET, compute=compute).model, []
    before = torch.get_num_threads()
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        memory = HybridMemory.for_model(model.config, 1, 200, model.device)
        start = 0
        for width in (100, 1, 4, 16, 1):
            tokens = [(7 * i) % 200 for i in range(width)]
            (ubatch,) = memory.split([Span(0, start, tokens, range(width))], width, "seq")
            with torch.inference_mode():
                found.append((n, start, model.forward(ubatch, memory).logits.clone()))
            start += width
    torch.set_num_threads(before)
    first = {start: logits for n, start, logits in found if n == 1}
    assert all(torch.equal(logits, first[start]) for _, start, logits in found)
