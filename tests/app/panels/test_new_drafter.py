"""A drafter is its module and a line in the registry: everything else follows from its record."""

from __future__ import annotations

from typing import Any

import pytest
from pytestqt.qtbot import QtBot

from app.__main__ import main
from app.cli.parser import parser_of
from app.cli.run_arguments import run_options
from app.panels.run_panel import RunPanel
from app.window.why_not_strip import why_not
from engine.draft.drafter import Draft
from engine.draft.ngram_drafter import History, NgramDrafter, NgramSizes, nothing
from engine.draft.registry import DRAFTERS, meaning
from engine.draft.spec import DrafterSpec
from engine.errors import OptionError
from tests.support.golden_runs import DATA, decode, prompt_of, session, tokens_of

MTP = "qwen35-c-v2x-mtp-f32"


class Echo(NgramDrafter):
    """Drafts the last token again, in every third round."""

    name, n_max = "echo", 2

    def __init__(self) -> None:
        super().__init__()
        self._n = 0

    def _look_up(self, seq: int, history: History, last: int) -> Draft:
        self._n += 1
        return Draft([last] * self.n_max) if self._n % 3 == 0 else nothing("out-of-breath")


SPEC = DrafterSpec(
    Echo.name,
    "the last token, again",
    lambda inputs: Echo(),
    NgramSizes,
    lambda sizes: Echo.n_max,
    field="ngram_simple",
    reasons={"out-of-breath": "an echo has to wait"},
    note=lambda sizes: "an echo is not a prophet.",
)


@pytest.fixture(autouse=True)
def _one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, SPEC.name, SPEC)


def parse(*words: str) -> Any:
    parser = parser_of("run")
    return run_options(parser.parse_args(words)), parser.format_help()


def test_the_command_line_knows_it() -> None:
    options, text = parse("--spec-type", "echo")
    assert options.spec.types == ("echo",)
    assert options.spec.longest == 2
    assert "draft-dspark,echo;" in "".join(text.split())
    with pytest.raises(OptionError, match=r"echoes is unknown\. .*draft-dspark, echo"):
        parse("--spec-type", "echoes")


def test_it_drafts_is_recorded_and_its_reasons_are_told() -> None:
    options, _ = parse("-n", "24", "--spec-type", "echo")
    plain, _ = parse("-n", "24")
    run = decode(session(MTP), [prompt_of(MTP)], options)
    assert tokens_of(run) == tokens_of(decode(session(MTP), [prompt_of(MTP)], plain))
    assert "echo" in run.summary()["drafters"]
    assert "echo" in run.trace.drafts.texts("drafter")
    assert meaning("out-of-breath") == "an echo has to wait"
    told = [one.sentence for one in why_not(run.trace, run.run_id)]
    assert any("echo found no draft" in one and "an echo has to wait" in one for one in told)


def test_the_form_offers_it(qtbot: QtBot) -> None:
    panel = RunPanel()
    qtbot.addWidget(panel)
    action = panel.drafter.actions_by_name["echo"]
    assert action.isEnabled() and action.toolTip() == "the last token, again"
    panel.drafter.set_names(["echo"])
    assert panel.options().spec.types == ("echo",)


def test_its_note_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("run", str(DATA / f"{MTP}.gguf"), "--tokens", "1,2,3", "-n", "2", "--threads", "1")
    assert main([*words, "--spec-type", "echo"]) == 0
    assert capsys.readouterr().err == "draftscope: note: an echo is not a prophet.\n"
