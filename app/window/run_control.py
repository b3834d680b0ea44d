"""Requests of the user to the engine: a model, a run, a comparison, a rule to pause at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from PySide6.QtCore import QObject, QTimer

from app.engine_thread.events import OpenRequest, RunRequest, State, TurnRequest
from app.engine_thread.jobs.engine import (
    CheckRollback,
    ConnectServer,
    OpenModel,
    PlayScript,
    StartComparison,
    StartRun,
    StartTurn,
    WatchClients,
)
from app.engine_thread.jobs.judging import MeasureFidelity, Rescore, rescored_sentence
from app.trace_models.compared_lanes import lanes_of
from app.trace_models.run_facts import fidelity_text
from app.trace_models.run_notes import note, run_name
from app.trace_models.run_rows import Position
from app.window.banner import Banner
from app.window.dialogs.files import LibraryDialog, ask_model
from app.window.dialogs.runs import LOOPBACK, UNTRIED, ConnectDialog, ForkDialog
from app.window.panels import Panels
from engine.compare.llama_library import find_build
from engine.compare.memory_script import MemoryScript
from engine.compare.scenario import Scenario
from engine.errors import DraftscopeError, OptionError
from engine.fork import Fork
from engine.options.llama_cpp import GateOptions
from engine.trace.run_ref import RunRef
from resources import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET, demo_prompts

_TOLD_MS = 8000


class RunControl:
    """Sends the contents of the panels to the bridge."""

    def __init__(self, panels: Panels) -> None:
        self._panels, self._bridge, self._feed = panels, panels.bridge, panels.feed
        self._docks, self._actions = panels.docks, panels.actions
        self._settings, self._window = panels.settings, panels.window
        self.guide = ScenarioGuide(panels)
        self._tried = UNTRIED
        self._watch_at: tuple[str, int] | None = None
        """Server being connected to, and the port to watch it at."""
        self._waiting: tuple[Callable[[], None], OpenRequest | None] | None = None
        """Starts the run or comparison that was requested while its model loads; and the model in
        use."""

    def handlers(self) -> dict[str, Callable[[], object]]:
        """Handlers of the Run menu's actions."""
        return {
            "run.start": lambda: self.run(None),
            "run.pause": self._bridge.pause,
            "run.step": lambda: self.run(1),
            "run.stop": self._stop,
            "run.fork": self.ask_fork,
            "run.watch": self.watch,
            "run.rescore": self.ask_rescore,
            "run.compare": self.compare_chosen,
            "run.add_break": self.write_break,
            "run.measure_fidelity": self.measure_fidelity,
            "run.llama_library": self.ask_llama_library,
        }

    def allowed(self, shown: RunRef | None) -> dict[str, bool]:
        """Which of them are possible now, with this run on show."""
        bridge, state = self._bridge, self._bridge.state
        served, can_start = bridge.server is not None, bridge.can_start
        will_start = can_start or (self._is_loading and self._waiting is None)
        going = will_start or state is State.PAUSED
        return {
            "run.start": going,
            "run.pause": state is State.RUNNING and not served and not self._bridge.pausing,
            "run.step": going and not served,
            "run.stop": bridge.has_run or self._waiting is not None,
            "run.fork": can_start
            and not served
            and shown is not None
            and shown.store is bridge.session_store,
            "run.watch": can_start and served,
            "run.rescore": shown is not None
            and state in (State.EMPTY, State.INSPECTED, State.READY),
            "run.compare": will_start and not served,
            "run.check_rollback": can_start and not served,
            "run.sweep": can_start and not served,
            "run.measure_fidelity": can_start and not served,
        }

    @property
    def _is_loading(self) -> bool:
        bridge = self._bridge  # it is also busy with measurements
        return bridge.state is State.LOADING and bridge.is_opening and not bridge.connecting

    # -- models ----------------------------------------------------------------------------

    def open_model(
        self, target: Path, *drafts: Path, then: Callable[[OpenModel], object] | None = None
    ) -> None:
        """Inspect and load a model; the current session stays until the new one is complete."""
        self._panels.banners.clear()
        panel = self._panels.run_panel
        how = panel.compute.currentText(), panel.mmap_choice(), panel.device.currentText()
        options = None if panel.problem else panel.options()
        self._bridge.ask(OpenModel(target, drafts, *how, options), then)

    def open_demo(self, then: Callable[[OpenModel], object]) -> None:
        """Load the bundled models, with a prompt ready."""
        self._panels.run_panel.use_first_prompt()
        self.open_model(DEMO_TARGET, DEMO_DRAFT, DEMO_EAGLE3, then=then)

    def ask_target(self, folder: Path | None = None) -> None:
        """Let the user choose a model, in this folder or the last one."""
        if folder is not None:
            self._settings.set_folder("model", folder)
        if (path := ask_model(self._window, self._settings, "Open model")) is not None:
            self.open_model(path)

    def ask_draft(self) -> None:
        """Let the user choose a further draft file for the model in use."""
        path = ask_model(self._window, self._settings, "Open draft model")
        files = self._bridge.files
        if path is not None and files is not None:
            self.open_model(files.target, *(draft for draft, *_ in files.drafts), path)

    def ask_server(self) -> None:
        """Let the user enter a server, without blocking the window."""
        server = self._bridge.server
        found = server is not None and server.facts.address == self._tried[0]
        dialog = ConnectDialog(self._settings, self._window, UNTRIED if found else self._tried)
        dialog.chosen.connect(self.connect_server)
        dialog.show()

    def connect_server(
        self, address: str, key: str = "", log: Path | None = None, port: int = 0, model: str = ""
    ) -> None:
        """Use a server; with a port, watch other programs there once it answers."""
        self._panels.banners.clear()
        self._tried = address, log, port, model
        self._watch_at = (address, port) if port else None
        timeout = self._settings.server_timeout
        self._bridge.ask(ConnectServer(address, key, log, timeout, model))

    def begin_watching(self, state: State) -> None:
        """Start watching once connected, if requested together with the connection."""
        if state is State.LOADING or self._watch_at is None:
            return
        (address, port), self._watch_at = self._watch_at, None
        server = self._bridge.server
        if server is not None and server.facts.address == address:
            self._bridge.ask(WatchClients(f"{LOOPBACK}:{port}"))

    def watch(self) -> None:
        """Record other programs' requests to the server, at the port used last."""
        self._panels.banners.clear()
        self._bridge.ask(WatchClients(f"{LOOPBACK}:{self._settings.watch_port}"))

    def ask_rescore(self) -> None:
        """Let the user choose the model that judges the run on show."""
        run = self._feed.run
        if run is None:
            return
        if (path := ask_model(self._window, self._settings, "Re-score with model")) is not None:
            self._panels.banners.clear()
            self._rescore(run, path)

    def _rescore(self, run: RunRef, target: Path, *, assume_same: bool = False) -> None:
        self._bridge.ask(Rescore(run, target, assume_same=assume_same), self._show_rescored)

    def _show_rescored(self, job: Rescore) -> None:
        """Show the result; if it is unknown whether the model is the run's, ask the user."""
        banners = self._panels.banners
        if job.unsure:
            again = partial(self._rescore, job.ref, job.target, assume_same=True)
            banners.add("warning", job.unsure, "", ("&Re-score anyway", again))
        elif job.found is not None:
            severity = "error" if job.found.n_changed else "info"
            self._panels.run_banners.add(job.ref, severity, rescored_sentence(job.found))
            self._feed.show_run(self._feed.run)  # cells that views have read are filled now

    def reload(self) -> None:
        """Load the current files again, with the Run panel's loading options."""
        if (files := self._bridge.files) is not None:
            self.open_model(files.target, *(draft for draft, *_ in files.drafts))

    # -- runs ------------------------------------------------------------------------------

    def _wait(self, name: str, begin: Callable[[], None]) -> None:
        """Start something once the loading model is in use."""
        self._waiting = begin, self._bridge.loaded_as
        words = f"{name} starts when the model is loaded; Stop (Shift+F5) cancels it"
        self._panels.status.say(waiting=words)
        self._enable()

    def begin_waiting(self, state: State) -> None:
        """Start what waits for a model, if it is now in use."""
        if state is State.LOADING or self._waiting is None:
            return
        begin, before = self._waiting
        self._forget_waiting()
        if state is State.READY and self._bridge.loaded_as is not before:
            begin()

    def _forget_waiting(self) -> None:
        self._waiting = None
        self._panels.status.say(waiting="")
        self._enable()

    def _enable(self) -> None:
        for name, allowed in self.allowed(self._feed.run).items():
            self._actions[name].setEnabled(allowed)

    def _stop(self) -> None:
        if self._waiting is not None:
            self._forget_waiting()
        else:
            self._bridge.stop()

    def run(self, rounds: int | None) -> None:
        """Start a run, or continue the paused one, for this many rounds or to its end."""
        self._panels.banners.clear()
        if self._bridge.state is State.PAUSED:
            self._bridge.resume(rounds)
        elif self._is_loading:
            self._wait("The run", partial(self.run, rounds))
        elif self._options_are_sound():
            panel = self._panels.run_panel
            self._settings.run_form = panel.entries()
            self._bridge.ask(StartRun(panel.texts(), panel.options(), rounds, panel.chat()))

    def ask_fork(self) -> None:
        """Let the user choose how a run is forked at the cursor."""
        self._panels.banners.clear()
        place = self._feed.cursor
        if place is None:
            self._panels.banners.add(
                "info", "No position is chosen.", "Click a token or a round of a plot first."
            )
            return
        try:
            fork = _fork_at(place)
        except DraftscopeError as error:
            message = error.message.replace(str(place.run), run_name(place.run))
            self._panels.banners.add("warning", message, error.remedy)
            return
        where = f"{run_name(fork.parent)}, sequence {fork.seq_id}, before round {fork.round}"
        if fork.n_kept is not None:
            where = f"{run_name(fork.parent)}, sequence {fork.seq_id}, after position {place.pos}"
        panel = self._panels.run_panel
        dialog = ForkDialog(where, fork, panel.options, self._window)
        panel.options_changed.connect(dialog.tell)
        dialog.chosen.connect(partial(self._fork, fork))
        dialog.show()

    def _fork(self, fork: Fork, has_own_options: bool, token: int) -> None:
        options = fork.options
        if has_own_options:
            if not self._options_are_sound():
                return
            options = replace(self._panels.run_panel.options(), parallel=options.parallel)
        fork = replace(fork, token=token if token >= 0 else None)
        self._bridge.ask(StartRun((), options, fork=fork))

    def say(self, conversation: int | None, parent: int | None, text: str, is_chat: bool) -> None:
        """Start a turn of a conversation with the options of the Run panel. A conversation of
        another trace, of an earlier session or another model, continues as a new one with all its
        messages."""
        self._panels.banners.clear()
        if not self._options_are_sound():
            return
        panel, view = self._panels.run_panel, self._panels.conversation
        before = view.kept_of_edit()
        if conversation is not None and view.store is not self._bridge.session_store:
            before = [*view.said_up_to(parent), *before]
            conversation = parent = None
            self._panels.banners.add(
                "info",
                "This conversation continues as a new one with the model in use.",
                "Its first turn contains all earlier messages.",
            )
        chat = (panel.chat() or {}) if is_chat else None
        cache = view.cache_options()
        turn = TurnRequest(conversation, parent, text, panel.options(), chat, cache, tuple(before))
        self._bridge.ask(StartTurn(turn))

    def use_setting(self, run: RunRef, n_max: int, p_min: float) -> None:
        """Set n_max and p_min in the Run panel, with the drafters of the run that they were
        estimated from."""
        types = run.facts.options.spec.types if run.facts.options else ()
        self._docks.reveal("run")
        message = self._panels.run_panel.use_setting(types, n_max, p_min)
        self._panels.status.showMessage(message, _TOLD_MS)

    def compare_chosen(self) -> None:
        """Compare the lanes of the divergence view."""
        lanes = self._panels.divergence.chosen_lanes()
        if lanes is None:
            self._docks.reveal("divergence", "findings")
        elif self._is_loading:
            self._wait("The comparison", self.compare_chosen)
        elif self._options_are_sound():
            panel = self._panels.run_panel
            texts = tuple(panel.texts())
            library = self._settings.llama_library
            request = RunRequest(
                texts, panel.options(), panel.chat(), lanes=lanes, llama_library=library
            )
            self.compare(StartComparison(request))

    def compare(self, lanes: StartComparison | PlayScript) -> None:
        """Run lanes side by side and show them: in the layout for comparisons if a panel on the
        right would be narrow."""
        if not self._docks.is_wide:
            self._take_layout("divergence")
        self._docks.reveal("divergence", "findings")
        self._panels.banners.clear()
        self._bridge.ask(lanes)

    def _take_layout(self, name: str) -> None:
        before = self._actions[f"view.layout_{self._docks.layout_name}"]
        if self._docks.layout_name != name:
            self._actions[f"view.layout_{name}"].trigger()
            key = before.shortcut().toString()
            back = before.text().replace("&", "")
            self._panels.status.showMessage(f"{key} goes back to the layout {back}", _TOLD_MS)

    def open_scenario(self, scenario: Scenario | MemoryScript) -> None:
        """Play a scenario's lanes on the model in use, or only run it without lanes; at its end the
        guide shows the result.

        A script of memory operations is played under the policy of the Run panel, or the first that
        it is for.
        """
        self.guide.begin(scenario)
        self._take_layout("divergence")
        if isinstance(scenario, MemoryScript):
            chosen = self._panels.run_panel.options().rollback
            policy = chosen if chosen in scenario.policies else scenario.policies[0]
            self.compare(PlayScript(scenario, policy))
            return
        if not scenario.lanes:
            self._docks.reveal("findings")
            self._panels.banners.clear()
            self._bridge.ask(StartRun(scenario.prompts, scenario.options))
            return
        request = RunRequest(
            scenario.prompts,
            scenario.options,
            lanes=scenario.lanes,
            draft_accept=scenario.draft_accept,
            llama_library=self._settings.llama_library,
        )
        self.compare(StartComparison(request))

    def check_rollback(self, gates: tuple[GateOptions, ...]) -> None:
        """Check the llama.cpp build of the lanes with the model in use."""
        self._panels.banners.clear()
        self._bridge.ask(CheckRollback(self._settings.llama_library, gates))

    def show_lane(self, run: RunRef) -> None:
        """Show a checked lane, at its difference from the plain one."""
        self._feed.select_run(run)
        self._docks.reveal("divergence")

    def ask_llama_library(self) -> None:
        """Let the user choose the llama.cpp build of lanes."""
        dialog = LibraryDialog(str(self._settings.llama_library or ""), self._window)
        dialog.accepted.connect(lambda: self.use_llama_library(dialog.path.text()))
        dialog.open()

    def use_llama_library(self, name: str) -> None:
        """Use this build for llama.cpp lanes from now on; empty: an installed package."""
        try:
            path = Path(name.strip()).expanduser() if name.strip() else None
            if path is not None:
                find_build(path)
        except OptionError as error:
            self._panels.banners.add("error", str(error))
            return
        path = path.resolve() if path and path.exists() else path
        self._settings.llama_library = path
        of = "of an installed package" if path is None else f"in {path}"
        self._panels.banners.add("info", f"Lanes of llama.cpp use the library {of}.")

    def measure_fidelity(self) -> None:
        """Compare the compute mode with f32."""
        if self._bridge.compute == "f32":
            self._panels.banners.add(
                "info", "This model is already computed in f32, the reference of this measurement."
            )
            return
        self._bridge.ask(MeasureFidelity(demo_prompts()[0]), self._show_fidelity)

    def _show_fidelity(self, job: MeasureFidelity) -> None:
        if job.found is not None:
            text = fidelity_text(job.found)
            self._panels.banners.add("info", f"Fidelity: {text}. It is saved with the runs.")

    def cancel_sequence(self, run: RunRef, seq_id: int) -> None:
        """End one sequence of the run in progress."""
        self._bridge.cancel_sequence(run, seq_id)
        self._panels.run_banners.add(run, "info", f"Sequence {seq_id} ends before the next round.")

    # -- break rules -----------------------------------------------------------------------

    def write_break(self) -> None:
        """Let the user write a rule."""
        self._docks.reveal("breaks")
        self._panels.breaks.begin_typing()

    def use_break_rules(self) -> None:
        """Send the ticked break rules to the engine, and save the list in the settings."""
        breaks = self._panels.breaks
        self._settings.break_rules = breaks.entries()
        self._bridge.set_break_rules(breaks.rules())

    def _options_are_sound(self) -> bool:
        """Whether the options are valid; if not, show the error in the Run panel."""
        problem = self._panels.run_panel.problem
        if problem:
            self._docks.reveal("run")
            self._panels.banners.add("warning", problem)
        return not problem


def _fork_at(place: Position) -> Fork:
    """After the token at a place if it was emitted, else before its round."""
    if place.pos is not None:
        try:
            return Fork.after(place.run, place.pos, place.seq_id)
        except OptionError:
            pass  # a prompt token, or a draft that was not accepted
    return Fork(place.run, place.round, seq_id=place.seq_id)


class ScenarioGuide(QObject):
    """Belongs to one window. Any other run ends it."""

    def __init__(self, panels: Panels) -> None:
        super().__init__(panels.window)
        self._panels, self._docks = panels, panels.docks
        self._bridge = bridge = panels.bridge
        self._scenario: Scenario | MemoryScript | None = None
        self._has_begun = self._is_told = False
        self._banner: Banner | None = None
        bridge.run_started.connect(self._begin_run)
        bridge.state_changed.connect(self._end_run)

    def begin(self, scenario: Scenario | MemoryScript) -> None:
        """The next run is this scenario's."""
        self._panels.banners.take_down(self._banner)
        self._scenario = scenario
        self._has_begun = self._is_told = False

    def _begin_run(self, first: RunRef) -> None:
        if self._is_told:
            self._scenario = None
            self._panels.banners.take_down(self._banner)
        elif self._scenario is not None:
            for run in lanes_of(first) or (first,):
                note(run, scenario=self._scenario.title)
        self._has_begun = True

    def _end_run(self, state: State) -> None:
        over = state is State.READY and self._bridge.live is not None and self._bridge.live.ended
        if self._scenario is not None and self._has_begun and not self._is_told and over:
            self._is_told = True
            QTimer.singleShot(0, self, self._tell)  # after the views' own last rows

    def _tell(self) -> None:
        scenario, panels, run = self._scenario, self._panels, self._bridge.live
        if scenario is None or run is None or self._bridge.trace is not None:
            return
        self._docks.reveal("findings")
        if lanes_of(run):
            self._docks.reveal("divergence")
        panels.divergence.refresh()
        diverges = panels.divergence.has_divergences
        if diverges:
            panels.divergence.go_first()
        found = panels.findings.open_first(getattr(scenario, "expects", ()), keep_place=diverges)
        outcome = panels.divergence.outcome if lanes_of(run) else ""
        message = " ".join(filter(None, (scenario.about, outcome, found)))
        self._banner = panels.run_banners.add(
            run, "info", f"{scenario.title}. {message}", sticky=True
        )
