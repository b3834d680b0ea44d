"""Sums that a llama-server keeps: read, subtracted, and beyond six digits only nearly."""

from __future__ import annotations

import pytest

from engine.observe.rounds.counters import (
    ACCEPTED,
    DRAFTED,
    DRAFTS,
    Counters,
    movement,
    read_counters,
)
from tests.support.scripted_replies import read_capture


@pytest.mark.parametrize("name", ["mtp", "draft", "ngram-mod", "chain", "mtp-2-slots"])
def test_the_counters_of_a_capture_are_those_of_its_log(name: str) -> None:
    capture = read_capture(name)
    before, after = (
        read_counters(capture[key]["text"]) for key in ("metrics_before", "metrics_after")
    )
    moved = movement(before, after)
    finals = [line for line in capture["log"] if "draft acceptance = " in line]
    said = [line.split("(")[-1].split(")")[0].split() for line in finals]
    assert moved.moved[ACCEPTED] == sum(int(words[0]) for words in said)
    assert moved.moved[DRAFTED] == sum(int(words[3]) for words in said)
    assert sum(moved.per_position) == moved.moved[ACCEPTED]
    assert moved.moved[DRAFTS] >= moved.per_position[0]
    assert not moved.restarted and not any(moved.slack.values())


def test_a_counter_that_falls_is_another_server() -> None:
    before, after = Counters({DRAFTED: 7.0}), Counters({DRAFTED: 6.0})
    assert movement(before, after).restarted


def test_values_from_a_million_on_are_approximate() -> None:
    before = read_counters(f"llamacpp:{DRAFTED} 1.23457e+06\nllamacpp:{DRAFTS} 900000\n")
    after = read_counters(f"llamacpp:{DRAFTED} 1.23462e+06\nllamacpp:{DRAFTS} 900020\n")
    moved = movement(before, after)
    assert not moved.differs(DRAFTED, 55) and moved.differs(DRAFTED, 62)
    assert not moved.differs(DRAFTS, 20) and moved.differs(DRAFTS, 21)
    assert not moved.differs(ACCEPTED, 3), "a counter that the server does not keep"


def test_numbers_that_are_none_are_left_out() -> None:
    text = f"llamacpp:{DRAFTS} NaN\nllamacpp:{DRAFTED} -3\nllamacpp:{ACCEPTED} +Inf\nother 4\n"
    assert not read_counters(text).values


@pytest.mark.parametrize(
    "text",
    [
        "<html><body>hello",
        "a{",
        "llamacpp:x y z w",
        "x" * (2**22 + 1),
        'llamacpp:a{l="' + '\\"' * 3000 + '"} 1\n',
    ],
)
def test_what_is_no_metrics_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".?"):
        read_counters(text)
