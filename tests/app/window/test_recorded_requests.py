"""Records of other engines in the real window: what they tell is shown, and nothing in its place
where they tell nothing."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QDockWidget
from pytestqt.qtbot import QtBot

from app.engine_thread.jobs.files import ReadText, ReadTrace
from app.engine_thread.jobs.judging import TriageRuns
from app.panels.runs.run_table import RunTable
from app.panels.tokens.tokens_view import TokensView
from app.trace_models.run_facts import effective, observed_text
from app.trace_models.run_rows import Position
from app.trace_models.shown_text import NOT_OBSERVED
from app.window.window import MainWindow
from engine.observe.files.importing import import_file
from engine.observe.files.records import fill
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.window_acts import job_ends, messages

pytestmark = pytest.mark.shares_window

RECORDS = Path(__file__).parents[2] / "data" / "records"
FILES = sorted(path.name for path in RECORDS.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The trace of all records, and of one that contradicts itself."""
    store = TraceStore()
    for file in FILES:
        import_file(store, RECORDS / file)
    wrong = json.loads((RECORDS / "vllm-summary.json").read_bytes())
    wrong["body"]["metrics"]["speculative_decoding"]["num_spec_steps"] = 13
    fill(store, json.dumps(wrong).encode(), "wrong.json")
    export_csv(store, tmp_path / "records")
    return tmp_path / "records"


@pytest.fixture
def opened(window: MainWindow, qtbot: QtBot, folder: Path) -> MainWindow:
    with job_ends(qtbot, window.bridge, ReadTrace, timeout=60_000):
        window.sessions.open(folder)
    return window


def test_a_copied_text_opens_like_its_file_and_another_is_refused_in_a_sentence(
    window: MainWindow, qtbot: QtBot
) -> None:
    paste = window.actions_by_id["file.paste"]
    clipboard = QGuiApplication.clipboard()
    clipboard.setText((RECORDS / "lmstudio-prediction.json").read_text("utf-8"))
    with job_ends(qtbot, window.bridge, ReadText):
        paste.trigger()
    (row,) = (row for row in table(window).rows if row.title.endswith("Pasted text"))
    assert row.run.facts.summary == {**(row.run.facts.summary or {}), "predicted_n": 29}
    clipboard.setText((RECORDS / "vllm-summary.json").read_text("utf-8"))
    with job_ends(qtbot, window.bridge, ReadText):
        paste.trigger()
    show(window, qtbot, "Pasted text")
    titles = [row.title for row in table(window).rows]
    assert titles == ["lm-studio · Pasted text", "vllm · Pasted text 2"], "as they were opened"
    assert "pasted text" in window.status.texts["model"]
    window.actions_by_id["file.close_trace"].trigger()
    show(window, qtbot, "Pasted text 2")
    assert window.settings.recent_traces == []
    clipboard.setText("Dear all,\nthe meeting is at ten.")
    with job_ends(qtbot, window.bridge, ReadText):
        paste.trigger()
    assert any("Pasted text 3 is not recognised" in text for text in messages(window))
    clipboard.clear()
    paste.trigger()
    assert any("The clipboard has nothing" in text for text in messages(window))


def test_runs_of_an_archive_have_the_names_of_their_files(
    window: MainWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    sums = "draft acceptance rate = 0.5 ( 4 accepted / 8 generated)\n"
    files = {"a.log": sums, "README.md": "Of last night.", "b.log": sums}
    with zipfile.ZipFile(tmp_path / "logs.zip", "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
    with job_ends(qtbot, window.bridge, ReadTrace):
        window.sessions.open(tmp_path / "logs.zip")
    for name in ("a.log", "b.log"):
        run = show(window, qtbot, name)
        assert f"server's log, {name}" in effective(run.facts, run)
    (tokens,) = window.findChildren(TokensView)
    said = tokens.currentWidget().words[1]
    assert "Unread files in it: 1. The format of README.md" in said and "--as" not in said


def table(window: MainWindow) -> RunTable:
    return window.panels.runs.model


def show(window: MainWindow, qtbot: QtBot, name: str) -> RunRef:
    rows = table(window).rows
    (run,) = (row.run for row in rows if row.title.endswith(name))
    window.panels.runs.run_selected.emit(run)
    qtbot.waitUntil(lambda: table(window).shown == run)
    return run


def chips(window: MainWindow) -> dict[str, str]:
    """What the status line says, by figure."""
    return {name: chip.text for name, chip in window.panels.status.chips.items()}


def test_the_list_of_runs_says_which_engine_and_what_it_told(opened: MainWindow) -> None:
    cells = {
        table(opened).cell(i, "drafter", 0): [
            table(opened).cell(i, name, 0) for name in ("tokens", "acceptance", "speed", "stop")
        ]
        for i in range(len(table(opened).rows))
    }
    assert cells["vllm · aiperf-record.json"] == ["29", "0.471", NOT_OBSERVED, "not reported"]
    assert cells["sglang · sglang-generate.json"] == ["29", "0.444", NOT_OBSERVED, "stop"]
    assert cells["lm-studio · lmstudio-prediction.json"] == ["29", "0.471", "50.0", "eosFound"]
    assert cells["vllm · vllm-metrics.prom"][0] == NOT_OBSERVED
    assert cells["vllm · wrong.json"][:3] == [NOT_OBSERVED] * 3


def test_a_run_of_sums_shows_its_figures_and_says_what_is_untold(
    opened: MainWindow, qtbot: QtBot
) -> None:
    show(opened, qtbot, "sglang-generate.json")
    qtbot.waitUntil(lambda: "0.444" in chips(opened)["acceptance"])
    assert "2.33" in chips(opened)["tokens_per_step"]
    assert NOT_OBSERVED in chips(opened)["tokens_per_second"]
    assert NOT_OBSERVED in chips(opened)["path"]
    plots = opened.panels.plots
    assert plots.rollback.empty.words[0] == "Not observed"
    assert "sglang does not report" in plots.rollback.empty.words[1]
    assert not plots.rollback.has_rounds
    acceptance = plots["acceptance"]
    assert acceptance.has_rounds
    dock = opened.findChild(QDockWidget, "dock.speed")
    dock.show()
    dock.raise_()
    curves = acceptance.rates.curves
    qtbot.waitUntil(lambda: curves["unconditional"].getData()[1] is not None)
    rates = curves["unconditional"].getData()[1]
    assert rates.tolist() == pytest.approx([8 / 12, 5 / 12, 3 / 12])
    assert curves["unconditional_given_drafted"].getData()[0] is None
    (tokens,) = opened.findChildren(TokensView)
    estimate = plots["what_if"]
    opened.docks.reveal("what_if")
    qtbot.waitUntil(lambda: estimate.empty.words[0] == "Not observed")
    show(opened, qtbot, "trtllm-perf-metrics.jsonl")
    untold = "tensorrt-llm does not report the tokens. Runs (Ctrl+8) lists what it reports."
    qtbot.waitUntil(lambda: tokens.currentWidget().words == ("Not observed", untold))
    assert not acceptance.has_rounds
    assert not [text for text in messages(opened) if text.startswith("error")]


def test_steps_are_rounds_and_stand_beside_another_run(opened: MainWindow, qtbot: QtBot) -> None:
    show(opened, qtbot, "vllm-detailed-stream.json")
    assert opened.panels.plots.rollback.has_rounds
    assert len(opened.panels.tokens.areas) == 1
    timing = opened.panels.plots["timing"]
    assert not timing.has_rounds
    assert timing.empty.words[1] == "vllm does not report how long its rounds took."
    (other,) = (row.run for row in table(opened).rows if "sglang-openai" in row.title)
    with job_ends(qtbot, opened.bridge, TriageRuns, timeout=60_000):
        opened.panels.runs.overlay_asked.emit(other)
    qtbot.waitUntil(lambda: table(opened).overlaid == other)
    opened.panels.plots["acceptance"].grab()


def test_a_contradiction_is_among_the_findings(opened: MainWindow, qtbot: QtBot) -> None:
    run = show(opened, qtbot, "wrong.json")
    findings = opened.panels.findings.model.rows
    assert [(f["rule"], f["run"]) for f in findings] == [("counters-contradict", run)]
    assert "num_spec_steps" in findings[0]["evidence"]


def test_what_is_kept_of_a_run_is_listed_and_what_is_untold_too(folder: Path) -> None:
    store = open_trace(folder)
    texts = {facts["record"]["file"]: observed_text(facts) for facts in store.runs.values()}
    brief, detailed = texts["vllm-summary.json"], texts["vllm-detailed-stream.json"]
    assert "source: vllm, read from a file, vllm-summary.json" in brief
    assert brief.endswith("kept, but not used: note, sources")
    assert "not observed: rollback path" in brief and "token ids" in brief.splitlines()[-2]
    assert "token ids" not in detailed and "reported: num_draft_tokens" in detailed


def test_tokens_of_unknown_rounds_are_shown(
    window: MainWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    store = TraceStore()
    for file in ("llama-reply.json", "sglang-stream.jsonl"):
        fill(store, (RECORDS.parent / "replies" / file).read_bytes(), file)
    export_csv(store, tmp_path / "trace")
    with job_ends(qtbot, window.bridge, ReadTrace, timeout=60_000):
        window.sessions.open(tmp_path / "trace")
    (tokens,) = window.findChildren(TokensView)
    for name in ("sglang-stream.jsonl", "llama-reply.json"):
        run = show(window, qtbot, name)
        qtbot.waitUntil(lambda: tokens.currentWidget() is not tokens.empty)
        for pos in (3, 6):
            window.feed.move_cursor(Position(run, 0, 0, pos))
            assert window.feed.cursor == Position(run, 0, 0, pos)
    assert not [text for text in messages(window) if text.startswith("error")]
