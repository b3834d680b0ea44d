"""The report on two runs: both learn of, under their names, and what they share once."""

from __future__ import annotations

from dataclasses import asdict

from engine.options import RunOptions, SpecOptions
from engine.report.page import html_page
from engine.report.parts import Report
from engine.report.run import pair_report
from engine.report.text import markdown
from engine.trace.run_ref import RunRef
from tests.support.trace_builder import TraceBuilder, sample_trace

FIGURES = [("tokens/s", "200", "100", "2.00×"), ("rounds", "5", "n/a", "n/a")]
NAMES = ("run 0 of a.gguf", "run 0 of b.gguf")


def _run(model: str, n_max: int | None = None, machine: str = "ours") -> RunRef:
    builder: TraceBuilder = sample_trace(rounds=3)
    spec = SpecOptions() if n_max is None else SpecOptions(types=("draft-mtp",), n_max=n_max)
    builder.store.runs[0] |= {
        "model": {"name": model},
        "options": asdict(RunOptions(n_predict=7, spec=spec)),
        "environment": {"machine": machine},
    }
    return RunRef(builder.store, 0)


def _report(one: RunRef, two: RunRef) -> Report:
    return pair_report((one, two), NAMES, FIGURES, "Same text, 9 tokens.", {})


def test_figures_and_settings_of_both_stand_side_by_side() -> None:
    found = markdown(_report(_run("a.gguf", n_max=2), _run("b.gguf")))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.splitlines()]
    assert ["figure", *NAMES, "ratio"] in rows
    assert ["tokens/s", "200", "100", "2.00×"] in rows
    assert ["option", *NAMES] in rows
    named = {row[0]: row[1:] for row in rows if len(row) == 3}
    assert named["--spec-draft-n-max"] == ["2", "default"]
    assert named["-n"] == ["7", "7"]
    assert "Same text, 9 tokens." in found


def test_each_model_is_told_of_and_a_machine_of_both_once() -> None:
    found = markdown(_report(_run("a.gguf"), _run("b.gguf")))
    for name in NAMES:
        assert f"## Model of {name}" in found
    assert found.count("Machine and versions") == 1
    apart = markdown(_report(_run("a.gguf"), _run("b.gguf", machine="theirs")))
    assert f"## Machine and versions of {NAMES[0]}" in apart
    assert apart.count("theirs") == 1
    assert found.count("draftscope run a.gguf") == found.count("draftscope run b.gguf") == 1


def test_an_engine_that_does_not_tell_its_settings_has_no_defaults() -> None:
    one, two = _run("a.gguf", n_max=2), _run("b.gguf")
    del two.facts["options"]
    found = markdown(_report(one, two))
    assert "default |" not in found
    assert "draftscope run b.gguf" not in found


def test_names_of_anyone_are_shown_as_text() -> None:
    run = _run("<script>alert(1)</script>")
    page = html_page(pair_report((run, run), ("<b>x</b>", "y"), FIGURES, "<i>", {}))
    for tag in ("<script>alert", "<b>x", "<i>"):
        assert tag not in page
