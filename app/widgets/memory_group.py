"""The memory's part of the Run panel: snapshots, splitting, limits, faults."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QCheckBox, QWidget

from app.widgets.fields import choice, whole
from app.widgets.form_group import FormGroup
from app.widgets.names_choice import NamesChoice
from engine.options import CHECKPOINT_DEVICES, FAULTS, KV_MODES, REPLAY_MODES, SPLITS

_MOST_TOKENS = 1 << 16


class MemoryGroup(FormGroup):
    """Fields of RunOptions that decide how memory is kept; the rollback policy is elsewhere."""

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("Memory and faults", parent)
        self._speculative, self._keeps = False, False
        self.fault = NamesChoice(FAULTS, alarming=True)
        self.n_rs_seq = whole(-1, 64, -1, special="automatic")
        self.replay = choice(REPLAY_MODES, "trust")
        self.checkpoint_device = choice(CHECKPOINT_DEVICES, "host")
        self.split = choice(SPLITS, "equal")
        self.kv = choice(KV_MODES, "per-seq")
        self.batch_invariant = QCheckBox("batch-invariant")
        self.parallel = whole(0, 64, 0, special="all sequences")
        self.n_ctx = whole(0, 2**20, 0, special="automatic")
        self.n_batch = whole(1, _MOST_TOKENS, 2048)
        self.n_ubatch = whole(1, _MOST_TOKENS, 512)
        for label, field, option in (
            ("fault", self.fault, "--fault: bugs of the field, on purpose; output may be wrong"),
            ("n_rs_seq", self.n_rs_seq, "--n-rs-seq: tokens undone by snapshots; automatic: n_max"),
            ("replay", self.replay, "--replay: after a restore, decode again or also sample again"),
            ("checkpoint", self.checkpoint_device, "--checkpoint-device: where they are kept"),
            ("split", self.split, "--split: how a batch becomes ubatches"),
            ("KV", self.kv, "--kv: a stream of attention cells per sequence, or one pool"),
            ("parallel", self.parallel, "--parallel: sequences side by side; others wait"),
            ("n_ctx", self.n_ctx, "-c: cells per sequence; automatic: as trained, at most 4096"),
            ("n_batch", self.n_batch, "-b: most prompt and verified tokens in one round"),
            ("n_ubatch", self.n_ubatch, "-ub: most tokens in one forward pass"),
        ):
            self.add(label, field, option)
        self.add(
            "",
            self.batch_invariant,
            "--batch-invariant: logits have the same bits whatever is decoded beside; slower",
            "batch-invariant",
        )
        for spin in (self.n_rs_seq, self.parallel, self.n_ctx, self.n_batch, self.n_ubatch):
            spin.valueChanged.connect(self._on_changed)
        for box in (self.replay, self.checkpoint_device, self.split, self.kv):
            box.currentTextChanged.connect(self._on_changed)
        self.fault.changed.connect(self._on_changed)
        self.batch_invariant.toggled.connect(self._on_changed)
        self._on_changed()

    def set_use(self, *, speculative: bool, keeps_snapshots: bool) -> None:
        """Show what matters with drafters, and with a policy that keeps snapshots."""
        self._speculative, self._keeps = speculative, keeps_snapshots
        self._on_changed()

    def faults(self) -> tuple[str, ...]:
        """The faults that are on; none of them does anything without a draft."""
        return self.fault.names() if self._speculative else ()

    def _on_changed(self) -> None:
        for field in (self.fault, self.replay, self.checkpoint_device):
            self.set_relevant(field, self._speculative)
        self.set_relevant(self.n_rs_seq, self._keeps)
        faults = self.faults()
        words = [f"fault {name}" for name in faults]
        if not faults:
            words = [f"split {self.split.currentText()}", f"KV {self.kv.currentText()}"]
            if self.batch_invariant.isChecked():
                words.append("batch-invariant")
        self.set_summary(", ".join(words), alarming=bool(faults))
        self.changed.emit()
