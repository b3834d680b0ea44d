"""The Model panel: contents of the files and the memory that running them needs, before loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import QRect, QSize, Qt, Signal
from PySide6.QtGui import QAction, QPainter, QPalette
from PySide6.QtWidgets import (
    QGridLayout,
    QLabel,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QStackedWidget,
    QWidget,
)

from app.engine_thread.events import OpenedFiles, ServerConnected
from app.looks import Theme, figures_font
from app.panels.model.server_page import ServerPage
from app.trace_models.shown_text import plain_tip
from app.widgets.build import Drawing, made, scrolling, vbox, words
from app.widgets.empty_state import EmptyState
from app.widgets.fields import new_form
from app.widgets.legend import FlowLegend
from engine.machine.host_memory import available_memory
from engine.memory.policies import POLICIES
from engine.memory_need import MemoryEstimate, PolicyCost, estimate, fits_text, server_estimate
from engine.options import RunOptions
from engine.plain_text import counted, size_text
from engine.report.text import visible

if TYPE_CHECKING:
    from engine.machine.device import DeviceMemory
    from engine.model.info import LayerInfo, ModelInfo


_FACTS = (
    "target",
    "draft",
    "architecture",
    "parameters",
    "quantisation",
    "tokenizer",
    "context",
    "rollback",
    "llama.cpp",
    "device",
)


class ModelMapView(QStackedWidget):
    """Facts, layer map and memory estimate of the inspected files, or how to choose some."""

    load_asked = Signal()

    def __init__(self, theme: Theme, open_actions: Sequence[QAction]) -> None:
        super().__init__()
        self._files: OpenedFiles | None = None
        self._compute = ""
        self._memory: DeviceMemory | None = None
        self._options, self._n_slots = RunOptions(), 1
        self._labels = {name: words(shrinks=True, selectable=True) for name in _FACTS}
        self._strip = LayerStrip(theme)
        self.legend, self._memory_title = words(muted=True), words(muted=True)
        self._bars = SizeBars(theme)
        self._fits = words(muted=True)
        self._costs_title = words("For rollback: bytes × snapshots × sequences", muted=True)
        self.costs = PolicyCosts()
        self._load = made(QPushButton, "Load weights", clicked=self.load_asked)
        self.addWidget(
            EmptyState(
                "No model",
                "Layers, quantisation and memory are shown here before anything is loaded. "
                "Open a GGUF file or drop one on the window.",
                open_actions,
            )
        )
        self.addWidget(self._make_page())
        self.server = ServerPage()
        self.addWidget(self.server)

    @property
    def facts(self) -> dict[str, str]:
        return {name: label.text() for name, label in self._labels.items()}

    def set_server(self, server: ServerConnected | None) -> None:
        if server is not None:
            self.set_files(None)
            self.server.set_server(server)
            self.setCurrentWidget(self.server)
        elif self.currentWidget() is self.server:
            self.setCurrentIndex(0)

    def set_files(self, files: OpenedFiles | None) -> None:
        self._files, self._compute = files, ""
        self.setCurrentIndex(0 if files is None else 1)
        if files is None:
            return
        info = files.info
        texts = {
            "target": files.target.name,
            "draft": _describe_draft(files),
            "architecture": f"{info.architecture} · {_count_layers(info)}",
            "parameters": f"{_count(info.n_params)} in {size_text(info.weight_bytes)}",
            "quantisation": _describe_mix(info.quant_mix),
            "tokenizer": info.tokenizer,
            "context": f"{info.n_ctx_train:,} tokens · vocabulary {info.n_vocab:,}",
            "rollback": info.rollback,
            "llama.cpp": info.llama_cpp,
        }
        for name, text in texts.items():
            self._labels[name].setText(visible(text))
        self._labels["target"].setToolTip(plain_tip(str(files.target)))
        self._labels["draft"].setToolTip(
            plain_tip("\n".join(str(path) for path, *_ in files.drafts))
        )
        self._strip.set_layers(info.layers)
        self.legend.setText(_legend(info))
        self._show_memory()

    def set_compute(self, mode: str) -> None:
        """Estimate for weights in this mode instead of as in the files."""
        self._compute = mode
        self._show_memory()

    def set_memory(self, memory: DeviceMemory | None) -> None:
        """Show held and free memory of the model's device; None without one."""
        self._memory = memory
        text = "" if memory is None else f"{memory.name} · {size_text(memory.free)} free"
        if memory is not None and memory.held is not None:
            text += f", {size_text(memory.held)} held by this program"
        self._labels["device"].setText(text)
        self._show_memory()

    def set_options(self, options: RunOptions, n_seqs: int = 1) -> None:
        """Estimate memory for these options and this many prompts."""
        self._options = options
        self._n_slots = max(1, min(options.parallel, n_seqs))
        self._show_memory()

    def set_loadable(self, loadable: bool) -> None:
        """Offer to load the inspected files."""
        self._load.setVisible(loadable)

    def _show_memory(self) -> None:
        if self._files is None:
            return
        files, options = self._files, self._options
        drafts = {drafter: info for _, drafter, info in files.drafts}
        found = estimate(files.info, drafts, options, self._n_slots, self._compute)
        server = server_estimate(files.info, drafts, options)
        available = available_memory()
        if self._memory is not None and self._memory.name.startswith("cuda"):
            available = self._memory.free + (self._memory.held or 0)
        self._fits.setText(fits_text({"here": found, "in llama-server": server}, available))
        self._fits.setToolTip(_estimate_tip(server))
        kept = "no snapshots"
        if found.n_rs_seq:
            kept = f"{options.rollback} with n_rs_seq {found.n_rs_seq}"
        sequences = counted(found.n_seqs, "sequence")
        total = size_text(sum(found.sizes.values()))
        self._memory_title.setText(
            f"Memory for {sequences}, {found.n_ctx:,} cells, {kept}: {total}"
        )
        self._bars.set_sizes(found.sizes)
        self.costs.set_costs(found.policies, options.rollback)
        self._costs_title.setVisible(bool(found.policies))

    def _make_page(self) -> QWidget:
        page = QWidget()
        form = new_form()
        form.setVerticalSpacing(2)
        for name, label in self._labels.items():
            heading = made(QLabel, name, muted=True, alignment=Qt.AlignmentFlag.AlignTop)
            form.addRow(heading, label)
        below = self._strip, self.legend, self._memory_title, self._bars, self._fits
        undo = self._costs_title, self.costs, self._load
        column = vbox(form, *below, *undo, 1, of=page, margins=(6, 6, 6, 6), spacing=4)
        column.insertSpacing(1, 2)
        return scrolling(QScrollArea(), page, "Model in full")


def _count(n: int) -> str:
    """Parameter count in short form: 9.28 M, 650 M, 35.1 B."""
    return f"{n / 1e6:.3g} M" if n < 999.5e6 else f"{n / 1e9:.3g} B"


def _describe_draft(files: OpenedFiles) -> str:
    parts = []
    if any(layer.kind == "mtp" for layer in files.info.layers):
        parts.append("MTP head")
    parts += [path.name for path, *_ in files.drafts]
    return ", ".join(parts) or "none"


def _legend(info: ModelInfo) -> str:
    """The kinds of layers in the model, as marked in its map."""
    kinds = dict.fromkeys(layer.kind for layer in info.layers)
    return " · ".join(f"{LAYER_KINDS[kind][0]} {LAYER_KINDS[kind][2]}" for kind in kinds)


def _count_layers(info: ModelInfo) -> str:
    mtp = sum(layer.kind.endswith("mtp") for layer in info.layers)
    trunk = len(info.layers) - mtp
    return f"{trunk} layers + MTP" if mtp else f"{trunk} layers"


def _describe_mix(mix: dict[str, int]) -> str:
    """Types by their share of the bytes, from one per cent on."""
    total = sum(mix.values()) or 1
    shares = {name: 100 * n / total for name, n in mix.items()}
    return ", ".join(f"{name} {share:.0f} %" for name, share in shares.items() if share >= 1)


def _estimate_tip(server: MemoryEstimate) -> str:
    """What llama-server would need with the same flags."""
    lines = [f"{name}: {size_text(n)}" for name, n in server.sizes.items()]
    lines += [f"{name}, at most: {size_text(n)}" for name, n in server.later.items()]
    return plain_tip(
        f"llama-server with the same flags, {server.n_seqs} × {server.n_ctx:,} cells in f16:\n"
        + "\n".join(lines)
    )


_NAME, _PRODUCT, _TOTAL = range(3)


class PolicyCosts(QWidget):
    """Bytes of a snapshot × snapshots × sequences, and the total."""

    def __init__(self) -> None:
        super().__init__()
        self._labels = {name: (QLabel(), QLabel(), QLabel()) for name in POLICIES}
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(10)
        grid.setVerticalSpacing(2)
        grid.setColumnStretch(_PRODUCT, 1)
        for row, (name, labels) in enumerate(self._labels.items()):
            for column, label in enumerate(labels):
                label.setFont(figures_font())
                grid.addWidget(label, row, column)
            labels[_NAME].setText(name)
            labels[_TOTAL].setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        self.setAccessibleName("Memory of each rollback policy")

    @property
    def lines(self) -> dict[str, str]:
        return {
            name: f"{product.text()} = {total.text()}"
            for name, (_, product, total) in self._labels.items()
        }

    def set_costs(self, costs: Sequence[PolicyCost], chosen: str) -> None:
        self.setVisible(bool(costs))
        for cost in costs:
            name, product, total = self._labels[cost.policy]
            what = "log entries" if POLICIES[cost.policy].is_log else "snapshots"
            product.setText(f"{size_text(cost.unit_bytes)} × {cost.n_units} × {cost.n_seqs}")
            product.setToolTip(f"Bytes × {what} for each sequence × sequences")
            total.setText(size_text(cost.total))
            role = QPalette.ColorRole
            for label in (name, product, total):
                font = label.font()
                font.setBold(cost.policy == chosen)
                label.setFont(font)
                label.setForegroundRole(
                    role.WindowText if cost.policy == chosen else role.PlaceholderText
                )
        self.setAccessibleDescription(
            ", ".join(f"{name} {line}" for name, line in self.lines.items())
        )


_BAR_HEIGHT = 6
_ROW_GAP = 4


class SizeBars(Drawing):
    """One row per entry: name, bar, size. The bars share the scale of the largest entry."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._sizes: dict[str, int] = {}
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName("Memory estimate")

    def set_sizes(self, sizes: Mapping[str, int]) -> None:
        """Show these byte counts in this order."""
        self._sizes = dict(sizes)
        text = ", ".join(f"{name} {size_text(n)}" for name, n in sizes.items())
        self.setAccessibleDescription(text)
        self.updateGeometry()
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(12 * self.fontMetrics().averageCharWidth(), self._row() * len(self._sizes))

    def minimumSizeHint(self) -> QSize:
        return self.sizeHint()

    def draw(self, painter: QPainter) -> None:
        metrics = self.fontMetrics()
        label = max((metrics.horizontalAdvance(f"{n}  ") for n in self._sizes), default=0)
        figure = metrics.horizontalAdvance("8,888 MiB ")
        room = max(0, self.width() - label - figure)
        most = max(self._sizes.values(), default=0)
        muted = self.palette().color(QPalette.ColorRole.PlaceholderText)
        for index, (name, n) in enumerate(self._sizes.items()):
            row = QRect(0, index * self._row(), self.width(), self._row())
            painter.setPen(muted)
            painter.drawText(row, Qt.AlignmentFlag.AlignVCenter, name)
            painter.setPen(self.palette().color(QPalette.ColorRole.WindowText))
            painter.drawText(
                row, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignRight, size_text(n)
            )
            width = max(2, round(room * n / most)) if n and most else 0
            top = row.center().y() - _BAR_HEIGHT // 2
            painter.fillRect(label, top, width, _BAR_HEIGHT, self._theme.color("ui.accent"))

    def _row(self) -> int:
        return self.fontMetrics().height() + _ROW_GAP


_GAP = 2


class LayerStrip(FlowLegend):
    """One cell per layer, wrapped to the width; a cell's tooltip shows its quantisation."""

    gap = _GAP

    def __init__(self, theme: Theme) -> None:
        super().__init__("Layer map")
        self._theme = theme
        self._layers: tuple[LayerInfo, ...] = ()
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)

    def set_layers(self, layers: tuple[LayerInfo, ...]) -> None:
        self._layers = layers
        letters = "".join(LAYER_KINDS[layer.kind][0] for layer in layers)
        self.setAccessibleDescription(f"{len(layers)} layers in order: {letters}")
        self.updateGeometry()
        self.update()

    def entry_sizes(self) -> list[QSize]:
        return [self._size()] * len(self._layers)

    def entry_tip(self, index: int) -> str:
        layer = self._layers[index]
        name = LAYER_KINDS[layer.kind][2]
        return f"blk.{layer.index}: {name}, {layer.quant}, {size_text(layer.n_bytes)}"

    def paint_entry(self, painter: QPainter, index: int, box: QRect) -> None:
        letter, role, _ = LAYER_KINDS[self._layers[index].kind]
        cell = box.adjusted(0, 0, 0, -_GAP)
        painter.fillRect(cell, self._theme.color(f"layer.{role}"))
        painter.setPen(self._theme.color("layer.text"))
        painter.drawText(cell, Qt.AlignmentFlag.AlignCenter, letter)

    def sizeHint(self) -> QSize:
        return QSize(self.minimumSizeHint().width(), self.heightForWidth(max(1, self.width())))

    def minimumSizeHint(self) -> QSize:
        return QSize(4 * (self._size().width() + _GAP), self._size().height())

    def _size(self) -> QSize:
        """Size of a cell, including the gap below it."""
        metrics = self.fontMetrics()
        return QSize(metrics.horizontalAdvance("M") + 12, metrics.height() + 8 + _GAP)


LAYER_KINDS = {
    "delta net": ("G", "delta_net", "Gated DeltaNet"),
    "kda": ("K", "kda", "Kimi Delta Attention"),
    "mamba": ("O", "mamba", "Mamba"),
    "mamba-2": ("S", "mamba", "Mamba-2"),
    "short convolution": ("C", "convolution", "short convolution"),
    "attention": ("A", "attention", "attention"),
    "sparse attention": ("B", "attention", "block-sparse attention"),
    "latent attention": ("L", "latent", "latent attention (MLA)"),
    "sparse latent attention": ("P", "latent", "sparse latent attention (pooled keys)"),
    "window attention": ("W", "attention", "sliding-window attention"),
    "CSA": ("D", "latent", "compressed sparse attention (CSA)"),
    "HCA": ("E", "latent", "heavily compressed attention (HCA)"),
    "attention + mamba-2": ("H", "side_by_side", "attention in parallel with Mamba-2"),
    "feed-forward": ("F", "feed_forward", "feed-forward only"),
    "mtp": ("M", "mtp", "MTP head"),
    "unused mtp": ("U", "mtp", "MTP block that is not used"),
}
"""The letter in the layer map, its colour role without `layer.`, and its name, by the block's name
in engine.model.parts, or for an MTP block in engine.model.info."""
