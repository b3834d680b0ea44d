"""Markdown as plain text: every block of the subset, widths, links."""

from __future__ import annotations

import re

import pytest

from app.cli.help import plain_text
from resources import help_page, help_topics


@pytest.mark.parametrize(
    ("markdown", "text"),
    [
        ("# A `b`", "A b\n===\n"),
        ("## Two **words**", "Two words\n---------\n"),
        ("one\ntwo", "one two\n"),
        ("a\n\nb", "a\n\nb\n"),
        ("`n_max` and *x* of snake_case_name, _so_", "n_max and *x* of snake_case_name, so\n"),
        ("[here](https://a.b/c)", "here (https://a.b/c)\n"),
        ("the [ring](glossary.md#ring)", "the ring (see glossary)\n"),
        ("[glossary](glossary.md), [above](#above)", "glossary, above\n"),
        ("```sh\nrun  --x\n```\nend", "    run  --x\nend\n"),
        ("a:\n\n    code  here\n\nb", "a:\n\n    code  here\n\nb\n"),
        ("- one\n  more\n- two", "- one more\n- two\n"),
        ("| a | b |\n|---|---|\n| `xx` | y\\|z |", "a   b\n--  ---\nxx  y|z\n"),
    ],
)
def test_blocks(markdown: str, text: str) -> None:
    assert plain_text(markdown, 80) == text


def test_lines_are_wrapped_and_items_hang() -> None:
    text = plain_text("1. " + "word " * 20, 40)
    lines = text.splitlines()
    assert lines[0].startswith("1. word") and all(line.startswith("   word") for line in lines[1:])
    assert max(map(len, lines)) <= 40
    assert text.split() == ["1.", *["word"] * 20]


def test_a_wide_table_is_wrapped_within_its_columns() -> None:
    cell = " ".join(f"w{i}" for i in range(40))
    text = plain_text(f"| key | what |\n|---|---|\n| k | {cell} |", 50)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 50
    assert [word for line in lines[2:] for word in line[5:].split()] == cell.split()
    assert lines[2].startswith("k    w0") and lines[3].startswith("     ")


@pytest.mark.parametrize("topic", help_topics())
def test_pages_lose_no_word(topic: str) -> None:
    page = re.sub(r"(?<=\])\([^)]*\)|^```.*$", "", help_page(topic), flags=re.MULTILINE)
    assert set(re.findall(r"\w+", page)) <= set(
        re.findall(r"\w+", plain_text(help_page(topic), 2000))
    )


@pytest.mark.parametrize("topic", help_topics())
def test_pages_keep_the_width(topic: str) -> None:
    for width in (72, 80, 100):
        text = plain_text(help_page(topic), width)
        assert "](" not in text and "**" not in text and "<!--" not in text
        for line in text.splitlines():
            # code and words that cannot be broken are the only ones that may be longer
            assert len(line) <= width or line.startswith("  ") or " " not in line.strip(), line
