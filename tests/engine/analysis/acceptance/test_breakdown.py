"""Acceptance by groups: the counts are those of rounds made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.analysis.acceptance.breakdown import (
    AFTER,
    BY,
    CLASS,
    DEPTH,
    ENTROPY,
    INDEX,
    breakdown,
    by_words,
    token_class,
)
from engine.analysis.acceptance.counts import logistic
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.acceptance_campaign import Records
from tests.support.golden_runs import SAMPLED, decode, options_of, prompt_of, session

MODEL = "qwen35-c-v2x-mtp-f32"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("  \n", "white space"),
        (" 12", "digits"),
        (" the", "words"),
        ("été", "words"),
        (" my_name", "identifiers"),
        ("getName", "identifiers"),
        ("x1", "identifiers"),
        ("):", "punctuation"),
        ("a b", "mixed"),
        ("�", "unknown"),
        ("", "unknown"),
    ],
)
def test_classes_of_tokens(text: str, name: str) -> None:
    assert token_class(text) == name


def _store() -> TraceStore:
    """Three drafts of two tokens: all, one and none of them accepted."""
    store = TraceStore()
    store.begin_run({})
    store.rounds.append(run_id=0, round=0, seq_id=0, num_emitted=1, pos0=0)
    pos = 10
    for number, accepted in enumerate((2, 1, 0), start=1):
        store.rounds.append(
            run_id=0,
            round=number,
            seq_id=0,
            pos0=pos,
            num_draft_tokens=2,
            num_accepted_draft_tokens=accepted,
            num_emitted=accepted + 1,
        )
        for i in range(accepted + 1):
            kind = "accepted" if i < accepted else "replacement"
            store.tokens.append(
                run_id=0,
                round=number,
                seq_id=0,
                pos=pos + 1 + i,
                kind=kind,
                token_id=i,
                target_entropy=0.1 if i < accepted else 2.5,
            )
        pos += accepted + 1
    store.pieces = {0: b" word", 1: b"7", 2: b"("}
    return store


def test_judged_tokens_are_counted_in_every_group() -> None:
    found = breakdown(RunRef(_store(), 0))
    assert (found.total.a.n, found.total.a.accepted) == (5, 3)

    def counts(by: str) -> dict[str, tuple[int, int]]:
        return {row.label: (row.a.n, row.a.accepted) for row in found.by(by)}

    assert counts(INDEX) == {"0": (3, 2), "1": (2, 1)}
    assert counts(AFTER) == {"no draft": (2, 2), "all accepted": (2, 1), "part accepted": (1, 0)}
    assert counts(CLASS) == {"words": (3, 2), "digits": (2, 1)}
    assert counts(ENTROPY) == {"0.05 to 0.25": (3, 3), "2 to 3": (2, 0)}
    assert counts(DEPTH) == {"0 to 63": (5, 3)}
    for by in BY:
        rows = found.by(by)
        assert not rows or sum(row.a.n for row in rows) == 5


def test_what_the_rule_expects_is_that_of_p_and_q() -> None:
    store = TraceStore()
    store.begin_run({})
    store.rounds.append(run_id=0, round=0, seq_id=0, num_emitted=1, pos0=0)
    numbers = {"num_draft_tokens": 2, "num_accepted_draft_tokens": 1, "num_emitted": 2}
    store.rounds.append(run_id=0, round=1, seq_id=0, pos0=5, **numbers)
    for i, (p, q, kind) in enumerate(((0.3, 0.6, "accepted"), (0.5, 0.2, "rejected"))):
        more = {"kind": kind, "draft_index": i, "rule_p": p, "rule_q": q}
        store.tokens.append(run_id=0, round=1, seq_id=0, pos=6 + i, token_id=i, **more)
    found = breakdown(RunRef(store, 0))
    assert [row.a.expected for row in found.by(INDEX)] == pytest.approx([0.5, 1.0])
    assert found.total.a.expected == pytest.approx(0.75)
    assert breakdown(RunRef(_store(), 0)).total.a.expected is None


def test_a_drafted_end_token_is_not_a_rejected_one() -> None:
    store = _store()
    numbers = {"num_draft_tokens": 2, "num_accepted_draft_tokens": 1, "num_emitted": 2}
    store.rounds.append(run_id=0, round=4, seq_id=0, pos0=16, **numbers)
    for i, (kind, token) in enumerate((("accepted", 0), ("replacement", 2))):
        more = {"kind": kind, "draft_index": i, "token_id": token}
        store.tokens.append(run_id=0, round=4, seq_id=0, pos=17 + i, **more)
    found = breakdown(RunRef(store, 0))
    assert (found.total.a.n, found.total.a.accepted) == (6, 4)


def test_rejection_accepts_as_often_as_expected() -> None:
    opened, options = session(MODEL), options_of(60, "draft-mtp", n_max=3, sampler=SAMPLED)
    options = replace(options, spec=replace(options.spec, accept="rejection"))
    run = decode(opened, [prompt_of(MODEL)] * 2, replace(options, parallel=2))
    found = breakdown(RunRef(run.trace, run.run_id))
    share = found.total.a
    assert share.expected is not None
    assert share.low < share.expected < share.high
    assert by_words(found).startswith("token class")


def test_two_runs_differ_where_they_do() -> None:
    random = np.random.default_rng(3)
    flat = Records(random, 4).play(400, lambda *_: 0.7)
    falling = Records(random, 4).play(400, lambda seq, i, *_: 0.7 if i < 2 else 0.2)
    found = breakdown(RunRef(flat, 0), RunRef(falling, 0))
    clear = [row.label for row in found.by(INDEX) if row.p is not None and row.p < 1e-3]
    assert clear == ["2", "3"]
    same = breakdown(RunRef(flat, 0), RunRef(flat, 0))
    assert all(row.p == 1.0 for row in same.groups)
    (a, b) = found.decay[INDEX]
    assert a is not None and b is not None
    assert abs(a[0]) < 3 * a[1]
    assert b[0] < -3 * b[1]


def test_a_slope_is_that_of_the_odds() -> None:
    x = np.repeat(np.arange(4.0), 1)
    odds = np.exp(1.0 - 0.5 * x)
    n = np.full(4, 1e6)
    found = logistic(x, n * odds / (1 + odds), n)
    assert found is not None
    assert found[0] == pytest.approx(-0.5, abs=1e-6)
    assert logistic(np.ones(3), np.ones(3), np.ones(3)) is None
    assert logistic(x, n, n) is None  # without a failure no slope is known
    assert logistic(x, 0 * n, n) is None
