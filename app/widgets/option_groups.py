"""Option groups of the Run panel: forms over options (engine.option_fields).

The group on the command line determines where an option goes; options are in the order of their
fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QPalette
from PySide6.QtWidgets import (
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QLineEdit,
    QSizePolicy,
    QSpinBox,
    QToolButton,
    QWidget,
)

from app.widgets.build import hbox, made, vbox
from app.widgets.fields import (
    NamesChoice,
    add_row,
    choice,
    file_path,
    new_form,
    reading,
    real,
    side_by_side,
    text,
    whole,
)
from app.widgets.fitted_labels import ElidedLabel
from engine.draft.registry import DRAFTERS
from engine.option_fields import PlacedOption, grouped
from engine.options import RunOptions


class FormGroup(QWidget):
    """Rows under an expandable title; collapsed at first, hidden while no row is relevant.

    The title is followed by values that differ from the initial ones, such as "temperature 0.8,
    top_k 20"; plain: the text if none do.
    """

    def __init__(self, title: str, *, plain: str = "") -> None:
        super().__init__()
        self._title, self._plain = title, plain
        self._relevant: dict[QWidget, bool] = {}
        self._first: dict[QWidget, tuple[str, str]] = {}
        self._gone = False
        self.header = made(
            QToolButton,
            text=title,
            autoRaise=True,
            arrowType=Qt.ArrowType.RightArrow,
            toolButtonStyle=Qt.ToolButtonStyle.ToolButtonTextBesideIcon,
            focusPolicy=Qt.FocusPolicy.StrongFocus,
            clicked=lambda: self.set_open(not self.is_open),
        )
        self._summary = ElidedLabel()
        self._summary.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self._body = QWidget()
        self._form = new_form()
        self._form.setContentsMargins(12, 0, 0, 4)
        self._body.setLayout(self._form)
        self._body.hide()
        top = hbox(self.header, (self._summary, 1), spacing=6)
        vbox(top, self._body, of=self, margins=(0, 0, 0, 0), spacing=2)
        self.summarise()

    @property
    def summary(self) -> str:
        return self._summary.text()

    @property
    def is_open(self) -> bool:
        return not self._body.isHidden()

    def add(self, label: str, field: QWidget, tip: str, name: str = "") -> None:
        """Append a row. The field's present value is the one that the summary leaves out."""
        add_row(self._form, label, field, tip, name)
        self._relevant[field] = True
        self._first[field] = (label, reading(field))

    def set_relevant(self, field: QWidget, relevant: bool) -> None:
        self._form.setRowVisible(field, relevant)
        self._relevant[field] = relevant
        gone = not any(self._relevant.values())
        if gone is not self._gone:  # not earlier: without a parent it would be a window
            self._gone = gone
            self.setVisible(not gone)

    def summarise(self, warning: str = "") -> None:
        """Summarise the relevant rows; a warning is shown with the differences, in the colour of
        errors."""
        words = []
        for field, (label, first) in self._first.items():
            now = reading(field)
            if self._relevant[field] and now != first:
                words.append(f"{label} {now or 'none'}".strip())
        warns = bool(words and warning)
        if warns:
            words.append(warning)
        text = ", ".join(words) or self._plain
        role = QPalette.ColorRole
        self._summary.setText(text)
        self._summary.setForegroundRole(role.BrightText if warns else role.PlaceholderText)
        self._describe()

    def set_open(self, wanted: bool) -> None:
        self.header.setArrowType(Qt.ArrowType.DownArrow if wanted else Qt.ArrowType.RightArrow)
        self._body.setVisible(wanted)
        self._describe()

    def _describe(self) -> None:
        state = "unfolded" if self.is_open else "folded"
        self.header.setAccessibleName(f"{self._title}, {state}")
        self.header.setAccessibleDescription(self.summary)


OptionValues = dict[tuple[str, ...], Any]
"""By path of the option in RunOptions."""

ABOVE: tuple[tuple[str, ...], ...] = (
    ("spec", "types"),
    ("spec", "n_max"),
    ("rollback",),
    ("n_predict",),
)
"""Options that are always visible, above the groups."""
_PER_ROW = 3
"""Number fields of a drafter per row; more would widen the panel."""
_FILES = {
    "json_schema": "JSON schema (*.json);;All files (*)",
    "grammar_file": "Lark grammar (*.lark);;All files (*)",
    "lookup_cache_static": "n-grams of llama-lookup-create (*)",
    "lookup_cache_dynamic": "n-grams of llama-lookup-create (*)",
    "baseline": "Results of check-rollback (*.json);;All files (*)",
}
"""Options that are file names, with the dialog's filter."""
_COMMON = (("n_min",), ("p_min",), ("accept",))


def make_field(one: PlacedOption) -> Any:
    row, option, start = one.row, one.option, one.default
    if one.kind is bool:
        return QCheckBox(row.label)
    if option.choices:
        if one.kind is tuple:
            return NamesChoice(option.meanings, alarming=option.group == "faults")
        return choice(option.meanings, start)
    number = start if row.start is None else row.start
    number = row.low if number is None else number
    if one.kind is int:
        return whole(int(row.low), int(row.high), int(number), row.special)
    if one.kind is float:
        return real(row.low, row.high, number, row.special)
    if one.path[-1] in _FILES:
        return file_path(row.text, _FILES[one.path[-1]])
    return text(row.text)


def value_of(one: PlacedOption, field: QWidget) -> Any:
    """The value of an option's field. Raises OptionError for invalid text."""
    match field:
        case QCheckBox():
            return field.isChecked()
        case NamesChoice():
            return field.names()
        case QComboBox():
            return field.currentText()
        case QSpinBox() | QDoubleSpinBox():
            is_none = one.default is None and field.value() == field.minimum()
            return None if is_none else field.value()
        case QLineEdit():
            words = field.text().strip()
            if one.option.parse is None:
                return words or None
            if one.option.repeats:
                return tuple(one.option.parse(word) for word in words.replace(",", " ").split())
            return one.option.parse(words)
    raise TypeError(f"{type(field).__name__} holds no option")


def tip(*options: PlacedOption) -> str:
    """Tooltip: the flags and their meaning."""
    flags = ", ".join(one.option.name for one in options)
    return f"{flags}: {', '.join(dict.fromkeys(one.option.about for one in options))}"


def shown(*groups: str) -> list[PlacedOption]:
    """Options of these groups that have rows in a form."""
    found = grouped(RunOptions, *groups)
    return [one for one in found if one.option.row and one.path not in ABOVE]


def entry_of(field: QWidget) -> Any:
    """The contents of a field, for `put_entry`; None if it has none."""
    if isinstance(field, NamesChoice):
        return list(field.names())
    return field.metaObject().userProperty().read(field)


def put_entry(field: QWidget, entry: object) -> None:
    """Restore what `entry_of` returned; invalid values from the settings leave the field
    unchanged."""
    match field, entry:
        case QCheckBox(), bool():
            field.setChecked(entry)
        case NamesChoice(), list():
            field.set_names([name for name in entry if isinstance(name, str)])
        case QComboBox(), str() if field.findText(entry) >= 0:
            field.setCurrentText(entry)
        case QSpinBox(), int() if abs(entry) < 2**31:
            field.setValue(entry)
        case QDoubleSpinBox(), float() | int():
            field.setValue(entry)
        case QLineEdit(), str():
            field.setText(entry)


class OptionGroup(FormGroup):
    """A form over some options; emits `changed`."""

    changed = Signal()

    def __init__(self, title: str, options: Iterable[PlacedOption], *, plain: str = "") -> None:
        super().__init__(title, plain=plain)
        self._fields: dict[tuple[str, ...], tuple[PlacedOption, QWidget]] = {}
        for one in options:
            self.append(one)

    def append(self, one: PlacedOption) -> None:
        field, label = self.make(one), one.row.label
        is_tick = isinstance(field, QCheckBox)
        self.add("" if is_tick else label, field, tip(one), label if is_tick else "")

    def make(self, one: PlacedOption) -> Any:
        """A connected field, not yet in a row."""
        field = make_field(one)
        self._fields[one.path] = one, field
        changes = field.metaObject().userProperty().notifySignal().name().data().decode()
        changed = field.changed if isinstance(field, NamesChoice) else getattr(field, changes)
        changed.connect(self._on_changed)
        return field

    def paths(self) -> list[tuple[str, ...]]:
        return list(self._fields)

    @property
    def fields(self) -> list[tuple[PlacedOption, QWidget]]:
        return list(self._fields.values())

    def __getitem__(self, name: str) -> Any:
        """The field of an option by its name in RunOptions, dotted within a drafter's part."""
        for path, (_, field) in self._fields.items():
            if name in (path[-1], ".".join(path[-2:])):
                return field
        raise KeyError(name)

    def values(self) -> OptionValues:
        """The fields' values by path. Raises OptionError for invalid text."""
        return {path: value_of(one, field) for path, (one, field) in self._fields.items()}

    def refresh(self) -> None:
        """Show the relevant rows and the summary."""
        self.summarise()

    def _on_changed(self) -> None:
        self.refresh()
        self.changed.emit()


class SamplerGroup(OptionGroup):
    """Sampler options, and whether the end token counts."""

    def __init__(self) -> None:
        super().__init__("Sampling", shown("decoding"), plain="greedy")
        self.refresh()

    def refresh(self) -> None:
        draws = self["temp"].value() > 0
        for name in ("top_k", "typical_p", "top_p", "min_p", "seed"):
            self.set_relevant(self[name], draws)
        penalties = ("repeat_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)
        penalised = any(self[name].value() != off for name, off in penalties)
        self.set_relevant(self["repeat_last_n"], penalised)
        self.summarise()


class LimitsGroup(OptionGroup):
    """Limits of sequences, cells and batches."""

    def __init__(self) -> None:
        super().__init__("Limits", shown("slots", "sizes"))


class MemoryGroup(OptionGroup):
    """Memory options other than the rollback policy, which is above the groups."""

    def __init__(self) -> None:
        self._speculative, self._keeps = False, False
        super().__init__("Memory", shown("memory"))
        self.refresh()

    def set_use(self, *, speculative: bool, keeps_snapshots: bool) -> None:
        """Show the options that matter with drafters, and with a policy that keeps snapshots."""
        self._speculative, self._keeps = speculative, keeps_snapshots
        self._on_changed()

    def refresh(self) -> None:
        for name in ("replay", "checkpoint_device"):
            self.set_relevant(self[name], self._speculative)
        self.set_relevant(self["n_rs_seq"], self._keeps)
        self.summarise()


class ProvokingGroup(OptionGroup):
    """Options that spoil runs on purpose, for learning; red while any is set.

    what: the effect on the output. options: their group on the command line.
    """

    def __init__(self, title: str, options: str, what: str, parent: QWidget) -> None:
        self._speculative, self._what = False, what
        super().__init__(title, shown(options), plain="none")
        self.setParent(parent)
        self.refresh()

    def set_use(self, speculative: bool) -> None:
        """Show the options only for runs that draft: otherwise they have no effect."""
        self._speculative = speculative
        self._on_changed()

    def values(self) -> OptionValues:
        """The values that are set, none without drafters."""
        return super().values() if self._speculative else {}

    def refresh(self) -> None:
        for _, field in self.fields:
            self.set_relevant(field, self._speculative)
        self.summarise(self._what)


class DraftGroup(OptionGroup):
    """Drafter options other than the longest draft; with rows for each drafter's own sizes."""

    def __init__(self) -> None:
        self._types: tuple[str, ...] = ()
        self._rows: dict[str, list[QWidget]] = {}
        options = shown("speculation", "ngram")
        common = [one for one in options if one.path[1:] in _COMMON]
        super().__init__("Drafter options", common)
        for name, drafter in DRAFTERS.items():
            own = [one for one in options if one.path[1:-1] == (drafter.field,)]
            for start in range(0, len(own), _PER_ROW):
                part = own[start : start + _PER_ROW]
                row = side_by_side({one.row.short: self.make(one) for one in part})
                self._rows.setdefault(name, []).append(row)
                self.add("" if start else name.removeprefix("ngram-"), row, tip(*part), name)
        for one in options:
            if len(one.path) == 2 and one not in common:
                self.append(one)
        self.refresh()

    def set_types(self, types: tuple[str, ...]) -> None:
        """Show the options of these drafters only."""
        self._types = types
        self._on_changed()

    def values(self) -> OptionValues:
        """The values used by the selected drafters; see OptionGroup.values."""
        found = super().values()
        if self["accept"].currentText() != "match":  # the engine refuses to drop drafts there
            found["spec", "n_min"] = 0
        return found

    def refresh(self) -> None:
        for path, (one, field) in self._fields.items():
            if len(path) == 2:
                users = [name for name, d in DRAFTERS.items() if path[1:] in d.paths()]
                used = set(self._types) & set(users) if users else self._types
                matches = one.field != "n_min" or self["accept"].currentText() == "match"
                self.set_relevant(field, bool(used) and matches)
        for name, rows in self._rows.items():
            for row in rows:
                self.set_relevant(row, name in self._types)
        self.summarise()
