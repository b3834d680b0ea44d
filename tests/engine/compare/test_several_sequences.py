"""Several sequences: joint batches against each sequence alone."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from engine.compare.comparison import Comparison
from engine.compare.lane_spec import DEFAULT_LANES, NOISE_LANE
from engine.options import Prompt
from tests.support.clean import PASSED
from tests.support.comparisons import differences_of, finish, rounds_of, specs, verdicts
from tests.support.golden_runs import (
    MTP_MODELS,
    SAMPLED,
    decode,
    options_of,
    prompt_of,
    session,
    tokens_of,
)

MTP = MTP_MODELS[0]
N = 24
LANES = (
    "checkpoint",
    "planes",
    "carry,split=seq",
    "ring,kv=unified",
    "replay,kv=unified,split=seq",
    "planes,kv=unified,ubatch=4",
)
FAULTS = ("planes,fault=plane-off-by-one", "checkpoint,kv=unified,fault=keep-stale-kv")


def prompts(n: int) -> list[Prompt]:
    tokens = prompt_of(MTP).tokens
    return [Prompt(tokens[i : 9 + 4 * i]) for i in range(n)]


@cache
def compared(n: int, parallel: int) -> Comparison:
    """Drafts of unequal acceptance, so that the sequences soon stand at different positions."""
    options = options_of(N, n_max=5, parallel=parallel, ignore_eos=True)
    return finish(
        Comparison(
            session(MTP), prompts(n), options, specs(*LANES, *FAULTS), draft_accept=(0, 5, 2, 1)
        )
    )


@pytest.mark.parametrize(("n", "parallel"), [(3, 3), (4, 2)])
@pytest.mark.thinned(4)
def test_the_reference_decodes_each_sequence_as_if_alone(n: int, parallel: int) -> None:
    alone = [
        tokens_of(decode(session(MTP), [p], options_of(N, ignore_eos=True)))[0] for p in prompts(n)
    ]
    assert compared(n, parallel).emitted == alone
    widths = compared(n, parallel).trace.ubatches
    mine = widths.column("run_id") == 0
    assert set(widths.column("n_seqs")[mine]) == {1}


@pytest.mark.parametrize(("n", "parallel"), [(3, 3), (4, 2)])
def test_clean_lanes_are_within_and_faults_are_not(n: int, parallel: int) -> None:
    found = verdicts(compared(n, parallel))
    for lane in ("noise", *LANES):
        assert found[lane].verdict in PASSED, lane
        assert (found[lane].n_positions, found[lane].duplicates) == (n * N, 0)
    for lane in FAULTS:
        assert found[lane].verdict == "suspect", lane
        undone = rounds_of(compared(n, parallel), lane)
        mine = undone["seq_id"] == found[lane].first_seq
        assert found[lane].after_round in undone["round"][mine & (undone["rollback_depth"] > 0)]


def test_lanes_decode_side_by_side() -> None:
    comparison = compared(3, 3)
    table = comparison.trace.ubatches
    by_lane = {
        lane: table.column("n_seqs")[table.column("run_id") == verdict.run_id]
        for lane, verdict in verdicts(comparison).items()
    }
    assert by_lane["checkpoint"].max() == by_lane["noise"].max() == 3
    assert by_lane["carry,split=seq"].max() == 1
    reasons = set(table.texts("reason"))
    assert {"one sequence", "keep-tail"} <= reasons


@pytest.mark.parametrize(("n", "parallel"), [(3, 3), (4, 2)])
def test_rows_belong_to_sequence_and_position(n: int, parallel: int) -> None:
    comparison = compared(n, parallel)
    for lane in ("noise", *LANES):
        rows = differences_of(comparison, lane)
        for seq_id, (prompt, tokens) in enumerate(zip(prompts(n), comparison.emitted, strict=True)):
            mine = rows["seq_id"] == seq_id
            first = len(prompt.tokens)
            assert rows["pos"][mine].tolist() == list(range(first, first + N))
            assert rows["token_id"][mine].tolist() == tokens
        if lane != "noise":
            ends = ~np.isnan(rows["state_error"])
            assert (rows["state_error"][ends] < 1e-5).all()
            assert (rows["cells_differ"][ends] == 0).all()


def test_waiting_prompts_take_freed_slots() -> None:
    rounds = rounds_of(compared(4, 2), "planes")
    per_round = {
        number: set(rounds["seq_id"][rounds["round"] == number].tolist())
        for number in rounds["round"].tolist()
    }
    assert max(map(len, per_round.values())) == 2
    assert set.union(*per_round.values()) == {0, 1, 2, 3}


def test_scripted_acceptance_is_what_was_asked_for() -> None:
    comparison = compared(3, 3)
    for lane in ("checkpoint", "planes"):
        rounds = rounds_of(comparison, lane)
        for seq_id in range(3):
            mine = (rounds["seq_id"] == seq_id) & (rounds["num_draft_tokens"] == 5)
            accepted = rounds["num_accepted_draft_tokens"][mine].tolist()
            assert len(accepted) >= 6
            assert accepted == ([0, 5, 2, 1] * 6)[: len(accepted)]
    assert comparison.trace.runs[0]["draft_accept"] == [0, 5, 2, 1]


def test_sequences_may_end_at_different_times_and_be_sampled() -> None:
    options = options_of(30, "draft-mtp", parallel=2, sampler=SAMPLED, n_ctx=40)
    comparison = finish(Comparison(session(MTP), prompts(3), options, DEFAULT_LANES))
    alone = tokens_of(decode(session(MTP), prompts(3), options_of(30, sampler=SAMPLED, n_ctx=40)))
    assert comparison.emitted == alone
    assert len({len(tokens) for tokens in alone}) > 1
    assert all(not verdict.is_beyond for verdict in comparison.results())
    assert comparison.trace.runs[0]["stops"].count("context") >= 1


def test_one_prompt_in_a_list_is_one_prompt() -> None:
    options = options_of(12, "draft-mtp")
    both = [
        finish(Comparison(session(MTP), prompt, options, [NOISE_LANE]))
        for prompt in (prompt_of(MTP), [prompt_of(MTP)])
    ]
    assert both[0].emitted == both[1].emitted and both[0].texts == both[1].texts
