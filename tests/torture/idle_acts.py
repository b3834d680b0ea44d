"""What a window does without a run, each of which may fail: it is reported, and works the next
time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from app.engine_thread.jobs.files import ReadResults, WriteFile, write_report_on
from app.engine_thread.jobs.judging import MeasureFidelity, Rescore, TriageRuns
from app.saved.autosave import Autosave
from engine.trace.export import export_csv
from engine.trace.run_ref import RunRef
from tests.support.golden_files import DATA
from tests.support.sweeps import write_results
from tests.torture import idle_runs
from tests.torture.real_window import RealWindow

_SAVED = "saved"
"""The end of an autosave, which the bridge knows nothing of."""
_RECORD = DATA / "captures" / "mtp.json.gz"


class IdleWindow:
    """A window with a model and two runs at least, of which the last two have not failed.

    rollback: the policy of what is run.
    heard: how often each end came, by the name of the signal or the job; a failure is "failed".
    """

    def __init__(self, real: RealWindow, folder: Path, model: Path, rollback: str) -> None:
        self.real, self.folder, self.model, self.rollback = real, folder, model, rollback
        self.heard: Counter[str] = Counter()
        bridge = real.window.bridge
        self.runs = [RunRef(bridge.session_store, run_id) for run_id in bridge.session_store.runs][
            -2:
        ]
        """Two that came to their end, so that they have drafts."""
        idle_runs.answers(model, bridge.compute)
        export_csv(bridge.session_store, folder / "trace")
        write_results(folder, 2, 2)
        ends = {act.end for act in ACTS.values()} | {"failed"}
        self._heard_by: dict[Any, Callable[..., None]] = {
            getattr(bridge, name): partial(self.hear, name)
            for name in ends
            if hasattr(bridge, name)
        }
        self._heard_by[bridge.finished] = lambda job: self.hear(type(job).__name__, job)
        for signal, hear in self._heard_by.items():
            signal.connect(hear)

    def leave(self) -> None:
        """Hear no more."""
        for signal, hear in self._heard_by.items():
            signal.disconnect(hear)

    def do(self, name: str) -> bool:
        """Begin an act and wait for what comes of it: whether it succeeded. Raises AssertionError
        if nothing is reported, or a success is not on show."""
        bridge, act, before = self.real.window.bridge, ACTS[name], self.heard.copy()
        act.begin(self)
        self.real.until(
            lambda: any(self.heard[one] > before[one] for one in (act.end, "failed")),
            f"what comes of it: {name}",
            40.0,
        )
        self.real.until(
            lambda: bridge.can_start and not bridge.reading and not bridge.exporting,
            f"rest after it: {name}",
        )
        succeeded = self.heard["failed"] == before["failed"] and not act.tells(self)
        assert not succeeded or act.shows(self), f"it is not on show: {name}"
        bridge.hide_trace()
        bridge.opened = {}
        return succeeded

    def hear(self, name: str, _: object = None) -> None:
        """Count an end."""
        self.heard[name] += 1


def _save(idle: IdleWindow) -> None:
    """All rows once more, as a new window would."""
    bridge = idle.real.window.bridge
    saver = Autosave(idle.folder / "saved", lambda: [bridge.session_store], bridge)
    saver.saved.connect(partial(idle.hear, _SAVED, saver))
    saver.failed.connect(partial(idle.hear, "failed"))
    saver.save()


def _rescore(idle: IdleWindow) -> None:
    idle.real.window.bridge.ask(Rescore(idle.runs[0], idle.model, assume_same=True))


def _tune(idle: IdleWindow) -> None:
    """Choose the next rule in the Tune view, which asks for speeds under it."""
    view = idle.real.window.plots["tune"]
    idle.real.window.feed.select_run(idle.runs[-1])
    view.rule.setCurrentIndex((view.rule.currentIndex() + 1) % view.rule.count())
    view.rule.activated.emit(view.rule.currentIndex())


def _shows_tuned(idle: IdleWindow) -> bool:
    view = idle.real.window.plots["tune"]
    return view.shown is not None and view.shown.request[1] == view.rule.currentText()


def _anything(_: IdleWindow) -> bool:
    return True


def _nothing(_: IdleWindow) -> bool:
    return False


class _Act(NamedTuple):
    """end: the job that ends, or the signal of the bridge, or _SAVED. stages: see fault.Fault.
    shows: whether the window shows what came of it; tells: whether it tells of a failure there.
    after: the act that has to be done before it."""

    begin: Callable[[IdleWindow], None]
    end: str
    stages: tuple[str, ...]
    shows: Callable[[IdleWindow], bool] = _anything
    tells: Callable[[IdleWindow], bool] = _nothing
    after: str = ""


_TURN = (
    "engine.conversation.conversation:Conversation.start",
    "engine.conversation.conversation:Conversation._rewritten_at",
    "engine.conversation.conversation:TurnRun._close",
    "engine.conversation.conversation:Rendering.behind",
    "engine.decode.held_sequences:PromptCache.take",
    "engine.decode.held_sequences:PromptCache.put",
    "engine.decode.held_sequences:HeldSequences.resume",
    "engine.decode.held_sequences:HeldSequences.checkpoint",
    "engine.decode.held_sequences:HeldSequences.observe",
    "engine.session:Session.start",
    "engine.run:Run.results",
)

ACTS: dict[str, _Act] = {
    "open a model": _Act(
        lambda idle: idle.real.window.open_model(idle.model),
        "loaded",
        (
            "engine.gguf.file:GgufFile.open",
            "engine.gguf.reader:TensorReader.take",
            "engine.model.info:describe",
            "engine.session:Session.open",
        ),
    ),
    "measure": _Act(
        lambda idle: idle.real.window.bridge.ask(MeasureFidelity("x y")),
        "MeasureFidelity",
        ("engine.compare.divergence:greedy_text", "engine.compare.divergence:measure_fidelity"),
    ),
    "rescore": _Act(
        _rescore,
        "Rescore",
        (
            "engine.observe.rescoring.rescore:identify",
            "engine.observe.rescoring.rescore:_score_text",
            "engine.observe.rescoring.rescore:_write",
        ),
    ),
    "open a trace": _Act(
        lambda idle: idle.real.window.sessions.open(idle.folder / "trace"),
        "trace_shown",
        (
            "engine.trace.reopen:read_session",
            "engine.trace.reopen:read_blocks",
            "engine.trace.store:Table.append",
        ),
    ),
    "import": _Act(
        lambda idle: idle.real.window.sessions.open(_RECORD),
        "trace_shown",
        ("engine.observe.files.importing:import_file", "engine.trace.store:Table.append"),
    ),
    "open results": _Act(
        lambda idle: idle.real.window.bridge.ask(ReadResults(idle.folder / "out")),
        "ReadResults",
        ("engine.experiments.results.reader:_read", "app.trace_models.results:of_experiment"),
    ),
    "tune": _Act(
        _tune,
        "EstimateSpeeds",
        (
            "app.engine_thread.jobs.judging:estimate",
            "engine.analysis.what_if.recorded:RecordedRounds.of",
            "engine.analysis.what_if.recorded:RoundCosts.measured",
            "app.trace_models.tune_surface:surface",
        ),
        _shows_tuned,
    ),
    "triage": _Act(
        lambda idle: idle.real.window.bridge.ask(TriageRuns(*idle.runs)),
        "TriageRuns",
        ("engine.observe.rescoring.triage:triage",),
    ),
    "report": _Act(
        lambda idle: idle.real.window.bridge.ask(
            WriteFile(
                "Report", idle.folder / "r.html", partial(write_report_on, idle.runs[:1], None, {})
            )
        ),
        "WriteFile",
        ("engine.report.run:summary", "engine.report.page:html_page"),
    ),
    "save": _Act(_save, _SAVED, ("engine.trace.export:_write", "engine.trace.export:_session")),
    "begin a conversation": _Act(
        idle_runs.begin_conversation,
        "run_ended",
        (*_TURN, "engine.decode.held_sequences:PromptCache.keep"),
        idle_runs.is_answered,
    ),
    "go on in a conversation": _Act(
        idle_runs.go_on, "run_ended", _TURN, idle_runs.is_answered, after="begin a conversation"
    ),
    "play a script": _Act(
        idle_runs.play_script,
        "run_ended",
        (
            "engine.compare.memory_engine:play_script",
            "engine.compare.memory_engine:SessionEngine.context",
            "engine.compare.memory_engine:SessionContext.decode",
            "engine.compare.memory_engine:SessionContext.seq_rm",
            "engine.compare.memory_engine:SessionContext.copy",
            "engine.compare.memory_engine:SessionContext.close_round",
            "engine.compare.memory_engine:SessionEngine.compared",
            "engine.compare.memory_engine:SessionEngine.states",
            "engine.compare.memory_engine:SessionEngine.end",
            "engine.compare.memory_player:MemoryPlay.step",
            "engine.compare.memory_player:MemoryPlay.stop",
        ),
        idle_runs.has_played,
        tells=idle_runs.script_error,
    ),
}
