"""The limits' part of the Run panel: how much at once, and how much there is room for."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

from app.widgets.fields import whole
from app.widgets.form_group import FormGroup

_MOST_TOKENS = 1 << 16


class LimitsGroup(FormGroup):
    """Fields of RunOptions that bound sequences, cells and batches."""

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("Limits", parent)
        self.parallel = whole(0, 64, 0, special="all sequences")
        self.n_ctx = whole(0, 2**20, 0, special="automatic")
        self.n_batch = whole(1, _MOST_TOKENS, 2048)
        self.n_ubatch = whole(1, _MOST_TOKENS, 512)
        for label, field, option in (
            ("parallel", self.parallel, "--parallel: sequences side by side; others wait"),
            ("n_ctx", self.n_ctx, "-c: cells per sequence; automatic: as trained, at most 4096"),
            ("n_batch", self.n_batch, "-b: most prompt and verified tokens in one round"),
            ("n_ubatch", self.n_ubatch, "-ub: most tokens in one forward pass"),
        ):
            self.add(label, field, option)
            field.valueChanged.connect(self._on_changed)

    def _on_changed(self) -> None:
        self.summarise()
        self.changed.emit()
