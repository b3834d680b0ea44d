"""Messages above the text: what happened and the remedy, dismissible, never modal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QColor, QHideEvent, QPainter, QPaintEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QWidget

from app.engine_thread.feed import timer
from app.looks import Theme, icon
from app.trace_models.compared_lanes import lanes_of
from app.widgets.build import flat_button, hbox, turn, vbox
from app.widgets.fitted_labels import ClampedLabel
from engine.trace.run_ref import RunRef

BannerButton = tuple[str, Callable[[], object]]
"""A button's text and handler."""

MOST_BANNERS = 3
NOTICE_MS = 12_000
"""How long a notice is shown."""
_CHECKS = 12
SEVERITIES = ("info", "warning", "error")
_EDGE = 3
_BESIDE_CHARACTERS = 60
"""Least width of the text next to its buttons."""
_LINE_CHARACTERS = 200
"""Longest line: longer ones are hard to read."""


class Banner(QFrame):
    """A message with buttons. A sticky one stays until it is dismissed; a notice, an info without
    buttons, disappears by itself, though not while the pointer is on it."""

    dismissed = Signal()

    def __init__(
        self,
        theme: Theme,
        severity: str,
        message: str,
        remedy: str,
        offers: Sequence[BannerButton] = (),
        parent: QWidget | None = None,
        *,
        sticky: bool = False,
    ) -> None:
        super().__init__(parent)
        self.severity, self.message, self.remedy = severity, message, remedy
        self.sticky = sticky
        self.is_notice = severity == "info" and not offers and not sticky
        self.shown_at = time.monotonic()
        self.setAccessibleName(f"{severity}: {message} {remedy}".strip())
        self._icon = QLabel()
        self.text = ClampedLabel(f"{message} {remedy}".strip())
        self.text.setMaximumWidth(_LINE_CHARACTERS * self.fontMetrics().averageCharWidth())
        self.details = flat_button("Details", "Show the whole message", checkable=True)
        self.details.toggled.connect(self.text.set_open)
        self.details.setVisible(self.text.is_cut)
        self.text.cut_changed.connect(self.details.setVisible)
        called = "Dismiss this message"
        self._close = flat_button("", "Dismiss", accessibleName=called, clicked=self.dismissed)
        self.offer_buttons = [QPushButton(text) for text, _ in offers]
        self._offers = QHBoxLayout()
        for button, (_, act) in zip(self.offer_buttons, offers, strict=True):
            button.clicked.connect(lambda _=False, run=act: run())
            self._offers.addWidget(button)
        self._body = hbox((self.text, 1), 0, self._offers, spacing=6)
        self._body.setAlignment(self._offers, Qt.AlignmentFlag.AlignRight)
        row = hbox(self._icon, (self._body, 1), of=self, margins=(10, 5, 5, 5), spacing=8)
        for tool in (self.details, self._close):
            tool.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
            row.addWidget(tool, 0, Qt.AlignmentFlag.AlignTop)
        self._theme = theme
        theme.apply(self._recolour)

    def _recolour(self) -> None:
        theme = self._theme
        self._tint = theme.color(f"status.{self.severity}_tint")
        self._line = theme.color(f"status.{self.severity}")
        drawing = icon(self.severity, theme, f"status.{self.severity}")
        self._icon.setPixmap(drawing.pixmap(QSize(16, 16), self.devicePixelRatioF()))
        self._close.setIcon(icon("close", theme))
        self.update()

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Put the buttons below the text if there is little room next to them."""
        super().resizeEvent(event)
        least = _BESIDE_CHARACTERS * self.fontMetrics().averageCharWidth()
        offers = self._offers.sizeHint().width()
        turn(self._body, down=bool(self.offer_buttons) and self.width() - offers < least)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(self.rect(), self._tint)
        painter.fillRect(0, 0, _EDGE, self.height(), QColor(self._line))
        painter.end()


class BannerArea(QWidget):
    """The newest few messages, stacked; takes no room while empty. Notices are removed first,
    sticky messages last."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._column = vbox(of=self, margins=(0, 0, 0, 0), spacing=1)
        self._ages = timer(self, self._age, NOTICE_MS // _CHECKS)
        self.setVisible(False)

    @property
    def banners(self) -> list[Banner]:
        items = (self._column.itemAt(i) for i in range(self._column.count()))
        return [w for item in items if item and isinstance(w := item.widget(), Banner)]

    def add(
        self,
        severity: str,
        message: str,
        remedy: str = "",
        *offers: BannerButton,
        sticky: bool = False,
    ) -> Banner:
        """Show a message. An equal one replaces the earlier; the oldest is removed if there are too
        many."""
        shown = self.banners
        for banner in shown:
            if (banner.message, banner.remedy) == (message, remedy):
                self._remove(banner)
        by_worth = sorted(self.banners, key=lambda one: (one.sticky, not one.is_notice))
        for banner in by_worth[: max(0, len(by_worth) + 1 - MOST_BANNERS)]:
            self._remove(banner)
        banner = Banner(self._theme, severity, message, remedy, offers, self, sticky=sticky)
        banner.dismissed.connect(lambda: self._remove(banner))
        self._column.addWidget(banner)
        self.setVisible(True)
        self._age()
        return banner

    def take_down(self, banner: Banner | None) -> None:
        """Remove a message that is no longer true, if it is still shown."""
        if banner is not None and banner in self.banners:
            self._remove(banner)

    def clear(self) -> None:
        """Dismiss everything that is not sticky."""
        for banner in self.banners:
            if not banner.sticky:
                self._remove(banner)

    def _age(self) -> None:
        """Remove notices after their time."""
        now = time.monotonic()
        for banner in [one for one in self.banners if one.is_notice]:
            if banner.underMouse() or not self.isVisible():
                banner.shown_at = now
            elif now - banner.shown_at >= NOTICE_MS / 1e3:
                self._remove(banner)
        if not self.isVisible() or not any(one.is_notice for one in self.banners):
            self._ages.stop()
        elif not self._ages.isActive():
            self._ages.start()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._age()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._ages.stop()

    def _remove(self, banner: Banner) -> None:
        self._column.removeWidget(banner)
        banner.hide()
        banner.deleteLater()
        self.setVisible(self._column.count() > 0)


class RunBanners:
    """Messages about runs: each is shown while its run, or a lane of the same comparison, is."""

    def __init__(self, area: BannerArea) -> None:
        self._area = area
        self._shown: RunRef | None = None
        self._runs: dict[Banner, RunRef] = {}

    def add(
        self,
        run: RunRef,
        severity: str,
        message: str,
        remedy: str = "",
        *offers: BannerButton,
        sticky: bool = False,
    ) -> Banner:
        """As BannerArea.add, for a run."""
        banner = self._area.add(severity, message, remedy, *offers, sticky=sticky)
        self._runs[banner] = run
        self.show_run(self._shown)
        return banner

    def show_run(self, run: RunRef | None) -> None:
        self._shown = run
        left = self._area.banners
        self._runs = {banner: of for banner, of in self._runs.items() if banner in left}
        for banner, of in self._runs.items():
            banner.setVisible(run is not None and run in (of, *lanes_of(of)))
