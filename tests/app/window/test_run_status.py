"""The card at the end of a run, the plain run that it is measured by, and how far a run is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.engine_thread.events import State
from app.panels.tokens.end_card import (
    COMPARE,
    FINDING,
    TUNE,
    EndCard,
    NextStep,
    RunEnd,
    run_end,
    why_it_ended,
)
from app.trace_models.live_numbers import LiveNumbers
from app.trace_models.run_facts import ModelRuns, plain_run
from app.window.run_status import duration_text, progress_text
from app.window.window import MainWindow
from engine.trace.run_ref import RunRef
from engine.trace.timings import summary
from tests.support.fake_session import FakeEngine
from tests.support.trace_builder import sample_trace
from tests.support.window_acts import trigger, wait

OPTIONS: dict[str, Any] = {"spec": {"types": ["draft-mtp"]}, "n_predict": 100, "sampler": {}}


def ended(stops: list[str], rounds: int = 12, **facts: Any) -> RunRef:
    run = sample_trace(rounds=rounds).run
    run.facts.update({"options": OPTIONS, "summary": summary(run.store, 0), **facts})
    run.facts["stops"] = stops
    return run


@pytest.mark.parametrize(
    ("stops", "facts", "said"),
    [
        (["end"], {}, "The text ended by an end token."),
        (["limit"], {}, "The text came to its limit of 100 tokens."),
        (["stopped"], {}, "The text was stopped."),
        (["failed"], {"error": "It broke."}, "The run failed: It broke."),
        (["end", "end"], {}, "Each of the 2 texts ended by an end token."),
        (
            ["end", "context", "end"],
            {},
            "Of 3 texts 2 ended by an end token, 1 filled the context.",
        ),
        (["eosFound"], {}, "The text ended: eosFound."),
    ],
)
def test_why_it_ended(stops: list[str], facts: dict[str, Any], said: str) -> None:
    assert why_it_ended(ended(stops, **facts)) == said


def test_a_full_context_tells_what_was_asked_for_and_what_came() -> None:
    run = ended(["context"], n_ctx=64)
    n = LiveNumbers.read(run.store, 0).tokens
    assert why_it_ended(run) == (
        f"The text filled the context of 64 tokens: {n} of 100 tokens asked for came; "
        "a larger Context takes more."
    )


def test_the_next_step_is_the_gravest_finding_else_by_the_figures() -> None:
    run = ended(["limit"])
    first = run_end(run, None)
    assert first is not None and first.next_step is not None
    assert first.next_step.kind == (
        COMPARE if (LiveNumbers.read(run.store, 0).acceptance or 0) >= 0.5 else TUNE
    )
    slow = ended(["limit"])
    slow.facts["summary"] = {**slow.facts["summary"], "predicted_per_second": 5.0}
    fast = ended(["limit"])
    fast.facts["summary"] = {**fast.facts["summary"], "predicted_per_second": 10.0}
    found = run_end(slow, fast)
    assert found is not None and found.next_step is not None
    assert (found.vs_plain, found.next_step.kind) == (0.5, TUNE)
    for severity, message in (("info", "i"), ("warning", "w"), ("error", "e")):
        run.store.findings.append(
            run_id=0, round=3, seq_id=0, rule="r", severity=severity, message=message, evidence=""
        )
    found = run_end(run, None)
    assert found is not None and found.next_step is not None
    assert (found.next_step.kind, found.next_step.why, found.next_step.round) == (FINDING, "e", 3)
    run.facts["lane"] = "planes"
    assert run_end(run, None) is None


def test_the_plain_run_is_found_in_other_traces_and_on_disk(tmp_path: Path) -> None:
    run = ended(["limit"])
    plain = ended(["limit"], options={**OPTIONS, "spec": {"types": []}})
    other = ended(["limit"], options={**OPTIONS, "spec": {"types": []}}, compute="int8")
    listed = [ModelRuns("a", one.store) for one in (run, plain, other)]
    if LiveNumbers.told(plain.facts["summary"]).tokens_per_second is None:
        plain.facts["summary"]["predicted_per_second"] = 10.0
        other.facts["summary"]["predicted_per_second"] = 10.0
    assert plain_run(run, listed) == plain
    from app.trace_models.run_notes import describe_prompt, note

    describe_prompt(plain)
    plain.store.let_go_of_rows()
    listed[1] = ModelRuns("a", plain.store, on_disk=tmp_path)
    assert plain_run(run, listed) == plain
    note(plain, deleted=True)
    assert plain_run(run, listed) is None
    assert plain_run(plain, listed) is None, "what is deleted, and another arithmetic"


def test_how_far_a_run_is() -> None:
    run = sample_trace(rounds=12).run
    run.facts["options"] = OPTIONS
    numbers = LiveNumbers.read(run.store, 0)
    words = progress_text(run, numbers).split(" · ")
    assert words[0] == f"{numbers.tokens} / 100 tokens"
    assert words[1] == f"round {numbers.rounds - 1}"
    run.facts["options"] = {"n_predict": -1}
    assert progress_text(run, numbers).startswith(f"{numbers.tokens} tokens · ")
    assert [duration_text(s) for s in (0.2, 44, 200, 7500)] == [
        "1 s",
        "44 s",
        "3 min 20 s",
        "2 h 5 min",
    ]


@pytest.mark.parametrize(
    ("audit", "said"),
    [
        (
            {"verdict": "agrees", "n_tokens": 40, "n_text": 40, "n_rounds_sampled": 24},
            "Audit: text and 24 rounds equal to plain decoding",
        ),
        (
            {"verdict": "agrees", "n_tokens": 8, "n_text": 1200, "n_rounds_sampled": 1},
            "Audit: 8 of 1,200 tokens and 1 round equal to plain decoding",
        ),
        (
            {"verdict": "differs", "wrong": [{"round": 12}], "sampler": [{"round": 14}]},
            "Audit: wrong from round 12",
        ),
        ({"verdict": "stopped", "not_judged": ["The audit was stopped."]}, "Audit stopped"),
        (
            {"verdict": "not audited", "not_judged": ["it has no limit of tokens"]},
            "Not audited because it has no limit of tokens",
        ),
        (["damaged"], ""),
    ],
)
def test_the_card_says_what_the_audit_has_shown(audit: Any, said: str, qtbot: QtBot) -> None:
    end = run_end(ended(["limit"], audit=audit), None)
    assert end is not None
    card = EndCard()
    qtbot.addWidget(card)
    card.resize(800, 200)
    card.show_end(end, can_measure=False, can_compare=True)
    assert card.isVisible() and card.audit.isVisible() == bool(said)
    assert card.audit.text() == said
    assert said in card.accessibleName() and said in card.reason.toolTip()
    card.set_low(True)
    assert not card.audit.isVisible()


def test_one_click_measures_plain_and_comes_back(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot
) -> None:
    card = loaded.tokens.end_card
    engine.rounds = 10**9
    trigger(loaded, "run.step")
    wait(qtbot, loaded, State.PAUSED)
    assert not card.isVisible()
    assert "tokens · round" in loaded.status.going_text
    trigger(loaded, "run.stop")
    wait(qtbot, loaded, State.READY)
    qtbot.waitUntil(card.isVisible)
    assert loaded.status.going_text == ""
    assert card.reason.text() == "The text was stopped."
    assert card.plain.isVisible() and "plain decoding" not in card.figures.text()
    run = loaded.feed.run
    engine.rounds = 12
    card.plain.click()
    qtbot.waitUntil(lambda: loaded.bridge.live != run)
    wait(qtbot, loaded, State.READY)
    assert loaded.bridge.live is not None
    asked = loaded.bridge.request_of(loaded.bridge.live)
    assert asked is not None and asked.options.spec.types == ()
    qtbot.waitUntil(lambda: loaded.feed.run == run)
    QApplication.processEvents()
    assert card.isVisible()


def test_in_a_wide_window_a_button_stands_by_its_sentence(qtbot: QtBot) -> None:
    card = EndCard()
    qtbot.addWidget(card)
    step = NextStep(COMPARE, "See whether rolling back leaves the text as it would be without.")
    end = RunEnd("The text ended.", (), None, is_plain=False, next_step=step)
    card.show_end(end, can_measure=True, can_compare=True)
    card.show()
    for width, low in ((2200, False), (2200, True), (500, False)):
        card.resize(width, 90)
        card.set_low(low)
        QApplication.processEvents()
        assert card.step.isVisible()
        assert card.step.geometry().right() < min(width, 900)
        if not low:
            assert card.why.geometry().right() <= card.step.x() <= card.why.geometry().right() + 10
