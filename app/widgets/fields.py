"""Form fields: numbers with a range, names chosen in a menu, and a guard for fields on a scrolling
page."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from PySide6.QtCore import QEvent, QMimeData, QObject, QSize, Qt, Signal
from PySide6.QtGui import QAction, QDropEvent, QKeyEvent, QMouseEvent, QPaintEvent, QPalette
from PySide6.QtWidgets import (
    QAbstractButton,
    QAbstractSpinBox,
    QApplication,
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QFileDialog,
    QFormLayout,
    QLineEdit,
    QMenu,
    QPlainTextEdit,
    QSizePolicy,
    QSpinBox,
    QStyle,
    QStyleOptionComboBox,
    QStylePainter,
    QToolButton,
    QWidget,
)

from app.widgets.build import hbox, made

_Number = TypeVar("_Number", QSpinBox, QDoubleSpinBox)


class WheelGuard(QObject):
    """Prevents the wheel from changing a field under the pointer while a page scrolls."""

    def __init__(self, page: QWidget) -> None:
        super().__init__(page)
        for field in (*page.findChildren(QAbstractSpinBox), *page.findChildren(QComboBox)):
            field.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if (
            event.type() == QEvent.Type.Wheel
            and isinstance(watched, QWidget)
            and not watched.hasFocus()
        ):
            event.ignore()
            return True
        return super().eventFilter(watched, event)


def whole(low: int, high: int, value: int, special: str = "") -> QSpinBox:
    """An integer field; `special` is shown for the minimum."""
    return _number(QSpinBox(), low, high, value, special)


def real(low: float, high: float, value: float, special: str = "") -> QDoubleSpinBox:
    """A number field with two decimals; `special` is shown for the minimum."""
    return _number(made(QDoubleSpinBox, singleStep=0.05, decimals=2), low, high, value, special)


def _number(box: _Number, low: Any, high: Any, value: Any, special: str) -> _Number:
    box.setRange(low, high)
    box.setValue(value)
    box.setSpecialValueText(special)
    box.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
    return box


def choice(names: Mapping[str, str], current: str) -> QComboBox:
    box = QComboBox()
    for i, (name, tip) in enumerate(names.items()):
        box.addItem(name)
        box.setItemData(i, tip, Qt.ItemDataRole.ToolTipRole)
    box.setCurrentText(current)
    box.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
    return box


def typed_choice(names: Sequence[str]) -> QComboBox:
    """An editable choice of names. The first Return acts, because nothing is completed."""
    field = made(QComboBox, lineEdit=_Line())
    field.addItems(names)
    field.setCompleter(None)  # type: ignore[arg-type]
    return field


def shown_choice(name: str) -> QComboBox:
    """A choice of what to show, as wide as its longest name, also for names added later."""
    box = made(QComboBox, accessibleName=name, toolTip=name, focusPolicy=Qt.FocusPolicy.StrongFocus)
    box.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToContents)
    return box


def offer(box: QComboBox, items: Iterable[tuple[str, object]], chosen: object) -> None:
    """Replace the items, each a text and its value, and select the one with this value."""
    box.clear()
    for item in items:
        box.addItem(*item)
    box.setCurrentIndex(box.findData(chosen))


class _Line(QLineEdit):
    """A line for dragged text. takes_path: also the path of a file; others go to the window."""

    takes_path = False

    def event(self, event: QEvent) -> bool:
        if not (isinstance(event, QDropEvent) and event.mimeData().hasUrls()):
            return super().event(event)
        event.setAccepted(self.takes_path)
        if event.type() == QEvent.Type.Drop:
            self.setText(event.mimeData().urls()[0].toLocalFile())
        return True


class _Box(QPlainTextEdit):
    def canInsertFromMimeData(self, source: QMimeData) -> bool:
        return not source.hasUrls() and super().canInsertFromMimeData(source)


def text(placeholder: str, *, takes_path: bool = False, **more: Any) -> QLineEdit:
    """A line of text, with `more` as made() takes it; dropped models go to the window."""
    line = made(_Line, placeholderText=placeholder, **more)
    line.takes_path = takes_path
    return line


def text_box(name: str, placeholder: str) -> QPlainTextEdit:
    """A multi-line text; Tab leaves it, and dropped models go to the window."""
    box = made(_Box, accessibleName=name, placeholderText=placeholder)
    box.setTabChangesFocus(True)
    return box


def retype(box: QPlainTextEdit, text: str) -> None:
    """Replace the text as a user does: Ctrl+Z brings back what was there."""
    box.selectAll()
    box.insertPlainText(text)


def file_path(placeholder: str, accepted: str = "") -> QLineEdit:
    """A file path, typed, dropped or chosen; a folder without `accepted`, the dialog's filters."""
    line = text(placeholder, takes_path=True)
    drawing = line.style().standardIcon(QStyle.StandardPixmap.SP_DialogOpenButton)
    browse = line.addAction(drawing, QLineEdit.ActionPosition.TrailingPosition)
    browse.setShortcut("Alt+Down")
    browse.setShortcutContext(Qt.ShortcutContext.WidgetShortcut)
    browse.setToolTip("Browse… (Alt+Down)")

    def ask() -> None:
        if accepted:
            name, _ = QFileDialog.getOpenFileName(line, "Choose a file", line.text(), accepted)
        else:
            name = QFileDialog.getExistingDirectory(line, "Choose a folder", line.text())
        if name:
            line.setText(name)

    browse.triggered.connect(ask)
    return line


def reading(field: QWidget) -> str:
    """The value of a field, or of a row of fields, as text for a summary."""
    match field:
        case QSpinBox() | QDoubleSpinBox():
            special = field.specialValueText()
            return special if special and field.value() == field.minimum() else f"{field.value():g}"
        case QComboBox():
            return field.currentText()
        case QLineEdit():
            return field.text().strip()
        case QCheckBox():
            return field.text() if field.isChecked() else ""
        case QAbstractButton():
            return field.text()
    return " ".join(f"{part.prefix()}{part.cleanText()}" for part in _numbers(field))


def _numbers(field: QWidget) -> list[QSpinBox | QDoubleSpinBox]:
    """The number fields in a row."""
    parts = field.findChildren(QAbstractSpinBox)
    return [part for part in parts if isinstance(part, QSpinBox | QDoubleSpinBox)]


def side_by_side(fields: dict[str, QSpinBox | QDoubleSpinBox]) -> QWidget:
    """Number fields in one row, each prefixed with its name."""
    row = hbox(of=(box := QWidget()), margins=(0, 0, 0, 0), spacing=4)
    for name, field in fields.items():
        field.setPrefix(f"{name} ")
        field.setButtonSymbols(QSpinBox.ButtonSymbols.NoButtons)  # three of them must fit
        field.setMinimumWidth(field.fontMetrics().horizontalAdvance(f"{name} 888"))
        row.addWidget(field, 1)
    return box


def new_form() -> QFormLayout:
    """An empty form with the standard spacing."""
    form = QFormLayout()
    form.setContentsMargins(0, 0, 0, 0)
    form.setHorizontalSpacing(10)
    form.setVerticalSpacing(4)
    form.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.AllNonFixedFieldsGrow)
    return form


def add_row(form: QFormLayout, label: str, field: QWidget, tip: str, name: str = "") -> None:
    """Append a labelled field; name: its accessible name if the label does not suffice."""
    name = name or label.replace("&", "")
    numbers = _numbers(field)
    for widget, prefix in ((field, ""), *((part, part.prefix().strip()) for part in numbers)):
        widget.setToolTip(tip)
        widget.setAccessibleName(" ".join(filter(None, (name, prefix))))
        widget.setAccessibleDescription(tip)
    form.addRow(label, field)
    if said := form.labelForField(field):
        said.setToolTip(tip)


NONE = "none"


class NamesChoice(QToolButton):
    """A multiple choice of names, shown in their given order.

    names: with the text of each tooltip. changed: the choice has changed. chosen: by the user.
    alarming: any choice is red.
    """

    changed = Signal()
    chosen = Signal()

    def __init__(self, names: Mapping[str, str], *, alarming: bool = False) -> None:
        super().__init__()
        self._alarming = alarming
        self._names: tuple[str, ...] = ()
        menu = _StayingMenu(self)
        menu.setToolTipsVisible(True)
        self._none = menu.addAction(NONE)
        self._none.triggered.connect(lambda: self._choose(()))
        menu.addSeparator()
        self.actions_by_name: dict[str, QAction] = {}
        self._tips = names
        for name, tip in names.items():
            action = menu.addAction(name)
            action.setToolTip(tip)
            action.setCheckable(True)
            action.triggered.connect(self._choose_ticked)
            self.actions_by_name[name] = action
        self.setMenu(menu)
        self.setText(NONE)
        self.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        self.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextOnly)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)

    def names(self) -> tuple[str, ...]:
        return self._names

    def set_names(self, names: Collection[str]) -> None:
        chosen = tuple(name for name in self.actions_by_name if name in names)
        for name, action in self.actions_by_name.items():
            action.setChecked(name in chosen)
        if chosen != self._names:
            self._names = chosen
            self.setText(", ".join(chosen) or NONE)
            self._colour()
            self.changed.emit()

    def set_refused(self, reasons: Mapping[str, str]) -> None:
        """Disable names with a reason; all others are enabled."""
        for name, action in self.actions_by_name.items():
            action.setEnabled(name not in reasons)
            action.setToolTip(reasons.get(name, self._tips[name]))

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """The down arrow opens the menu; Qt's buttons would move to the next field."""
        if event.key() == Qt.Key.Key_Down:
            self.showMenu()
        else:
            super().keyPressEvent(event)

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() is QEvent.Type.PaletteChange:
            self._colour()

    def sizeHint(self) -> QSize:
        text = self.fontMetrics().size(0, self.text()) + QSize(0, 2)
        kind = QStyle.ContentsType.CT_ComboBox
        return self.style().sizeFromContents(kind, self._as_box(), text, self)

    def paintEvent(self, _event: QPaintEvent) -> None:
        """Painted like the neighbouring combo boxes."""
        painter = QStylePainter(self)
        painter.drawComplexControl(QStyle.ComplexControl.CC_ComboBox, self._as_box())
        painter.drawControl(QStyle.ControlElement.CE_ComboBoxLabel, self._as_box())
        painter.end()

    def _as_box(self) -> QStyleOptionComboBox:
        option = QStyleOptionComboBox()
        option.initFrom(self)
        option.currentText = self.text()
        return option

    def _colour(self) -> None:
        """Red while an alarming name is chosen: tool buttons ignore foreground roles."""
        if not self._alarming:
            return
        role = QPalette.ColorRole
        palette = QApplication.palette()
        wanted = palette.color(role.BrightText if self._names else role.ButtonText)
        if self.palette().color(role.ButtonText) != wanted:
            own = QPalette()  # all other roles stay the application's
            own.setColor(role.ButtonText, wanted)
            self.setPalette(own)

    def _choose(self, names: Collection[str]) -> None:
        self.set_names(names)
        self.chosen.emit()

    def _choose_ticked(self) -> None:
        self._choose([n for n, action in self.actions_by_name.items() if action.isChecked()])


class _StayingMenu(QMenu):
    """A menu that stays open while entries are ticked."""

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        if not self._toggle():
            super().mouseReleaseEvent(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() != Qt.Key.Key_Space or not self._toggle():
            super().keyPressEvent(event)

    def _toggle(self) -> bool:
        action = self.activeAction()
        if action is None or not action.isCheckable() or not action.isEnabled():
            return False
        action.trigger()
        return True
