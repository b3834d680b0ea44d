"""Errors that misuse makes end in a finding with the invariant that was broken."""

from __future__ import annotations

import pytest

from engine.analysis.findings.check import recorded
from engine.compare.comparison import Comparison
from engine.errors import RollbackRefusedError
from engine.memory.planes import PlanesMemory
from engine.memory.recurrent import SnapshotPolicy
from engine.memory.replay import ReplayMemory
from engine.trace.facts import Finding
from engine.trace.store import TraceStore
from tests.support.comparisons import finish, specs, verdicts
from tests.support.golden_runs import options_of, prompt_of, session
from tests.support.host_chosen import host_chosen  # noqa: F401

pytestmark = pytest.mark.usefixtures("host_chosen")

MTP = "qwen35-c-v2x-mtp-f32"
Patch = pytest.MonkeyPatch


def errors(trace: TraceStore) -> list[Finding]:
    return [one for one in recorded(trace) if one.severity == "error"]


def compared(lane: str) -> Comparison:
    options = options_of(10, n_max=4, ignore_eos=True)
    return finish(
        Comparison(session(MTP), prompt_of(MTP), options, specs(lane), draft_accept=[1, 0, 3])
    )


def no_promise_kept(patch: Patch) -> None:
    patch.setattr(PlanesMemory, "valid_depth", lambda self, seq: 0)


def test_a_run_names_the_promise_that_was_not_kept(monkeypatch: Patch) -> None:
    no_promise_kept(monkeypatch)
    options = options_of(10, "draft-mtp", n_max=4, ignore_eos=True, rollback="planes")
    run = session(MTP).start([prompt_of(MTP)], options)

    def to_the_end() -> None:
        while run.step():
            pass

    with pytest.raises(RollbackRefusedError):
        to_the_end()
    (found,) = errors(run.trace)
    assert (found.rule, found.seq_id) == ("depth-not-kept", 0)
    assert "pending 0, valid_depth 0" in found.evidence


def test_a_rollback_that_stays_pending(monkeypatch: Patch) -> None:
    commit = SnapshotPolicy.commit

    def keeps(self: SnapshotPolicy) -> None:
        before = self._pending[:]
        commit(self)
        if isinstance(self, PlanesMemory) and self.n_rs_seq:
            self._pending = before

    monkeypatch.setattr(SnapshotPolicy, "commit", keeps)
    comparison = compared("planes")
    assert verdicts(comparison)["planes"].verdict == "failed"
    assert [one.rule for one in errors(comparison.trace)] == ["rollback-still-pending"]


def test_an_error_in_a_lane_leaves_the_others_alone(monkeypatch: Patch) -> None:
    def breaks(self: ReplayMemory, *_: object) -> None:
        raise RuntimeError("shapes 3 and 4 do not fit")

    monkeypatch.setattr(ReplayMemory, "advance", breaks)
    comparison = compared("replay")
    assert verdicts(comparison)["noise"].verdict != "failed"
    (found,) = errors(comparison.trace)
    assert (found.rule, found.round) == ("engine-failed", 0)
    assert found.message.startswith("RuntimeError in test_failures.breaks; before it")
    assert "recurrent states at -1" in found.message
