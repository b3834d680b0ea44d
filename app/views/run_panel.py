"""The Run panel: the prompt and the options of the next run."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QAbstractSpinBox,
    QCheckBox,
    QComboBox,
    QFormLayout,
    QFrame,
    QPlainTextEdit,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)

from app.events import ModelFiles
from app.widgets.drafter_choice import DrafterChoice
from app.widgets.fields import WheelGuard, choice, real, whole
from engine.options import (
    ACCEPT_RULES,
    COMPUTE_MODES,
    FAULTS,
    KV_MODES,
    MODEL_DRAFTERS,
    REPLAY_MODES,
    ROLLBACK_POLICIES,
    SPLITS,
    RunOptions,
    SamplerOptions,
    SpecOptions,
)
from resources import demo_prompts

NO_FAULT = "none"
_PROMPT_LINES = 4


class RunPanel(QScrollArea):
    """A form over RunOptions. The options are read when a run starts; nothing is live but
    the compute mode, which belongs to loading."""

    options_changed = Signal()
    compute_changed = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._prompts = demo_prompts()
        self._make_fields()
        self._page = QWidget()
        column = QVBoxLayout(self._page)
        column.setContentsMargins(6, 6, 6, 6)
        column.setSpacing(6)
        column.addWidget(self.examples)
        column.addWidget(self.prompt)
        self._form = self._make_form()
        column.addLayout(self._form)
        column.addStretch(1)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setWidgetResizable(True)
        self.setWidget(self._page)
        self._connect()
        self.set_files(None)
        self._show_relevant()

    # -- what the window reads -------------------------------------------------------------

    def texts(self) -> list[str]:
        """The prompts, one per sequence."""
        return [self.prompt.toPlainText()]

    def options(self) -> RunOptions:
        """The options as set."""
        matches = self.accept_rule.currentText() == "match"
        return RunOptions(
            n_predict=self.n_predict.value(),
            sampler=SamplerOptions(
                temp=self.temp.value(),
                top_k=self.top_k.value(),
                top_p=self.top_p.value(),
                min_p=self.min_p.value(),
                seed=self.seed.value(),
                typical_p=self.typical_p.value(),
                repeat_penalty=self.repeat_penalty.value(),
                repeat_last_n=self.repeat_last_n.value(),
                presence_penalty=self.presence_penalty.value(),
                frequency_penalty=self.frequency_penalty.value(),
            ),
            spec=SpecOptions(
                types=self.drafter.types(),
                n_max=self.n_max.value(),
                n_min=min(self.n_min.value(), self.n_max.value()) if matches else 0,
                p_min=self.p_min.value(),
                accept=self.accept_rule.currentText(),
            ),
            rollback=self.rollback.currentText(),
            n_rs_seq=None if self.n_rs_seq.value() < 0 else self.n_rs_seq.value(),
            split=self.split.currentText(),
            kv=self.kv.currentText(),
            replay=self.replay.currentText(),
            faults=() if self.fault.currentText() == NO_FAULT else (self.fault.currentText(),),
            ignore_eos=self.ignore_eos.isChecked(),
        )

    # -- what the window sets --------------------------------------------------------------

    def set_files(self, files: ModelFiles | None) -> None:
        """Offer the drafters that these files have; a choice that is gone becomes the best left."""
        refused = dict(_WHY_NOT)
        if files is not None and any(layer.kind == "mtp" for layer in files.info.layers):
            del refused["draft-mtp"]
        if files is not None and files.draft is not None:
            del refused["draft-simple"]
        self.drafter.set_refused(refused)
        if files is not None:
            left = [name for name in self._wished_drafters if name not in refused]
            if self._wished_drafters and not left:
                left = [name for name in reversed(MODEL_DRAFTERS) if name not in refused][:1]
            self.drafter.set_types(left)

    def use_first_prompt(self) -> None:
        """Put the first bundled prompt in place, unless something is typed already."""
        if not self.prompt.toPlainText():
            self.prompt.setPlainText(self._prompts[0].text)

    def set_compute(self, mode: str) -> None:
        """Show a compute mode without asking for it."""
        blocked = self.compute.blockSignals(True)
        self.compute.setCurrentText(mode)
        self.compute.blockSignals(blocked)

    def set_compute_enabled(self, enabled: bool) -> None:
        """The compute mode cannot change while a model is in use or on its way."""
        self.compute.setEnabled(enabled)

    # -- internals -------------------------------------------------------------------------

    def _make_fields(self) -> None:
        self._wished_drafters: tuple[str, ...] = ("draft-mtp",)
        self.examples = QComboBox()
        self.examples.setPlaceholderText("Example prompts")
        self.examples.addItems([p.title for p in self._prompts])
        self.examples.setCurrentIndex(-1)
        self.examples.setAccessibleName("Example prompts")
        self.prompt = QPlainTextEdit()
        self.prompt.setAccessibleName("Prompt")
        self.prompt.setPlaceholderText("Text to continue")
        self.prompt.setTabChangesFocus(True)
        self.prompt.setAcceptDrops(False)  # a dropped model is for the window
        self.prompt.setFixedHeight(_PROMPT_LINES * self.fontMetrics().lineSpacing() + 12)
        self.n_predict = whole(-1, 100_000, 128, special="no limit")
        self.temp = real(0.0, 5.0, 0.0, special="0 (greedy)")
        self.top_k = whole(0, 100_000, 40, special="off")
        self.top_p = real(0.01, 1.0, 0.95)
        self.min_p = real(0.0, 1.0, 0.05)
        self.typical_p = real(0.01, 1.0, 1.0)
        self.seed = whole(0, 2**31 - 1, 42)
        self.repeat_penalty = real(0.01, 10.0, 1.0)
        self.presence_penalty = real(-10.0, 10.0, 0.0)
        self.frequency_penalty = real(-10.0, 10.0, 0.0)
        self.repeat_last_n = whole(-1, 100_000, 64, special="all")
        self.drafter = DrafterChoice()
        self.drafter.set_types(self._wished_drafters)
        self.n_max = whole(1, 64, 3)
        self.n_min = whole(0, 64, 0)
        self.p_min = real(0.0, 1.0, 0.0)
        self.accept_rule = choice(ACCEPT_RULES, "match")
        self.rollback = choice(ROLLBACK_POLICIES, "planes")
        self.n_rs_seq = whole(-1, 64, -1, special="automatic")
        self.replay = choice(REPLAY_MODES, "trust")
        self.split = choice(SPLITS, "equal")
        self.kv = choice(KV_MODES, "per-seq")
        self.fault = choice((NO_FAULT, *FAULTS), NO_FAULT)
        self.compute = choice(COMPUTE_MODES, "auto")
        self.ignore_eos = QCheckBox("ignore end of text")

    def _make_form(self) -> QFormLayout:
        form = QFormLayout()
        form.setContentsMargins(0, 2, 0, 0)
        form.setHorizontalSpacing(10)
        form.setVerticalSpacing(4)
        form.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.AllNonFixedFieldsGrow)
        for label, field, option in (
            ("tokens", self.n_predict, "-n: tokens to generate"),
            ("drafters", self.drafter, "--spec-type: what proposes tokens; asked in this order"),
            ("n_max", self.n_max, "--spec-draft-n-max: longest draft of draft-*"),
            ("n_min", self.n_min, "--spec-draft-n-min: shorter drafts are thrown away"),
            ("p_min", self.p_min, "--spec-draft-p-min: the draft ends below this confidence"),
            ("accept", self.accept_rule, "--spec-accept: draw the same token, or p/q"),
            ("rollback", self.rollback, "--rollback: how rejected tokens are undone"),
            ("n_rs_seq", self.n_rs_seq, "--n-rs-seq: tokens undone by snapshots; automatic: n_max"),
            ("replay", self.replay, "--replay: after a restore, decode again or also sample again"),
            ("split", self.split, "--split: how a batch becomes ubatches"),
            ("KV", self.kv, "--kv: a stream of attention cells per sequence, or one pool"),
            ("fault", self.fault, "--fault: a bug of the field, on purpose; output may be wrong"),
            ("compute", self.compute, "--compute: arithmetic of the linear layers; reloads"),
            ("temperature", self.temp, "--temp: 0 takes the most probable token"),
            ("top_k", self.top_k, "--top-k: keep this many candidates"),
            ("typical_p", self.typical_p, "--typical: keep tokens near the expected surprise"),
            ("top_p", self.top_p, "--top-p: keep candidates up to this total probability"),
            ("min_p", self.min_p, "--min-p: drop candidates below this share of the best"),
            ("seed", self.seed, "--seed: start of the random numbers"),
            ("repeat", self.repeat_penalty, "--repeat-penalty: divides logits of recent tokens"),
            ("presence", self.presence_penalty, "--presence-penalty: off a recent token's logit"),
            ("frequency", self.frequency_penalty, "--frequency-penalty: the same per occurrence"),
            ("last_n", self.repeat_last_n, "--repeat-last-n: tokens that count as recent"),
            ("", self.ignore_eos, "--ignore-eos: go on after the end token"),
        ):
            field.setToolTip(option)
            field.setAccessibleName(label or "ignore end of text")
            field.setAccessibleDescription(option)
            form.addRow(label, field)
        return form

    def _connect(self) -> None:
        wheel = WheelGuard(self)
        for spin in self._page.findChildren(QAbstractSpinBox):
            spin.installEventFilter(wheel)
        for box in self._page.findChildren(QComboBox):
            box.installEventFilter(wheel)
        for number in (self.n_predict, self.n_max, self.n_min, self.n_rs_seq):
            number.valueChanged.connect(self._changed)
        self.temp.valueChanged.connect(self._changed)
        for penalty in (self.repeat_penalty, self.presence_penalty, self.frequency_penalty):
            penalty.valueChanged.connect(self._changed)
        for box in (
            self.accept_rule, self.rollback, self.replay, self.split, self.kv, self.fault,
        ):  # fmt: skip
            box.currentTextChanged.connect(self._changed)
        self.drafter.changed.connect(self._changed)
        self.drafter.chosen.connect(self._remember_drafters)
        self.compute.currentTextChanged.connect(self.compute_changed)
        self.examples.activated.connect(self._use_example)

    def _changed(self) -> None:
        self._show_relevant()
        self.options_changed.emit()

    def _remember_drafters(self) -> None:
        self._wished_drafters = self.drafter.types()

    def _use_example(self, index: int) -> None:
        self.prompt.setPlainText(self._prompts[index].text)
        self.examples.setCurrentIndex(-1)

    def _show_relevant(self) -> None:
        """Hide the options that the others make meaningless."""
        types = self.drafter.types()
        speculative, with_model = bool(types), bool(set(types) & set(MODEL_DRAFTERS))
        for field in (self.n_max, self.p_min):
            self._form.setRowVisible(field, with_model)
        for box in (self.accept_rule, self.rollback, self.replay, self.fault):
            self._form.setRowVisible(box, speculative)
        matches = self.accept_rule.currentText() == "match"
        self._form.setRowVisible(self.n_min, with_model and matches)
        keeps = speculative and self.rollback.currentText() != "checkpoint"
        self._form.setRowVisible(self.n_rs_seq, keeps)
        for field in (self.top_k, self.typical_p, self.top_p, self.min_p, self.seed):
            self._form.setRowVisible(field, self.temp.value() > 0)
        penalties = (
            self.repeat_penalty.value(), self.presence_penalty.value(),
            self.frequency_penalty.value(),
        )  # fmt: skip
        self._form.setRowVisible(self.repeat_last_n, penalties != (1.0, 0.0, 0.0))


_WHY_NOT = {
    "draft-mtp": "The model file has no MTP head",
    "draft-simple": "Open a draft model first",
}
