"""What reports say: the figures are those of the trace, commands repeat the run, odd facts of a
trace from anyone make no report fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.errors import OptionError
from engine.experiments.bench.request import PLAIN, Configuration
from engine.experiments.bench.suite_report import options_of, suite_page, suite_report
from engine.experiments.results.reader import read_results
from engine.experiments.sweep.sweep import sweep_report
from engine.options import RunOptions, SamplerOptions, SpecOptions
from engine.report.common import run_command
from engine.report.page import html_page, write_report
from engine.report.run import compare_report, run_report
from engine.report.text import markdown
from engine.trace.facts import RunFacts
from engine.trace.run_ref import RunRef
from engine.trace.timings import summary
from tests.support.lane_traces import faulty_comparison
from tests.support.request_results import made_up
from tests.support.sweeps import write_results
from tests.support.trace_builder import TraceBuilder, sample_trace

HERE = {"processor": "a processor"}
OPTIONS = RunOptions(
    n_predict=7,
    sampler=SamplerOptions(temp=0.5, logit_bias=((3, 1.5),)),
    spec=SpecOptions(types=("draft-mtp",), synth_rates=(0.9, 0.5, 0.25)),
    rollback="ring",
    faults=("stale-logits",),
    ignore_eos=True,
)


def test_the_figures_of_a_run_are_those_of_its_trace() -> None:
    builder = sample_trace(n_seqs=2)
    builder.store.runs[0] |= {"model": {"name": "a.gguf", "size": 1 << 20}, "compute": "f32"}
    report = run_report(RunRef(builder.store, 0), HERE)
    found, page = markdown(report), html_page(report)
    figures = summary(builder.store, 0)
    assert f"- drafted: {figures['draft_n']}" in found
    assert f"- acceptance: {figures['draft_acceptance_rate']:.3f}" in found
    assert "- size: 1 MiB" in found
    assert "- processor: a processor" in found
    assert "- compute: f32" in found
    assert page.count("<svg") == 3  # by position, accepted, rolled back; nothing was timed
    assert page.count('class="rejected"') > 10
    assert "quicksort" in page


def test_the_environment_of_the_run_goes_before_this_one() -> None:
    builder = sample_trace(rounds=3)
    builder.store.runs[0]["environment"] = {"machine": "theirs"}
    found = markdown(run_report(RunRef(builder.store, 0), HERE))
    assert ("theirs" in found, "a processor" in found) == (True, False)


def test_a_character_of_several_tokens_is_whole() -> None:
    builder = TraceBuilder()
    builder.prompt(["x"])
    for byte in "é".encode():
        builder.plain(bytes([byte]))
    assert "é" in html_page(run_report(RunRef(builder.store, 0), HERE))


def test_a_command_has_the_options_that_are_not_defaults() -> None:
    words = run_command({"name": "a.gguf", "draft": {"name": "d.gguf"}}, OPTIONS, ["x y"])
    assert words == [
        *("draftscope", "run", "a.gguf", "-md", "d.gguf", "-p", "x y", "-n", "7", "--temp", "0.5"),
        *("--logit-bias", "3+1.5", "--spec-type", "draft-mtp"),
        *("--spec-synth-rates", "0.9,0.5,0.25", "--rollback", "ring"),
        *("--fault", "stale-logits", "--ignore-eos"),
    ]


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"options": [], "model": "x", "environment": 3, "source": None},
        {"options": {"spec": 3, "n_predict": "x", "rollback": "<b>", "sampler": {"temp": [1]}}},
        {"options": {"spec": {"types": [["x"]]}, "faults": [None], "seed": 2.5}},
        {"model": {"name": 3, "size": "x", "draft": [1]}, "weight_bytes": None},
    ],
)
def test_facts_from_anyone(facts: dict) -> None:
    store = sample_trace(rounds=4).store
    store.runs[0] = RunFacts(facts)
    assert "</html>" in html_page(run_report(RunRef(store, 0), HERE))


def test_a_comparison_names_the_lane_beyond_its_bound() -> None:
    store = faulty_comparison().store
    report = compare_report([RunRef(store, i) for i in range(4)], HERE)
    assert report.summary.endswith("beyond their bounds: ring,fault=no-conv-rollback")
    found = markdown(report)
    assert re.search(r"\| ring,fault=no-conv-rollback \| suspect \| \\> 1e-4 \| 2\.5e-01 ", found)
    assert "<svg" in html_page(report)


def test_the_suite() -> None:
    plain, draft = Configuration.plain(OPTIONS), Configuration("draft-mtp", OPTIONS)
    done = {
        PLAIN: [made_up("one", PLAIN)],
        "draft-mtp": [made_up("one", "draft-mtp", draft_n=4, draft_n_accepted=3)],
    }
    result = {
        "model": {"name": "a.gguf"},
        "compute": "f32",
        "device": "cpu",
        "prompts": "python",
        "repeat": 3,
        "complete": False,
        "environment": HERE,
        "configurations": suite_report(options_of([plain, draft]), done),
    }
    found = markdown(suite_page(result, ["draftscope", "bench", "a b"]))
    assert "not complete: the suite was stopped" in found
    assert "| draft-mtp |" in found
    assert "draftscope bench 'a b'" in found
    assert "- --rollback: ring" in found


def test_a_sweep(tmp_path: Path) -> None:
    results = read_results(write_results(tmp_path, 3, 4))
    report = sweep_report(results, ["draftscope", "sweep"])
    found, page = markdown(report), html_page(report)
    assert "12 of 12 jobs, 1 failed" in found
    first = found.split("#### Fastest")[1].splitlines()[4]
    assert first == "| 12 | 3 | 3 | 12.0 | n/a | n/a | done |"
    assert "Job 7 failed." in found
    assert page.count("<svg") == 3  # two settings, and one against the other
    (empty,) = (tmp_path / "none",)
    empty.mkdir()
    assert "1 of 1 jobs" in markdown(sweep_report(read_results(write_results(empty, 1, 1))))


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    report = run_report(RunRef(sample_trace(rounds=2).store, 0), HERE)
    write_report(report, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == html_page(report)
    with pytest.raises(OptionError, match="cannot be written"):
        write_report(report, tmp_path / "none" / "page.html")
