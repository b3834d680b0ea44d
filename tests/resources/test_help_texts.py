"""README and the pages of help: short enough, and everything that they name is there."""

from __future__ import annotations

import re
import shlex
from argparse import SUPPRESS
from functools import cache
from pathlib import Path

import pytest

from app.cli.parser import KINDS, SUBCOMMANDS, first_options, parser_of, split_command
from resources import HELP, help_topics

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = {"README": README, **{topic: HELP / f"{topic}.md" for topic in help_topics()}}
_OPTION = re.compile(r"(?<![\w`/-])(--?[a-z][\w-]*\w|-[a-z])(?![\w…-])")
FOREIGN_OPTIONS = {
    # llama-server, llama-bench, llama-spec-bench, vLLM
    *(
        "--metrics",
        "-lv",
        "--log-file",
        "--log-jsonl",
        "-embd",
        "--output-format",
        "-r",
        "--api-key",
    ),
    *("--per-request-spec-decode-metrics", "--spec-draft-sampling"),
    # pytest, bench of the window and of kernels, campaigns
    *("--only", "--pairs", "--readme", "--seconds", "--seed", "--starts", "--minutes", "--clean"),
    "--part",
    # bootstrap's own tools, pip, curl and cmake in the recipe of a server; flags of compilers
    *("-mno-amx-tile", "-e", "--no-binary", "--no-deps", "-v"),
}
"""Options on these pages that are not the program's."""


@cache
def options() -> frozenset[str]:
    kinds = [f"{name} {kind}" for name in KINDS for kind in KINDS[name]]
    names = ("", *SUBCOMMANDS, *kinds)
    return frozenset().union(*(parser_of(name)._option_string_actions for name in names))


def text_of(name: str) -> str:
    return PAGES[name].read_text(encoding="utf-8")


def code_of(name: str) -> list[str]:
    """What is set as code, in lines."""
    text = text_of(name)
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return [*inline, *(line for block in fenced for line in block.splitlines())]


def test_readme_is_short() -> None:
    assert len(text_of("README").splitlines()) <= 200
    assert README.stat().st_size <= 10 * 1024


def test_readme_keeps_the_set_up_commands() -> None:
    start = text_of("README").partition("## Start")[2]
    for goal in ("demo", "test", "help"):
        assert re.search(rf"^sh bootstrap {goal} +# ", start, re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_links_to_files_resolve(name: str) -> None:
    for address in re.findall(r"\]\(([^)\s]+)\)", text_of(name)):
        if address.startswith("http"):
            continue
        path, _, fragment = address.partition("#")
        target = (PAGES[name].parent / path) if path else PAGES[name]
        assert target.is_file(), address
        if fragment:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert fragment in slugs, address


def test_every_page_is_linked_from_another() -> None:
    linked = {
        Path(address).stem
        for name in PAGES
        for address in re.findall(r"\]\(([\w/-]+\.md)", text_of(name))
        if Path(address).stem != name
    }
    assert set(help_topics()) <= linked


@pytest.mark.parametrize("topic", help_topics())
def test_a_page_begins_with_its_title(topic: str) -> None:
    first, second, *_ = text_of(topic).splitlines()
    assert first.startswith("# ") and second == ""
    assert len(first) <= 66, "the list of pages has it in a line"


@pytest.mark.parametrize("name", PAGES)
def test_named_options_exist(name: str) -> None:
    for code in code_of(name):
        if code.lstrip().startswith(("cmake", "-D", "pip", "tar", "LLAMA", ".venv/bin/", "#")):
            continue
        for option in _OPTION.findall(code):
            assert option in options() | FOREIGN_OPTIONS, (code, option)


@pytest.mark.parametrize("command", [*SUBCOMMANDS, *(f"bench {kind}" for kind in KINDS["bench"])])
def test_options_of_the_short_help_are_on_a_page(command: str) -> None:
    """Those that --help shows; of a command without a list of such options, all."""
    named = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", "".join(map(text_of, help_topics()))))
    most_used = set(first_options(command))
    for action in parser_of(command)._actions:
        names = set(action.option_strings)
        is_shown = not most_used or names & most_used
        if names and is_shown and action.help != SUPPRESS and action.dest != "version":
            assert names & named, (command, action.option_strings)


@pytest.mark.parametrize("name", PAGES)
def test_named_commands_exist(name: str) -> None:
    for code in code_of(name):
        for word in re.findall(r"(?:^|/)draftscope ([a-z][a-z-]*)(?![\w./-])", code):
            assert word in SUBCOMMANDS, code


@pytest.mark.parametrize("name", PAGES)
def test_example_commands_parse(name: str) -> None:
    """Whole lines of code: each is taken by the parser as it is."""
    for code in code_of(name):
        if not re.match(r"(\.venv/bin/)?draftscope [a-z]", code):
            continue
        words = shlex.split(code.partition(" > ")[0], comments=True)
        # a command by its name alone, or with places to fill in
        if len(words) < 3 or re.search(r"[…\[|]|\b[A-Z]{3,}\b|--help", code):
            continue
        name, rest = split_command(words[1:])
        parser_of(name).parse_intermixed_args(rest)


@pytest.mark.parametrize("name", PAGES)
def test_named_files_exist(name: str) -> None:
    tops = "app|engine|kernels|resources|tests|\\.ci"
    for code in code_of(name):
        for path in re.findall(rf"(?<![\w/])((?:{tops})/[\w./-]*[\w/])", code):
            assert (ROOT / path).exists(), path
        for module in re.findall(r"python -m ([\w.]+)", code):
            if module.split(".")[0] in ("app", "engine", "kernels", "tests"):
                path = ROOT / module.replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_glossary_terms_are_linked_from_the_pages() -> None:
    linked = {
        fragment
        for name in PAGES
        for fragment in re.findall(r"glossary\.md#([\w-]+)\)", text_of(name))
    }
    wanted = {"plane", "carry", "ring", "noise-lane", "ghost-token", "valid-depth", "peer"}
    assert wanted <= linked
