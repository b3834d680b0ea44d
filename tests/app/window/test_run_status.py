"""The card at the end of a run, the plain run that it is measured by, and how far a run is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.engine_thread.events import State
from app.panels.tokens.end_card import COMPARE, FINDING, TUNE, EndCard, NextStep, RunEnd, run_end
from app.trace_models.run_facts import LiveNumbers
from app.window.run_status import progress_text
from app.window.window import MainWindow
from engine.analysis.run_cost import PlainRatio
from engine.plain_text import duration_text
from engine.report.run import why_it_ended
from engine.trace.facts import RequestFacts
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
        (["end"], {}, "The run ended with an end token."),
        (["limit"], {}, "The run reached its limit of 100 tokens."),
        (["stopped"], {}, "The run was stopped."),
        (["failed"], {"error": "It broke."}, "The run failed: It broke."),
        (["end", "end"], {}, "Each of the 2 sequences ended with an end token."),
        (
            ["end", "context", "end"],
            {},
            "Of 3 sequences 2 ended with an end token, 1 filled the context.",
        ),
        (
            ["limit", "stop", "failed"],
            {},
            (
                "Of 3 sequences 1 reached its limit of 100 tokens, "
                "1 ended with an end token or a stop text, 1 failed."
            ),
        ),
        (["eosFound"], {}, "The run ended: eosFound."),
    ],
)
def test_why_it_ended(stops: list[str], facts: dict[str, Any], said: str) -> None:
    assert why_it_ended(ended(stops, **facts)) == said


def test_a_full_context_tells_what_was_asked_for_and_what_came() -> None:
    run = ended(["context"], n_ctx=64)
    n = LiveNumbers.read(run.store, 0).tokens
    assert why_it_ended(run) == (
        f"The run filled the context of 64 tokens after {n} of 100 requested tokens; "
        "raise -c for more."
    )


def test_of_a_server_without_a_drafter_there_is_nothing_to_measure() -> None:
    for types, is_plain in ((["none"], True), (["draft-mtp"], False)):
        run = ended(["limit"], speculative_types=types)
        del run.facts["options"]
        end = run_end(run)
        assert end is not None and end.is_plain is is_plain


def test_the_card_says_how_many_replies_counted_drafts() -> None:
    known, unknown = {"draft_acceptance_rate": 0.5}, {"draft_acceptance_rate": None}
    for replies, said in (
        ([known, unknown, {}], " in 1 of 3 replies"),
        ([known, known], ""),
        ([unknown], ""),
    ):
        end = run_end(ended(["limit"], requests=[RequestFacts(told=told) for told in replies]))
        assert end is not None
        (rate,) = (one for one in end.figures if one.startswith("acceptance"))
        assert rate.removeprefix(f"acceptance {rate.split()[1]}") == said


def test_the_next_step_is_the_gravest_finding_else_by_the_figures() -> None:
    run = ended(["limit"])
    first = run_end(run)
    assert first is not None and first.next_step is not None
    assert first.next_step.kind == (
        COMPARE if (LiveNumbers.read(run.store, 0).acceptance or 0) >= 0.5 else TUNE
    )
    slow = ended(["limit"], plain_pairs=[(5.0, 10.0), (6.0, 10.0), (9.0, 10.0)])
    found = run_end(slow)
    assert found is not None and found.next_step is not None and found.vs_plain is not None
    assert found.vs_plain.words == "0.50 to 0.90× plain decoding in 3 pairs"
    assert found.next_step.kind == TUNE
    for severity, message in (("info", "i"), ("warning", "w"), ("error", "e")):
        run.store.findings.append(
            run_id=0,
            round=3,
            seq_id=0,
            rule="r",
            severity=severity,
            message=message,
            evidence="",
            suggestion="do",
        )
    found = run_end(run)
    assert found is not None and found.next_step is not None
    assert (found.next_step.kind, found.next_step.why, found.next_step.round) == (FINDING, "e", 3)
    run.facts["error"] = "e"  # which the reason says already
    found = run_end(run)
    assert found is not None and found.next_step is not None and found.next_step.why == "do"
    run.facts["lane"] = "planes"
    assert run_end(run) is None


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([(11.0, 10.0), (13.6, 10.0), (12.0, 10.0)], "1.10 to 1.36× plain decoding in 3 pairs"),
        (
            [(13.5, 10.0), (10.4, 10.0), (6.0, 10.0)],
            "no clear difference from plain decoding (0.60 to 1.35× in 3 pairs)",
        ),
        ([(13.5, 10.0), (10.4, 10.0)], None),
        ([(13.5, 10.0), (10.4, 10.0), (10.0, 0.0)], None),
        (["damaged"], None),
        (None, None),
    ],
)
def test_no_verdict_inside_the_spread_or_from_fewer_pairs(pairs: Any, said: str | None) -> None:
    ratio = PlainRatio.of(ended(["limit"], plain_pairs=pairs).facts)
    assert (None if ratio is None else ratio.words) == said


def test_how_far_a_run_is() -> None:
    run = sample_trace(rounds=12).run
    run.facts["options"] = OPTIONS
    numbers = LiveNumbers.read(run.store, 0)
    words = progress_text(run, numbers).split(" · ")
    assert words[0] == f"{numbers.tokens} / 100 tokens"
    assert words[1] == f"round {numbers.rounds - 1}"
    assert "left" in progress_text(run, replace(numbers, tokens=60, tokens_per_second=20.0))
    for tokens, speed in ((8, 1.0), (60, 40.0)):
        early = replace(numbers, tokens=tokens, tokens_per_second=speed)
        assert "left" not in progress_text(run, early), "too few tokens, too short a time"
    assert progress_text(run, replace(numbers, tokens=0)).startswith("processing the prompt")
    run.facts["listens_at"] = "http://127.0.0.1:8081"
    assert progress_text(run, replace(numbers, tokens=0)) == "waiting for a client"
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
            "Audit: 8 tokens and 1 round equal to plain decoding (a sample of 1,200 tokens)",
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
    end = run_end(ended(["limit"], audit=audit))
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


def test_one_click_measures_plain_in_pairs(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot
) -> None:
    card = loaded.tokens.end_card
    engine.rounds = 10**9
    trigger(loaded, "run.step")
    wait(qtbot, loaded, State.PAUSED)
    assert not card.isVisible()
    assert "tokens · round" in loaded.status.texts["going"]
    trigger(loaded, "run.stop")
    wait(qtbot, loaded, State.READY)
    qtbot.waitUntil(card.isVisible)
    assert loaded.status.texts["going"] == ""
    assert card.reason.text() == "The run was stopped."
    assert card.plain.isVisible() and "plain decoding" not in card.figures.text()
    run = loaded.feed.run
    assert run is not None
    n_runs = len(run.store.runs)
    engine.rounds = 12
    card.plain.click()
    assert loaded.bridge.state is State.LOADING
    qtbot.waitUntil(lambda: "plain decoding" in card.figures.text())
    assert (loaded.feed.run, len(run.store.runs)) == (run, n_runs), "no other run is kept"
    pairs = run.facts.plain_pairs
    assert pairs is not None and len(pairs) == 5
    ratio = PlainRatio.of(run.facts)
    assert ratio is not None and ratio.low > 1, "scripted drafts take no more time than a token"
    assert not card.plain.isVisible()
    assert loaded.status.chips["vs_plain"].text == ratio.range_text


def test_a_pause_and_a_compiler_are_said_at_once(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.rounds = 10**9
    trigger(loaded, "run.step")
    wait(qtbot, loaded, State.PAUSED)
    engine.gate.clear()
    trigger(loaded, "run.start")
    qtbot.waitUntil(engine.waits.is_set)
    compiling = [True]
    monkeypatch.setattr("engine.machine.clock.is_compiling", lambda: compiling[0])
    qtbot.waitUntil(lambda: loaded.status.texts["going"].startswith("compiling kernels · "))
    compiling.clear()
    compiling.append(False)
    qtbot.waitUntil(lambda: "compiling" not in loaded.status.texts["going"])
    trigger(loaded, "run.pause")
    assert loaded.status.texts["going"].startswith("pausing after this round · ")
    assert not loaded.actions_by_id["run.pause"].isEnabled()
    engine.gate.set()
    wait(qtbot, loaded, State.PAUSED)
    assert "pausing" not in loaded.status.texts["going"]
    trigger(loaded, "run.stop")
    wait(qtbot, loaded, State.READY)


def test_in_a_wide_window_a_button_stands_by_its_sentence(qtbot: QtBot) -> None:
    card = EndCard()
    qtbot.addWidget(card)
    step = NextStep(COMPARE, "See whether rolling back leaves the text as it would be without.")
    end = RunEnd("The run ended.", (), None, is_plain=False, next_step=step)
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
        if (width, low) == (2200, False):
            same = "one below the other, as wide"
            assert card.plain.geometry().right() == card.step.geometry().right(), same
