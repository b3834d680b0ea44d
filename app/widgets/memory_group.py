"""The memory's part of the Run panel: snapshots, checkpoints, splitting."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QCheckBox, QWidget

from app.widgets.fields import choice, whole
from app.widgets.form_group import FormGroup
from engine.options import CHECKPOINT_DEVICES, KV_MODES, REPLAY_MODES, SPLITS


class MemoryGroup(FormGroup):
    """Fields of RunOptions that decide how memory is kept; the rollback policy is elsewhere."""

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("Memory", parent)
        self._speculative, self._keeps = False, False
        self.n_rs_seq = whole(-1, 64, -1, special="automatic")
        self.replay = choice(REPLAY_MODES, "trust")
        self.checkpoint_device = choice(CHECKPOINT_DEVICES, "host")
        self.split = choice(SPLITS, "equal")
        self.kv = choice(KV_MODES, "per-seq")
        self.batch_invariant = QCheckBox("batch-invariant")
        for label, field, option in (
            ("n_rs_seq", self.n_rs_seq, "--n-rs-seq: tokens undone by snapshots; automatic: n_max"),
            ("replay", self.replay, "--replay: after a restore, decode again or also sample again"),
            ("checkpoint", self.checkpoint_device, "--checkpoint-device: where they are kept"),
            ("split", self.split, "--split: how a batch becomes ubatches"),
            ("KV", self.kv, "--kv: a stream of attention cells per sequence, or one pool"),
        ):
            self.add(label, field, option)
        self.add(
            "",
            self.batch_invariant,
            "--batch-invariant: logits have the same bits whatever is decoded beside; slower",
            "batch-invariant",
        )
        self.n_rs_seq.valueChanged.connect(self._on_changed)
        for box in (self.replay, self.checkpoint_device, self.split, self.kv):
            box.currentTextChanged.connect(self._on_changed)
        self.batch_invariant.toggled.connect(self._on_changed)
        self._on_changed()

    def set_use(self, *, speculative: bool, keeps_snapshots: bool) -> None:
        """Show what matters with drafters, and with a policy that keeps snapshots."""
        self._speculative, self._keeps = speculative, keeps_snapshots
        self._on_changed()

    def _on_changed(self) -> None:
        for field in (self.replay, self.checkpoint_device):
            self.set_relevant(field, self._speculative)
        self.set_relevant(self.n_rs_seq, self._keeps)
        self.summarise()
        self.changed.emit()
