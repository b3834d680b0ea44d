"""The header of a comparison: its lanes, the chosen lane's cost and verdict, the table of costs,
the choice of a sequence, and the editor of the next lanes (one per line, checked while typing)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QTextCursor
from PySide6.QtWidgets import QHeaderView, QMenu, QProgressBar, QPushButton, QToolButton, QWidget

from app.actions import Actions
from app.looks import Theme, fixed_font
from app.panels.divergence.lane_cards import LaneCards
from app.trace_models.compared_lanes import ComparedLanes
from app.trace_models.shown_text import plain_tip
from app.widgets.build import action_button, hbox, made, vbox, words
from app.widgets.empty_state import StatusMessage
from app.widgets.fields import offer, retype, shown_choice, text_box
from app.widgets.plain_table import ColumnTable, TableColumn, fit_height, plain_table
from engine.analysis.run_cost import COST_HEADS, RunCost, cost_cells, cost_sentence
from engine.compare.lane_spec import DEFAULT_LANES, LLAMA, NOISE_LANE, LaneSpec
from engine.compare.llama_library import missing
from engine.errors import OptionError
from engine.options import LANE_FAULTS, ROLLBACK_POLICIES, RunOptions
from engine.options.faults import notes_on
from engine.trace.records import NOISE, PEER, PHASES, REFERENCE

_BAR_CHARACTERS = 16


class ComparisonHeader(QWidget):
    """Cards, a sentence on a lane's cost, one on its verdict with the progress, the costs of all
    lanes as a table, and the editor, which can be folded."""

    lane_chosen = Signal(int)  # run_id

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._costs_shown: dict[int, RunCost] | None = None
        self._low = False
        self.cards = LaneCards(theme)
        self.cards.lane_chosen.connect(self.lane_chosen)
        self.editor = LaneEditor(theme)
        self.cost, self.sentence = (
            words(shrinks=True, selectable=True, bold=bold) for bold in (True, False)
        )
        self.cost_model = CostTable()
        self.costs = plain_table(self.cost_model, "Cost of the lanes", selects=False)
        self.costs.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        self.costs.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.costs.horizontalScrollBar().rangeChanged.connect(lambda *_: self._fit_costs())
        self.progress = made(QProgressBar, textVisible=False)
        self.progress.setAccessibleName("Progress of the comparison")
        self.progress.setFixedWidth(_BAR_CHARACTERS * self.fontMetrics().averageCharWidth())
        self.progress.setMaximumHeight(self.fontMetrics().height())
        self.edit_button = made(QToolButton, text="&Lanes")
        self.edit_button.setToolTip("Choose the lanes of the next comparison")
        self.edit_button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.edit_button.setCheckable(True)
        self.edit_button.toggled.connect(self.editor.setVisible)
        self.edit_button.toggled.connect(lambda _: self._fit())
        self._lay_out()
        self.set_editing(True)
        for part in (self.cost, self.sentence, self.progress, self.costs):
            part.hide()  # there is no comparison yet

    def chosen_lanes(self) -> tuple[LaneSpec, ...] | None:
        """The lanes of the next comparison; None if one is invalid, and then the text is shown."""
        lanes = self.editor.lanes()
        self.set_editing(lanes is None)
        if lanes is None:
            self.editor.text.setFocus()
        return lanes

    def set_editing(self, editing: bool) -> None:
        """Unfold the editor or fold it away."""
        self.edit_button.setChecked(editing)

    def set_low(self, low: bool) -> None:
        """Switch to the layout for little height, where costs are on the cards, or back."""
        self._low = low
        self._fit()

    def _fit(self) -> None:
        """The editor takes the place of the table of costs, and part of the cards'."""
        low = self._low or self.edit_button.isChecked()
        self.cards.set_low(low)
        self.costs.setVisible(not low and bool(self.cost_model.n_rows()))

    def set_lanes(self, lanes: ComparedLanes | None) -> None:
        """Show the lanes of another comparison, or none; without one the editor is open."""
        self.cards.set_lanes(lanes)
        self._costs_shown = None
        self.cost_model.show_costs([])
        self.set_editing(lanes is None)

    def tell(self, lanes: ComparedLanes | None, run_id: int) -> None:
        """Bring verdicts, sentence and progress up to date; the sentence is about one lane."""
        self.sentence.setVisible(lanes is not None)
        self.progress.setVisible(lanes is not None and not lanes.is_over)
        if lanes is None:
            self.cost.hide()
            return
        self.cards.set_verdicts(lanes.verdicts)
        self._show_costs(lanes, run_id)
        text = lanes.sentence(run_id)
        is_wrong = lanes.verdicts[run_id].first_pos is not None
        for part, is_bold in ((self.cost, not is_wrong), (self.sentence, is_wrong)):
            (font := part.font()).setBold(is_bold)
            part.setFont(font)
        self.sentence.setText(text)
        self.sentence.setToolTip(plain_tip(text))
        done, total = len(lanes.positions()), max(lanes.n_predict, 0)
        self.progress.setRange(0, total)
        self.progress.setValue(min(done, total))
        of = f" of {total:,}" if total else ""
        self.progress.setToolTip(f"{done:,}{of} tokens in {len(lanes.run_ids)} lanes")

    def _show_costs(self, lanes: ComparedLanes, run_id: int) -> None:
        costs = lanes.costs
        if costs is not self._costs_shown:
            self._costs_shown = costs
            self.cards.set_costs(costs)
            self.cost_model.show_costs([cost for cost in costs.values() if cost.round_ms])
            self._fit_costs()
        self._fit()
        every = list(costs.values())  # an untimed lane has no sentence
        sentences = (cost_sentence(every, one) for one in (run_id, *costs))
        text = next(filter(None, sentences), "")
        self.cost.setText(text)
        self.cost.setVisible(bool(text))

    def _fit_costs(self) -> None:
        """Show all rows, above the horizontal scroll bar."""
        fit_height(self.costs)
        bar = self.costs.horizontalScrollBar()
        if bar.maximum():
            self.costs.setFixedHeight(self.costs.minimumHeight() + bar.sizeHint().height())

    def _lay_out(self) -> None:
        right = Qt.AlignmentFlag.AlignRight
        line = hbox((self.sentence, 1), self.progress, (self.edit_button, 0, right), spacing=4)
        line.setContentsMargins(0, 0, 0, 0)
        parts = self.cards, self.cost, line, self.costs, self.editor
        vbox(*parts, of=self, margins=(6, 2, 6, 0), spacing=4)


_COST_TIPS = {
    "lane": "As given in the list of lanes",
    "ms/round": "Mean time of a round after the prompt, all phases together",
    "draft": "Drafting, shared by the lanes: mean time per round",
    "passes": "Forward passes of the target after the prompt",
    "restores": "Rounds rolled back by restoring a checkpoint",
    "seq_rm": "Rounds rolled back by partial removal (seq_rm)",
    "refused": "Rounds whose rollback was refused",
    "replayed": "Tokens decoded again after a restore",
    "moved": "State copied, restored and saved in checkpoints",
    "held": "Largest size of KV cells and recurrent states",
}


class CostTable(ColumnTable):
    """Rows are lanes."""

    columns = tuple(
        TableColumn(
            head,
            f"{head}, ms" if head in PHASES else head,
            _COST_TIPS.get(head, f"{head}: mean time per round"),
            head == "lane",
        )
        for head in COST_HEADS
    )

    def show_costs(self, costs: Sequence[RunCost]) -> None:
        """A row for each."""
        self.show_rows([dict(zip(COST_HEADS, cost_cells(cost), strict=True)) for cost in costs])

    def cell(self, row: int, name: str, role: int) -> Any:
        return self.rows[row][name] if role == Qt.ItemDataRole.DisplayRole else None


_ICON = 16
_SEQUENCE = "Sequence that is compared"
_STEPS = ("go.first_divergence", "go.previous_divergence", "go.next_divergence")


class PositionBar(QWidget):
    """The choice of the sequence, hidden if there is only one, and buttons for steps."""

    seq_chosen = Signal(int)

    def __init__(self, actions: Actions) -> None:
        super().__init__()
        self.seq = shown_choice(_SEQUENCE)
        self.seq.activated.connect(lambda i: self.seq_chosen.emit(int(self.seq.itemData(i))))
        row = hbox(self.seq, of=self, margins=(0, 0, 0, 0), spacing=4)
        for name in _STEPS:
            size = QSize(_ICON, _ICON)
            row.addWidget(action_button(actions[name], iconSize=size))

    def show_sequences(self, lanes: ComparedLanes | None) -> None:
        """Offer the sequences of a comparison, with the one on show chosen."""
        seq_ids = [] if lanes is None else list(lanes.seq_ids)
        self.seq.setVisible(len(seq_ids) > 1)
        if self.seq.count() != len(seq_ids):
            offer(self.seq, ((f"sequence {seq_id}", seq_id) for seq_id in seq_ids), None)
        if lanes is not None:
            self.seq.setCurrentIndex(self.seq.findData(lanes.seq_id))


_SHOWN_LINES = 3
_LLAMA_LANES = (
    LLAMA,
    f"{LLAMA},rollback=planes",
    f"{LLAMA},rollback=checkpoint",
    f"{LLAMA},rollback=checkpoint,device",
)
_HINT = (
    "One lane per line: POLICY[,key=value…], such as planes,n_rs_seq=2,split=seq. The reference "
    "and noise lanes are always included."
)


def parse_lanes(text: str) -> tuple[LaneSpec, ...]:
    """The noise lane and one lane per line; empty lines are skipped. Raises OptionError."""
    lanes = [NOISE_LANE]
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        if line.strip() in (REFERENCE, NOISE):
            raise OptionError(
                f"Line {number}: the {line.strip()} lane is always included.", "Remove the line."
            )
        try:
            lane = LaneSpec.parse(line.strip())
        except OptionError as error:
            raise OptionError(f"Line {number}: {error.message}", error.remedy) from error
        if any(lane.name == other.name for other in lanes):
            raise OptionError(f"Line {number}: {lane.name!r} is given twice.", "Give it once.")
        lanes.append(lane)
    if len(lanes) == 1:
        raise OptionError("No lane is given.", "Write at least one, such as planes.")
    return tuple(lanes)


class LaneEditor(QWidget):
    """A text field for lanes, one per line, and a message about errors and ineffective faults."""

    lanes_changed = Signal()

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._options = RunOptions()
        self.error = self.note = ""
        self.text = text_box("Lanes of the next comparison", "planes")
        self.text.setFont(fixed_font())
        lines = _SHOWN_LINES * self.text.fontMetrics().lineSpacing()
        self.text.setFixedHeight(lines + 12)
        self.add_button = made(QPushButton, "&Add", accessibleName="Add a lane")
        self.add_button.setMenu(self._make_menu())
        tip = "Checkpoint restore, partial seq_rm over planes, and copies of sequences"
        defaults = made(QPushButton, "De&faults", toolTip=tip, clicked=self.set_defaults)
        self._message = StatusMessage(theme)
        buttons = vbox(self.add_button, defaults, 1)
        row = hbox((self.text, 1), buttons)
        vbox(row, self._message, of=self, margins=(0, 0, 0, 0), spacing=4)
        self.text.textChanged.connect(self._check)
        theme.changed.connect(self._check)
        self.set_defaults()
        self.text.document().clearUndoRedoStacks()

    def set_defaults(self) -> None:
        """Enter the default lanes."""
        names = [lane.name for lane in DEFAULT_LANES if lane.name != NOISE]
        retype(self.text, "\n".join(names))

    def lanes(self) -> tuple[LaneSpec, ...] | None:
        """The lanes as written, the noise lane first; None while there is an error."""
        try:
            return parse_lanes(self.text.toPlainText())
        except OptionError:
            return None

    def set_options(self, options: RunOptions) -> None:
        """The options common to all lanes; whether a lane's fault has an effect depends on them."""
        if options != self._options:
            self._options = options
            self._check()

    def _check(self) -> None:
        self.error = self.note = ""
        try:
            lanes = parse_lanes(self.text.toPlainText())
            self.note = self._idle_faults(lanes)
            if any(lane.llama or lane.kind == PEER for lane in lanes):
                self.note = missing() or self.note
        except OptionError as error:
            self.error = str(error)
        severity = "error" if self.error else "warning" if self.note else "info"
        self._message.say(severity, self.error or self.note or _HINT)
        self.lanes_changed.emit()

    def _idle_faults(self, lanes: Sequence[LaneSpec]) -> str:
        """A note on every fault without effect under the options of the next comparison."""
        n_draft = None if self._options.spec.types else self._options.spec.n_max
        return " ".join(
            f"{lane.name}: {note}"
            for lane in lanes
            for note in notes_on(lane.options(self._options), n_draft, is_led=not lane.free)
        )

    def _make_menu(self) -> QMenu:
        menu = made(QMenu, self, toolTipsVisible=True)
        faulty = [f"{fault.shown_by},fault={name}" for name, fault in LANE_FAULTS.items()]
        typed = [f"{lane},cache_type_s=bf16" for lane in (REFERENCE, "planes")]
        splits = ["planes,split=seq", "planes,kv=unified", "planes,forks", "carry,forks"]
        for names in (ROLLBACK_POLICIES, splits, typed, faulty):
            for name in names:
                menu.addAction(name, lambda lane=name: self._add(lane))
            menu.addSeparator()
        without = missing()
        for name in _LLAMA_LANES:
            action = menu.addAction(name, lambda lane=name: self._add(lane))
            action.setEnabled(not without)
            action.setToolTip(without)
        return menu

    def _add(self, lane: str) -> None:
        text = self.text.toPlainText().rstrip("\n")
        retype(self.text, f"{text}\n{lane}" if text else lane)
        self.text.moveCursor(QTextCursor.MoveOperation.End)
