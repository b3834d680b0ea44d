"""A sentence after the icon of its severity, below what is being typed."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt
from PySide6.QtWidgets import QHBoxLayout, QLabel, QSizePolicy, QWidget

from app.looks.theme import Theme, icon
from engine.report.text import visible


class StatusMessage(QWidget):
    """An icon and a text, both in the colour of a severity: "info", "warning" or "error"."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._said: tuple[Theme, str, str, float] | None = None
        self._icon, self._label = QLabel(), QLabel()
        self._label.setWordWrap(True)
        self._label.setTextFormat(Qt.TextFormat.PlainText)
        self._label.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(self._icon, 0, Qt.AlignmentFlag.AlignTop)
        row.addWidget(self._label, 1)

    @property
    def text(self) -> str:
        """The sentence on show."""
        return self._label.text()

    def say(self, severity: str, text: str) -> None:
        """Show another sentence."""
        said = self._theme, severity, text, self.devicePixelRatioF()
        if said == self._said:  # an icon takes as long to draw as a line of tokens
            return
        self._said = said
        drawing = icon(severity, self._theme, f"status.{severity}")
        self._icon.setPixmap(drawing.pixmap(QSize(16, 16), self.devicePixelRatioF()))
        self._label.setText(visible(text, keep_lines=True))
        self._label.setAccessibleName(text)
        palette = self.palette()
        role = "ui.muted" if severity == "info" else f"status.{severity}"
        palette.setColor(palette.ColorRole.WindowText, self._theme.color(role))
        self._label.setPalette(palette)

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme, from the next `say` on."""
        self._theme = theme
