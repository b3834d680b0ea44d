"""Lanes whose sequences are copied: clean ones are within the noise, and bugs have names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.analysis.findings.check import find, recorded
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import DEFAULT_LANES, LaneSpec
from engine.errors import OptionError
from engine.options import Prompt
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from tests.support import copy_bugs as bugs
from tests.support.comparisons import differences_of, finish, specs, verdicts
from tests.support.golden_runs import options_of, prompt_of, session

MODEL = "qwen35-c-v2x-mtp-f32"
FORKS = "carry,forks"
POLICIES = ("planes,forks", FORKS, "ring,forks", "replay,forks", "checkpoint,forks")
Bug = Callable[[pytest.MonkeyPatch], None]


def compared(lanes: list[LaneSpec], n_seqs: int = 1, n: int = 16, **others) -> Comparison:
    tokens = prompt_of(MODEL).tokens
    prompts = [Prompt(tokens[: 14 - 3 * i]) for i in range(n_seqs)]
    options = options_of(n, n_max=3, parallel=n_seqs, ignore_eos=True, **others)
    script = [1, 0, 3, 2]
    return finish(Comparison(session(MODEL), prompts, options, lanes, draft_accept=script))


def named(comparison: Comparison, lane: str) -> set[str]:
    run_id = verdicts(comparison)[lane].run_id
    return {f.rule for f in recorded(comparison.trace) if f.run_id == run_id}


@pytest.mark.parametrize(
    ("lanes", "n_seqs", "kv"), [(POLICIES, 1, "per-seq"), (POLICIES[1:3], 3, "unified")]
)
@pytest.mark.thinned(4)
def test_clean_lanes_with_forks_are_within_the_noise(
    lanes: tuple[str, ...], n_seqs: int, kv: str
) -> None:
    comparison = compared(specs(*lanes), n_seqs, 13, kv=kv)
    found = verdicts(comparison)
    assert {found[lane].verdict for lane in lanes} <= {"within", "exact"}
    errors = {f.rule for f in recorded(comparison.trace) if f.severity == "error"}
    assert errors == set()


def test_a_pool_of_cells_alone_may_have_no_copies_to_undo() -> None:
    """Copies are made anew in some of the rounds; in others nothing can be undone as a whole."""
    name, lane = "qwen3-f-f32", "replay,kv=unified,forks"
    options = options_of(20, n_max=3, ignore_eos=True)
    prompts = [Prompt(prompt_of(name).tokens[:8])]
    comparison = finish(Comparison(session(name), prompts, options, specs(lane), draft_accept=[0]))
    assert verdicts(comparison)[lane].verdict in ("within", "exact")
    assert not [f for f in recorded(comparison.trace) if f.severity == "error"]


def test_every_position_has_one_row_in_order() -> None:
    comparison = compared(specs(FORKS, "carry"), 2)
    forked, plain = (differences_of(comparison, lane) for lane in (FORKS, "carry"))
    for name in ("round", "seq_id", "pos", "token_id"):
        assert np.array_equal(forked[name], plain[name])
    assert np.array_equal(np.isnan(forked["state_error"]), np.isnan(plain["state_error"]))


@pytest.mark.parametrize(
    ("bug", "lane", "finds"),
    [
        (bugs.a_copy_loses_the_pending_rollback, FORKS, "fork-wrong"),
        (bugs.rows_are_read_by_cell, FORKS, "fork-wrong"),
        (bugs.idle_states_move_from_plane_0, FORKS, "neighbour-state-wrong"),
        (bugs.idle_states_keep_their_pending_rollback, FORKS, "neighbour-state-wrong"),
        (bugs.carry_reads_from_plane_0, FORKS, "carried-state-wrong"),
        (bugs.carry_reads_by_cell, FORKS, "carried-state-wrong"),
        (bugs.ring_does_not_count_the_copy, "ring,forks", "carried-state-wrong"),
        (bugs.ring_writes_at_home, "ring,forks", "carried-state-wrong"),
        (bugs.replay_stays_in_a_shared_row, "replay,forks", "neighbour-state-wrong"),
    ],
)
def test_a_bug_of_copies_or_neighbours_is_named(
    monkeypatch: pytest.MonkeyPatch, bug: Bug, lane: str, finds: str
) -> None:
    bug(monkeypatch)
    lanes = list(DEFAULT_LANES) if lane == FORKS else specs(lane)
    comparison = compared(lanes)
    found = verdicts(comparison)
    assert found.pop(lane).verdict == "suspect"
    assert named(comparison, lane) == {finds}
    assert {other.verdict for other in found.values()} <= {"reference", "within", "exact"}


def test_the_default_names_them_among_several_sequences(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bugs.idle_states_move_from_plane_0(monkeypatch)
    comparison = compared(list(DEFAULT_LANES), 2)
    (finding, *_) = (f for f in recorded(comparison.trace) if f.severity == "error")
    assert finding.rule == "neighbour-state-wrong"
    assert "tokens pending" in finding.evidence
    assert "policy carry" in finding.evidence
    export_csv(comparison.trace, tmp_path / "out")
    again = find(open_trace(tmp_path / "out"))
    assert finding in again


def test_forks_and_free_do_not_go_together() -> None:
    with pytest.raises(OptionError, match="forks"):
        LaneSpec.parse("carry,forks,free")
