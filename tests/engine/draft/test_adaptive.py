"""Rules of adaptive depth, against lengths worked out by hand, and in a run and a simulation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from engine.analysis.what_if import rules
from engine.analysis.what_if.recorded import RecordedRounds, RoundCosts
from engine.analysis.what_if.rules import RULES
from engine.analysis.what_if.surface import simulate
from engine.draft.adaptive import ADAPT_RULES, AdaptedSequences
from engine.trace.records import MISSING
from engine.trace.run_ref import RunRef
from tests.support.golden_runs import decode, options_of, prompt_of, session, tokens_of
from tests.support.timed_trace import timed_trace

MODEL = "qwen35-c-v2x-mtp-f32"


def _lengths(rule: str, accepted: list[int], n_max: int, **setting: float) -> list[int]:
    """Lengths that a rule chooses, where a draft has as many right tokens as given."""
    only = np.zeros(1, np.int64)
    depth = ADAPT_RULES[rule].make([{"n_max": n_max, **setting}], only)
    found = []
    for right in accepted:
        n = int(depth.n_max(only)[0])
        found.append(n)
        depth.learn(only, np.array([n]), np.array([min(right, n)]))
    return [*found, int(depth.n_max(only)[0])]


def test_a_step_up_and_down() -> None:
    # the lines of a log of llama.cpp #27210: 1 -> 2 -> 3 -> 4 -> 5 -> 4 -> 3 -> 2 -> 3 -> 2
    right = [1, 2, 3, 4, 1, 1, 0, 2, 0]
    assert _lengths("step", right, 5) == [1, 2, 3, 4, 5, 4, 3, 2, 3, 2]
    assert _lengths("step", [2], 3, start=3) == [3, 3]  # a part is neither


def test_streaks_and_probes() -> None:
    assert _lengths("streak", [9] * 4, 8, threshold=2, start=3) == [3, 3, 4, 4, 5]
    assert _lengths("streak", [0] * 4, 8, threshold=2, start=3) == [3, 3, 2, 2, 1]
    assert _lengths("streak", [2] * 2, 8, threshold=2, bias=1, start=3) == [3, 3, 4]
    # 2, then max(2, 2) + 1 = 3, then 3 + 1 = 4, then 4 - 0.25 * 4 = 3
    assert _lengths("probed-mean", [9, 9, 0], 8) == [2, 3, 4, 3]


def test_goodput_finds_where_drafts_fail() -> None:
    lengths = _lengths("goodput", [2] * 200, 8, draft_cost=0.2)
    assert set(lengths[150:]) - {8} <= {2, 3}  # 8 in every tenth, to see
    assert max(_lengths("goodput", [0] * 60, 8, draft_cost=0.2)[50:59]) <= 2


def test_sequences_learn_by_themselves() -> None:
    adapted = AdaptedSequences(ADAPT_RULES["step"], 4)
    adapted.learn(0, 1, 1)
    assert (adapted.n_max(0), adapted.n_max(1)) == (2, 1)
    adapted.forget(0)
    assert adapted.n_max(0) == 1


@pytest.mark.parametrize("rule", ADAPT_RULES)
def test_no_rule_changes_the_text(rule: str) -> None:
    plain = decode(session(MODEL), [prompt_of(MODEL)], options_of(16))
    options = options_of(16, "draft-mtp", n_max=4)
    options = replace(options, spec=replace(options.spec, adapt=rule))
    run = decode(session(MODEL), [prompt_of(MODEL)], options)
    assert tokens_of(run) == tokens_of(plain)
    drafted = run.trace.rounds.column("num_draft_tokens")
    assert drafted.max() <= 4
    longest = run.trace.rounds.column("draft_n_max")[drafted > 0]
    assert (longest >= drafted[drafted > 0]).all() and longest.max() <= 4
    assert (plain.trace.rounds.column("draft_n_max") == MISSING).all()
    if rule == "step":
        assert drafted[drafted > 0][0] == longest[0] == 1


def test_nothing_beats_the_oracle() -> None:
    store, _, run_id = timed_trace(120)
    rounds = RecordedRounds.of(RunRef(store, run_id))
    costs = RoundCosts.measured(rounds)
    speeds = {
        name: simulate(rounds, costs, rule, rule.settings(rounds.n_max)).tokens_per_second().max()
        for name, rule in RULES.items()
        if name != "survival"
    }
    assert max(speeds, key=speeds.__getitem__) == "oracle"


@pytest.mark.parametrize("seed", range(12))
def test_the_oracle_of_rounds_is_the_fastest_of_all_choices(seed: int) -> None:
    """A round with a draft takes much more, whatever its length, as where another kernel begins:
    what takes least for its own tokens may then be slower than no draft."""
    draw, n_max = random.Random(seed), 3
    right = np.array([draw.randint(0, n_max) for _ in range(6)])
    more = [draw.uniform(0, 20), *(draw.uniform(0, 3) for _ in range(n_max - 1))]
    ms = np.cumsum([10.0, *more])

    def per_token(lengths: Sequence[int]) -> float:
        return float(ms[list(lengths)].sum() / (len(lengths) + sum(lengths)))

    best = min(map(per_token, product(*(range(n + 1) for n in right))))
    assert per_token(rules._fastest(right, ms).tolist()) == pytest.approx(best)
