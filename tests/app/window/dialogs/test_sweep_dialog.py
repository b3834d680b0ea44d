"""A sweep that is asked for in the window: its form, its jobs, and what comes of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.engine_thread.events import State
from app.engine_thread.jobs.files import ReadResults
from app.engine_thread.jobs.judging import RunSweep
from app.window.dialogs.runs import SweepDialog
from app.window.window import MainWindow
from engine.errors import Cancelled
from engine.experiments.results.table import RESULTS_FILE
from engine.experiments.results.writer import JobResult
from engine.experiments.sweep import sweep
from engine.experiments.sweep.plan import SweepJob
from tests.support.fake_session import FakeEngine
from tests.support.window_acts import enabled, job_ends, messages, trigger, wait


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[SweepJob]:
    """The jobs that were run; none takes a process or time."""
    ran: list[SweepJob] = []

    def at_once(
        jobs: Sequence[SweepJob], _: object, cancelled: Callable[[], bool]
    ) -> Iterator[tuple[SweepJob, JobResult]]:
        for job in jobs:
            ran.append(job)
            yield job, JobResult(figures={"predicted_per_second": 10.0 * job.number})

    monkeypatch.setattr(sweep, "one_by_one", at_once)
    return ran


@pytest.fixture
def form(loaded: MainWindow, tmp_path: Path) -> Iterator[SweepDialog]:
    loaded.run_panel.prompt.setPlainText("start")
    trigger(loaded, "run.sweep")
    (form,) = loaded.findChildren(SweepDialog)
    form.folder.setText(str(tmp_path / "out"))
    yield form
    for left in loaded.findChildren(SweepDialog):
        left.close()


def fill(form: SweepDialog, **rows: str) -> None:
    for (key, values), (name, text) in zip(form.rows, rows.items(), strict=False):
        key.setCurrentText(name.replace("_", "-"))
        values.setText(text)


def test_every_combination_is_run_and_the_results_are_shown(
    loaded: MainWindow, form: SweepDialog, done: list[SweepJob], qtbot: QtBot, tmp_path: Path
) -> None:
    loaded.run_panel.n_predict.setValue(12)
    loaded.run_panel.prompts.add()
    loaded.run_panel.prompt.setPlainText("another\n\U0001f600")
    fill(form, spec_draft_n_max="1, 2", spec_type="none, ngram-simple+ngram-mod")
    assert form.about.text() == "3 jobs on model."
    with job_ends(qtbot, loaded.bridge, ReadResults):
        form.accept()
    assert [(job.options.spec.types, job.options.spec.n_max) for job in done] == [
        ((), 3),
        (("ngram-simple", "ngram-mod"), 1),
        (("ngram-simple", "ngram-mod"), 2),
    ]
    assert {job.options.n_predict for job in done} == {12}
    assert {job.prompts for job in done} == {("start", "another\n\U0001f600")}
    assert {job.options.parallel for job in done} == {2}
    results = loaded.panels.results.results
    assert results is not None
    assert (results.n, results.path) == (3, tmp_path / "out" / RESULTS_FILE)
    assert loaded.panels.results.isVisible()
    assert loaded.bridge.state is State.READY
    assert not messages(loaded)


def test_the_drafter_of_each_job_gets_its_own_file(
    loaded: MainWindow,
    form: SweepDialog,
    done: list[SweepJob],
    model_file: Path,
    tmp_path: Path,
    qtbot: QtBot,
) -> None:
    (draft := tmp_path / "small.gguf").write_bytes(b"fake")
    loaded.open_model(model_file, draft)
    qtbot.waitUntil(lambda: bool(loaded.bridge.files and loaded.bridge.files.drafts))
    wait(qtbot, loaded, State.READY)
    fill(form, spec_type="draft-simple, ngram-simple")
    with job_ends(qtbot, loaded.bridge, RunSweep):
        form.accept()
    assert [job.draft for job in done] == [draft, None]


def test_a_long_name_of_a_model_does_not_widen_the_form(
    loaded: MainWindow, form: SweepDialog
) -> None:
    files = loaded.bridge.files
    assert files is not None
    before = form.minimumSizeHint().width()
    loaded.bridge.files = replace(files, target=Path("/x") / f"{'long_' * 40}.gguf")
    form.tell()
    assert form.minimumSizeHint().width() == before
    assert "…" in form.about.text()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"spec_draft_n_max": "1, x"}, "spec-draft-n-max: x is not a whole number."),
        ({"spec_draft_n_max": " , "}, "spec-draft-n-max has no values."),
        ({"spec_draft_p_min": "2"}, "spec-draft-p-min: 2 is wrong: "),
        ({"rollback": "sideways"}, "rollback: sideways is wrong: "),
        ({"nothing": ""}, "No option is swept."),
    ],
)
def test_the_form_says_what_is_wrong(form: SweepDialog, rows: dict[str, str], said: str) -> None:
    fill(form, **rows)
    assert form.about.text().startswith(said)
    assert not form._go.isEnabled()


def test_values_of_one_option_in_two_rows_are_together(form: SweepDialog) -> None:
    fill(form, seed="1, 2", temp="0")
    form.rows[2][0].setCurrentText("seed")
    form.rows[2][1].setText("3")
    assert form.about.text() == "3 jobs on model."


def test_an_empty_prompt_is_refused(loaded: MainWindow, form: SweepDialog) -> None:
    loaded.run_panel.prompt.setPlainText(" \n")
    form.tell()
    assert form.about.text().startswith("There is no prompt.")


def test_what_contradicts_itself_leaves_no_folder_and_an_old_one_stays(
    form: SweepDialog, tmp_path: Path
) -> None:
    fill(form, spec_type="draft-simple")
    form.accept()
    assert "draft-simple needs it" in form.about.text()
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    fill(form, seed="1, 2")
    form.accept()
    assert "File exists" in form.about.text()
    assert form.isVisible()


def test_cancel_keeps_the_rows_so_far_and_says_how_it_goes_on(
    loaded: MainWindow,
    form: SweepDialog,
    qtbot: QtBot,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = threading.Event()

    def one_then_wait(jobs: Any, _: object, cancelled: Callable[[], bool]) -> Iterator[Any]:
        yield jobs[0], JobResult(figures={"predicted_per_second": 1.0})
        waits.set()
        while not cancelled():
            threading.Event().wait(0.005)
        raise Cancelled

    monkeypatch.setattr(sweep, "one_by_one", one_then_wait)
    form.accept()
    qtbot.waitUntil(waits.is_set)
    qtbot.waitUntil(lambda: loaded.status.progress_shown)
    assert not {"run.start", "run.compare", "run.sweep"} & enabled(loaded)
    with job_ends(qtbot, loaded.bridge, ReadResults):
        loaded.bridge.cancel()
    (message,) = messages(loaded)
    assert "after 1 of 4 jobs" in message
    assert f"draftscope sweep {tmp_path}/out/plan.toml --out {tmp_path}/out" in message
    results = loaded.panels.results.results
    assert results is not None
    assert results.n == 1
    assert results.note.startswith("1 of 4 jobs")
    wait(qtbot, loaded, State.READY)
    assert "run.start" in enabled(loaded)


def test_while_the_engine_measures_no_run_is_promised(
    loaded: MainWindow, form: SweepDialog, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def waits(jobs: Any, _: object, cancelled: Callable[[], bool]) -> Iterator[Any]:
        while not (gate.is_set() or cancelled()):
            gate.wait(0.005)
        yield from ()

    monkeypatch.setattr(sweep, "one_by_one", waits)
    form.accept()
    assert loaded.bridge.state is State.LOADING
    QApplication.processEvents()
    assert loaded.tokens.empty.words[1] == "The engine is busy, as the status line says."
    assert "run.start" not in enabled(loaded)
    with job_ends(qtbot, loaded.bridge, RunSweep):
        gate.set()


def test_a_server_has_no_sweep(window: MainWindow, engine: FakeEngine) -> None:
    assert "run.sweep" not in enabled(window)
