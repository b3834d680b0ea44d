"""Small widgets of the window: layer strip, size bars, banners, figures, map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QAction, QColor
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.engine_thread.events import OpenedFiles
from app.looks import Theme
from app.panels.model.model_map import LayerStrip, ModelMapView, SizeBars
from app.trace_models.run_facts import LiveNumbers
from app.trace_models.shown_text import significant
from app.widgets.fitted_labels import MOST_LINES
from app.window.banner import MOST_BANNERS, BannerArea
from app.window.status_line import StatusLine
from engine.options import RunOptions, SpecOptions
from tests.support.fake_session import FakeInfo, FakeLayer
from tests.support.trace_builder import TraceBuilder


@pytest.fixture(params=["light", "dark"])
def theme(request: pytest.FixtureRequest) -> Theme:
    return Theme(request.param)


def layers(n: int) -> Any:
    return tuple(FakeLayer(i, "attention" if i % 4 == 3 else "delta net") for i in range(n))


def test_layer_strip_wraps_and_paints_each_kind(qtbot: QtBot, theme: Theme) -> None:
    strip = LayerStrip(theme)
    qtbot.addWidget(strip)
    strip.set_layers(layers(48))
    assert strip.heightForWidth(150) > strip.heightForWidth(600)
    strip.resize(300, strip.heightForWidth(300))
    image = strip.grab().toImage()
    for index in (0, 3, 46, 47):
        cell = strip.boxes(strip.width())[index]
        assert strip.rect().contains(cell)
        role = "attention" if index % 4 == 3 else "delta_net"
        assert image.pixelColor(cell.left() + 1, cell.top() + 1) == theme.color(f"layer.{role}")
    assert "GGGA" in strip.accessibleDescription()
    assert strip.entry_tip(3) == "blk.3: attention, Q8_0, 977 KiB"


def test_size_bars_share_one_scale(qtbot: QtBot, theme: Theme) -> None:
    bars = SizeBars(theme)
    qtbot.addWidget(bars)
    bars.set_sizes({"half": 500_000, "whole": 1_000_000, "none": 0})
    bars.resize(400, bars.sizeHint().height())
    image = bars.grab().toImage()
    accent = theme.color("ui.accent")

    def painted(row: int) -> int:
        y = round((row + 0.5) * bars.height() / 3)
        return sum(QColor(image.pixelColor(x, y)) == accent for x in range(400))

    assert painted(1) == pytest.approx(2 * painted(0), abs=2)
    assert painted(2) == 0
    assert "whole 977 KiB" in bars.accessibleDescription()


def test_banners_are_few_and_dismissible(qtbot: QtBot, theme: Theme) -> None:
    area = BannerArea(theme)
    qtbot.addWidget(area)
    area.show()
    for i in range(MOST_BANNERS + 2):
        area.add("error", f"Error {i}.", "Do this.")
    assert [b.message for b in area.banners] == ["Error 2.", "Error 3.", "Error 4."]
    area.add("error", "Error 3.", "Do this.")
    assert [b.message for b in area.banners] == ["Error 2.", "Error 4.", "Error 3."]
    assert area.banners[0].accessibleName() == "error: Error 2. Do this."
    area.banners[0].dismissed.emit()
    assert len(area.banners) == 2
    area.clear()
    assert not area.isVisible()


def test_banner_takes_severity_colours_and_offers_an_action(qtbot: QtBot, theme: Theme) -> None:
    area = BannerArea(theme)
    qtbot.addWidget(area)
    pressed: list[bool] = []
    banner = area.add("warning", "Text.", "", ("Act", lambda: pressed.append(True)))
    area.resize(600, 40)
    area.show()
    image = banner.grab().toImage()
    assert image.pixelColor(0, 10) == theme.color("status.warning")
    assert image.pixelColor(banner.width() // 2, 1) == theme.color("status.warning_tint")
    banner.offer_buttons[0].click()
    assert pressed == [True]


def test_figures_come_from_the_rows_of_one_run() -> None:
    builder = TraceBuilder()
    builder.prompt(["a"])
    builder.plain(" b")  # the first row of a sequence counts as its prompt
    builder.draft([" c", " d"], " e", [" x"])
    builder.draft([" c"], " e", [" x", " y"], path="restore_depth")
    builder.plain(" f")
    numbers = LiveNumbers.read(builder.store, builder.run_id)
    assert numbers.acceptance == pytest.approx(3 / 6)
    assert numbers.tokens_per_step == pytest.approx(1 + 3 / 2)
    assert numbers.path == "restore (depth > n_rs_seq)"
    assert numbers.rounds == 5
    other = TraceBuilder(builder.store)
    assert LiveNumbers.read(builder.store, other.run_id) == LiveNumbers()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.70512, "0.705"),
        (0.75, "0.750"),
        (412.3, "412"),
        (999.7, "1,000"),
        (1234.5, "1,230"),
    ],
)
def test_figures_have_three_digits(value: float | None, text: str) -> None:
    assert significant(value) == text


def test_status_line_shows_figures_or_progress(qtbot: QtBot) -> None:
    status = StatusLine()
    qtbot.addWidget(status)
    status.show()
    status.set_numbers(LiveNumbers(3, 9, 0.70512, 412.25, 2.93, "seq_rm"))
    assert {k: c.text for k, c in status.chips.items()} == {
        "acceptance": "0.705",
        "tokens_per_step": "2.93",
        "tokens_per_second": "412",
        "path": "seq_rm",
        "vs_plain": "–",
    }
    assert "0.70512" in status.chips["acceptance"].toolTip()
    status.show_progress(5, 10, "dequantising blk.3")
    assert status.progress_shown
    assert not status.chips["path"].isVisible()
    status.hide_progress()
    assert status.chips["path"].isVisible()
    status.set_numbers(LiveNumbers())
    assert {c.text for c in status.chips.values()} == {"–"}


def test_model_map_tells_the_facts_and_follows_the_options(qtbot: QtBot, theme: Theme) -> None:
    view = ModelMapView(theme, [QAction("Open…")])
    qtbot.addWidget(view)
    assert view.currentIndex() == 0
    info: Any = FakeInfo()
    drafts = ((Path("/m/d.gguf"), "draft-simple", info),)
    view.set_files(OpenedFiles(Path("/m/target.gguf"), drafts, info, {}))
    assert view.currentIndex() == 1
    facts = view.facts
    assert facts["target"] == "target.gguf"
    assert facts["draft"] == "MTP head, d.gguf"
    assert facts["architecture"] == "qwen35 · 8 layers + MTP"
    assert facts["parameters"] == "9 M in 8.96 MiB"
    large: Any = FakeInfo(n_params=35_100_000_000, weight_bytes=21 * 10**9)
    view.set_files(OpenedFiles(Path("/m/large.gguf"), (), large, {}))
    assert view.facts["parameters"] == "35.1 B in 19.6 GiB"
    view.set_files(OpenedFiles(Path("/m/target.gguf"), drafts, info, {}))
    assert facts["quantisation"] == "Q8_0 99 %, F32 1 %"
    assert facts["llama.cpp"] == "partial rollback"
    assert view.legend.text() == "G Gated DeltaNet · A attention · M MTP head"
    bars = view.findChild(SizeBars)
    view.set_options(RunOptions(spec=SpecOptions(types=("draft-mtp",), n_max=4)))
    assert "planes 1.91 MiB" in bars.accessibleDescription()
    view.set_options(RunOptions(spec=SpecOptions(types=("draft-mtp",)), rollback="checkpoint"))
    assert "checkpoint 488 KiB" in bars.accessibleDescription()
    assert "planes" not in bars.accessibleDescription()
    view.set_options(RunOptions())
    assert "checkpoint" not in bars.accessibleDescription()
    view.set_files(None)
    assert view.currentIndex() == 0


def test_a_banner_wraps_and_then_elides_with_details(qtbot: QtBot, theme: Theme) -> None:
    area = BannerArea(theme)
    qtbot.addWidget(area)
    words = " ".join(f"word{i:02}" for i in range(40))
    banner = area.add("warning", words, "", ("Restore", print), ("Discard", print))
    area.resize(360, 400)
    area.show()

    def under() -> bool:
        return banner.offer_buttons[0].y() > banner.text.geometry().bottom()

    qtbot.waitUntil(lambda: banner.text.is_cut and under())
    lines = banner.text.text().splitlines()
    metrics = banner.text.fontMetrics()
    assert len(lines) == MOST_LINES
    assert lines[-1].endswith("…")
    assert all(metrics.horizontalAdvance(line) <= banner.text.width() for line in lines)
    assert banner.text.height() >= MOST_LINES * metrics.lineSpacing()
    assert banner.text.toolTip() == words
    for button in (*banner.offer_buttons, banner.details):
        assert banner.rect().contains(button.geometry())
    qtbot.mouseClick(banner.details, Qt.MouseButton.LeftButton)
    assert banner.text.text().replace("\n", " ") == words
    n_lines = len(banner.text.text().splitlines())
    qtbot.waitUntil(lambda: banner.text.height() >= n_lines * metrics.lineSpacing())
    area.resize(8000, 400)
    qtbot.waitUntil(lambda: len(banner.text.text().splitlines()) <= MOST_LINES)
    assert banner.text.text().replace("\n", " ") == words
    assert banner.text.width() < 1500, "a line of 8000 pixels cannot be read"
    assert banner.details.isHidden()
    qtbot.waitUntil(lambda: not under())
    assert banner.width() - banner.offer_buttons[-1].geometry().right() < 60, "next to Dismiss"


def test_a_status_that_is_too_long_ends_in_dots(qtbot: QtBot, theme: Theme) -> None:
    status = StatusLine()
    qtbot.addWidget(status)
    status.resize(600, status.sizeHint().height())
    status.show()
    words = "93 / 300 tokens · round 24 · 3 s · about 2 s left · " * 4
    label = status.findChild(QWidget, "status.words")
    pictures = []
    for cut in (False, True):
        room = label.contentsRect().width()
        told = label.fontMetrics().elidedText(words, Qt.TextElideMode.ElideRight, room)
        assert told.endswith("…")
        status.say(going=told if cut else words)
        pictures.append(label.grab().toImage())
    assert pictures[0] == pictures[1]
