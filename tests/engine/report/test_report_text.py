"""Untrusted text: what a page and a comment make of it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from engine.report.page import html_page
from engine.report.parts import CODE, Plot, Remark, Report, ReportTable, Section, Tokens
from engine.report.text import (
    escape,
    escape_lines,
    markdown,
    markdown_block,
    markdown_cell,
    table_lines,
    visible,
)

HOSTILE = (
    "<script>alert(1)</script>",
    "</pre></td><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "' onmouseover='x",
    "<style>*{display:none}</style>",
    "<!-- ",
    "]]>",
    "&lt;b&gt;",
    "a|b\n|---|\n`code` **bold** [x](javascript:alert(1)) ![i](http://evil.example/x.png)",
    "@everyone fixes #1 https://evil.example",
    "\u202eevil\u202c",
    "\x00\x1b[31m\ud800",
    "```\n# heading\n```",
    "- item",
    "12. item",
)

ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "b", "section"),
    *("div", "table", "tr", "th", "td", "pre", "span", "figure"),
    *("svg", "text", "rect", "line", "circle", "path"),
}


class Reader(HTMLParser):
    """Tags with their attributes, and the text outside of the style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] != "style":
            self.text += data


def names_in(page: Reader) -> list[tuple[str, list[str]]]:
    """Tags with the names of their attributes; short cells have a class."""
    return [(tag, sorted({*attributes} - {"class"})) for tag, attributes in page.tags]


def report_of(text: str) -> Report:
    """The text in every place that a report has."""
    parts = [
        ReportTable([text, "n"], [[text, "1"]], title=text),
        {text: text},
        Remark(text, text),
        Remark(text, CODE),
        Tokens(text, [(text, "accepted"), (text, text)]),
        *(
            Plot(kind, text, [text, text], {text: [1.0, 2.0], text + "2": [3.0, None]}, text)
            for kind in ("bars", "columns", "lines", "heat")
        ),
    ]
    return Report(text, text, [Section(text, parts)])


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_in_a_page_comes_from_a_text(text: str) -> None:
    page = html_page(report_of(text))
    plain = Reader(html_page(report_of("plain")))
    found = Reader(page)
    assert names_in(found) == names_in(plain)
    assert {tag for tag, _ in found.tags} <= ALLOWED
    for _, attributes in found.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name not in ("src", "href", "xlink:href")
            if name == "style":
                assert re.fullmatch(r"fill-opacity:[0-9.]+", value or "")
    page.encode("utf-8")
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x09\x0b-\x1f\x7f]", page)


def test_a_page_needs_nothing_else() -> None:
    page = html_page(report_of("plain"))
    assert "default-src 'none'" in page
    assert not re.search(r"https?:|url\(|@import|<link|<script", page)
    assert "prefers-color-scheme:dark" in page
    assert "@media print" in page


@pytest.mark.parametrize("text", HOSTILE)
def test_a_table_in_markdown_keeps_its_shape(text: str) -> None:
    lines = list(table_lines(ReportTable([text, "n"], [[text, "1"]])))
    assert len(lines) == 3
    for line in lines:
        assert len(re.findall(r"(?<!\\)\|", line)) == 3
    cell = markdown_cell(text)
    bare = re.sub(r"\\.", "", cell)
    assert not re.search(r"[`*_\[\]<>|~]", bare)
    assert not re.search(r"@\w|#\w|://", bare)
    assert not re.match(r"(\d*[.)]|[-+]) ", bare)


def test_what_is_harmless_stays_readable() -> None:
    for text in ("draft-mtp", "0.66", "1,024", "-1", "qwen35 (q8 0)", "größe", "a b"):
        assert (escape(text), markdown_cell(text)) == (text, text)
    assert escape_lines("a  b\n\tc") == "a  b\n    c"
    assert visible("a\u200bb\u00a0c") == "a⟨U+200B⟩b c"


def test_a_block_cannot_be_left() -> None:
    block = markdown_block("```\n````\nend").split("\n")
    assert (block[0], block[-1]) == ("`````", "`````")
    whole = markdown(report_of("```\n# x\n```"))
    assert "\n# x\n" in whole  # within the fence
    assert whole.count("````\n```\n# x\n```\n````") == 1


def test_ghosts_are_in_the_page_and_not_in_the_text() -> None:
    report = Report("t", "s", [Section("h", [Tokens("one", [("a", "target"), ("b", "rejected")])])])
    assert '<span class="rejected">b</span>' in html_page(report)
    assert "```\na\n```" in markdown(report)
