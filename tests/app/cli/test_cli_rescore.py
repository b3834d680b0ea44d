"""rescore and triage: what they print, write and leave with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import DraftscopeError
from engine.plain_text import counted
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from resources import DEMO_DRAFT
from tests.app.cli.conftest import Outcome
from tests.support.observed_texts import (
    CAPTURED_TARGET,
    GREEDY,
    N_PROMPT,
    emitted_ids,
    observed_run,
    with_token,
)

Cli = Callable[..., Outcome]
IDS = emitted_ids()
DATA = Path(__file__).parents[2] / "data"


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    plain = [(0, 0, [token]) for token in IDS]
    runs = {"right": GREEDY, "altered": with_token(GREEDY, 20, 700), "plain": plain}
    for name, rounds in runs.items():
        export_csv(observed_run(rounds).store, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("compute", ["f32", "q8", "auto"])
def test_a_right_text_is_re_scored_and_written(cli: Cli, traces: Path, compute: str) -> None:
    """Three tokens lead by less than 0.04, all others by more than 0.05: where a mode that rounds
    ranks one of the three second, as on some processors, it is a near tie."""
    words = ("--compute", compute, "--trace", traces / "out")
    outcome = cli("rescore", traces / "right", CAPTURED_TARGET, *words)
    assert outcome.status == 0, outcome.err
    assert outcome.out.startswith(f"run 0: {len(IDS)} tokens re-scored, compute ")
    assert "same as far as can be known" in outcome.out and "temperature 0" in outcome.out
    assert not len(open_trace(traces / "right").runs[0].get("rescored", ()))
    store = open_trace(traces / "out")
    facts = store.runs[0]["rescored"]
    (found,) = facts["sequences"]
    ranks = store.tokens.column("target_rank")
    n_near = int((ranks > 1).sum())
    assert (len(ranks), ranks.min(), ranks.max()) == (len(IDS), 1, 1 + (n_near > 0))
    assert (found["n_first"], found["n_near_ties"]) == (len(IDS) - n_near, n_near)
    assert (found["n_lossy"], found["n_changed"]) == (0, 0)
    assert n_near <= (0 if facts["compute"] == "f32" else 3)
    near = f"; {counted(n_near, 'near tie')}" if n_near else ""
    assert f", temperature 0, {len(IDS) - n_near} of rank 1{near}\n" in outcome.out
    assert ("rounding changes gaps" in outcome.out) == (facts["noise"] is not None) == (n_near > 0)
    assert store.runs[0]["columns"]["tokens"]["target_rank"] == "derived"


def test_what_was_found_is_printed_where_the_trace_cannot_be_written(
    cli: Cli, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DraftscopeError("out cannot be written: No space left on device.", "Free some space.")

    monkeypatch.setattr("app.cli.rescore.export", full)
    outcome = cli("rescore", traces / "right", CAPTURED_TARGET, "--trace", traces / "out")
    assert (outcome.status, "No space" in outcome.err) == (1, True)
    assert outcome.out.startswith(f"run 0: {len(IDS)} tokens re-scored")


def test_an_altered_token_asks_first_and_is_then_named(cli: Cli, traces: Path) -> None:
    asks = cli("rescore", traces / "altered", CAPTURED_TARGET)
    assert asks.status == 2 and "--assume-same" in asks.err and "is not known" in asks.err
    outcome = cli(
        "rescore", traces / "altered", CAPTURED_TARGET, "--assume-same", "--trace", traces / "o"
    )
    assert outcome.status == 1
    assert "error: text-changed: Speculation changed the text" in outcome.out
    assert f"position {N_PROMPT + 20}" in outcome.out and "top-2 gap" in outcome.out
    again = cli("rescore", traces / "altered", CAPTURED_TARGET, "--assume-same", "--json")
    (found,) = again.json["runs"]
    assert found["sequences"][0]["changed"]["pos"] == N_PROMPT + 20
    # what was found opens again with the trace
    store = open_trace(traces / "o")
    assert "text-changed" in store.findings.texts("rule")


def test_other_models_runs_and_files_are_refused_in_a_sentence(cli: Cli, traces: Path) -> None:
    other = cli("rescore", traces / "right", DEMO_DRAFT, "--assume-same")
    assert other.status == 1 and "another model" in other.err
    assert cli("rescore", traces / "right", CAPTURED_TARGET, "--run", 4).status == 2
    assert cli("rescore", traces / "right", CAPTURED_TARGET, "--probe").status == 2
    nothing = cli("rescore", traces, CAPTURED_TARGET)
    assert nothing.status == 1 and "not an exported trace" in nothing.err


def test_a_prompt_outside_the_vocabulary_is_called_that(cli: Cli, tmp_path: Path) -> None:
    cli("run", "--demo", "--tokens", "7,4000", "-n", 2, "--trace", tmp_path / "run")
    outcome = cli("rescore", tmp_path / "run", DATA / "qwen35-a-f32.gguf")
    assert outcome.status == 2
    assert "Its prompt has token 4000, outside the vocabulary. Choose another run" in outcome.err


def test_two_texts_are_compared_with_and_without_the_model(cli: Cli, traces: Path) -> None:
    same = cli("triage", traces / "plain", traces / "right")
    assert same.status == 0 and same.out.startswith("verdict: same")
    unknown = cli("triage", traces / "plain", traces / "altered")
    assert unknown.status == 1 and "re-score with the model" in unknown.out
    judged = cli(
        "triage",
        traces / "plain",
        traces / "altered",
        "--rescore",
        CAPTURED_TARGET,
        "--assume-same",
        "--json",
    )
    assert judged.status == 1 and judged.json["verdict"] == "different"
    (pair,) = judged.json["pairs"]
    assert (pair["n_same"], pair["a"]["short"]) == (20, 0) and pair["b"]["short"] > pair["noise"]
