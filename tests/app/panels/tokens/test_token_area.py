"""The token area: pixels of every kind, following, walking, selecting, large streams."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from PySide6.QtCore import QEvent, QPoint, Qt
from PySide6.QtGui import QGuiApplication, QHelpEvent, QImage
from PySide6.QtWidgets import QApplication, QToolTip
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.panels.tokens.token_area import TokenArea, token_tip
from app.panels.tokens.token_scroll import SLICE_SECONDS
from app.trace_models.run_rows import Position
from app.trace_models.token_stream import KIND
from tests.app.panels.tokens.conftest import Shown, every_kind, finish
from tests.support.trace_builder import TraceBuilder, repeated, sample_trace


def with_unknown() -> TraceBuilder:
    builder = every_kind()
    builder.untold(" unknown")
    builder._token("side", " side", 0, 1, draft_node=1, draft_parent=-1)
    return builder


def box_of(area: TokenArea, text: str) -> tuple[int, int, int, int]:
    """x, y, width and height of a token's cell in the viewport."""
    stream = area.stream
    assert stream is not None
    token = stream.texts.index(text)
    for span, y in area._spans_in_sight():
        if span.token == token:
            return round(span.x) + 10, y, round(span.width), area._metrics.row_height
    raise AssertionError(f"{text!r} is not in sight")


def colours_in(image: QImage, box: tuple[int, int, int, int]) -> set[str]:
    x0, y0, width, height = box
    return {
        image.pixelColor(x, y).name()
        for x in range(x0, x0 + width - 1)
        for y in range(y0, y0 + height)
    }


def rows_with(image: QImage, box: tuple[int, int, int, int], colour: str) -> list[int]:
    """Rows of a cell, from its top, that are this colour from its left to its right."""
    x0, y0, width, height = box
    return [
        y
        for y in range(height)
        if all(image.pixelColor(x, y0 + y).name() == colour for x in range(x0 + 1, x0 + width - 2))
    ]


def test_every_kind_has_its_own_look(show: Callable[..., Shown], theme: Theme) -> None:
    area, _ = show(with_unknown(), theme)
    image = area.viewport().grab().toImage()
    box = {kind: box_of(area, " " + kind) for kind in KIND if kind not in ("prompt", "replayed")}
    ground = theme.color("ui.panel").name()

    def colour(role: str) -> str:
        return theme.color(role).name()

    assert {ground} <= colours_in(image, box["target"])
    assert colour("accepted.tint") in colours_in(image, box["accepted"])
    assert colour("rejected.tint") in colours_in(image, box["rejected"])
    for kind in ("target", "ignored", "replacement", "bonus"):
        assert not {colour("accepted.tint"), colour("rejected.tint")} & colours_in(image, box[kind])

    underline = rows_with(image, box["accepted"], colour("accepted.line"))
    strike = rows_with(image, box["rejected"], colour("rejected.line"))
    double = rows_with(image, box["replacement"], colour("replacement.line"))
    outline = rows_with(image, box["ignored"], colour("ignored.line"))
    height = area._metrics.row_height
    assert len(underline) == 2
    assert underline[0] > height * 0.7
    assert len(strike) == 1
    assert height * 0.3 < strike[0] < height * 0.7
    assert double[1] - double[0] == 2
    assert len(outline) == 2
    assert outline[1] - outline[0] > height / 2
    assert rows_with(image, box["side"], colour("side.line")) == outline
    for kind in ("target", "bonus", "unknown"):
        assert not rows_with(image, box[kind], colour("accepted.line"))

    x, y, width, _ = box["bonus"]
    dot = x + (width - 1) // 2, y + area._metrics.under + 1
    assert image.pixelColor(*dot).name() == colour("bonus.line")


def test_replayed_tokens_have_a_dotted_underline(show: Callable[..., Shown], theme: Theme) -> None:
    area, _ = show(every_kind(), theme)
    image = area.viewport().grab().toImage()
    x0, y0, width, _ = box_of(area, " again")
    y = y0 + area._metrics.under
    line = [image.pixelColor(x, y).name() for x in range(x0 + 1, x0 + width - 2)]
    dotted = theme.color("accepted.line").name()
    assert 0.3 < line.count(dotted) / len(line) < 0.7
    assert line.count(theme.color("ui.panel").name()) > len(line) * 0.3


def test_tokens_of_unknown_kind_have_a_dashed_underline(
    show: Callable[..., Shown], theme: Theme
) -> None:
    area, _ = show(with_unknown(), theme)
    image = area.viewport().grab().toImage()
    x0, y0, width, _ = box_of(area, " unknown")
    y = y0 + area._metrics.under
    line = [image.pixelColor(x, y).name() for x in range(x0 + 1, x0 + width - 2)]
    changes = sum(a != b for a, b in pairwise(line))
    assert theme.color("unknown.line").name() in line and theme.color("ui.panel").name() in line
    assert changes < len(line) / 4, "dashes are longer than the dots of replayed tokens"


def test_prompt_text_is_muted(show: Callable[..., Shown], theme: Theme) -> None:
    area, _ = show(every_kind(), theme)
    image = area.viewport().grab().toImage()
    found = colours_in(image, box_of(area, "prompt"))
    assert theme.color("ui.text").name() not in found


def test_ghosts_come_and_go(show: Callable[..., Shown]) -> None:
    area, run = show(every_kind())
    stream = run.by_seq[0]

    def texts() -> list[str]:
        return [stream.texts[span.token] for span, _ in area._spans_in_sight()]

    assert " rejected" in texts()
    area.set_ghosts(False)
    assert not {" rejected", " ignored", " wrong"} & set(texts())
    assert " replacement" in texts()
    area.set_ghosts(True)
    assert " ignored" in texts()


def test_a_click_selects_and_announces(show: Callable[..., Shown], qtbot: QtBot) -> None:
    area, run = show(every_kind())
    x, y, width, height = box_of(area, " rejected")
    with qtbot.waitSignal(area.position_selected) as signal:
        qtbot.mouseClick(
            area.viewport(), Qt.MouseButton.LeftButton, pos=QPoint(x + width // 2, y + height // 2)
        )
    assert signal.args == [Position(run.run, 0, 2, 3)]
    stream = run.by_seq[0]
    assert stream.texts[area.current] == " rejected"
    assert "rejected, round 2, position 3" in area.accessibleDescription()
    # the position comes back from the window: the outline stays where it is
    area.set_cursor(signal.args[0])
    assert stream.texts[area.current] == " rejected"
    image = area.viewport().grab().toImage()
    focus = area._theme.color("ui.focus").name()
    assert image.pixelColor(x + width // 2, y).name() == focus


def test_a_click_beside_the_text_selects_nothing(show: Callable[..., Shown], qtbot: QtBot) -> None:
    area, _ = show(every_kind())
    with qtbot.assertNotEmitted(area.position_selected):
        qtbot.mouseClick(area.viewport(), Qt.MouseButton.LeftButton, pos=QPoint(470, 190))
    assert area.current == -1


def test_keys_walk(show: Callable[..., Shown], qtbot: QtBot) -> None:
    area, run = show(every_kind(), width=200)
    stream = run.by_seq[0]
    key = Qt.Key

    def press(which: Qt.Key) -> str:
        qtbot.keyClick(area, which)
        return stream.texts[area.current]

    def rejection(step: int) -> str:
        area.step_rejection(step)
        return stream.texts[area.current]

    assert press(key.Key_Home) == "prompt"
    assert press(key.Key_Right) == " target"
    assert rejection(+1) == " rejected"
    assert rejection(+1) == " wrong"
    assert rejection(-1) == " rejected"
    assert press(key.Key_Left) == " accepted"
    assert press(key.Key_End) == " more"
    above = press(key.Key_Up)
    assert above != " more"
    row = area._rows.layout.row_of  # type: ignore[union-attr]
    assert row(stream.texts.index(above)) == row(stream.texts.index(" more")) - 1
    press(key.Key_Down)
    assert row(area.current) == row(stream.texts.index(" more"))
    with qtbot.waitSignal(area.position_selected) as signal:
        qtbot.keyClick(area, key.Key_Escape)
    assert signal.args == [None]
    assert area.current == -1


def drag(area: TokenArea, qtbot: QtBot, first: str, last: str) -> None:
    x0, y0, w0, h0 = box_of(area, first)
    x1, y1, w1, h1 = box_of(area, last)
    view, left = area.viewport(), Qt.MouseButton.LeftButton
    qtbot.mousePress(view, left, pos=QPoint(x0 + w0 // 2, y0 + h0 // 2))
    qtbot.mouseMove(view, QPoint(x1 + w1 // 2, y1 + h1 // 2))
    qtbot.mouseRelease(view, left, pos=QPoint(x1 + w1 // 2, y1 + h1 // 2))


def test_dragging_selects_for_copying(show: Callable[..., Shown], qtbot: QtBot) -> None:
    area, _ = show(every_kind())
    assert area.copy_text() == " target accepted replacement bonus again more"
    with qtbot.assertNotEmitted(area.position_selected):
        drag(area, qtbot, " target", " replacement")
    assert area.copy_text() == " target accepted replacement"
    qtbot.keyClick(area, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    assert QGuiApplication.clipboard().text() == " target accepted replacement"
    drag(area, qtbot, " ignored", " rejected")
    assert area.copy_text() == " rejected ignored"


def test_positions_from_elsewhere(show: Callable[..., Shown]) -> None:
    area, run = show(sample_trace(rounds=200), height=120)
    stream = run.by_seq[0]
    middle = next(i for i, number in enumerate(stream.rounds) if number == 90)
    area.set_cursor(Position(run.run, 0, 90, None))
    assert area.current == middle
    assert middle in {span.token for span, _ in area._spans_in_sight()}
    assert not area.follow
    before = area.verticalScrollBar().value()
    area.set_cursor(Position(run.run, 1, 5, None))  # another sequence: nothing moves
    assert area.current == -1
    assert area.verticalScrollBar().value() == before
    area.set_cursor(Position(run.run.sibling(7), 0, 5, None))
    assert area.current == -1
    area.set_cursor(Position(run.run, 0, 5000, None))
    assert area.current == -1


def test_following_the_newest(show: Callable[..., Shown], qtbot: QtBot) -> None:
    builder = sample_trace(rounds=100)
    area, run = show(builder, height=120)
    bar = area.verticalScrollBar()
    assert area.follow
    assert bar.value() == bar.maximum() > 0
    builder.draft(["\n", "\n"], "newest")
    run.poll()
    area.grow()
    assert bar.value() == bar.maximum()
    box_of(area, "newest")

    with qtbot.waitSignal(area.follow_changed) as signal:
        bar.setValue(bar.value() - 60)
    assert signal.args == [False]
    assert area._chip.isVisible()
    kept = bar.value()
    builder.draft(["\n", "\n"], "newer")
    run.poll()
    area.grow()
    assert bar.value() == kept
    with qtbot.waitSignal(area.follow_changed):
        qtbot.mouseClick(area._chip, Qt.MouseButton.LeftButton)
    assert area.follow
    assert not area._chip.isVisible()
    box_of(area, "newer")
    bar.setValue(0)
    assert not area.follow
    bar.setValue(bar.maximum())
    assert area.follow


def test_resizing_keeps_the_place(show: Callable[..., Shown]) -> None:
    area, _ = show(sample_trace(rounds=400))
    area.verticalScrollBar().setValue(area.verticalScrollBar().maximum() // 2)
    top = next(area._spans_in_sight())[0].token
    area.resize(300, 200)
    finish(area)
    shown = [span.token for span, _ in area._spans_in_sight()]
    assert top in shown[:20]
    area.set_ghosts(False)
    finish(area)
    shown = [span.token for span, _ in area._spans_in_sight()]
    assert shown[0] - 20 <= top <= shown[-1]


class _Ticks:
    """A clock that moves whenever it is read, so that a slice has this many looks at it."""

    def __init__(self, looks: float) -> None:
        self._now, self._step = 0.0, SLICE_SECONDS / looks

    def perf_counter(self) -> float:
        self._now += self._step
        return self._now


@pytest.mark.parametrize("looks", [0.5, 3, 20], ids=["busy", "slow", "fast"])
@pytest.mark.thinned(4)
def test_a_long_stream_is_shown_before_it_is_laid_out(
    show: Callable[..., Shown], monkeypatch: pytest.MonkeyPatch, looks: float
) -> None:
    monkeypatch.setattr("app.panels.tokens.token_layout.time", _Ticks(looks))
    area, run = show(repeated(sample_trace(rounds=250), 100))
    stream = run.by_seq[0]
    assert len(stream) > 90_000
    area.resize(300, 200)
    QApplication.processEvents()
    rows = area._rows
    assert rows is not None
    assert not rows.layout.complete
    assert area.follow
    shown = [span.token for span, _ in area._spans_in_sight()]
    assert shown[-1] == len(stream) - 1
    finish(area)
    after = [span.token for span, _ in area._spans_in_sight()]
    assert after[-1] == len(stream) - 1
    # half-way up, narrower again: the same token on top, at once
    bar = area.verticalScrollBar()
    bar.setValue(bar.maximum() * 3 // 4)
    top = next(area._spans_in_sight())[0].token
    area.resize(280, 200)
    QApplication.processEvents()
    assert area._rows is not None
    assert area._rows.preview is not None
    assert abs(next(area._spans_in_sight())[0].token - top) <= 1
    area.set_follow(False)
    finish(area)
    assert abs(next(area._spans_in_sight())[0].token - top) < 20
    # the end of what is laid out so far is not the newest token
    bar.setValue(0)
    area.resize(310, 200)
    QApplication.processEvents()
    assert not area._rows.layout.complete
    bar.setValue(bar.maximum())
    assert not area.follow
    # to a token that a layout has not reached yet
    area.resize(320, 200)
    QApplication.processEvents()
    area.set_cursor(Position(run.run, 0, 24_000, None))
    assert area.current in {span.token for span, _ in area._spans_in_sight()}
    finish(area)
    assert area.current in {span.token for span, _ in area._spans_in_sight()}


def test_the_tooltip_gives_the_numbers(show: Callable[..., Shown], qtbot: QtBot) -> None:
    area, run = show(every_kind())
    stream = run.by_seq[0]
    tip = token_tip(stream, stream.texts.index(" rejected"))
    for fact in ("rejected", "' rejected'", "0.33", "0.44", ">2<", ">3<"):
        assert fact in tip
    assert "target p" not in token_tip(stream, stream.texts.index(" ignored"))
    assert "replayed" in token_tip(stream, stream.texts.index(" again"))
    x, y, width, height = box_of(area, " bonus")
    place = QPoint(x + width // 2, y + height // 2)
    event = QHelpEvent(QEvent.Type.ToolTip, place, area.viewport().mapToGlobal(place))
    QApplication.sendEvent(area.viewport(), event)
    assert "bonus" in QToolTip.text()
    QToolTip.hideText()


def test_markup_in_a_token_is_text(show: Callable[..., Shown]) -> None:
    builder = TraceBuilder()
    builder.prompt(["<b>bold</b>"])
    _, run = show(builder)
    assert "&lt;b&gt;bold" in token_tip(run.by_seq[0], 0)


def test_a_theme_change_repaints(show: Callable[..., Shown]) -> None:
    area, _ = show(every_kind(), Theme("dark"))
    light = Theme("light")
    area._theme.become("light")
    image = area.viewport().grab().toImage()
    assert light.color("accepted.tint").name() in colours_in(image, box_of(area, " accepted"))
    assert image.pixelColor(470, 190) == light.color("ui.panel")


def test_an_empty_area_takes_every_key(show: Callable[..., Shown], qtbot: QtBot) -> None:
    area = TokenArea(Theme("dark"))
    qtbot.addWidget(area)
    for key in (Qt.Key.Key_End, Qt.Key.Key_Up, Qt.Key.Key_Return):
        qtbot.keyClick(area, key)
    area.step_rejection(+1)
    assert area.copy_text() == ""
    assert area.current == -1


def test_wide_characters_are_measured_not_counted(show: Callable[..., Shown]) -> None:
    builder = TraceBuilder()
    builder.prompt(["推测解码", "abcd", "🎉"])
    area, _ = show(builder)
    x, _, width, _ = box_of(area, "推测解码")
    after, _, _, _ = box_of(area, "abcd")
    assert abs(after - x - width) <= 1
    assert width == round(area._metrics.width("推测解码"))


def test_a_position_leads_to_what_was_emitted_there(show: Callable[..., Shown]) -> None:
    area, _run = show(every_kind())
    stream = area.stream
    assert stream is not None
    drafted, emitted = stream.texts.index(" rejected"), stream.texts.index(" replacement")
    pos = stream.position(emitted)
    assert stream.position(drafted) == pos and drafted < emitted
    area.set_cursor(Position(stream.run, 0, stream.rounds[emitted], pos))
    assert area.current == emitted
    area.set_cursor(Position(stream.run, 0, stream.rounds[drafted], pos, stream.rows[drafted]))
    assert area.current == drafted, "a row names one of both"


def test_larger_letters_take_more_room_and_keep_the_token(show: Callable[..., Shown]) -> None:
    area, _ = show(every_kind(), width=200)
    area.go_to(3)
    chosen, rows = area.current, [area._metrics.row_height]
    for zoom in (10, -4, 0):
        area.set_zoom(zoom)
        rows.append(area._metrics.row_height)
        assert area.current == chosen
    assert rows[2] < rows[0] == rows[3] < rows[1]


def test_a_text_that_is_resized_several_times_at_once_is_laid_out_once(
    show: Callable[..., Shown],
) -> None:
    area, _ = show(sample_trace())
    rows = area._rows
    area.resize(300, 200)
    area.resize(310, 200)
    assert area._rows is rows
    QApplication.processEvents()
    assert area._rows is not rows
