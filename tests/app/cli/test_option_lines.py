"""Pages of commands: what their lines declare, and that every page is one of a command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli import option_lines
from app.cli.option_lines import declare
from app.cli.parser import KINDS, SUBCOMMANDS, module_of
from resources import COMMANDS

PAGE = """usage: tool FILE [options]
first: --size
---
file=FILE  what is read
pair=NAME x2  two of them
what is made
  > Of {material}.
  --size N  how large (default {size})
  -k, --kind {kinds}  which (default b)
  --tag NAME*  repeatable
  --tags NAME?*  repeatable, too
  --out OUT!  where it goes, which is a long text that goes
      on in another line
  | --fast  in a hurry
  | --slow  with care
options
  --[no-]check  look at it
  +more {}
what is made
  @--seed?  where chance begins, {about}
  @colours
---
Of {sizes}.
+more {}
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., argparse.ArgumentParser]:
    (tmp_path / "tool.txt").write_text(PAGE, encoding="utf-8")
    (tmp_path / "shared.txt").write_text("[more]\n  --json  print {}\n", encoding="utf-8")
    monkeypatch.setattr(option_lines, "COMMANDS", tmp_path)
    for cached in (option_lines.page, option_lines._shared):
        cached.cache_clear()
        monkeypatch.setattr(option_lines, cached.__name__, cached.__wrapped__)

    def make(**given: object) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(exit_on_error=False)
        given = {"material": ("oak", "ash"), "size": 7, "kinds": ("a", "b"), "colours": (), **given}
        declare(parser, "app.cli.tool", sizes={"s": "small", "l": ("large",)}, **given)
        return parser

    return make


def test_a_page_declares_its_options(made: Callable[..., argparse.ArgumentParser]) -> None:
    found = vars(
        made().parse_args(
            ["f", "a", "b", "--out", "o", "--tag", "x", "--tag", "y", "--slow", "--no-check"]
        )
    )
    assert found == {
        "file": Path("f"),
        "pair": ["a", "b"],
        "size": 7,
        "kind": "b",
        "tag": ["x", "y"],
        "tags": None,
        "out": Path("o"),
        "fast": False,
        "slow": True,
        "check": False,
        "json": False,
        "seed": None,
    }


def test_a_page_says_what_it_is_given(made: Callable[..., argparse.ArgumentParser]) -> None:
    parser = made()
    assert parser.usage == "tool FILE [options]"
    assert parser.epilog == "Of s: small; l: large.\n  --json  print {}"
    text = " ".join(parser.format_help().split())
    assert "what is made: Of oak, ash. --size N how large (default 7)" in text
    assert "which is a long text that goes on in another line" in text
    assert "where chance begins, seed" in text


@pytest.mark.parametrize("words", ["f a b", "f a --out o", "f a b --out o --fast --slow"])
def test_what_has_to_be_given_and_excludes_another(
    made: Callable[..., argparse.ArgumentParser], words: str
) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        made().parse_args(words.split())


def test_every_page_is_one_of_a_command() -> None:
    kinds = [f"{name} {kind}" for name in KINDS for kind in KINDS[name]]
    modules = {module_of(name).rpartition(".")[2] for name in ("", *SUBCOMMANDS, *kinds)}
    assert {path.stem for path in COMMANDS.glob("*")} == modules | {"index", "shared"}
