"""The pages of help in the window: every page, links, search, both themes."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import QTextTable
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.window.dialogs.help import HelpPages, blocks, heading_position, slug
from app.window.window import MainWindow
from resources import help_page, help_topics

pytestmark = pytest.mark.shares_window

SHIFT = Qt.KeyboardModifier.ShiftModifier


@pytest.fixture
def pages(window: MainWindow, qtbot: QtBot) -> HelpPages:
    window.actions_by_id["help.pages"].trigger()
    found = window.findChild(HelpPages)
    assert found is not None and found.isVisible() and not found.isModal()
    return found


def titles(pages: HelpPages) -> list[str]:
    return [pages.list.item(row).text() for row in range(pages.list.count())]


def top_text(pages: HelpPages) -> str:
    """What is selected, or the block of the cursor."""
    cursor = pages.browser.textCursor()
    return cursor.selectedText() or cursor.block().text()


def test_every_page_is_listed_and_shown(pages: HelpPages) -> None:
    assert titles(pages) == list(help_topics().values())
    for row, (topic, title) in enumerate(help_topics().items()):
        pages.list.setCurrentRow(row)
        assert pages.browser.topic == topic
        text = pages.browser.toPlainText()
        assert text.splitlines()[0] == title
        assert "](" not in text and "<!--" not in text
        n_tables = sum(
            isinstance(frame, QTextTable)
            for frame in pages.browser.document().rootFrame().childFrames()
        )
        lines = help_page(topic).splitlines()
        rules = [line for line in lines if line.startswith("|") and set(line) <= set("|- :")]
        assert n_tables == len(rules)


def test_it_opens_once(pages: HelpPages, window: MainWindow) -> None:
    window.actions_by_id["help.pages"].trigger()
    assert window.findChildren(HelpPages) == [pages]


def test_links_lead_to_pages_and_headings_and_back(pages: HelpPages) -> None:
    browser = pages.browser
    browser.open("rollback")
    assert not pages.forward.isEnabled()
    browser.setSource(QUrl("glossary.md#ring"))
    assert browser.topic == "glossary"
    assert browser.textCursor().block().text() == "Ring"
    assert browser.cursorRect().top() < browser.viewport().height() / 2
    assert pages.list.currentItem().text() == "Glossary"
    pages.back.click()
    assert browser.topic == "rollback" and pages.forward.isEnabled()
    pages.forward.click()
    assert browser.topic == "glossary"


def test_every_link_has_its_target(pages: HelpPages) -> None:
    n = 0
    for topic in help_topics():
        pages.browser.open(topic)
        for block in blocks(pages.browser.document()):
            for form in block.textFormats():
                address = QUrl(form.format.anchorHref())
                if address.isEmpty() or address.scheme():
                    continue
                target = address.fileName().removesuffix(".md") or topic
                assert target in help_topics(), (topic, address)
                if address.hasFragment():
                    n += 1
                    document = pages._document(target)
                    assert heading_position(document, address.fragment()) > 0, (topic, address)
    assert n > 20


def test_search_lists_hits_of_all_pages_with_context(pages: HelpPages, qtbot: QtBot) -> None:
    qtbot.keyClicks(pages.field, "STALE PLANE")
    hits = titles(pages)
    said = sum(pages._document(t).toPlainText().lower().count("stale plane") for t in help_topics())
    assert len(hits) == said > 0
    assert all("stale plane" in hit.lower() for hit in hits)
    cut = [set(hit.split("\n")[1].strip("… ").split()) for hit in hits]
    known = {
        word for topic in pages._topics for word in pages._document(topic).toPlainText().split()
    }
    assert all(words <= known for words in cut), "whole words"
    assert pages.count.text().startswith(f"{said} hit")
    qtbot.keyClick(pages.field, Qt.Key.Key_Return)
    assert top_text(pages).lower() == "stale plane"
    assert pages.browser.extraSelections()
    qtbot.keyClicks(pages.field, " that is not there")
    assert titles(pages) == [] and pages.count.text() == "0 hits on 0 pages"
    assert not pages.next.isEnabled()
    pages.field.clear()
    assert titles(pages) == list(help_topics().values())
    assert pages.count.text() == "" and not pages.browser.extraSelections()


def test_next_and_previous_go_around(pages: HelpPages, qtbot: QtBot) -> None:
    pages.activateWindow()
    qtbot.keyClicks(pages.field, "n_rs_seq")
    n = pages.list.count()
    seen = []
    for _ in range(n):
        qtbot.keyClick(pages, Qt.Key.Key_F3)
        assert top_text(pages) == "n_rs_seq"
        seen.append((pages.browser.topic, pages.browser.textCursor().position()))
    assert len(set(seen)) == n > 3
    qtbot.keyClick(pages, Qt.Key.Key_F3)
    assert (pages.browser.topic, pages.browser.textCursor().position()) == seen[0]
    qtbot.keyClick(pages, Qt.Key.Key_F3, SHIFT)
    assert (pages.browser.topic, pages.browser.textCursor().position()) == seen[-1]


def test_a_theme_recolours_the_page_and_keeps_the_place(
    pages: HelpPages, window: MainWindow
) -> None:
    looks = {}
    pages.browser.open("measurements")
    bar = pages.browser.verticalScrollBar()
    bar.setValue(bar.maximum() // 2)
    place = bar.value()
    for theme in ("light", "dark"):
        window.appearance.set_theme(theme)
        QApplication.processEvents()  # palettes are passed on by events
        assert bar.value() == place > 0
        image = pages.browser.viewport().grab().toImage()
        corner = image.pixelColor(4, image.height() // 2)
        pages.browser.open("rollback")
        links = {
            form.format.foreground().color().name()
            for block in blocks(pages.browser.document())
            for form in block.textFormats()
            if form.format.isAnchor()
        }
        looks[theme] = (corner.lightness() > 128, links)
        pages.browser.open("measurements")
        bar.setValue(place)
    assert looks["light"][0] and not looks["dark"][0]
    assert looks["light"][1].isdisjoint(looks["dark"][1])


def test_only_pages_are_loaded(pages: HelpPages) -> None:
    assert pages.browser.loadResource(2, QUrl("file:///etc/passwd")) is None
    assert pages.browser.loadResource(2, QUrl("../../README.md")) is None


@pytest.mark.parametrize(
    ("heading", "fragment"),
    [("On a GPU", "on-a-gpu"), ("n_rs_seq", "n_rs_seq"), ("A, b: (c)", "a-b-c")],
)
def test_fragments_are_githubs(heading: str, fragment: str) -> None:
    assert slug(heading) == fragment
