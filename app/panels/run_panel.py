"""The Run panel: the prompts and the options of the next run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from PySide6.QtCore import QSignalBlocker, Qt, Signal
from PySide6.QtGui import QPalette
from PySide6.QtWidgets import QCheckBox, QComboBox, QLabel, QToolButton, QWidget

from app.engine_thread.events import OpenedFiles
from app.widgets.build import hbox, made, vbox
from app.widgets.fields import add_row, choice, new_form, retype, text, text_box, whole
from app.widgets.fitted_labels import ScrollPage
from app.widgets.option_groups import (
    ABOVE,
    DraftGroup,
    LimitsGroup,
    MemoryGroup,
    OptionGroup,
    ProvokingGroup,
    SamplerGroup,
    entry_of,
    make_field,
    put_entry,
    tip,
    value_of,
)
from engine.draft.registry import DRAFTERS, model_drafters
from engine.draft.spec import MTP_HEAD
from engine.errors import OptionError
from engine.memory.policies import POLICIES
from engine.model.compute_modes import COMPUTE_MODES, MMAP_ABOUT, MMAP_CHOICES
from engine.option_fields import PlacedOption, build, options_in
from engine.options import RunOptions
from engine.options.faults import notes_on
from resources import titled_prompts

_SERVER_NOTE = "Greyed settings cannot be changed by a request: the server uses those of its start."


class RunPanel(QWidget):
    """A form for RunOptions. The options are read when a run starts; only compute mode, device and
    mmap, which belong to loading, take effect at once.

    Contradictions of the options are shown below the form, and are `problem`.
    """

    options_changed = Signal()
    loading_changed = Signal()
    """The user has changed the compute mode, the device, or whether files are mapped."""

    def __init__(self) -> None:
        super().__init__()
        self._wished_drafters: tuple[str, ...] = ("draft-mtp",)
        self._refused: dict[tuple[str, ...], str] = {}
        """Options that the server does not take, and why."""
        self._files: OpenedFiles | None = None
        self.problem = ""
        """Why no run can start with these options, empty if one can."""
        self._make_fields()
        self._lay_out()
        self._connect()
        self.set_files(None)
        self._changed()

    # -- what the window reads -------------------------------------------------------------

    def texts(self) -> list[str]:
        return self.prompts.texts()

    def chat(self) -> dict[str, Any] | None:
        """See RunRequest.chat. Raises OptionError."""
        return self.prompts.chat()

    def options(self) -> RunOptions:
        """The current options. Raises OptionError if they contradict each other."""
        values = {one.path: value_of(one, field) for one, field in self._above}
        for group in (*self._groups.values(), *self.provoking):
            values |= group.values()
        values = {path: value for path, value in values.items() if path not in self._refused}
        if ("spec", "n_min") in values:
            values["spec", "n_min"] = min(values["spec", "n_min"], self.n_max.value())
        if ("parallel",) not in values:
            values["parallel",] = 0
        values["parallel",] = values["parallel",] or min(64, len(self.texts()))
        return build(RunOptions, values)

    # -- what the window sets --------------------------------------------------------------

    def set_files(self, files: OpenedFiles | None) -> None:
        """Offer the drafters of these files; a choice that is gone is replaced by the best one
        left."""
        there: set[str] = set()
        self._files = files
        if files is not None:
            there = {drafter for _, drafter, _ in files.drafts}
            if any(layer.kind == "mtp" for layer in files.info.layers):
                there |= {name for name, one in DRAFTERS.items() if one.needs is MTP_HEAD}
        refused = {
            name: drafter.needs[1]
            for name, drafter in DRAFTERS.items()
            if drafter.needs and name not in there
        }
        self.drafter.set_refused(refused)
        if files is not None:
            left = [name for name in self._wished_drafters if name not in refused]
            if self._wished_drafters and not left:
                left = [name for name in reversed(model_drafters()) if name not in refused][:1]
            self.drafter.set_names(left)
        self._judge()

    def set_server(self, why_not: Callable[[PlacedOption], str] | None) -> None:
        """Disable what a server does not take with a request; why_not: says why, empty for what it
        takes; None without a server. Disabled options count as unset."""
        self.note.setVisible(why_not is not None)
        self._refused = {
            one.path: reason for one, _ in self._fields if why_not and (reason := why_not(one))
        }
        for one, field in self._fields:
            reason = self._refused.get(one.path, "")
            field.setEnabled(not reason)
            field.setToolTip(reason or tip(one))
        self._judge()

    def use_first_prompt(self) -> None:
        """Enter the first bundled prompt, unless something was typed."""
        self.prompts.use_first()

    def use_setting(self, types: Collection[str], n_max: int, p_min: float) -> str:
        """Set draft lengths, and these drafters if all of them are available; returns one sentence
        about it."""
        words = f"n_max {n_max} and p_min {p_min:g} are set for the next run"
        offered = self.drafter.actions_by_name
        if not all(name in offered and offered[name].isEnabled() for name in types):
            words += f"; {', '.join(types)} is not available"
        elif tuple(types) != self.drafter.names():
            self.drafter.set_names(types)
            self._remember_drafters()
            words += f", with {', '.join(types)}"
        self.n_max.setValue(n_max)
        self.draft["p_min"].setValue(p_min)
        return f"{words}."

    def entries(self) -> dict[str, Any]:
        """The contents of the form, saved for the next start. Faults and synthetic acceptance are
        excluded: wrong output must always be requested."""
        fields = {".".join(one.path): entry_of(field) for one, field in self._remembered()}
        return {"prompts": self.prompts.entries(), "options": fields}

    def put_entries(self, entries: Mapping[str, Any]) -> None:
        """Restore `entries`; what does not fit a field is skipped."""
        prompts, options = entries.get("prompts"), entries.get("options")
        if isinstance(prompts, dict):
            self.prompts.put_entries(prompts)
        if isinstance(options, dict):
            for one, field in self._remembered():
                put_entry(field, options.get(".".join(one.path)))
            self._remember_drafters()
            self._changed()

    def open_groups(self) -> list[str]:
        """Names of the open groups."""
        return [name for name, group in self._groups.items() if group.is_open]

    def set_open_groups(self, names: Collection[str]) -> None:
        """Open these groups and close the others."""
        for name, group in self._groups.items():
            group.set_open(name in names)

    def mmap_choice(self) -> bool | None:
        """Whether model files are to be mapped; None: the engine decides."""
        return MMAP_CHOICES[self.mmap.currentText()][0]

    def set_devices(self, devices: Mapping[str, str]) -> None:
        """Offer these CUDA devices, names by --device value, in addition to auto and the CPU."""
        for device, name in devices.items():
            if self.device.findText(device) < 0:
                self.device.addItem(device)
                self.device.setItemData(self.device.count() - 1, name, Qt.ItemDataRole.ToolTipRole)

    def set_loading(self, compute: str, mmap: bool | None, device: str) -> None:
        """Show how a model was loaded without emitting `loading_changed`."""
        name = next(name for name, (value, _) in MMAP_CHOICES.items() if value is mmap)
        for field, shown in ((self.compute, compute), (self.mmap, name), (self.device, device)):
            with QSignalBlocker(field):
                field.setCurrentText(shown)

    def set_loading_enabled(self, enabled: bool) -> None:
        """Loading options are disabled while a model is in use or loading."""
        for field in (self.compute, self.device, self.mmap):
            field.setEnabled(enabled)

    @property
    def provoking(self) -> tuple[ProvokingGroup, ProvokingGroup]:
        """The groups shown in another panel: deliberate disturbances of a run."""
        return self.faults, self.synthetic

    def _remembered(self) -> list[tuple[PlacedOption, QWidget]]:
        n_provoking = sum(len(group.fields) for group in self.provoking)
        return self._fields[:-n_provoking]

    # -- internals -------------------------------------------------------------------------

    def _make_fields(self) -> None:
        self.prompts = PromptBox()
        self.prompt = self.prompts.editor
        options = {one.path: one for one in options_in(RunOptions)}
        self._above = [(options[path], make_field(options[path])) for path in ABOVE]
        self.drafter, self.n_max, self.rollback, self.n_predict = (f for _, f in self._above)
        self.drafter.set_names(self._wished_drafters)
        self.compute = choice(COMPUTE_MODES, "auto")
        self.device = choice(
            {"auto": "the first CUDA device if there is one", "cpu": "the processor"}, "auto"
        )
        self.mmap = choice({name: about for name, (_, about) in MMAP_CHOICES.items()}, "auto")
        self.draft, self.sampling, self.memory = DraftGroup(), SamplerGroup(), MemoryGroup()
        self.limits = LimitsGroup()
        self.faults = ProvokingGroup("Faults", "faults", "output may be wrong", self)
        self.synthetic = ProvokingGroup("Synthetic acceptance", "synthetic", "output invalid", self)
        self._groups: dict[str, OptionGroup] = {
            "drafters": self.draft,
            "sampling": self.sampling,
            "memory": self.memory,
            "limits": self.limits,
        }
        self._fields = list(self._above)
        for group in (*self._groups.values(), *self.provoking):
            self._fields += group.fields
        self.ignore_eos = self.sampling["ignore_eos"]
        self._form = new_form()
        for one, field in self._above:
            add_row(self._form, one.row.label, field, tip(one))
        about = "--compute: arithmetic of the linear layers; reloads the model"
        add_row(self._form, "compute", self.compute, about)
        about = "--device: where models run; reloads. More CUDA devices appear after the first one"
        add_row(self._form, "device", self.device, about)
        add_row(self._form, "mmap", self.mmap, f"--mmap: {MMAP_ABOUT}; reloads")
        self.note = made(QLabel, _SERVER_NOTE, wordWrap=True, muted=True)
        self.note.hide()
        self.message = made(QLabel, wordWrap=True, textFormat=Qt.TextFormat.PlainText)
        self.message.setForegroundRole(QPalette.ColorRole.BrightText)
        self.message.setContentsMargins(6, 3, 6, 3)

    def _lay_out(self) -> None:
        column = vbox(self.prompts, self.note, self._form, margins=(6, 6, 6, 6), spacing=4)
        for group in self._groups.values():
            column.addWidget(group)
        column.addStretch(1)
        vbox((ScrollPage(column), 1), self.message, of=self, margins=(0, 0, 0, 0), spacing=0)

    def _connect(self) -> None:
        for number in (self.n_predict, self.n_max):
            number.valueChanged.connect(self._changed)
        self.rollback.currentTextChanged.connect(self._changed)
        self.drafter.changed.connect(self._changed)
        self.prompts.changed.connect(self._judge)
        for group in (*self._groups.values(), *self.provoking):
            group.changed.connect(self._judge)
        self.drafter.chosen.connect(self._remember_drafters)
        self.compute.currentTextChanged.connect(self.loading_changed)
        self.device.currentTextChanged.connect(self.loading_changed)
        self.mmap.currentTextChanged.connect(self.loading_changed)

    def _changed(self) -> None:
        """Hide options that have no effect, then check the others."""
        types = self.drafter.names()
        with_model = bool(set(types) & set(model_drafters()))
        self._form.setRowVisible(self.n_max, with_model)
        self._form.setRowVisible(self.rollback, bool(types))
        keeps = bool(types) and POLICIES[self.rollback.currentText()].keeps_snapshots
        blockers = [QSignalBlocker(one) for one in (self.draft, self.memory, *self.provoking)]
        self.draft.set_types(types)
        self.memory.set_use(speculative=bool(types), keeps_snapshots=keeps)
        for group in self.provoking:
            group.set_use(bool(types))
        for blocker in blockers:
            blocker.unblock()
        self._judge()

    def _judge(self) -> None:
        """Show an error of the options, or their effect on the output."""
        notes = []
        try:
            options = self.options()
            self.prompts.chat()
            self.problem = ""
        except OptionError as error:
            self.problem = str(error)
        else:
            if options.spec.synthetic:
                notes.append("Acceptance is synthetic: the output is invalid.")
            if options.faults:
                notes.append(f"Fault on: {', '.join(options.faults)}. The output may be wrong.")
                notes += notes_on(options)
            if self._files is not None:
                notes.append(self._files.info.note_on_context(options.n_ctx))
        text = self.problem or " ".join(filter(None, notes))
        self.message.setText(text)
        self.message.setAccessibleName(text)
        self.message.setVisible(bool(text))
        self.options_changed.emit()

    def _remember_drafters(self) -> None:
        self._wished_drafters = self.drafter.names()


_LINES = 4
_MOST_PROMPTS = 64


class PromptBox(QWidget):
    """One prompt at a time in the editor; the list next to the examples chooses another one."""

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self._examples = titled_prompts()
        self._texts = [""]
        self._removed: list[tuple[int, str]] = []
        self._make_fields()
        self.choice.activated.connect(self._go_to)
        self.add_button.clicked.connect(self.add)
        self.remove_button.clicked.connect(self.remove)
        self.undo_button.clicked.connect(self.undo)
        self.editor.textChanged.connect(self._keep)
        self.examples.activated.connect(self._use_example)
        self.copies.valueChanged.connect(lambda _: self.changed.emit())
        self.chat_box.toggled.connect(self._on_chat)
        self.chat_kwargs.textChanged.connect(lambda _: self.changed.emit())
        self._lay_out()
        self._list()

    def texts(self) -> list[str]:
        return [text for text in self._texts for _ in range(self.copies.value())]

    def chat(self) -> dict[str, Any] | None:
        """Variables of the chat template that wraps the texts, None without it. Raises OptionError
        if they are not a JSON object."""
        if not self.chat_box.isChecked():
            return None
        written = self.chat_kwargs.text().strip()
        if not written:
            return {}
        try:
            values = json.loads(written)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise OptionError(
                "The chat template's variables are not a JSON object.",
                'Write them like {"enable_thinking": false}.',
            )
        return values

    def entries(self) -> dict[str, Any]:
        """The contents of the box, for `put_entries`."""
        return {
            "texts": list(self._texts),
            "copies": self.copies.value(),
            "chat": self.chat_box.isChecked(),
            "chat_kwargs": self.chat_kwargs.text(),
        }

    def put_entries(self, entries: Mapping[str, Any]) -> None:
        """Restore `entries`; what has another type is skipped."""
        texts = entries.get("texts")
        if isinstance(texts, list) and texts and all(isinstance(one, str) for one in texts):
            self._texts = texts[:_MOST_PROMPTS]
            self._list()
        for name, field in (
            ("copies", self.copies),
            ("chat", self.chat_box),
            ("chat_kwargs", self.chat_kwargs),
        ):
            put_entry(field, entries.get(name))

    def use_first(self) -> None:
        """Enter the first bundled prompt, unless something was typed."""
        if not self.editor.toPlainText():
            self.editor.setPlainText(self._examples[0][1])

    def add(self) -> None:
        if len(self._texts) < _MOST_PROMPTS:
            self._texts.append("")
            self._list(len(self._texts) - 1)
            self.editor.setFocus()
            self.changed.emit()

    def remove(self) -> None:
        """Remove the prompt on show; the last one stays."""
        if len(self._texts) > 1:
            index = self.choice.currentIndex()
            self._removed.append((index, self._texts.pop(index)))
            self._list(max(0, index - 1))
            self.changed.emit()

    def undo(self) -> None:
        """Restore the prompt that was removed last."""
        if self._removed and len(self._texts) < _MOST_PROMPTS:
            index, words = self._removed.pop()
            self._texts.insert(min(index, len(self._texts)), words)
            self._list(min(index, len(self._texts) - 1))
            self.changed.emit()

    # -- internals -------------------------------------------------------------------------

    def _make_fields(self) -> None:
        self.examples = made(QComboBox, placeholderText="Examples")
        self.examples.addItems([title for title, _ in self._examples])
        self.examples.setCurrentIndex(-1)
        self.examples.setAccessibleName("Example prompts")
        self.examples.setToolTip("Insert an example into the shown prompt")
        self.choice = made(QComboBox, accessibleName="Prompt to edit")
        self.choice.setToolTip("Shown prompt; each prompt is a separate sequence")
        self.add_button = _button("+", "Add a sequence with its own prompt")
        self.remove_button = _button("−", "Remove the shown prompt")
        self.undo_button = _button("↶", "Restore the last removed prompt")
        self.editor = text_box("Prompt", "Text to continue")
        self.editor.setFixedHeight(_LINES * self.fontMetrics().lineSpacing() + 12)
        self.copies = whole(1, 64, 1)
        self.copies.setPrefix("same prompt × ")
        self.copies.setToolTip("Sequences with the same prompt")
        self.copies.setAccessibleName("Sequences with the same prompt")
        self.chat_box = QCheckBox("chat template")
        self.chat_box.setToolTip("--chat: wrap each text as a user's message")
        self.chat_kwargs = text('{"enable_thinking": false}')
        self.chat_kwargs.setToolTip("--chat-template-kwargs: variables of the template, JSON")
        self.chat_kwargs.setAccessibleName("Variables of the chat template")
        self.chat_kwargs.hide()

    def _lay_out(self) -> None:
        for box in (self.examples, self.choice):
            box.setMinimumContentsLength(6)
            box.setSizeAdjustPolicy(box.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        buttons = self.undo_button, self.add_button, self.remove_button
        top = hbox((self.examples, 1), (self.choice, 1), *buttons, spacing=4)
        below = hbox(self.chat_box, 1, self.copies, spacing=4)
        vbox(top, self.editor, below, self.chat_kwargs, of=self, margins=(0, 0, 0, 0), spacing=4)

    def _list(self, index: int = 0) -> None:
        """List the prompts and show one."""
        n = len(self._texts)
        self.choice.clear()
        self.choice.addItems([f"Prompt {i + 1} of {n}" for i in range(n)])
        self.choice.setVisible(n > 1)
        self.remove_button.setEnabled(n > 1)
        self.undo_button.setVisible(bool(self._removed))
        self._go_to(index)

    def _go_to(self, index: int) -> None:
        self.choice.setCurrentIndex(index)
        self.editor.setPlainText(self._texts[index])

    def _keep(self) -> None:
        self._texts[max(0, self.choice.currentIndex())] = self.editor.toPlainText()

    def _use_example(self, index: int) -> None:
        retype(self.editor, self._examples[index][1])
        self.examples.setCurrentIndex(-1)

    def _on_chat(self, on: bool) -> None:
        self.chat_kwargs.setVisible(on)
        self.changed.emit()


def _button(text: str, tip: str) -> QToolButton:
    button = made(QToolButton, text=text, toolTip=tip, accessibleName=tip)
    button.setFocusPolicy(button.focusPolicy().StrongFocus)
    return button
