"""The whole comparison with scripts in place of llama.cpp, and once with the real programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import OptionError
from engine.experiments.bench.against_llama_cpp import (
    BETTER,
    PLAIN,
    SPECULATIVE,
    Against,
    OwnPasses,
    Pair,
    PassWork,
    own_request,
    paired_ratio,
    pass_works,
    take_turns,
)
from engine.experiments.bench.llama_programs import SpeculativeWork
from engine.experiments.random_models.random_model import write_random_model
from engine.model.hybrid import HybridModel
from engine.options import RunOptions
from engine.session import Session
from tests.support.fake_llama_programs import FakePrograms

WORK = SpeculativeWork(tuple(range(40, 60)), 13, (1.0, 1.0, 0.0), 128)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    path = tmp_path_factory.mktemp("against") / "tiny.gguf"
    write_random_model(path, size="tiny", quant="q4_k_m")
    return Session.open(path)


@pytest.fixture
def passes(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens and rows of logits of each pass of the model."""
    seen: list[tuple[int, int]] = []
    forward = HybridModel.forward

    def spy(self: HybridModel, ubatch, memory, **wanted):
        out = forward(self, ubatch, memory, **wanted)
        seen.append((ubatch.tokens.size, len(out.logits)))
        return out

    monkeypatch.setattr(HybridModel, "forward", spy)
    return seen


def test_our_side_does_the_work_that_it_is_asked_for(
    session: Session, passes: list[tuple[int, int]]
) -> None:
    own = OwnPasses(session.model, depth=5, n_most=520)
    assert passes == [(5, 1)]
    passes.clear()
    assert own.measure(PassWork("", 3, one_by_one=True, repeats=2)) > 0
    assert passes == [(1, 1)] * 9  # once untimed, twice timed
    passes.clear()
    own.measure(PassWork("", 4, all_logits=True))
    assert passes == [(4, 4)] * 2
    passes.clear()
    own.measure(PassWork("", 520))
    assert passes == [(512, 1), (8, 1)] * 2


def test_our_request_accepts_as_many_as_the_rates_say(session: Session) -> None:
    speed, acceptance = own_request(session, RunOptions(), WORK)
    assert acceptance == pytest.approx(2 / 3, abs=0.1)  # the last draft is shorter
    assert speed > 0


def test_pairs_of_every_work_and_what_they_come_to(session: Session, tmp_path: Path) -> None:
    fake = FakePrograms(tmp_path)
    works = pass_works((4,), 16, 0)
    against = Against(session, fake.folder, works, WORK, RunOptions(), 3)
    assert list(against.steps()) == [PLAIN, "verify 4", "prompt 16"] * 3 + [SPECULATIVE] * 3
    assert against.n_steps == 12
    assert against.build == "abc1234 (7)"
    rows = against.rows()
    assert list(rows) == [PLAIN, "verify 4", "prompt 16", SPECULATIVE, BETTER]
    assert all(row["n_pairs"] == 3 for row in rows.values())
    assert rows[PLAIN]["theirs"] == 20.0
    # its plain decoding is four times as fast as its speculation
    assert rows[SPECULATIVE]["theirs"] == 5.0
    assert rows[BETTER]["theirs"] == 20.0
    assert rows[BETTER]["ours"] == rows[SPECULATIVE]["ours"]
    assert rows[BETTER]["ratio"] == pytest.approx(rows[SPECULATIVE]["ratio"] / 4)
    assert against.acceptance == [pytest.approx((2 / 3, 2 / 3), abs=0.1)] * 3
    if sys.platform == "linux":
        assert against.memory is not None
        theirs, ours = against.memory
        # of an interpreter, and of one with torch and a model
        assert 2**22 < theirs < ours < 2**33
    asked = fake.asked("llama-server")
    assert len(asked) == 1 + 4  # started once; a request to warm up
    assert [words[words.index("-t") + 1] for words in fake.asked("llama-bench")] == [
        str(torch.get_num_threads())
    ] * 9


def test_a_missing_program_is_told_before_anything_is_measured(
    session: Session, tmp_path: Path
) -> None:
    fake = FakePrograms(tmp_path)
    (fake.folder / "llama-server").unlink()
    with pytest.raises(OptionError, match="There is no llama-server in"):
        Against(session, fake.folder, pass_works((4,), 16, 0), WORK, RunOptions(), 1)
    without = Against(session, fake.folder, pass_works((4,), 16, 0), None, RunOptions(), 1)
    assert SPECULATIVE not in list(without.steps())


@pytest.mark.peer
def test_real_programs_on_the_tiny_model(session: Session) -> None:
    folder = os.environ.get("DRAFTSCOPE_LLAMA_CPP")
    if not folder:
        pytest.skip("DRAFTSCOPE_LLAMA_CPP names no folder with a build of llama.cpp")
    works = pass_works((4,), 16, 8)
    against = Against(session, Path(folder), works, WORK, RunOptions(), 1)
    assert len(list(against.steps())) == against.n_steps
    rows = against.rows()
    assert all(row["theirs"] > 0 and row["ours"] > 0 for row in rows.values())
    ((theirs, ours),) = against.acceptance
    assert theirs == pytest.approx(2 / 3, abs=0.1)
    assert ours == pytest.approx(2 / 3, abs=0.1)


def test_equal_figures_count_for_neither_side() -> None:
    pairs = [Pair(1, ratio, 0) for ratio in (2, 2, 2, 1)]
    assert paired_ratio(pairs)["p"] == 0.25
    assert paired_ratio(pairs[-1:])["p"] == 1.0


def test_ratios_are_those_of_the_pairs() -> None:
    """The machine was half as fast during the second pair: no ratio changes."""
    found = paired_ratio([Pair(10, 20, 0), Pair(5, 10, 0), Pair(10, 30, 0)])
    shown = {"theirs": 10, "ours": 20, "ratio": 2, "low": 2, "high": 3, "n_pairs": 3}
    assert {name: found[name] for name in shown} == shown


def test_the_first_side_changes_from_pair_to_pair() -> None:
    order: list[str] = []

    def side(name: str) -> str:
        order.append(name)
        return name

    for number in range(3):
        theirs, ours, _ = take_turns(number, lambda: side("a"), lambda: side("b"))
        assert (theirs, ours) == ("a", "b")
    assert "".join(order) == "abbaab"


def test_waiting_is_told_from_working(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = used = 0.0

    def take(seconds: float, of_them_used: float) -> None:
        nonlocal wall, used
        wall, used = wall + seconds, used + of_them_used

    monkeypatch.setattr("engine.experiments.bench.against_llama_cpp.perf_counter", lambda: wall)
    monkeypatch.setattr("engine.experiments.bench.against_llama_cpp.process_time", lambda: used)
    *_, idle = take_turns(0, lambda: take(2.0, 0.5), lambda: take(1.0, 1.0))
    *_, busy = take_turns(1, lambda: take(2.0, 2.0), lambda: take(1.0, 0.0))
    assert (idle, busy) == (0.25, 1.0)
