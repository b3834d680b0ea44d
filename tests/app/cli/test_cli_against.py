"""bench against: table, Markdown and JSON with scripts in place of llama.cpp, and refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.experiments.bench.against_llama_cpp import LlamaBench
from tests.app.cli.conftest import ROOT, Outcome
from tests.support.fake_llama_programs import FakePrograms

Cli = Callable[..., Outcome]

MODEL = ROOT / "tests" / "data" / "qwen35-c-v2x-mtp-f32.gguf"
PLAIN = ROOT / "tests" / "data" / "qwen35-a-f32.gguf"
WORKS = ["1 token", "verify 4", "verify 8", "prompt 512", "draft-mtp", "draft-mtp, better"]


@pytest.fixture
def fake(tmp_path: Path) -> FakePrograms:
    return FakePrograms(tmp_path / "bin")


def test_table_and_markdown(cli: Cli, fake: FakePrograms) -> None:
    words = [
        "bench",
        "against",
        MODEL,
        "--llama-cpp",
        fake.folder,
        "--pairs",
        1,
        "-n",
        7,
        "--threads",
        1,
    ]
    outcome = cli(*words)
    assert outcome.status == 0
    assert "llama.cpp abc1234 (7)" in outcome.out
    lines = outcome.out.splitlines()
    (head,) = (at for at, line in enumerate(lines) if line.startswith("tokens/s"))
    assert [line[:20].strip() for line in lines[head + 1 : head + 7]] == WORKS
    assert lines[head + 1].split()[2] == "20.0"
    assert "Medians of 1 alternating pairs;" in outcome.out
    assert "--spec-synth-rates 1,1,0: accepted 0.67 there" in outcome.out
    assert "[5/5] draft-mtp" in outcome.err
    assert ("Resident memory, largest: llama-server" in outcome.out) == (sys.platform == "linux")

    table = cli(*words, "--markdown", "--spec-type", "none", "--depth", 3).out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in table if line.startswith("| ")]
    assert [row[0] for row in rows] == ["tokens/s", *WORKS[:4]]
    assert all(len(row) == 6 for row in rows)
    assert "All with 3 tokens in the context." in table


def test_json_has_every_pair(cli: Cli, fake: FakePrograms) -> None:
    words = ["bench", "against", MODEL, "--llama-cpp", fake.folder, "--pairs", 2, "--json"]
    report = cli(*words, "-n", 9, "--spec-synth-rates", "0.5,0.5,0.5").json
    assert report["complete"] is True
    assert [row["work"] for row in report["rows"]] == WORKS
    for row in report["rows"][:-1]:
        pairs = report["pairs"][row["work"]]
        ratios = sorted(pair["ours"] / pair["theirs"] for pair in pairs)
        assert [row["low"], row["high"]] == pytest.approx(ratios)
        assert row["ratio"] == pytest.approx(sum(ratios) / 2)
    assert report["speculation"]["rates"] == [0.5, 0.5, 0.5]
    assert report["speculation"]["n_predict"] == 9
    assert report["memory_copy_bytes_per_second"] > 0
    assert report["environment"]["processor"]
    server = fake.asked("llama-server")[0]
    assert server[server.index("--spec-synth-rates") + 1] == "0.5,0.5,0.5"


def test_without_an_mtp_head_there_is_no_speculation(cli: Cli, fake: FakePrograms) -> None:
    (fake.folder / "llama-server").unlink()
    report = cli("bench", "against", PLAIN, "--llama-cpp", fake.folder, "--pairs", 1, "--json").json
    assert [row["work"] for row in report["rows"]] == WORKS[:4]
    assert report["speculation"] is None


def test_what_was_measured_before_ctrl_c_is_told(
    cli: Cli, fake: FakePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = LlamaBench.measure

    def until_the_third(self: LlamaBench, work):
        if len(fake.asked("llama-bench")) == 2:
            raise KeyboardInterrupt
        return measure(self, work)

    (fake.folder / "llama-bench.log").touch()
    monkeypatch.setattr(LlamaBench, "measure", until_the_third)
    outcome = cli("bench", "against", MODEL, "--llama-cpp", fake.folder, "--pairs", 1)
    assert outcome.status == 130
    assert "not complete: the measurement was stopped" in outcome.out
    assert [line for line in WORKS if line in outcome.out] == WORKS[:2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--llama-cpp", "no/such/folder"], "There is no llama-bench in no/such/folder"),
        (["--llama-cpp", ".", "--markdown", "--json"], "--markdown and --json are both given"),
        (["--llama-cpp", ".", "--device", "cuda"], "compared only on the CPU"),
        (["--llama-cpp", ".", "-n", "0"], "-n 0 is not a number of tokens"),
        (["--llama-cpp", ".", "--depth", "4000"], "more than the trained context of 4096"),
        (["--llama-cpp", ".", "--spec-synth-rates", "1,0"], "--spec-synth-rates has 2 values"),
        (["--llama-cpp", ".", "--spec-type", "suffix"], "The request drafts with draft-mtp."),
        (["--llama-cpp", ".", "--temp", "1"], "unrecognized arguments: --temp"),
    ],
)
def test_wrong_usage_of_against_is_one_line(cli: Cli, words: list[str], message: str) -> None:
    outcome = cli("bench", "against", MODEL, *words)
    assert outcome.status == 2
    assert outcome.out == ""
    assert message in outcome.err.splitlines()[-1]
