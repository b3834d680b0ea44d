"""Free lanes: runs of their own, compared until they say something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.analysis.verdict import judge
from engine.compare.comparison import Comparison
from engine.draft.drafter import Draft, Drafter
from engine.errors import OptionError
from engine.options import Prompt
from engine.trace.export import export_csv
from engine.trace.records import EMITTED_KINDS
from engine.trace.reopen import open_trace
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


def emitted_by(comparison: Comparison, lane: str, seq_id: int = 0) -> dict[int, int]:
    tokens, run = comparison.trace.tokens, verdicts(comparison)[lane].run_id
    mine = (tokens.column("run_id") == run) & (tokens.column("seq_id") == seq_id)
    mine &= np.isin(tokens.texts("kind"), EMITTED_KINDS)
    return dict(
        zip(
            tokens.column("pos")[mine].tolist(),
            tokens.column("token_id")[mine].tolist(),
            strict=True,
        )
    )


def test_a_trace_with_free_lanes_of_several_sequences_opens(tmp_path: Path) -> None:
    """The reference lane gives one sequence more tokens in a round than the lane, another less."""
    prompts = [prompt_of(MTP), Prompt(prompt_of(MTP).tokens[:5])]
    options = options_of(40, "draft-mtp", n_max=4, ignore_eos=True, parallel=2)
    lanes = specs("planes,free", "checkpoint,free,replay=verify")
    comparison = finish(Comparison(session(MTP), prompts, options, lanes))
    export_csv(comparison.trace, tmp_path / "out")
    again = open_trace(tmp_path / "out")
    for lane in ("planes,free", "checkpoint,free,replay=verify"):
        run = verdicts(comparison)[lane].run_id
        rounds = comparison.trace.divergence.column("round")
        mine = comparison.trace.divergence.column("run_id") == run
        assert (np.diff(rounds[mine]) >= 0).all() and mine.sum() == 80
    assert len(again.divergence) == len(comparison.trace.divergence)


@pytest.mark.parametrize(
    ("lane", "sampler"),
    [
        ("planes,free", SAMPLED),
        ("checkpoint,free,replay=verify", SAMPLED),
        ("checkpoint,free,replay=verify", None),
        ("ring,free=1", None),
    ],
)
@pytest.mark.thinned(4)
def test_a_clean_lane_never_forks(lane: str, sampler) -> None:
    options = options_of(60, "draft-mtp", n_max=4, ignore_eos=True)
    if sampler:
        options = options_of(60, "draft-mtp", n_max=4, ignore_eos=True, sampler=sampler)
    comparison = finish(Comparison(session(MTP), prompt_of(MTP), options, specs(lane)))
    verdict = verdicts(comparison)[lane]
    assert verdict.verdict in PASSED
    assert (verdict.fork, verdict.n_positions) == (None, 60)
    assert list(emitted_by(comparison, lane).values()) == comparison.emitted[0]
    rows = differences_of(comparison, lane)
    first = len(prompt_of(MTP).tokens)
    assert rows["pos"].tolist() == list(range(first, first + 60))
    assert rows["token_id"].tolist() == comparison.emitted[0]
    assert (rows["rank"] == 1).all() or sampler
    assert 0 <= verdict.state_error < 1e-5


def test_a_free_lane_is_the_run_that_its_options_give() -> None:
    options = options_of(50, "draft-mtp", n_max=4, ignore_eos=True)
    comparison = finish(Comparison(session(MTP), prompt_of(MTP), options, specs("ring,free")))
    as_ring = replace(options, rollback="ring")
    alone = decode(session(MTP), [prompt_of(MTP)], as_ring)
    rounds = alone.trace.rounds
    for name, column in rounds_of(comparison, "ring,free").items():
        if name != "path":
            assert column.tolist() == rounds.column(name).tolist(), name


def test_a_wrong_state_forks_and_ends_there() -> None:
    options = options_of(80, "draft-mtp", n_max=5, ignore_eos=True)
    lane = "planes,free,fault=plane-off-by-one"
    comparison = finish(Comparison(session(MTP), prompt_of(MTP), options, specs("planes", lane)))
    verdict = verdicts(comparison)[lane]
    assert verdict.verdict == "suspect"
    fork, own = verdict.fork, emitted_by(comparison, lane)
    first = len(prompt_of(MTP).tokens)
    true = dict(enumerate(comparison.emitted[0], first))
    wrong = min(pos for pos, token in own.items() if token != true[pos])
    assert (fork.seq_id, fork.pos) == (0, wrong)
    assert (fork.token_id, fork.reference_id) == (own[wrong], true[wrong])
    rounds = rounds_of(comparison, lane)
    earlier = rounds["round"][(rounds["rollback_depth"] > 0) & (rounds["round"] < fork.round)]
    assert fork.after_round == earlier[-1]
    assert fork.top2_gap > 0
    rows = differences_of(comparison, lane)
    assert rows["pos"].tolist() == list(range(first, wrong + 1))
    assert rows["rank"][-1] > 1
    assert rounds["round"].max() == fork.round  # nothing is decoded after the fork
    assert verdicts(comparison)["planes"].n_positions == 80


def test_stale_logits_are_the_ones_compared() -> None:
    options = options_of(60, n_max=4, ignore_eos=True)
    lane = "checkpoint,free,fault=stale-logits"
    comparison = finish(
        Comparison(session(MTP), prompt_of(MTP), options, specs(lane), draft_accept=(1,))
    )
    verdict = verdicts(comparison)[lane]
    assert (verdict.verdict, verdict.first_round, verdict.fork.round) == ("suspect", 1, 1)


def test_sequences_fork_one_by_one(tmp_path) -> None:
    tokens = prompt_of(MTP).tokens
    prompts = [Prompt(tokens[:9]), Prompt(tokens[3:20]), Prompt(tokens[5:12])]
    options = options_of(50, n_max=5, parallel=2, ignore_eos=True)
    lanes = specs("ring,free,kv=unified", "planes,free,fault=no-conv-rollback")
    comparison = finish(Comparison(session(MTP), prompts, options, lanes, draft_accept=(0, 3, 1)))
    clean, faulty = comparison.results()[2:]
    assert clean.verdict in PASSED and clean.n_positions == 150
    assert faulty.verdict == "suspect"
    rows = differences_of(comparison, faulty.lane)
    for seq_id in range(3):
        own = emitted_by(comparison, faulty.lane, seq_id)
        first = len(prompts[seq_id].tokens)
        true = dict(enumerate(comparison.emitted[seq_id], first))
        wrong = min(
            (pos for pos, token in own.items() if token != true.get(pos, token)), default=first + 49
        )
        assert rows["pos"][rows["seq_id"] == seq_id].tolist() == list(range(first, wrong + 1))
    export_csv(comparison.trace, tmp_path / "out")
    again = judge(open_trace(tmp_path / "out"), faulty.run_id, faulty.bound)
    assert again.fork == replace(faulty.fork, top2_gap=again.fork.top2_gap)
    assert again.fork.top2_gap == pytest.approx(faulty.fork.top2_gap)
    assert again.verdict == faulty.verdict


def test_a_drafter_is_not_shared() -> None:
    class Mute(Drafter):
        name = "mute"
        n_max = 3

        def draft(self, requests) -> list[Draft]:
            return [Draft() for _ in requests]

    with pytest.raises(OptionError, match="cannot share the given drafter"):
        Comparison(session(MTP), prompt_of(MTP), options_of(8), specs("ring,free"), drafter=Mute())
    with pytest.raises(OptionError, match="and a drafter are both given"):
        Comparison(session(MTP), prompt_of(MTP), options_of(8, "draft-mtp"), draft_accept=(1,))
    assert tokens_of(decode(session(MTP), [prompt_of(MTP)], options_of(2)))


def test_stopping_ends_free_lanes_too() -> None:
    comparison = Comparison(
        session(MTP), prompt_of(MTP), options_of(60, "draft-mtp"), specs("ring,free")
    )
    comparison.step()
    comparison.step()
    comparison.stop()
    assert comparison.trace.runs[2]["stops"] == ["stopped"]
    assert comparison.results()[2].n_positions == len(comparison.emitted[0])
