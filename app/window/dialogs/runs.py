"""Dialogs before a run: the server to observe, the round to fork at, the scenario, the sweep."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QAction, QPalette
from PySide6.QtWidgets import (
    QCheckBox,
    QComboBox,
    QHeaderView,
    QLabel,
    QLineEdit,
    QTreeWidget,
    QTreeWidgetItem,
    QWidget,
)

from app.engine_thread.bridge import Bridge
from app.engine_thread.jobs.judging import RunSweep
from app.panels.inspector.step_facts import read_step
from app.panels.inspector.step_table import alternatives
from app.panels.run_panel import RunPanel
from app.saved.settings import Settings
from app.trace_models.run_facts import other_options
from app.trace_models.shown_text import probability_text
from app.widgets.build import CLOSE, ModelessDialog, hbox, made, words
from app.widgets.fields import add_row, choice, file_path, new_form, text, typed_choice, whole
from engine.compare.memory_script import MemoryScript
from engine.compare.scenario import Scenario
from engine.errors import DraftscopeError, OptionError
from engine.experiments.sweep import plan as plans
from engine.fork import Fork
from engine.gguf.binary import shorten
from engine.options import RunOptions
from engine.plain_text import counted
from engine.trace.records import EMITTED_KINDS

LOOPBACK = "127.0.0.1"
_ABOUT = (
    "Draftscope sends the prompts of the Run panel to the server and shows what it drafts, accepts "
    "and rolls back, as far as the server reports it."
)
_KEY_TIP = (
    "API key of the server; empty for none, or for a saved one. It is saved in the system's "
    "keyring if there is one, else kept for this session only"
)
_MODEL_TIP = (
    "Name of the model, if a router or another engine's server has several; Connect lists them "
    "if one has to be chosen"
)
_LOG_TIP = (
    "File that the server writes with --log-file (-lv 5 and LLAMA_TRACE=1). It has rejected "
    "tokens, drafters and checkpoints, which replies do not have"
)
_WATCH_TIP = (
    "Other programs use the server through this port of this machine; their requests are "
    "forwarded and recorded, and the replies are those that they would have without it"
)
_LIMIT_TIP = (
    "Time limit for the start of a reply, for its first event and between events; on a CPU a "
    "long prompt takes minutes"
)
_USUAL = "http://127.0.0.1:8080"
"""llama-server's default address."""

Tried = tuple[str, Path | None, int, str]
UNTRIED: Tried = ("", None, 0, "")


class ConnectDialog(ModelessDialog):
    """`chosen` gives address, key, log file or None, the port for other programs, 0 without, and
    the name of a model, empty without. tried: address, log, port and model of the last attempt, if
    it failed."""

    chosen = Signal(str, str, object, int, str)  # Path | None

    def __init__(self, settings: Settings, parent: QWidget, tried: Tried = UNTRIED) -> None:
        super().__init__("Connect to server", parent)
        address, chosen_log, port, model = tried
        self._settings = settings
        self.address = typed_choice(settings.recent_servers)
        self.address.setCurrentIndex(0 if settings.recent_servers else -1)
        line = self.address.lineEdit()
        assert line is not None
        line.setPlaceholderText(_USUAL)
        if address:
            line.setText(address)
        self.key = text("", echoMode=QLineEdit.EchoMode.Password)
        self.model = text("the only model, or the only loaded one", text=model)
        self.log = file_path("none", "All files (*)")
        self.log.setText(str(chosen_log or ""))
        self.limit = whole(1, 999_999, settings.server_timeout)
        self.limit.setSuffix(" s")
        self.watch = QCheckBox(f"&Watch other programs at {LOOPBACK}, port")
        self.port = whole(1, 65535, settings.watch_port)
        self.port.setEnabled(False)
        self.watch.toggled.connect(self.port.setEnabled)
        self.watch.setChecked(port > 0)
        self.problem = made(QLabel, wordWrap=True, textFormat=Qt.TextFormat.PlainText)
        self.problem.setForegroundRole(QPalette.ColorRole.BrightText)
        self.problem.hide()
        self._lay_out()
        line.textChanged.connect(lambda _: self.problem.hide())
        line.setFocus()

    def _lay_out(self) -> None:
        about, watch = made(QLabel, _ABOUT, wordWrap=True), QWidget()
        hbox(self.watch, self.port, of=watch, margins=(0, 0, 0, 0)).addStretch(1)
        self.port.setAccessibleName("Port for other programs")
        self.port.setToolTip(_WATCH_TIP)
        self.watch.setToolTip(_WATCH_TIP)
        form = new_form()
        add_row(form, "&Address", self.address, "Address of the server")
        add_row(form, "API &key", self.key, _KEY_TIP)
        add_row(form, "&Model", self.model, _MODEL_TIP)
        add_row(form, "&Log file", self.log, _LOG_TIP)
        add_row(form, "&Time limit", self.limit, _LIMIT_TIP)
        form.addRow("", watch)
        self.lay_out(about, form, self.problem, act="&Connect")
        self.setMinimumWidth(66 * self.fontMetrics().averageCharWidth())

    def accept(self) -> None:
        from engine.observe.server.address import server_address

        written = self.log.text().strip()
        log = Path(written) if written else None
        try:
            address = server_address(self.address.currentText().strip() or _USUAL)
            if log is not None and not os.path.isfile(log):
                raise OptionError(f"There is no log file {written}.", "Name one, or none.")
        except OptionError as error:
            self.problem.setText(str(error))
            self.problem.show()
            return
        self._settings.server_timeout = self.limit.value()
        if self.watch.isChecked():
            self._settings.watch_port = self.port.value()
        port = self.port.value() if self.watch.isChecked() else 0
        self.chosen.emit(address, self.key.text(), log, port, self.model.text().strip())
        self.key.clear()
        super().accept()


_GROUPS = "Runs and comparisons", "Operations on the memory only"
_HEADS = "Symptom", "Scenario"
_CHARACTERS, _LINES = 180, 40
_NO_MODEL = "Open a model first: a scenario runs on the model in use, when nothing else runs."


def scenario_actions(
    scenarios: Iterable[Scenario | MemoryScript],
    play: Callable[[Scenario | MemoryScript], None],
    parent: QObject,
) -> list[QAction]:
    """An action per scenario that plays it: its title as text, its description as tooltip, and as
    data the sentence to choose it by with its number among the groups."""
    actions = []
    for one in scenarios:
        action = QAction(one.title.replace("&", "&&"), parent)
        action.setObjectName(f"scenario.{one.name}")
        action.setToolTip(one.about)
        symptom = re.split(r"[.:;](?: |$)", one.about, maxsplit=1)[0] + "."
        action.setData((getattr(one, "symptom", "") or symptom, isinstance(one, MemoryScript)))
        action.triggered.connect(lambda _=False, chosen=one: play(chosen))
        actions.append(action)
    return actions


class ScenarioDialog(ModelessDialog):
    """actions: see `scenario_actions`."""

    def __init__(self, actions: Sequence[QAction], parent: QWidget) -> None:
        super().__init__("Scenarios", parent)
        self._actions: dict[int, QAction] = {}
        self.list = made(QTreeWidget, accessibleName="Scenarios by symptom")
        self.list.setHeaderLabels(_HEADS)
        self.list.setRootIsDecorated(False)
        self.list.setItemsExpandable(False)
        head = self.list.header()
        head.setStretchLastSection(False)
        head.setSectionResizeMode(0, QHeaderView.ResizeMode.Stretch)
        head.setSectionResizeMode(1, QHeaderView.ResizeMode.ResizeToContents)
        for number, title in enumerate(_GROUPS):
            group = QTreeWidgetItem([title])
            group.setFlags(Qt.ItemFlag.ItemIsEnabled)
            for action in actions:
                symptom, is_script = action.data()
                if is_script is bool(number):
                    item = QTreeWidgetItem(group, [symptom, action.text().replace("&&", "&")])
                    item.setToolTip(0, f"{symptom}\n\n{action.toolTip()}")
                    self._actions[id(item)] = action
            if group.childCount():
                self.list.addTopLevelItem(group)
                group.setFirstColumnSpanned(True)
        self.list.expandAll()
        self.about = made(QLabel, wordWrap=True, textFormat=Qt.TextFormat.PlainText)
        self.play = self.lay_out((self.list, 1), self.about, act="&Play", leave=CLOSE)
        self.list.currentItemChanged.connect(lambda *_: self._tell())
        self.list.itemActivated.connect(lambda *_: self.accept())
        for action in actions:
            action.enabledChanged.connect(self._tell)
        metrics = self.fontMetrics()
        wanted = _CHARACTERS * metrics.averageCharWidth(), _LINES * metrics.height()
        self.resize(*(min(pair) for pair in zip(wanted, parent.size().toTuple(), strict=True)))
        if (first := self.list.topLevelItem(0)) is not None:
            self.list.setCurrentItem(first.child(0))
        self.list.setFocus()

    def _chosen(self) -> QAction | None:
        return self._actions.get(id(self.list.currentItem()))

    def _tell(self) -> None:
        chosen = self._chosen()
        ready = chosen is not None and chosen.isEnabled()
        self.play.setEnabled(ready)
        about = "" if chosen is None else chosen.toolTip()
        self.about.setText(about if ready or chosen is None else f"{about}\n{_NO_MODEL}")

    def accept(self) -> None:
        chosen = self._chosen()
        if chosen is not None and chosen.isEnabled():
            super().accept()
            chosen.trigger()


_OPTIONS = ("those of Run Settings", "those of the run")
_FORKS = (
    "States, drafters and random numbers are restored from the nearest checkpoint (up to 8 of a "
    "run are kept while its model is open, 256 MiB for all runs; with any rollback policy), and "
    "the rounds after it are replayed; without one, all earlier rounds are decoded again. The "
    "status line shows which."
)
_MOST = 2**31 - 1
_NO_TOKEN = "none"


class ForkDialog(ModelessDialog):
    """place: in words. options: the current ones of Run Settings; raises OptionError. `chosen`
    gives whether to use these instead of the run's own, and a token that replaces the newest one,
    below 0 for none."""

    chosen = Signal(bool, int)

    def __init__(
        self, place: str, fork: Fork, options: Callable[[], RunOptions], parent: QWidget
    ) -> None:
        super().__init__("Continue from Here", parent)
        self._before, self._now = fork.options, options
        where, about = words(f"From {place}."), words(_FORKS, muted=True)
        self.options = QComboBox()
        self.options.addItems(_OPTIONS)
        self.token = typed_choice([_NO_TOKEN, *_other_tokens(fork)])
        self.changes = words()
        form = new_form()
        tip = "Drafters, n_max, p_min, policy, faults, sampler and seed to continue with"
        add_row(form, "&Options", self.options, tip)
        tip = "Id of the token that replaces the last kept one; the most probable tokens"
        add_row(form, "Another &token", self.token, tip)
        self._go = self.lay_out(where, form, self.changes, about, act="&Continue")
        self.options.currentIndexChanged.connect(self.tell)
        self.token.currentTextChanged.connect(self.tell)
        self.tell()

    def tell(self, *_: object) -> None:
        """Show what the fork changes."""
        token = self._token()
        problem = "" if token is not None else f"A token is an id from 0 to {_MOST}, or none."
        try:
            now = self._now() if self.options.currentIndex() == 0 else self._before
        except OptionError as error:
            now, problem = self._before, problem or str(error)
        changes = other_options(self._before, replace(now, parallel=self._before.parallel))
        changes += [f"token {token}"] if token not in (None, -1) else []
        sentence = f"Changed: {', '.join(changes)}." if changes else "Nothing is changed."
        self.changes.setText(problem or sentence)
        self._go.setEnabled(not problem)

    def _token(self) -> int | None:
        """The entered token, -1 for "none" or nothing, None if invalid."""
        word = next(iter(self.token.currentText().split()), _NO_TOKEN)
        known = word.isascii() and word.isdecimal() and int(word) <= _MOST
        return int(word) if known else -1 if word == _NO_TOKEN else None

    def accept(self) -> None:
        token = self._token()
        self.chosen.emit(self.options.currentIndex() == 0, -1 if token is None else token)
        super().accept()


def _other_tokens(fork: Fork) -> list[str]:
    """Alternatives to the newest kept token, most probable first."""
    step = read_step(fork.parent, fork.seq_id, fork.round - 1)
    out = [one for one in step.tokens if one["kind"] in EMITTED_KINDS] if step else []
    if step is None or not out[: fork.n_kept]:
        return []
    newest = out[: fork.n_kept][-1]
    return [
        f"{token_id} “{step.text(token_id)}”" + ("" if p is None else f" · p {probability_text(p)}")
        for token_id, _, p, _ in alternatives(newest)
        if token_id != newest["token_id"]
    ]


_SWEPT = 3
_NOTHING = "nothing"
_FIRST = "spec-draft-n-max", "1, 2, 3, 4"
_SWEEP = (
    "Each combination of the values below is a job: the prompts and all other options of Run "
    "Settings, in its own process, which opens the model again. Results are shown in Tune."
)
_VALUES_TIP = "Comma-separated values; + joins names, as in draft-mtp+ngram-mod"
_REPEAT_TIP = "Runs of each job; the median one counts, and the range of its speeds is shown"


class SweepDialog(ModelessDialog):
    """Asks what is swept. `chosen` gives the job, whose plan is written."""

    chosen = Signal(object)  # RunSweep

    def __init__(
        self, bridge: Bridge, panel: RunPanel, settings: Settings, parent: QWidget
    ) -> None:
        super().__init__("Sweep", parent)
        self._bridge, self._panel, self._settings = bridge, panel, settings
        keys = {key: plans.JOB_KEYS[key][0] for key in (plans.COMPUTE, plans.THREADS)}
        keys |= {key: one.option.about for key, one in plans.OPTIONS.items() if one.option.row}
        self.rows = [(choice({_NOTHING: "", **keys}, _NOTHING), text("")) for _ in range(_SWEPT)]
        form = new_form()
        for number, (key, values) in enumerate(self.rows, start=1):
            key.setAccessibleName(f"Option {number}")
            values.setAccessibleName(f"Values of option {number}")
            values.setToolTip(_VALUES_TIP)
            key.currentTextChanged.connect(self.tell)
            values.textChanged.connect(self.tell)
            form.addRow(key, values)
        self.repeat = whole(1, plans.MOST_REPEATS, 1)
        self.traces = made(QCheckBox, "Keep the &trace of each job", checked=True)
        self.folder = file_path("")
        name = time.strftime("draftscope-sweep-%Y%m%d-%H%M%S")
        self.folder.setText(str(settings.folder("export") / name))
        add_row(form, "&Runs each", self.repeat, _REPEAT_TIP)
        add_row(form, "&Into", self.folder, "New folder for the plan, the results and the traces")
        self.about = words(shrinks=True)  # names of files may be long
        self._go = self.lay_out(words(_SWEEP), form, self.traces, self.about, act="&Start")
        self.rows[0][0].setCurrentText(_FIRST[0])
        self.rows[0][1].setText(_FIRST[1])
        panel.options_changed.connect(self.tell)
        bridge.state_changed.connect(self.tell)
        self.setMinimumWidth(110 * self.fontMetrics().averageCharWidth())

    def tell(self, *_: object) -> None:
        """Say how many jobs it makes, or what is wrong."""
        for key, values in self.rows:
            one = plans.OPTIONS.get(key.currentText())
            values.setEnabled(key.currentText() != _NOTHING)
            values.setPlaceholderText(", ".join(one.option.choices) if one else "")
        try:
            grids = self._parts()[1]
            n = sum(math.prod(len(v) for v in g.values() if isinstance(v, list)) for g in grids)
            said = f"{counted(n, 'job')} on {self._target()}."
        except OptionError as error:
            grids, said = [], str(error)
        self.about.setText(said)
        self._go.setEnabled(bool(grids) and self._bridge.can_start)

    def accept(self) -> None:
        folder = Path(self.folder.text()).absolute()
        try:
            settings, grids = self._parts()
            title = f"{', '.join(self._axes())} of {self._target()}"
            plan = plans.write_plan(folder, title, self._panel.texts(), settings, grids)
        except DraftscopeError as error:
            self.about.setText(str(error))
            return
        self._settings.set_folder("export", folder.parent)
        self.chosen.emit(RunSweep(plan, traces=self.traces.isChecked()))
        super().accept()

    def _target(self) -> str:
        files = self._bridge.files
        return "" if files is None else shorten(files.target.stem)

    def _axes(self) -> dict[str, list[Any]]:
        """The values of each option that is swept."""
        axes: dict[str, list[Any]] = {}
        for key, values in ((box.currentText(), line.text()) for box, line in self.rows):
            if key != _NOTHING:
                axes[key] = [*axes.get(key, ()), *plans.typed_values(key, values)]
        if not axes:
            raise OptionError("No option is swept.", "Choose one and write its values.")
        return axes

    def _parts(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The settings of all jobs, and a grid for each choice of drafters: its file and the
        options that have an effect with it. Raises OptionError."""
        axes, files, opened = self._axes(), self._bridge.files, self._bridge.loaded_as
        if files is None or opened is None or self._bridge.server is not None:
            raise OptionError("No model is in use.", "Open one first.")
        if not all(map(str.strip, self._panel.texts())):
            raise OptionError("There is no prompt.", "Write one in Run Settings.")
        if chat := self._panel.chat():
            raise OptionError(
                f"A sweep cannot set {', '.join(chat)} in the chat template.",
                "Clear its variables in Run Settings.",
            )
        common = plans.settings_of(self._panel.options()) | {
            plans.MODEL: str(files.target.absolute()),
            plans.COMPUTE: opened.compute,
            plans.DEVICE: opened.device,
            plans.CHAT: chat is not None,
            plans.REPEAT: self.repeat.value(),
        }
        grids = []
        in_spec = {key for key, one in plans.OPTIONS.items() if one.path[0] == "spec"}
        for types in axes.pop(plans.SPEC_TYPE, [common.pop(plans.SPEC_TYPE, "none")]):
            grid = {k: values for k, values in axes.items() if types != "none" or k not in in_spec}
            grids.append({**grid, plans.SPEC_TYPE: types})
            for file in [file for file, name, _ in files.drafts if name in types.split(",")][:1]:
                grids[-1][plans.DRAFT_MODEL] = str(file.absolute())
        return common, grids
