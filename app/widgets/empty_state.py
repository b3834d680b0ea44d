"""Messages in panels: the purpose of an empty panel, with actions that fill it, and a sentence with
a severity icon."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QGridLayout, QLabel, QPushButton, QSizePolicy, QWidget

from app.looks import Theme, icon
from app.widgets.build import Fitting, hbox, made, vbox, words
from app.widgets.fitted_labels import ClampedLabel
from engine.report.text import visible

_MARGIN = _GAP = 8


class EmptyState(Fitting, QWidget):
    """A title, one sentence, and a button for each action. If space is short, the buttons disappear
    first, then the title; the tooltip then has the full sentence.

    waits_for_run: it disappears when a run is on show; the window then knows what to offer.
    """

    def __init__(
        self,
        title: str,
        text: str,
        actions: Sequence[QAction] = (),
        parent: QWidget | None = None,
        *,
        waits_for_run: bool = False,
    ) -> None:
        super().__init__(parent)
        self.waits_for_run = waits_for_run
        self._is_brief = self._says_other = False
        self._actions = QWidget()
        self._buttons = QGridLayout(self._actions)
        self._buttons.setContentsMargins(0, 0, 0, 0)
        self._offered: list[QPushButton] = []
        self._first = title, text
        middle = Qt.AlignmentFlag.AlignHCenter
        self._heading = words(title, bold=True, alignment=middle)
        self._body = made(ClampedLabel, text, muted=True, alignment=middle)
        buttons = self._actions, 0, middle
        parts = 2, self._heading, self._body, buttons, 3
        vbox(*parts, of=self, margins=(_MARGIN,) * 4, spacing=_GAP)
        self.offer(actions)

    def say(self, title: str = "", text: str = "") -> None:
        """Replace title and sentence and hide the buttons; without arguments restore the first
        ones."""
        words = title or self._first[0], text or self._first[1]
        if words == self.words and self._says_other == bool(title):
            return
        self._heading.setText(words[0])
        self._body.say(words[1])
        self._says_other = bool(title)
        self.fit()

    def say_what(self) -> None:
        """Show the panel's purpose without instructions that have been followed already."""
        self.say(text=self._first[1].partition(" Press ")[0])

    def change(self, title: str, text: str) -> None:
        """Replace the initial title and sentence, above the buttons."""
        is_first, self._first = self.words == self._first, (title, text)
        if is_first:
            self.say()

    def set_brief(self, brief: bool) -> None:
        """Show the sentence alone, if the rest of the window makes the action obvious."""
        self._is_brief = brief
        self.fit()

    @property
    def words(self) -> tuple[str, str]:
        """The current title and sentence."""
        return self._heading.text(), self._body.whole

    def offer(self, actions: Sequence[QAction]) -> None:
        """Add a button for each action, enabled with the action."""
        self._offered += [self._button(action) for action in actions]
        self._n_columns = 0
        self.fit()

    def _button(self, action: QAction) -> QPushButton:
        button = QPushButton(action.text().replace("&", ""))  # a shortcut used twice is disabled
        button.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        button.clicked.connect(lambda: self._trigger(action, button))
        action.changed.connect(partial(_follow, button, action))
        _follow(button, action)
        return button

    def _trigger(self, action: QAction, button: QPushButton) -> None:
        """Keep the focus in the panel when the button disappears; Qt would move it elsewhere."""
        panel = self.parentWidget()
        if button.hasFocus() and panel is not None:
            panel.setFocus()
        action.trigger()
        if panel is not None and panel.hasFocus() and button.isVisible() and button.isEnabled():
            button.setFocus()

    def minimumSizeHint(self) -> QSize:
        return QSize(0, 2 * self.fontMetrics().height())

    def _place(self, n_columns: int) -> None:
        """Arrange the buttons in this many columns."""
        if n_columns == self._n_columns:
            return
        self._n_columns = n_columns
        for index, button in enumerate(self._offered):
            row, column = divmod(index, n_columns)
            self._buttons.addWidget(button, row, column, Qt.AlignmentFlag.AlignCenter)

    def _columns(self) -> int:
        """Columns of buttons that fit the width."""
        widths = [button.sizeHint().width() for button in self._offered]
        gap, room = self._buttons.horizontalSpacing(), self.contentsRect().width() - 2 * _MARGIN
        for n in range(len(widths), 1, -1):
            wide = sum(max(widths[column::n]) for column in range(n)) + gap * (n - 1)
            if wide <= room:
                return n
        return 1

    def fit(self) -> None:
        self._place(self._columns())
        area, plain = self.contentsRect(), not self._is_brief or self._says_other
        width, line = area.width() - 2 * _MARGIN, self._body.fontMetrics().lineSpacing()
        room = area.height() - 2 * _MARGIN
        heading = self._heading.heightForWidth(width) + _GAP
        needed = line * self._body.n_lines(width) + heading
        self._heading.setVisible(plain and needed <= room)
        needed += self._buttons.sizeHint().height() + _GAP
        self._actions.setVisible(plain and not self._says_other and needed <= room)
        self._body.clamp(max(1, room // line))


def _follow(button: QPushButton, action: QAction) -> None:
    """While disabled, its tooltip says what it needs."""
    button.setEnabled(action.isEnabled())
    button.setToolTip(action.toolTip())


class StatusMessage(QWidget):
    """An icon and a text, both in the colour of a severity: "info", "warning" or "error"."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._said: tuple[str, str, str, float] | None = None
        self._icon, self._label = QLabel(), words(shrinks=True)
        parts = (self._icon, 0, Qt.AlignmentFlag.AlignTop), (self._label, 1)
        hbox(*parts, of=self, margins=(0, 0, 0, 0))

    @property
    def text(self) -> str:
        return self._label.text()

    def say(self, severity: str, text: str) -> None:
        """Show another sentence."""
        said = self._theme.name, severity, text, self.devicePixelRatioF()
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
