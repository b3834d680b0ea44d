"""run --turns: what is printed for each turn, the JSON, the trace, and every refusal."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli import run
from app.cli.output import Interrupted
from engine.conversation.turns import TurnTree
from engine.trace.reopen import open_trace
from tests.app.cli.conftest import ROOT, Outcome

Cli = Callable[..., Outcome]

MTP = ROOT / "tests" / "data" / "qwen35-c-v2x-mtp-f32.gguf"
WORDS = ("--threads", 1, "-n", 6, "--spec-type", "draft-mtp", "--ignore-eos", "-c", 1024)
MESSAGES = [
    {"role": "user", "content": "The quick brown fox jumps over the lazy dog."},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And then?"},
]


@pytest.fixture
def turns(tmp_path: Path) -> Path:
    path = tmp_path / "turns.json"
    path.write_text(json.dumps(MESSAGES), "utf-8")
    return path


def test_recorded_and_new_answers(cli: Cli, turns: Path, tmp_path: Path) -> None:
    words = ["run", MTP, "--turns", turns, *WORDS]
    report = cli(*words, "--json", "--trace", tmp_path / "out").json
    first, second = report["turns"]
    assert first["is_recorded"] and first["answer"]["content"] == "Yes."
    assert second["record"]["n_reused"] > 0 and second["summary"]["predicted_n"] == 6
    assert (
        second["record"]["n_prompt"] == second["summary"]["cache_n"] + second["summary"]["prompt_n"]
    )
    trace = open_trace(tmp_path / "out")
    tree = TurnTree.of(trace.runs, 0)
    assert tree.messages(1)[:3] == MESSAGES and len(trace.runs) == 2
    assert tree.turns[1].record.n_reused == second["record"]["n_reused"]
    text = cli(*words, "--turns-answers", "anew").out
    assert "turn 2 after turn 1: And then?" in text
    assert (
        "tokens reused: " in text
        and "processed from" in text
        and "context checkpoints: at " in text
    )
    assert "2 turns: " in text and "as recorded" not in text
    control = cli(*words, "--no-cache-prompt").out
    assert "no prompt cache" in control


def test_a_turn_that_a_signal_kept_from_its_first_round_has_an_end(
    cli: Cli, turns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def comes(*_: object) -> None:
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(run, "record", comes)
    words = ["run", MTP, "--turns", turns, *WORDS, "--trace", tmp_path / "out"]
    assert cli(*words).status == 128 + signal.SIGTERM
    (facts,) = open_trace(tmp_path / "out").runs.values()
    assert facts.stops == ["stopped"]


def test_what_goes_not_together(cli: Cli, turns: Path) -> None:
    for words, problem in (
        (("--turns", turns, "-p", "x"), "A prompt cannot be combined with --turns."),
        (("--turns", turns, "--markdown"), "--markdown cannot be combined with --turns."),
        (("-p", "x", "--turns-answers", "anew"), "--turns-answers has no effect without --turns."),
        (("-p", "x", "--no-cache-prompt"), "--no-cache-prompt has no effect without --turns."),
        (("-p", "x", "--ctx-checkpoints", 2), "--ctx-checkpoints has no effect without --turns."),
        (("--turns", "missing.json"), "missing.json cannot be read"),
    ):
        found = cli("run", MTP, *words)
        assert found.status == 2 and problem in found.err


def test_one_turn_is_no_plural(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('["one two"]')
    text = cli("run", MTP, "--turns", tmp_path / "one.json", *WORDS).out
    assert text.startswith("1 turn, messages") and "\n1 turn: " in text
