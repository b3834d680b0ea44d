"""The parsers: a short help that hides nothing for good, and names known from other engines."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

import pytest

from app.cli.parser import KINDS, SUBCOMMANDS, elsewhere, first_options, parser_of
from tests.app.cli.conftest import Outcome

Cli = Callable[..., Outcome]
ALL_KINDS = tuple(f"{name} {kind}" for name, kinds in KINDS.items() for kind in kinds)
LONG = tuple(name for name in (*SUBCOMMANDS, *ALL_KINDS) if first_options(name))


def options_of(name: str) -> set[str]:
    return set(parser_of(name)._option_string_actions)


@pytest.mark.parametrize("name", [*SUBCOMMANDS, *ALL_KINDS, ""])
def test_the_whole_help_has_every_option(cli: Cli, name: str) -> None:
    parser = parser_of(name)
    words = name.split()
    flag = "--help-all" if name in LONG else "--help"
    outcome = cli(*words, flag)
    assert outcome.status == 0
    named = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", outcome.out))
    shown = [a for a in parser._actions if a.help != argparse.SUPPRESS]
    assert {flags[-1] for a in shown if (flags := a.option_strings)} <= named


@pytest.mark.parametrize("name", LONG)
def test_the_short_help_has_ten_options(cli: Cli, name: str) -> None:
    first = first_options(name)
    assert len(first) == 10 and set(first) <= options_of(name)
    out = cli(*name.split(), "--help").out
    listed = re.findall(r"^  (--?[\w-]+)", out.partition("All ")[0], re.MULTILINE)
    assert listed == first
    assert f"draftscope {name} --help-all" in out
    full = cli(*name.split(), "--help-all").out
    assert len(out.splitlines()) < len(full.splitlines()) / 1.6


def test_names_elsewhere_are_none_of_ours_and_lead_to_ours() -> None:
    ours = set().union(*(options_of(name) for name in SUBCOMMANDS))
    assert not set(elsewhere()[0]) & options_of("run")
    for name, found in elsewhere()[0].items():
        for option in re.findall(r"(?<!\w)--?[a-z][\w-]*", found):
            assert option in ours, (name, option)
    assert not set(elsewhere()[1]) & set(SUBCOMMANDS)
    for name, said in elsewhere()[1].items():
        for word in re.findall(r"draftscope ([a-z][\w-]*)", said):
            assert word in SUBCOMMANDS or word == "without", name


@pytest.mark.parametrize("words", [["compare", "--list-scenarios"], ["memory", "--list"]])
def test_lists_are_json_too(cli: Cli, words: list[str]) -> None:
    found = cli(*words, "--json").json
    assert [line.split(maxsplit=1) for line in cli(*words).out.splitlines()] == [
        [name, title] for name, title in found.items()
    ]


def test_every_command_takes_help_all(cli: Cli) -> None:
    for name in ("info", "bench forward", "help", "sweep"):
        outcome = cli(*name.split(), "--help-all")
        assert outcome.status == 0 and f"draftscope {name} " in outcome.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["triage", ".", ".", "--compute", "q8"], "--compute has no effect without --rescore."),
        (["triage", ".", ".", "--demo", "--probe"], "--probe has no effect without --server URL."),
        (
            ["rescore", ".", "--demo", "--timeout", "3"],
            "--timeout has no effect without --server URL.",
        ),
        (["acceptance", ".", "--run-b", "1"], "--run-b has no effect without a second TRACE."),
        (
            ["drafter-diff", ".", ".", "-p", "a"],
            "-p has no effect without a run that is decoded now.",
        ),
        (["drafter-diff", ".", ".", "--compute", "q8"], "--compute has no effect without --model."),
        (
            ["drafter-diff", ".", ".", "--spec-type", "none"],
            "--spec-type has no effect without --model.",
        ),
        (
            ["run", "--demo", "-p", "a", "--from-seq=1"],
            "--from-seq has no effect without --from TRACE.",
        ),
        (["observe", "http://a", "-p", "a", "--assume-same"], "has no effect without --rescore."),
        (["observe", "http://a", "-p", "a", "--pass-unchanged"], "has no effect without --listen."),
        (["observe", "http://a", "--listen", "0", "-n9"], "-n has no effect without prompts."),
        (["bench", "forward", "--demo", "--draft", "1"], "--draft has no effect without --splits."),
        (
            ["bench", "forward", "--demo", "--splits", "--outputs", "all"],
            "no effect without --steps.",
        ),
        (
            ["memory", "--demo", "--all", "-ngl", "1"],
            "-ngl has no effect without --engine llama.cpp.",
        ),
        (
            ["compare", "--demo", "-p", "a", "-fa", "on"],
            "-fa has no effect without a lane of llama.cpp.",
        ),
    ],
)
def test_an_option_without_an_effect_is_refused(cli: Cli, words: list[str], said: str) -> None:
    outcome = cli(*words)
    assert outcome.status == 2 and said in outcome.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--demo", "-p", "a", "--trace", ""], "--trace: its value is empty"),
        (["run", "--demo", "-p", "a", "--spec-type="], "--spec-type: its value is empty"),
        (["run", "--demo", "-p", "a", "-n", "x"], "'x' is not a whole number"),
        (["info", "--demo", "-ctxcp", "-1"], "--ctx-checkpoints is negative."),
        (["check-rollback", "--demo", "--junit", "."], "--junit . is a folder."),
        (["bisect", "--demo", "--markdown", "no/such/x"], "--markdown no/such/x cannot be written"),
        (["conform", "draftscope", "--html", "."], "--html . is a folder."),
        (["bench", "slot", "--demo"], "There is no bench slot. Did you mean bench slots?"),
    ],
)
def test_a_value_that_cannot_be_is_refused_at_once(cli: Cli, words: list[str], said: str) -> None:
    outcome = cli(*words)
    assert outcome.status == 2 and said in outcome.err and len(outcome.err) < 1500


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--draft-max", "3"], "--draft-max is --spec-draft-n-max here."),
        (["run", "--demo", "--draft-min=3", "-p", "a"], "--draft-min is --spec-draft-n-min here."),
        (["run", "--demo", "-ngl", "99", "-p", "a"], "-ngl is --device cuda"),
        (["run", "--demo", "-fa", "on", "-p", "a"], "-fa has no counterpart here: attention"),
        (["run", "--demo", "-p", "a", "-fa"], "-fa has no counterpart here: attention"),
        (["run", "-hf", "a/b", "-p", "a"], "-hf has no counterpart here: nothing is downloaded"),
        (["info", "--demo", "-cb"], "-cb has no counterpart here: continuous"),
        (["run", "--demo", "-p", "a", "--n-max", "3"], "--n-max is --spec-draft-n-max here."),
        (["run", "--demo", "-p", "a", "--spec-type", "MTP"], "unknown. Choose from draft-mtp."),
        (["run", "--demo", "-p", "a", "--spec-type", "eagle3"], "Choose from draft-eagle3."),
        (["run", "--demo", "-p", "a", "--spec-type", "ngram_mod"], "Choose from ngram-mod."),
        (["run", "--demo", "-p", "a", "--spec-type", "x"], "Choose from none, ngram-simple,"),
        (["run", "--demo", "-np", "2", "-p", "a"], "-np is --parallel here."),
        (["run", "--speculative-config", "{}"], "is --spec-type and --spec-draft-n-max here."),
        (
            ["run", "--demo", "-p", "a", "--spec-draft-sampling", "probabilistic"],
            "--spec-draft-sampling is --spec-accept (rejection for probabilistic",
        ),
        (
            ["tokenize", "--n-gpu-layers", "1"],
            "here, but draftscope tokenize does not have that option.",
        ),
        (["run", "--spec-draft-nmax", "3"], "Did you mean --spec-draft-n-max?"),
        (["bench", "forward", "--demo", "--step", "3"], "Did you mean --steps?"),
        (["bench", "--w1", "--demo"], "Did you mean draftscope bench w1?"),
        (["inof", "m.gguf"], "Did you mean draftscope info?"),
        (["serve"], "draftscope observe URL --listen PORT"),
        (["--demo", "run"], "Write the subcommand first: draftscope run"),
        (["run", "--demo", "-p", "a", "--draft\x1b[2Jmax", "3"], r"--draft\x1b[2Jmax"),
    ],
)
def test_an_error_names_what_to_write(cli: Cli, words: list[str], message: str) -> None:
    outcome = cli(*words)
    assert outcome.status == 2
    assert message in outcome.err.splitlines()[-1]
    assert outcome.out == "" and "\x1b" not in outcome.err


def test_words_after_two_dashes_are_no_options(cli: Cli) -> None:
    assert "has no counterpart" not in cli("tokenize", "--demo", "--", "-fa", "x").err
