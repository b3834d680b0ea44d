"""Form fields with a range and a first value, and a guard for those on a page that scrolls."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QEvent, QObject, Qt
from PySide6.QtWidgets import (
    QAbstractButton,
    QAbstractSpinBox,
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QFormLayout,
    QHBoxLayout,
    QLineEdit,
    QSpinBox,
    QWidget,
)


class WheelGuard(QObject):
    """Scrolling the panel must not change a field that happens to be under the pointer."""

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
    box = QSpinBox()
    box.setRange(low, high)
    box.setValue(value)
    box.setSpecialValueText(special)
    box.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
    return box


def real(low: float, high: float, value: float, special: str = "") -> QDoubleSpinBox:
    """A number with two decimals; `special` is shown for the lowest."""
    box = QDoubleSpinBox()
    box.setRange(low, high)
    box.setSingleStep(0.05)
    box.setDecimals(2)
    box.setValue(value)
    box.setSpecialValueText(special)
    box.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
    return box


def choice(names: Mapping[str, str], current: str) -> QComboBox:
    """One of several names, each with what its tip says."""
    box = QComboBox()
    for i, (name, tip) in enumerate(names.items()):
        box.addItem(name)
        box.setItemData(i, tip, Qt.ItemDataRole.ToolTipRole)
    box.setCurrentText(current)
    box.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
    return box


def text(placeholder: str) -> QLineEdit:
    """A line of text; a dropped model is for the window."""
    line = QLineEdit()
    line.setPlaceholderText(placeholder)
    line.setAcceptDrops(False)
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
    row = QHBoxLayout(box := QWidget())
    row.setContentsMargins(0, 0, 0, 0)
    row.setSpacing(4)
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
    numbers = _numbers(field)
    for widget, prefix in ((field, ""), *((part, part.prefix().strip()) for part in numbers)):
        widget.setToolTip(tip)
        widget.setAccessibleName(" ".join(word for word in (name or label, prefix) if word))
        widget.setAccessibleDescription(tip)
    form.addRow(label, field)
