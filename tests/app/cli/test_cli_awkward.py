"""Awkward values for every option of every subcommand: a sentence and a status, no traceback."""

from __future__ import annotations

from argparse import Action, ArgumentParser
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli.parser import SUBCOMMANDS, parser_of
from engine.errors import DraftscopeError
from tests.app.cli.conftest import Outcome
from tests.support.hostile_words import IN_A_NAME, left_of

Cli = Callable[..., Outcome]

AWKWARD = (
    "--",
    "",
    "-",
    "-1",
    "0",
    "nan",
    "-inf",
    "1e999",
    str(2**63),
    "9" * 5000,
    "x" * 5000,
    "\udcff",
    "a\nb",
    IN_A_NAME,
    "1,,2",
    "[" * 5000,
)
NAMES = ("", *SUBCOMMANDS)


def options(name: str) -> list[Action]:
    """Every option of a subcommand, or of the window, that takes a value."""
    parser: ArgumentParser = parser_of(name)
    return [a for a in parser._actions if a.option_strings and a.nargs != 0]


def words(name: str, action: Action, value: str, option: str = "") -> list[str]:
    """A command that gives the value to the option, on a model that is not there."""
    given = [f"{option or action.option_strings[-1]}={value}"]
    if action.nargs == 2:
        given = [action.option_strings[-1], value, value]
    texts = {"tokenize": ["text"], "logits": ["--tokens=1", "--out=x"], "run": ["-ptext"]}
    model = [] if name in ("demo-path", "help") else ["no-such.gguf"]
    return [*([name] if name else []), *model, *texts.get(name, []), *given]


def check(outcome: Outcome) -> None:
    assert outcome.status in (0, 1, 2)
    assert "Traceback" not in outcome.err
    assert not left_of(outcome.out + outcome.err)
    assert bool(outcome.err) == bool(outcome.status) or outcome.err.startswith("draftscope: note")


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files with awkward names are written nowhere else, and no window opens."""
    monkeypatch.chdir(tmp_path)

    def no_display() -> None:
        raise DraftscopeError("There is no display.", "Use a subcommand.")

    monkeypatch.setattr("app.cli.launch.check_display", no_display)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.thinned(4)
def test_two_dashes_are_a_value_like_others(cli: Cli, name: str) -> None:
    for action in options(name):
        for option in action.option_strings:
            check(cli(*words(name, action, "--", option)))


def test_two_dashes_can_be_a_prompt(cli: Cli) -> None:
    for given in (["-p=--"], ["--prompt=--"], ["-p--"]):
        assert "no-such.gguf" in cli("run", "no-such.gguf", *given).err


def distinct() -> list[tuple[str, Action]]:
    """Every option once, of the first subcommand that has it."""
    found: dict[str, tuple[str, Action]] = {}
    for name in reversed(NAMES):
        found |= {action.option_strings[-1]: (name, action) for action in options(name)}
    return list(found.values())


@pytest.mark.parametrize("value", AWKWARD, ids=lambda value: repr(value[:12]))
@pytest.mark.thinned(4)
def test_any_value_of_any_option_ends_in_a_sentence(cli: Cli, value: str) -> None:
    for name, action in distinct():
        check(cli(*words(name, action, value)))


@pytest.mark.parametrize("value", AWKWARD, ids=lambda value: repr(value[:12]))
def test_any_model_and_text_end_in_a_sentence(cli: Cli, value: str) -> None:
    for name in ("", "info", "run", "compare", "bench", "match", "fidelity"):
        check(cli(*([name] if name else []), value))
        check(cli(*([name] if name else []), f"--model={value}"))
    check(cli("tokenize", value, value))
    check(cli("tokenize", f"--model={value}", value))
