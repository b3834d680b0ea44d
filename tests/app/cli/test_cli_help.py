"""Pages of help on the command line: the list, a page, the nearest name, the pager."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli.help import plain_text
from resources import help_page, help_topics
from tests.app.cli.conftest import ROOT, Outcome

Cli = Callable[..., Outcome]


def test_the_list_has_every_page_with_its_title(cli: Cli) -> None:
    for words in (["help"], ["help", "--help"]):
        out = cli(*words).out
        lines = [line.split(maxsplit=1) for line in out.splitlines() if line.startswith("  ")]
        assert {name: title for name, title in lines if name in help_topics()} == help_topics()
    assert {path.stem for path in (ROOT / "resources" / "help").iterdir()} == set(help_topics())


@pytest.mark.parametrize("topic", help_topics())
def test_every_page_is_printed(cli: Cli, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    outcome = cli("help", topic)
    assert outcome.status == 0
    assert outcome.out == plain_text(help_page(topic), 90)


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("rolback", "Did you mean rollback?"),
        ("Memory_Scripts.md", ""),
        ("llamacpp", "Did you mean llama-cpp?"),
        ("zzzz", "Choose from acceptance, commands, compare"),
        ("\x1b[2J", r"'\x1b[2J'"),
    ],
)
def test_an_unknown_topic_names_the_nearest(cli: Cli, topic: str, said: str) -> None:
    outcome = cli("help", topic)
    assert outcome.status == (2 if said else 0)
    assert said in outcome.err and "\x1b" not in outcome.err


@pytest.mark.skipif(os.name != "posix", reason="terminals as on POSIX")
@pytest.mark.parametrize(
    ("pager", "is_paged"), [("{pager} -x", True), ("", False), ("no-such-program", False)]
)
def test_a_terminal_gets_the_pager(tmp_path: Path, pager: str, is_paged: bool) -> None:
    script = tmp_path / "pager"
    script.write_text('#!/bin/sh\necho "$1 $LESS"\ncat > "$0.out"\n')
    script.chmod(0o755)
    env = {**os.environ, "PAGER": pager.format(pager=script), "LESS": "F", "COLUMNS": "80"}
    master, slave = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "app", "help", "sweeps"], cwd=ROOT, env=env, stdout=slave
    )
    os.close(slave)
    said = b""
    try:
        while part := os.read(master, 4096):
            said += part
    except OSError:  # the end of a terminal
        pass
    os.close(master)
    assert done.returncode == 0
    page = plain_text(help_page("sweeps"), 80)
    if is_paged:
        assert said == b"-x F\r\n"
        assert (tmp_path / "pager.out").read_text() == page
    else:
        assert said.decode() == page.replace("\n", "\r\n")
        assert not (tmp_path / "pager.out").exists()
