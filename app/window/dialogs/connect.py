"""Asking which server to observe, and how."""

from __future__ import annotations

import os
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QPalette
from PySide6.QtWidgets import (
    QCheckBox,
    QComboBox,
    QDialog,
    QDialogButtonBox,
    QFileDialog,
    QLabel,
    QLineEdit,
    QPushButton,
    QWidget,
)

from app.saved.settings import Settings
from app.widgets.build import hbox, made, vbox
from app.widgets.fields import add_row, new_form, text, whole
from engine.errors import OptionError

LOOPBACK = "127.0.0.1"
_ABOUT = (
    "Draftscope sends the prompts of the Run panel to the server and shows what it drafts, accepts "
    "and rolls back, as far as the server tells."
)
_KEY_TIP = (
    "API key that the server was started with; empty for none, or for the one that was kept. It is "
    "kept in the system's keyring where there is one, else for this session only"
)
_MODEL_TIP = (
    "Name of the model, where a router or another engine's server has several; Connect lists them "
    "if it has to be named"
)
_LOG_TIP = (
    "File that the server writes with --log-file (-lv 5 and LLAMA_TRACE=1): it tells rejected "
    "tokens, drafters and checkpoints, which no reply tells"
)
_WATCH_TIP = (
    "Other programs talk to the server through this port of this machine; what they ask is passed "
    "on unchanged and recorded"
)
_LIMIT_TIP = (
    "Time within which a reply has to begin, its first event has to come, and each next one; on a "
    "CPU a long prompt takes minutes"
)


class ConnectDialog(QDialog):
    """Does not block the window. `chosen` gives address, key, log file or None, the port that other
    programs are to use, 0 without, and the name of a model, empty without."""

    chosen = Signal(str, str, object, int, str)  # Path | None

    def __init__(self, settings: Settings, parent: QWidget) -> None:
        super().__init__(parent)
        self._settings = settings
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle("Connect to server")
        self.address = made(QComboBox, editable=True)
        self.address.addItems(settings.recent_servers)
        self.address.setCurrentIndex(0 if settings.recent_servers else -1)
        line = self.address.lineEdit()
        assert line is not None
        line.setPlaceholderText("http://127.0.0.1:8080")
        self.key = text("")
        self.key.setEchoMode(QLineEdit.EchoMode.Password)
        self.model = text("the only one, or the one that is loaded")
        self.log = text("none")
        browse = QPushButton("&Browse…")
        browse.setToolTip("Choose the log file")
        browse.setAutoDefault(False)  # Return is for Connect
        browse.clicked.connect(self._browse)
        self.limit = whole(1, 999_999, settings.server_timeout)
        self.limit.setSuffix(" s")
        self.watch = QCheckBox(f"&Watch other programs at {LOOPBACK}, port")
        self.port = whole(1, 65535, settings.watch_port)
        self.port.setEnabled(False)
        self.watch.toggled.connect(self.port.setEnabled)
        self.problem = made(QLabel, wordWrap=True, textFormat=Qt.TextFormat.PlainText)
        self.problem.setForegroundRole(QPalette.ColorRole.BrightText)
        self.problem.hide()
        self._lay_out(browse)
        line.textChanged.connect(lambda _: self.problem.hide())
        line.setFocus()

    def _lay_out(self, browse: QPushButton) -> None:
        about = made(QLabel, _ABOUT, wordWrap=True)
        log, watch = QWidget(), QWidget()
        for box, widgets in ((log, (self.log, browse)), (watch, (self.watch, self.port))):
            row = hbox(*widgets, of=box, margins=(0, 0, 0, 0))
        row.addStretch(1)
        self.log.setAccessibleName("Log file of the server")
        self.port.setAccessibleName("Port for other programs")
        self.port.setToolTip(_WATCH_TIP)
        self.watch.setToolTip(_WATCH_TIP)
        form = new_form()
        add_row(form, "&Address", self.address, "Where the server listens", "Address")
        add_row(form, "API &key", self.key, _KEY_TIP, "API key")
        add_row(form, "&Model", self.model, _MODEL_TIP, "Model")
        add_row(form, "&Log file", log, _LOG_TIP, "Log file")
        self.log.setToolTip(_LOG_TIP)
        add_row(form, "&Time limit", self.limit, _LIMIT_TIP, "Time limit")
        form.addRow("", watch)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Cancel)
        connect = buttons.addButton("&Connect", QDialogButtonBox.ButtonRole.AcceptRole)
        buttons.accepted.connect(self.accept)
        buttons.rejected.connect(self.reject)
        vbox(about, form, self.problem, buttons, of=self)
        connect.setDefault(True)  # in the dialog by now: before, Return would cancel
        self.setMinimumWidth(66 * self.fontMetrics().averageCharWidth())

    def accept(self) -> None:
        from engine.observe.server.address import server_address

        written = self.log.text().strip()
        log = Path(written) if written else None
        try:
            address = server_address(self.address.currentText())
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

    def _browse(self) -> None:
        name, _ = QFileDialog.getOpenFileName(
            self,
            "Log file of the server",
            str(self._settings.folder("log")),
            "All files (*)",
            options=QFileDialog.Option.DontUseNativeDialog,
        )
        if name:
            self._settings.set_folder("log", Path(name).parent)
            self.log.setText(name)
