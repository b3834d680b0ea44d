"""Why a run does not speculate, or not as asked: sentences, numbers, places."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.trace_models.run_rows import Position
from app.widgets.build import vbox
from app.window.why_not_strip import WhyNotStrip, why_not
from engine.options import RunOptions, SpecOptions
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.trace_builder import TraceBuilder


def store_of(options: RunOptions | None = None, **facts: Any) -> TraceStore:
    store = TraceStore()
    known = {} if options is None else {"options": asdict(options)}
    store.begin_run({**known, **facts})
    return store


def rollback(store: TraceStore, round_: int, path: str, depth: int, **facts: int) -> None:
    store.rounds.append(
        run_id=0, round=round_, seq_id=1, rollback_path=path, rollback_depth=depth, **facts
    )


def draft(store: TraceStore, round_: int, n: int, reason: str, drafter: str = "draft-mtp") -> None:
    store.drafts.append(
        run_id=0, round=round_, seq_id=0, drafter=drafter, num_draft_tokens=n, reason=reason
    )


def sentences(store: TraceStore) -> list[str]:
    return [one.sentence for one in why_not(store, 0)]


MTP = RunOptions(spec=SpecOptions(types=("draft-mtp",), p_min=0.9, n_min=2))


def test_a_run_as_asked_has_nothing_to_explain() -> None:
    store = store_of(MTP, synthetic=False)
    rollback(store, 1, "seq_rm", 2, n_rs_seq=3)
    rollback(store, 2, "restore", 2, n_rs_seq=0)
    draft(store, 1, 3, "")
    draft(store, 2, 1, "p_min")
    draft(store, 3, 0, "limit")
    assert sentences(store) == []


def test_tokens_that_the_draft_model_lacks() -> None:
    store = store_of(RunOptions(spec=SpecOptions(types=("draft-simple",))))
    for round_ in range(1, 5):
        lacks = round_ == 3
        draft(store, round_, 3 * (not lacks), "unknown-token" * lacks, "draft-simple")
    (found,) = sentences(store)
    assert found.startswith("draft-simple found no draft in 1 of 4 rounds, mostly unknown-token: ")
    assert found.endswith("the draft model does not have the newest token.")
    assert why_not(store, 0)[0].place == (0, 3)


def test_speculation_off() -> None:
    assert sentences(store_of(RunOptions())) == ["Speculation is off: this run has no drafter."]
    assert sentences(store_of(RunOptions(), lane="reference")) == []
    assert sentences(store_of(RunOptions(), draft_accept=[0, 3])) == [], "a script drafts"
    drafted = store_of(RunOptions())
    drafted.rounds.append(run_id=0, round=1, seq_id=0, num_draft_tokens=2)
    assert sentences(drafted) == []


def test_falling_back_names_depth_and_bound() -> None:
    store = store_of(MTP)
    rollback(store, 4, "restore_depth", 5, n_rs_seq=4)
    (reason,) = why_not(store, 0)
    assert reason.severity == "warning"
    assert reason.place == (1, 4)
    assert reason.sentence == (
        "A rollback fell back to a checkpoint: depth 5 > n_rs_seq 4, in round 4, sequence 1."
    )
    rollback(store, 9, "restore_depth", 6, n_rs_seq=4)
    assert sentences(store) == [
        "2 rollbacks fell back to a checkpoint: depth 5 > n_rs_seq 4, first in round 4, sequence 1."
    ]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"memory_rollback": 5, "n_rs_seq": 4}, ": depth 5 with padding > n_rs_seq 4"),
        ({"n_rs_seq": 4, "valid_depth": 1}, ": depth 3 > valid depth 1"),
        ({"n_rs_seq": 4, "valid_depth": 4}, ""),
    ],
)
def test_which_bound_was_broken(facts: dict[str, int], why: str) -> None:
    store = store_of(MTP)
    rollback(store, 2, "restore_depth", 3, **facts)
    assert sentences(store) == [
        f"A rollback fell back to a checkpoint{why}, in round 2, sequence 1."
    ]


def test_a_refusal_comes_first() -> None:
    store = store_of(MTP)
    rollback(store, 1, "restore_depth", 3, n_rs_seq=1)
    rollback(store, 2, "refused", 3, n_rs_seq=1)
    first = why_not(store, 0)[0]
    assert first.severity == "error"
    assert first.sentence == (
        "A rollback was refused: depth 3 > n_rs_seq 1, in round 2, sequence 1."
    )


def test_drafts_that_came_to_nothing() -> None:
    store = store_of(MTP)
    for i in range(12):
        draft(store, i, 0, "p_min")
    draft(store, 12, 0, "n_min")
    draft(store, 13, 3, "")
    assert sentences(store) == [
        "p_min 0.9 ended 12 of 14 drafts of draft-mtp at length 0.",
        "n_min 2 discarded 1 of 14 drafts of draft-mtp as too short.",
    ]
    assert [one.place for one in why_not(store, 0)] == [(0, 0), (0, 12)]


def test_a_look_up_drafter_has_its_own_n_min_and_may_find_nothing_now_and_then() -> None:
    store = store_of(MTP)
    draft(store, 0, 0, "n_min", "ngram-mod")
    draft(store, 1, 0, "no-match", "ngram-simple")
    draft(store, 2, 8, "", "ngram-simple")
    assert sentences(store) == ["n_min 48 discarded 1 of 1 drafts of ngram-mod as too short."]
    draft(store, 3, 0, "no-match", "ngram-simple")
    assert sentences(store)[1] == (
        "ngram-simple found no draft in 2 of 3 rounds, mostly no-match: "
        "the n-gram has not occurred before."
    )


def test_output_that_is_invalid() -> None:
    options = RunOptions(
        spec=SpecOptions(types=("draft-mtp",)), faults=("stale-plane", "stale-logits")
    )
    assert sentences(store_of(options, synthetic=True)) == [
        "Synthetic acceptance: drafts are accepted at random, the output is invalid.",
        "2 faults are switched on: stale-plane, stale-logits. The output may be wrong.",
    ]


@pytest.mark.parametrize("junk", [None, 3, "spec", {"spec": None}, {"spec": {"types": None}}])
def test_facts_of_a_strange_file_do_no_harm(junk: object) -> None:
    store = TraceStore()
    store.begin_run({"options": junk, "lane": 3})
    draft(store, 0, 0, "p_min")
    bound = " 0.0" if isinstance(junk, dict) else ""  # what cannot be read has its default
    assert f"p_min{bound} ended 1 of 1 drafts of draft-mtp at length 0." in sentences(store)


def test_other_runs_do_not_count() -> None:
    store = store_of(MTP)
    rollback(store, 4, "restore_depth", 5, n_rs_seq=4)
    other = store.begin_run({})
    assert why_not(store, other) == []


# -- the strip -----------------------------------------------------------------------------


@pytest.fixture
def strip(qtbot: QtBot) -> WhyNotStrip:
    strip = WhyNotStrip(Theme("dark"))
    qtbot.addWidget(strip)
    strip.resize(1400, 26)
    return strip


def test_the_strip_is_hidden_until_there_is_a_reason(strip: WhyNotStrip, qtbot: QtBot) -> None:
    builder = TraceBuilder()
    strip.show_run(builder.run)
    assert strip.isHidden()
    builder.prompt(["p"])
    builder.draft([" a"], " b", [" x"], path="restore_depth")
    strip.refresh()
    qtbot.waitUntil(lambda: not strip.isHidden())
    assert "A rollback fell back to a checkpoint" in strip.accessibleName()
    assert not strip.next_button.isVisibleTo(strip)
    with qtbot.waitSignal(strip.position_selected) as signal:
        qtbot.mouseClick(strip.show_button, Qt.MouseButton.LeftButton)
    assert signal.args == [Position(builder.run, 0, 1, None)]
    strip.show_run(None)
    assert strip.isHidden()


def test_the_strip_turns_over_its_reasons(strip: WhyNotStrip, qtbot: QtBot) -> None:
    store = store_of(MTP, synthetic=True)
    draft(store, 3, 0, "p_min")
    strip.show_run(RunRef(store, 0))
    assert strip.text.whole.startswith("Synthetic acceptance")
    assert not strip.show_button.isVisibleTo(strip)
    assert strip.next_button.text() == "1 of 2"
    qtbot.mouseClick(strip.next_button, Qt.MouseButton.LeftButton)
    assert strip.text.whole.startswith("p_min 0.9")
    strip._theme.become("light")
    assert strip.text.whole.startswith("p_min 0.9")
    assert "Synthetic" in strip.toolTip()


@pytest.mark.parametrize(("width", "n_lines"), [(1400, 1), (330, 2)])
def test_a_reason_takes_two_lines_where_it_has_to(qtbot: QtBot, width: int, n_lines: int) -> None:
    store = store_of(RunOptions())
    store.runs[0].speculative_types = ["none"]
    host, strip = QWidget(), WhyNotStrip(Theme("dark"))
    qtbot.addWidget(host)
    vbox(0, strip, of=host)
    host.resize(width, 200)
    host.show()
    qtbot.waitExposed(host)
    strip.show_run(RunRef(store, 0))
    qtbot.waitUntil(lambda: len(strip.text.text().splitlines()) == n_lines)
    assert " ".join(strip.text.text().split()) == strip.reasons[0].sentence
    qtbot.waitUntil(lambda: strip.text.height() >= n_lines * strip.fontMetrics().height())


def test_a_dismissed_strip_comes_back_with_another_reason(strip: WhyNotStrip, qtbot: QtBot) -> None:
    store = store_of(MTP)
    rollback(store, 1, "restore_depth", 4, n_rs_seq=3)
    strip.show_run(RunRef(store, 0))
    strip.show()
    qtbot.mouseClick(strip.close_button, Qt.MouseButton.LeftButton)
    assert strip.isHidden()
    rollback(store, 2, "restore_depth", 4, n_rs_seq=3)
    strip.refresh()
    qtbot.waitUntil(lambda: strip.reasons[0].sentence.startswith("2 rollbacks"))
    assert strip.isHidden(), "the same reason, of which there is more"
    strip._theme.become("light")
    assert strip.isHidden()
    rollback(store, 3, "refused", 9, n_rs_seq=3)
    strip.refresh()
    qtbot.waitUntil(lambda: not strip.isHidden())
    assert "refused" in strip.text.whole
    strip.close_button.click()
    assert strip.isHidden()
    other = store_of(RunOptions())
    strip.show_run(RunRef(other, 0))
    assert not strip.isHidden(), "another run has its own reasons"


def test_a_server_without_a_drafter_is_told() -> None:
    builder = TraceBuilder()
    builder.store.runs[0] |= {"speculative_types": ["none"]}
    (reason,) = why_not(builder.store, 0)
    assert "started without a drafter" in reason.sentence
    builder.store.runs[0] |= {"speculative_types": ["none", "draft-mtp"]}
    assert why_not(builder.store, 0) == []
