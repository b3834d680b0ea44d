"""--report and --markdown of the commands that have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.app.cli.conftest import ROOT, Outcome

Cli = Callable[..., Outcome]

MTP = ROOT / "tests" / "data" / "qwen35-c-v2x-mtp-f32.gguf"
QUICK = ("--threads", "1", "-n", "4")


@pytest.mark.parametrize(
    ("command", "words", "title"),
    [
        ("run", ["-p", "def f", "--spec-type", "draft-mtp"], "Speculative decoding of qwen35-c"),
        ("compare", ["-p", "def f"], "Rollback compared: qwen35-c"),
        ("bench", ["--prompts", "python", "--spec-type", "none"], "Speculative decoding measured"),
    ],
)
def test_a_page_and_a_comment(
    cli: Cli, tmp_path: Path, command: str, words: list[str], title: str
) -> None:
    page = tmp_path / "page.html"
    outcome = cli(command, MTP, *words, *QUICK, "--report", page, "--markdown")
    assert outcome.status == 0
    assert outcome.out.startswith(f"### {title}")
    assert f"report written to {page}" in outcome.err
    text = page.read_text(encoding="utf-8")
    assert f"<h1>{title}" in text
    assert f"draftscope {command} {MTP}" in text
    assert str(page) in outcome.out.split("#### How to repeat it")[1]


def test_without_markdown_the_usual_text_is_printed(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("run", MTP, "-p", "def f", *QUICK, "--report", tmp_path / "page.html")
    assert outcome.out.startswith("def f")
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "none.gguf", "-p", "a", "--markdown", "--json"], "--markdown and --json"),
        (["run", "none.gguf", "-p", "a", "--report", "no/such/folder.html"], "--report no/such"),
        (["compare", "none.gguf", "-p", "a", "--report", "."], "is a folder"),
        (["sweep", "--demo", "--markdown", "--json"], "--markdown and --json"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_loaded(
    cli: Cli, words: list[str], message: str
) -> None:
    outcome = cli(*words)
    assert (outcome.status, message in outcome.err) == (2, True)
