"""The one place where the command line writes: what it lets through, and that there is no other."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import app
from app.cli.output import (
    end_text,
    in_columns,
    json_text,
    print_line,
    print_text,
    print_texts,
    show_progress,
    tell,
)
from engine.plain_text import TEXT, terminal_text
from tests.support.hostile_words import HOSTILE, left_of

PROGRAM = Path(app.__file__).parent
WRITES = PROGRAM / "cli" / "output.py"
_WRITES = re.compile(r"print$|pprint|os\.write$|sys\.(__)?std(out|err)(__)?\.(?!isatty|fileno)")


def test_a_line_is_one_line_of_printable_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(f"{HOSTILE}\ud800é\u00a0漢👍\t")
    tell(HOSTILE)
    said = capsys.readouterr()
    assert said.out.endswith("\\ud800é\u00a0漢👍\\t\n") and said.out.count("\n") == 1
    assert said.err.startswith("draftscope: a\\x1b]0;b\\x07\\x9b31m\\u202e") and not left_of(
        said.err
    )


@given(st.text(st.characters(codec=None), max_size=40))
def test_nothing_else_passes(text: str) -> None:
    line = terminal_text(text)
    assert not left_of(line) and "\n" not in line and "\t" not in line
    assert terminal_text(line) == line
    assert not left_of(terminal_text(text, TEXT))


def test_colours_are_added_behind_the_filter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_texts([("\x1b[31m\n", "1;32")])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_texts([("\x1b[31m\n", "1;32")])
    monkeypatch.setenv("TERM", "dumb")
    print_texts([("\x1b[31m\n", "1;32")])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    print_texts([("\x1b[31m\n", "1;32")])
    show_progress("5 % \x1b[2J")
    said = capsys.readouterr()
    assert said.out == "\x1b[31m\n" + "\x1b[1;32m\\x1b[31m\n\x1b[0m" + "\\x1b[31m\n" * 2
    assert said.err == "\r\x1b[K5 % \\x1b[2J"


def test_a_message_is_not_glued_to_the_text_of_a_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    for words in ("text", "text\n"):
        print_text(words)
        tell("written")
        tell("again")
        end_text()
        assert capsys.readouterr() == ("text\n\n", "draftscope: written\ndraftscope: again\n")
    print_text("text")
    end_text()
    assert capsys.readouterr().out == "text\n\n"


@given(st.recursive(st.text(st.characters(exclude_categories=["Cs"])), st.lists, max_leaves=5))
def test_json_is_harmless_and_equal_after_parsing(value: object) -> None:
    text = json_text({"a": value})
    assert not left_of(text) and "\t" not in text and "\u200d" not in text
    assert json.loads(text) == {"a": value}


def test_json_keeps_what_is_readable() -> None:
    assert json_text("größe 漢\u3000👍") == '"größe 漢\u3000👍"'
    assert json_text("\x9b\u202e\u2028\ud800\U000e0041\x7f\u200d") == (
        '"\\u009b\\u202e\\u2028\\ud800\\udb40\\udc41\\u007f\\u200d"'
    )
    assert json.loads(json_text(HOSTILE + "\udcff")) == HOSTILE + "\udcff"


def test_a_column_is_as_wide_as_its_widest_cell() -> None:
    rows = [("lane", "n", "note"), ("a", "100", ""), ("longest", "-", "as before")]
    assert [*in_columns(rows, (False, True, False))] == [
        "lane       n  note",
        "a        100",
        "longest    -  as before",
    ]


def test_nothing_else_writes() -> None:
    for path in PROGRAM.rglob("*.py"):
        if path == WRITES or path.is_relative_to(PROGRAM / "bench"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            said = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert not _WRITES.match(said), f"{path}, line {node.lineno}: {said}"
