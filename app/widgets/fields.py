"""Form fields: numbers with a range and a first value, names ticked in a menu, and a guard for
fields on a page that scrolls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from PySide6.QtCore import QEvent, QMimeData, QObject, QSize, Qt, Signal
from PySide6.QtGui import (
    QAction,
    QDragEnterEvent,
    QDragMoveEvent,
    QDropEvent,
    QKeyEvent,
    QMouseEvent,
    QPaintEvent,
    QPalette,
)
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
    """Scrolling a page must not change a field of it that happens to be under the pointer."""

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
    """A whole number; `special` is shown for the lowest."""
    return _number(QSpinBox(), low, high, value, special)


def real(low: float, high: float, value: float, special: str = "") -> QDoubleSpinBox:
    """A number with two decimals; `special` is shown for the lowest."""
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
    """Names, and any other that is typed. The first Return acts, as it completes nothing."""
    field = made(QComboBox, lineEdit=_Line())
    field.addItems(names)
    field.setCompleter(None)  # type: ignore[arg-type]
    return field


def shown_choice(name: str) -> QComboBox:
    """A choice of what is on show, as wide as its longest name also when names come later."""
    box = made(QComboBox, accessibleName=name, toolTip=name, focusPolicy=Qt.FocusPolicy.StrongFocus)
    box.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToContents)
    return box


class _Line(QLineEdit):
    """A line that takes a dragged text. takes_path: and a file's path; others are for the
    window."""

    takes_path = False

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if event.mimeData().hasUrls():
            event.setAccepted(self.takes_path)
        else:
            super().dragEnterEvent(event)

    def dragMoveEvent(self, event: QDragMoveEvent) -> None:
        if not event.mimeData().hasUrls():
            super().dragMoveEvent(event)

    def dropEvent(self, event: QDropEvent) -> None:
        if event.mimeData().hasUrls():
            self.setText(event.mimeData().urls()[0].toLocalFile())
            event.acceptProposedAction()
        else:
            super().dropEvent(event)


class _Box(QPlainTextEdit):
    def canInsertFromMimeData(self, source: QMimeData) -> bool:
        return not source.hasUrls() and super().canInsertFromMimeData(source)


def text(placeholder: str, *, takes_path: bool = False, **more: Any) -> QLineEdit:
    """A line of text. takes_path: a dragged file is put in as its path. more: as for made()."""
    line = made(_Line, placeholderText=placeholder, **more)
    line.takes_path = takes_path
    return line


def text_box(name: str, placeholder: str) -> QPlainTextEdit:
    """Lines of text; Tab leaves it."""
    box = made(_Box, accessibleName=name, placeholderText=placeholder)
    box.setTabChangesFocus(True)
    return box


def file_path(placeholder: str, accepted: str = "") -> QLineEdit:
    """The path of a file, typed or chosen; of a folder without `accepted`, filters of the
    dialog."""
    line = text(placeholder, takes_path=True)
    drawing = line.style().standardIcon(QStyle.StandardPixmap.SP_DialogOpenButton)
    browse = line.addAction(drawing, QLineEdit.ActionPosition.TrailingPosition)
    browse.setToolTip("Browse…")

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
    """The value of a field, or of a row of fields side by side, as text for a summary."""
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
    """The numbers in a row of fields side by side."""
    parts = field.findChildren(QAbstractSpinBox)
    return [part for part in parts if isinstance(part, QSpinBox | QDoubleSpinBox)]


def side_by_side(fields: dict[str, QSpinBox | QDoubleSpinBox]) -> QWidget:
    """Numbers in one row, each with its name before the figure."""
    row = hbox(of=(box := QWidget()), margins=(0, 0, 0, 0), spacing=4)
    for name, field in fields.items():
        field.setPrefix(f"{name} ")
        field.setButtonSymbols(QSpinBox.ButtonSymbols.NoButtons)  # three of them must fit
        field.setMinimumWidth(field.fontMetrics().horizontalAdvance(f"{name} 888"))
        row.addWidget(field, 1)
    return box


def new_form() -> QFormLayout:
    """An empty form in the house's spacing."""
    form = QFormLayout()
    form.setContentsMargins(0, 0, 0, 0)
    form.setHorizontalSpacing(10)
    form.setVerticalSpacing(4)
    form.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.AllNonFixedFieldsGrow)
    return form


def add_row(form: QFormLayout, label: str, field: QWidget, tip: str, name: str = "") -> None:
    """Append a field that says what it is; name: how it is called where the label does not."""
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
    """Shows the chosen names in the order in which they were given, whatever was ticked first.

    names: with what the tip of each says.
    changed: the choice is another one. chosen: the user made it. alarming: any choice is red.
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
        """Disable names and say why; all others can be chosen."""
        for name, action in self.actions_by_name.items():
            action.setEnabled(name not in reasons)
            action.setToolTip(reasons.get(name, self._tips[name]))

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """The arrow that it shows: Qt's buttons would go on to the next field."""
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
        """As the boxes around it."""
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
        """Red while an alarming name is chosen: tool buttons paint no foreground role."""
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
    """Stays open while entries are ticked, so that several can be."""

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
