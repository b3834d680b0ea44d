"""`draftscope export`: acceptance records of AIPerf, from any trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.observe.files.records import fill
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore

Cli = Callable[..., Any]
RECORDS = Path(__file__).parents[2] / "data" / "records"


@pytest.fixture
def exported(cli: Cli, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """The acceptance records of a trace on disk with the records of these files."""

    def export(*files: str | bytes) -> list[dict[str, Any]]:
        store = TraceStore()
        for i, file in enumerate(files):
            data = (RECORDS / file).read_bytes() if isinstance(file, str) else file
            fill(store, data, f"file {i}")
        export_csv(store, tmp_path / "trace")
        out = tmp_path / "records.jsonl"
        outcome = cli("export", tmp_path / "trace", "--aiperf", out)
        assert outcome.status == 0, outcome.err
        return [json.loads(line) for line in out.read_text().splitlines()]

    return export


def test_a_record_of_aiperf_comes_back_as_it_was(exported: Cli) -> None:
    one = json.loads((RECORDS / "aiperf-record.json").read_bytes())["record"]
    others = [
        one | {"per_step_accepted": None, "per_step_drafted": None, "worker": {"id": 3}},
        {name: value for name, value in one.items() if not name.startswith("per_step")},
        one | {"acceptance_histogram": None, "num_spec_tokens": None, "completion_tokens": None},
        one | {"num_spec_steps": 40},  # contradicts itself, and is not ours to mend
        one | {"per_step_drafted": None},
    ]
    lines = "\n".join(map(json.dumps, (one, *others)))
    assert exported(lines.encode()) == [one, *others]


def test_other_engines_records_have_equal_figures(exported: Cli) -> None:
    record = json.loads((RECORDS / "aiperf-record.json").read_bytes())["record"]
    lists = ("per_step_accepted", "per_step_drafted")
    detailed, brief, sglang, unknown = exported(
        "vllm-detailed-stream.json",
        "vllm-summary.json",
        "sglang-generate.json",
        "mlx-vlm-timings.json",
    )
    assert detailed == record
    assert brief == record | dict.fromkeys(lists)
    assert sglang == record | dict.fromkeys((*lists, "num_spec_tokens")) | {
        "engine": "sglang",
        "num_draft_tokens": 36,
        "draft_acceptance_rate": 16 / 36,
    }
    assert unknown["acceptance_histogram"] is None
    assert unknown["num_spec_steps"] == 12


def test_the_records_of_our_own_run_have_the_sums_of_its_trace(cli: Cli, tmp_path: Path) -> None:
    words = ["-n", 24, "--spec-type", "draft-mtp", "--compute", "f32", "--threads", 1]
    prompts = ["-p", "def quicksort(arr):", "-p", "import os\n", "--parallel", 2]
    trace, out = tmp_path / "trace", tmp_path / "records.jsonl"
    report = cli("run", "--demo", *prompts, *words, "--trace", trace, "--json")
    assert report.status == 0, report.err
    assert cli("export", trace, "--aiperf", out).status == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    rounds = open_trace(trace).rounds
    steps = rounds.column("num_draft_tokens") > 0
    for seq_id, record in enumerate(records):
        mine = steps & (rounds.column("seq_id") == seq_id)
        drafted = rounds.column("num_draft_tokens")[mine]
        accepted = rounds.column("num_accepted_draft_tokens")[mine]
        assert record["engine"] == "draftscope"
        assert record["per_step_drafted"] == drafted.tolist()
        assert record["per_step_accepted"] == accepted.tolist()
        assert record["num_draft_tokens"] == drafted.sum()
        assert record["num_accepted_draft_tokens"] == accepted.sum()
        assert record["num_spec_steps"] == mine.sum()
        assert record["mean_acceptance_length"] == 1 + accepted.sum() / mine.sum()
        assert record["completion_tokens"] == 24
        histogram = {int(j): n for j, n in record["acceptance_histogram"].items()}
        assert histogram == {int(j): int((accepted == j).sum()) for j in np.unique(accepted)}
    assert sum(r["num_draft_tokens"] for r in records) == report.json["totals"]["draft_n"]
    # and they are records that this program reads
    again = TraceStore()
    fill(again, out.read_bytes(), "records.jsonl")
    assert len(again.runs[0]["requests"]) == 2 and not len(again.findings)


def test_sequences_without_counts_are_left_out_and_told(
    cli: Cli, exported: Cli, tmp_path: Path
) -> None:
    assert len(exported("lmstudio-prediction.json", "vllm-summary.json")) == 1
    store = TraceStore()
    fill(store, (RECORDS / "lmstudio-prediction.json").read_bytes(), "stats")
    export_csv(store, tmp_path / "none")
    outcome = cli("export", tmp_path / "none", "--aiperf", tmp_path / "out")
    assert outcome.status == 1 and "no sequence with counted drafts" in outcome.err
    assert not (tmp_path / "out").exists()


def test_wrong_use_is_told_before_anything_is_read(cli: Cli, tmp_path: Path) -> None:
    assert cli("export", tmp_path).status == 2
    assert "is a folder" in cli("export", tmp_path, "--aiperf", tmp_path).err
    assert cli("export", tmp_path / "no", "--aiperf", tmp_path / "out").status == 1


def test_a_page_and_a_trace_for_perfetto(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    pytest.importorskip("perfetto")
    words = ["-n", 8, "--spec-type", "ngram-simple", "--compute", "f32", "--threads", 1]
    trace, page, perfetto = (tmp_path / name for name in ("trace", "page.html", "run.pftrace"))
    assert cli("run", "--demo", "-p", "a b a b", *words, "--trace", trace).status == 0
    outcome = cli("export", trace, "--html", page, "--perfetto", perfetto)
    assert outcome.status == 0, outcome.err
    assert "page with 1 run written" in outcome.err and "events written" in outcome.err
    assert page.read_bytes().startswith(b"<!DOCTYPE html>") and perfetto.stat().st_size
    assert cli("export", trace, "--html", page, "--run", 3).status == 2


@pytest.mark.parametrize(("option", "extra"), [("--html", "share"), ("--perfetto", "perfetto")])
def test_without_the_library_the_extra_is_named(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, extra: str
) -> None:
    store = TraceStore()
    store.begin_run({})
    store.rounds.append(run_id=0, round=0, seq_id=0, t_ms=1.0)
    export_csv(store, tmp_path / "trace")
    for module in ("bokeh.document", "perfetto.trace_builder.proto_builder"):
        monkeypatch.setitem(sys.modules, module, None)
    outcome = cli("export", tmp_path / "trace", option, tmp_path / "out")
    assert outcome.status == 2 and f"pip install 'draftscope[{extra}]'" in outcome.err
    assert not (tmp_path / "out").exists()
