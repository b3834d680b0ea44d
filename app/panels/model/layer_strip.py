"""The layers of a model as a row of letters, one for each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from PySide6.QtCore import QEvent, QRect, QSize, Qt
from PySide6.QtGui import QHelpEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.looks.theme import Theme
from app.trace_models.plain_tip import plain_tip
from engine.size_text import size_text

if TYPE_CHECKING:
    from engine.model.info import LayerInfo

_GAP = 2


class LayerStrip(QWidget):
    """One cell per layer, wrapped to the width; the tooltip of a cell tells its quantisation."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._layers: tuple[LayerInfo, ...] = ()
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.setAccessibleName("Layer map")

    def set_layers(self, layers: tuple[LayerInfo, ...]) -> None:
        """Show these layers, in order."""
        self._layers = layers
        letters = "".join(LAYER_KINDS[layer.kind].letter for layer in layers)
        self.setAccessibleDescription(f"{len(layers)} layers in order: {letters}")
        self.updateGeometry()
        self.update()

    def cell(self, index: int) -> QRect:
        """Where a layer is painted."""
        cell = self._cell_size()
        row, column = divmod(index, self._per_row(self.width()))
        return QRect(
            column * (cell.width() + _GAP),
            row * (cell.height() + _GAP),
            cell.width(),
            cell.height(),
        )

    def describe_layer(self, index: int) -> str:
        """One line about a layer."""
        layer = self._layers[index]
        name = LAYER_KINDS[layer.kind].name
        return f"blk.{layer.index}: {name}, {layer.quant}, {size_text(layer.n_bytes)}"

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        per_row = self._per_row(width)
        rows = max(1, -(-len(self._layers) // per_row))
        return rows * (self._cell_size().height() + _GAP)

    def sizeHint(self) -> QSize:
        return QSize(self.minimumSizeHint().width(), self.heightForWidth(max(1, self.width())))

    def minimumSizeHint(self) -> QSize:
        cell = self._cell_size()
        return QSize(4 * (cell.width() + _GAP), cell.height() + _GAP)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        ink = self._theme.color("layer.text")
        for index, layer in enumerate(self._layers):
            cell = self.cell(index)
            kind = LAYER_KINDS[layer.kind]
            painter.fillRect(cell, self._theme.color(f"layer.{kind.role}"))
            painter.setPen(ink)
            painter.drawText(cell, Qt.AlignmentFlag.AlignCenter, kind.letter)
        painter.end()

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            for index in range(len(self._layers)):
                if self.cell(index).contains(event.pos()):
                    tip = plain_tip(self.describe_layer(index))
                    QToolTip.showText(event.globalPos(), tip, self)
                    return True
            QToolTip.hideText()
            return True
        return super().event(event)

    def _per_row(self, width: int) -> int:
        return max(1, (width + _GAP) // (self._cell_size().width() + _GAP))

    def _cell_size(self) -> QSize:
        metrics = self.fontMetrics()
        return QSize(metrics.horizontalAdvance("M") + 12, metrics.height() + 8)


class LayerKind(NamedTuple):
    """letter: in the map of layers. role: of its colour in a theme, without `layer.`."""

    letter: str
    role: str
    name: str


LAYER_KINDS = {
    "delta net": LayerKind("G", "delta_net", "Gated DeltaNet"),
    "kda": LayerKind("K", "kda", "Kimi Delta Attention"),
    "mamba": LayerKind("O", "mamba", "Mamba"),
    "mamba-2": LayerKind("S", "mamba", "Mamba-2"),
    "short convolution": LayerKind("C", "convolution", "short convolution"),
    "attention": LayerKind("A", "attention", "attention"),
    "sparse attention": LayerKind("B", "attention", "block-sparse attention"),
    "latent attention": LayerKind("L", "latent", "latent attention (MLA)"),
    "sparse latent attention": LayerKind("P", "latent", "latent attention sparse by pooled keys"),
    "window attention": LayerKind("W", "attention", "attention to a window"),
    "CSA": LayerKind("D", "latent", "compressed sparse attention (CSA)"),
    "HCA": LayerKind("E", "latent", "heavily compressed attention (HCA)"),
    "attention + mamba-2": LayerKind("H", "side_by_side", "attention in parallel with Mamba-2"),
    "feed-forward": LayerKind("F", "feed_forward", "feed-forward only"),
    "mtp": LayerKind("M", "mtp", "MTP head"),
    "unused mtp": LayerKind("U", "mtp", "MTP block that is not used"),
}
"""By the name that engine.model.parts gives a block, or engine.model.info an MTP block."""
