"""Free lanes that come apart: what noise explains, and what it does not."""

from __future__ import annotations

import pytest
import torch

from engine.analysis.verdict import judge
from engine.compare import lanes
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import LaneSpec
from engine.options import SamplerOptions
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from tests.support.comparisons import finish, specs, verdicts
from tests.support.golden_runs import MTP_MODELS, SAMPLED, options_of, prompt_of, session
from tests.support.noisy_logits import with_logits

MTP = MTP_MODELS[0]
FAULTY = (
    "checkpoint,fault=keep-stale-kv,free",
    "planes,fault=stale-logits,free",
    "planes,ubatch=3,fault=stale-plane,free",
    "ring,fault=no-conv-rollback,free",
    "carry,fault=plane-off-by-one,free",
)


def compared(*lanes: str, sampler: SamplerOptions | None = None) -> Comparison:
    options = options_of(
        60, "draft-mtp", n_max=5, ignore_eos=True, sampler=sampler or SamplerOptions()
    )
    return Comparison(session(MTP), prompt_of(MTP), options, specs(*lanes))


def spoil(comparison: Comparison, at: int) -> None:
    """Let the first lane after the noise draw another token than its logits give."""
    sampler = comparison._followers[1]._scheduler.sequences[0].sampler
    draw, n_drawn = sampler.draw, 0

    def other(distribution):
        nonlocal n_drawn
        n_drawn += 1
        token = draw(distribution)
        return (token + 1) % 300 if n_drawn == at else token

    sampler.draw = other


@pytest.mark.parametrize("sampler", [None, SAMPLED], ids=["greedy", "sampled"])
def test_a_token_that_its_logits_do_not_give_is_no_near_tie(
    sampler: SamplerOptions | None, tmp_path
) -> None:
    """All logits are right; only the sampler is wrong."""
    comparison = compared("planes,free", "planes", sampler=sampler)
    spoil(comparison, 12)
    found = verdicts(finish(comparison))
    verdict, at = found["planes,free"], len(prompt_of(MTP).tokens) + 11
    assert (verdict.verdict, verdict.fork.explained, verdict.first_pos) == ("suspect", False, at)
    assert verdict.worst_nmse < 1e-9 and not found["planes"].is_beyond
    export_csv(comparison.trace, tmp_path / "out")
    again = judge(open_trace(tmp_path / "out"), verdict.run_id, verdict.bound)
    assert (again.verdict, again.first_pos) == ("suspect", at)


@pytest.mark.parametrize("sampler", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.thinned(4)
def test_every_fault_that_changes_a_token_fails_its_free_lane(
    sampler: SamplerOptions | None,
) -> None:
    comparison = finish(compared(*FAULTY, sampler=sampler))
    forked = 0
    for lane in FAULTY:
        verdict = verdicts(comparison)[lane]
        forked += verdict.fork is not None
        assert verdict.is_beyond or verdict.fork is None, lane
    assert forked >= 3  # else nothing was shown


@pytest.mark.parametrize("sampler", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.thinned(4)
def test_noise_that_tips_a_choice_is_a_fork_and_no_fault(
    sampler: SamplerOptions | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = type(session(MTP).model).forward

    def width_dependent(self, ubatch, memory, **wanted):
        out = forward(self, ubatch, memory, **wanted)
        rows = []
        positions = ubatch.positions.reshape(-1)[ubatch.outputs].tolist()
        for pos, row in zip(positions, out.logits, strict=True):
            noise = torch.Generator().manual_seed(1000 * pos + ubatch.n_seq_tokens)
            rows.append(row + 0.3 * torch.randn(row.shape, generator=noise))
        return with_logits(out, torch.stack(rows)) if rows else out

    monkeypatch.setattr(type(session(MTP).model), "forward", width_dependent)
    monkeypatch.setattr(lanes, "logits_ceiling", lambda mode: 1.0)  # as if it rounded so coarsely
    found = verdicts(finish(compared("planes,free", "ring,free", sampler=sampler)))
    forks = [found[lane].fork for lane in ("planes,free", "ring,free")]
    assert any(forks)
    for lane, fork in zip(("planes,free", "ring,free"), forks, strict=True):
        assert found[lane].verdict == ("forked" if fork else "within")


def test_a_mode_may_choose_other_tokens_than_the_reference() -> None:
    lanes = [*specs(), LaneSpec.parse("ring,free,compute=int8")]
    options = options_of(60, "draft-mtp", n_max=3, ignore_eos=True)
    found = verdicts(finish(Comparison(session(MTP), prompt_of(MTP), options, lanes)))
    assert not found["ring,free,compute=int8"].is_beyond
