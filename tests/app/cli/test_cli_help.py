"""Pages of help on the command line."""

from __future__ import annotations

from collections.abc import Callable

from resources import help_topics
from tests.app.cli.conftest import Outcome

Cli = Callable[..., Outcome]


def test_topics_and_pages(cli: Cli) -> None:
    lines = cli("help").out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(help_topics())
    page = cli("help", "what-it-sees").out
    assert page == help_topics()["what-it-sees"].read_text(encoding="utf-8")
    assert cli("help", "no-such-topic").status == 2
