"""Form fields with a range and a first value, and a guard for those on a page that scrolls."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, Qt
from PySide6.QtWidgets import QComboBox, QDoubleSpinBox, QSpinBox, QWidget


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


def choice(names: tuple[str, ...], current: str) -> QComboBox:
    """One of several names."""
    box = QComboBox()
    box.addItems(list(names))
    box.setCurrentText(current)
    box.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
    return box
