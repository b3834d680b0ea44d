"""Lanes on golden models: clean ones within the noise, every fault found where it began."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from engine.analysis.verdict import judge, noise_bound
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import DEFAULT_LANES
from engine.compare.policy_lane import PolicyLane
from engine.draft.drafter import Draft, Drafter, DraftRequest
from engine.errors import ContextFullError, DeviceLostError, OptionError
from engine.model.layers import TargetRows
from engine.options import ROLLBACK_POLICIES, Prompt
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from tests.support.clean import PASSED
from tests.support.comparisons import finish, rounds_of, specs, verdicts
from tests.support.faults import FAULTY_LANES, LARGE_FAULTS, assert_named, first_spoilt
from tests.support.golden_runs import (
    MTP_MODELS,
    SAMPLED,
    decode,
    golden,
    options_of,
    prompt_of,
    session,
    tokens_of,
)
from tests.support.noisy_logits import with_logits

MTP = MTP_MODELS[0]
N = 32
CLEAN = (
    *ROLLBACK_POLICIES,
    "planes,ubatch=3",
    "ring,split=seq,kv=unified",
    "planes,n_rs_seq=1",
    "checkpoint,checkpoint_device=device",
)


class Scripted(Drafter):
    """Drafts the true continuation, with wrong tokens here and there, sometimes nothing."""

    name = "scripted"
    n_max = 64

    def __init__(self, tokens: Sequence[int], n_vocab: int, p_wrong: float = 0.3) -> None:
        self._tokens, self._n_vocab, self._p_wrong = tokens, n_vocab, p_wrong
        self._random = np.random.default_rng(5)

    def observe(self, seq: int, pos0: int, tokens: Sequence[int], rows: TargetRows) -> None:
        assert list(tokens) == list(self._tokens[pos0 : pos0 + len(tokens)])
        assert len(rows) == len(tokens)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        (request,) = requests
        n = min(request.n_max, int(self._random.integers(0, 6)))
        true = self._tokens[request.pos0 + 1 : request.pos0 + 1 + n]
        wrong = self._random.random(len(true)) < self._p_wrong
        tokens = [(t + int(w)) % self._n_vocab for t, w in zip(true, wrong, strict=True)]
        n = len(tokens)
        return [Draft(tokens, [1.0] * n, [[0] * 5] * n, [[0.0] * 5] * n, self.name)]

    def begin(self, seq: int, prompt: Sequence[int]) -> None:
        assert list(prompt) == list(self._tokens[: len(prompt)])

    def accept(self, seq: int, n_accepted: int, *, is_other: bool) -> None:
        assert not is_other

    def forget(self, seq: int) -> None:
        pass


@cache
def compared(name: str) -> Comparison:
    """Clean and faulty lanes of an MTP model side by side."""
    options = options_of(N, "draft-mtp", n_max=5, ignore_eos=True)
    return finish(Comparison(session(name), prompt_of(name), options, specs(*CLEAN, *FAULTY_LANES)))


@pytest.mark.parametrize("name", MTP_MODELS)
def test_clean_lanes_are_within_the_noise(name: str) -> None:
    comparison = compared(name)
    found = verdicts(comparison)
    assert comparison.emitted[0] == golden(name)["greedy"][:N].tolist()
    assert comparison.bound <= 1e-7
    assert found["reference"].verdict == "reference"
    for lane in ("noise", *CLEAN):
        verdict = found[lane]
        assert verdict.verdict in PASSED, lane
        assert verdict.n_positions == N
        assert verdict.worst_nmse < (1e-8 if lane == "noise" else 1e-10)
        assert (verdict.first_pos, verdict.n_forks, verdict.duplicates) == (None, 0, 0)
        assert not verdict.is_beyond
        if lane != "noise":
            assert 0 <= verdict.state_error < 1e-5
            assert 0 <= verdict.conv_error < 1e-5


@pytest.mark.parametrize("name", MTP_MODELS)
@pytest.mark.parametrize("lane", FAULTY_LANES)
def test_faults_are_found_behind_the_rollback_that_they_spoil(name: str, lane: str) -> None:
    assert {text.split("fault=")[1] for text in FAULTY_LANES} == LARGE_FAULTS
    comparison = compared(name)
    verdict, spoilt = verdicts(comparison)[lane], first_spoilt(comparison.trace, lane)
    assert (verdict.verdict, verdict.band) == ("suspect", "> 1e-4")
    assert verdict.worst_nmse > 1e-4
    if "stale-logits" in lane:  # spoils what is read, not what is kept
        assert verdict.first_round == spoilt
    else:
        assert (verdict.after_round, verdict.first_round) == (spoilt, spoilt + 1)
    assert (verdict.duplicates > 0) == ("keep-stale-kv" in lane)
    rows = comparison.trace.divergence
    at = (rows.column("run_id") == verdict.run_id) & (rows.column("round") < verdict.first_round)
    assert (rows.column("nmse")[at] < 1e-9).all()


@pytest.mark.parametrize("name", MTP_MODELS)
def test_every_fault_is_named_and_nothing_else(name: str) -> None:
    assert_named(compared(name).trace)


def test_faults_leave_the_mark_of_their_kind() -> None:
    found = verdicts(compared(MTP))
    rows = compared(MTP).trace.divergence

    def largest(lane: str, column: str) -> float:
        values = rows.column(column)[rows.column("run_id") == found[lane].run_id]
        return float(values.max(initial=0, where=~np.isnan(values)))

    assert largest("checkpoint,fault=keep-stale-kv", "cells_differ") > 0
    assert largest("planes,fault=no-conv-rollback", "cells_differ") == 0
    assert largest("planes,fault=plane-off-by-one", "state_error") > 0.1
    assert largest("checkpoint,fault=stale-logits", "state_error") < 1e-5


def test_duplicates_grow_with_every_restore_and_acceptance_does_not_fall() -> None:
    """Teacher-forced acceptance is the reference's; the reported signature is in the cells."""
    faulty = rounds_of(compared(MTP), "checkpoint,fault=keep-stale-kv")
    clean = rounds_of(compared(MTP), "checkpoint")
    restored = clean["path"] == "restore"
    surplus = faulty["kv_cells_used"] - clean["kv_cells_used"]
    assert (np.diff(surplus)[restored[1:]] == clean["verify_width"][1:][restored[1:]]).all()
    assert (np.diff(surplus)[~restored[1:]] == 0).all()
    name = "num_accepted_draft_tokens"
    assert faulty[name].tolist() == clean[name].tolist()


def test_rows_follow_the_tokens_of_the_reference() -> None:
    comparison = compared(MTP)
    rows = comparison.trace.divergence
    first = len(prompt_of(MTP).tokens)
    for verdict in comparison.results()[1:]:
        mine = rows.column("run_id") == verdict.run_id
        assert rows.column("token_id")[mine].tolist() == comparison.emitted[0]
        assert rows.column("pos")[mine].tolist() == list(range(first, first + N))
        last_of_round = np.append(np.diff(rows.column("round")[mine]) > 0, True)
        observed = ~np.isnan(rows.column("state_error")[mine])
        assert not (observed & ~last_of_round).any()
        if verdict.lane != "noise":
            assert (observed == last_of_round).all()


def test_states_are_recorded_by_layer() -> None:
    comparison = compared(MTP)
    rows, states = comparison.trace.divergence, comparison.trace.states
    kinds = session(MTP).config.recurrent_layers
    layers = [i for i, recurrent in enumerate(kinds) if recurrent]
    for verdict in comparison.results()[2:]:
        mine = states.column("run_id") == verdict.run_id
        assert states.column("layer")[mine].reshape(-1, len(layers)).tolist()[0] == layers
        ends = (rows.column("run_id") == verdict.run_id) & ~np.isnan(rows.column("state_error"))
        for name in ("state_error", "conv_error"):
            by_layer = states.column(name)[mine].reshape(-1, len(layers))
            assert by_layer.max(1).tolist() == rows.column(name)[ends].tolist()
        # a token's logits choose the one after it
        at = states.column("pos")[mine][:: len(layers)]
        assert (at == rows.column("pos")[ends] - 1).all()


def test_lanes_accept_what_llama_cpp_accepts() -> None:
    data = golden(MTP)
    comparison = finish(
        Comparison(session(MTP), prompt_of(MTP), options_of(80, "draft-mtp", ignore_eos=True))
    )
    for lane in ("checkpoint", "planes"):
        accepted = rounds_of(comparison, lane)["num_accepted_draft_tokens"][1:]
        steps = len(data["spec_accepted"])
        assert accepted[:steps].tolist() == data["spec_accepted"].tolist()


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("qwen35-a-f32", None),
        ("qwen3next-e-v2x-f32", SAMPLED),
        ("qwen35-g-v2x-q4_k_m", None),
        ("qwen3-f-f32", SAMPLED),
    ],
)
@pytest.mark.thinned(4)
def test_models_without_head_follow_a_script(name: str, sampler) -> None:
    opened, prompt = session(name), prompt_of(name)
    options = options_of(N, n_max=5, n_ubatch=16, ignore_eos=True)
    options = replace(options, sampler=sampler or options.sampler)
    plain = tokens_of(decode(opened, [prompt], options))[0]
    drafter = Scripted([*prompt.tokens, *plain], opened.config.n_vocab)
    drafting = replace(options, spec=replace(options.spec, types=("draft-simple",)))
    comparison = finish(
        Comparison(
            opened, prompt, drafting, specs("checkpoint", "planes", "replay"), drafter=drafter
        )
    )
    asked = comparison.trace.drafts
    assert len(asked) and set(asked.texts("drafter")) == {"scripted"}
    counters = comparison.trace.runs[0]["summary"]["drafters"]["scripted"]
    assert counters["n_gen_tokens"] == asked.column("num_draft_tokens").sum()
    assert 0 < counters["n_acc_tokens"] < counters["n_gen_tokens"]
    assert comparison.emitted[0] == plain
    for lane, verdict in verdicts(comparison).items():
        assert verdict.verdict in ("reference", *PASSED), lane
        assert lane == "reference" or verdict.n_positions == N
    if opened.config.n_recurrent:
        assert {"none", "restore"} == set(rounds_of(comparison, "checkpoint")["path"])


def test_batches_of_one_token_are_exact() -> None:
    opened, prompt = session(MTP), Prompt(prompt_of(MTP).tokens[:5])

    class Mute(Scripted):
        def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft() for _ in requests]

    plain = tokens_of(decode(opened, [prompt], options_of(12)))[0]
    mute = Mute([*prompt.tokens, *plain], opened.config.n_vocab)
    options = options_of(12, "draft-mtp")
    comparison = Comparison(opened, prompt, options, DEFAULT_LANES, drafter=mute)
    _, noise, *same = finish(comparison).results()
    assert 0 < noise.worst_nmse < 1e-8
    for verdict in same:
        assert (verdict.verdict, verdict.worst_nmse, verdict.state_error) == ("exact", 0.0, 0.0)


def test_noise_of_the_width_is_not_a_wrong_state(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session(MTP)
    forward = type(opened.model).forward

    def width_dependent(self, ubatch, memory, **wanted):
        out = forward(self, ubatch, memory, **wanted)
        noise = torch.Generator().manual_seed(ubatch.n_seq_tokens)
        row = torch.randn(out.logits.shape[1], generator=noise)
        return with_logits(out, out.logits + 1e-3 * row)

    monkeypatch.setattr(type(opened.model), "forward", width_dependent)
    lanes = specs("planes", "checkpoint", "planes,fault=no-conv-rollback")
    comparison = finish(Comparison(opened, prompt_of(MTP), options_of(40, "draft-mtp"), lanes))
    found = verdicts(comparison)
    assert comparison.bound > 1e-6
    assert found["planes"].worst_nmse > 1e-7
    assert found["planes"].verdict == found["checkpoint"].verdict == "within"
    assert found["planes,fault=no-conv-rollback"].verdict == "suspect"


def test_a_bound_of_ones_own() -> None:
    def verdict(bound: float) -> str:
        comparison = Comparison(
            session(MTP),
            prompt_of(MTP),
            options_of(20, "draft-mtp", n_max=12),
            specs("planes"),
            bound=bound,
        )
        assert comparison.bound == bound
        return verdicts(finish(comparison))["planes"].verdict

    # passes of this many tokens do not sum in the order of one
    assert (verdict(1e-20), verdict(1e-6)) == ("suspect", "within")


def test_a_lane_without_room_stops_and_the_others_go_on() -> None:
    prompt = prompt_of(MTP)
    options = options_of(60, "draft-mtp", n_max=8, n_ctx=len(prompt.tokens) + 70, ignore_eos=True)
    lanes = specs("checkpoint,fault=keep-stale-kv", "checkpoint")
    comparison = finish(Comparison(session(MTP), prompt, options, lanes))
    full, clean = comparison.results()[2:]
    assert full.verdict == "failed"
    assert full.is_beyond
    assert "free cells" in full.error
    assert full.n_positions < clean.n_positions == 60
    assert clean.verdict in PASSED


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access"), "cpu failed: CUDA error"),
        (torch.OutOfMemoryError("CUDA out of memory."), "take more memory than cpu has"),
    ],
)
def test_a_device_that_fails_is_no_fault_of_a_lane(monkeypatch, error, says) -> None:
    """A lost one ends all of them; of memory the others may need less."""
    lanes, follow, n = specs("ring", "planes"), PolicyLane._follow, [0]

    def fail(lane, round_):
        n[0] += lane.name == "ring"
        if lane.name == "ring" and n[0] == 4:
            raise error
        follow(lane, round_)

    monkeypatch.setattr(PolicyLane, "_follow", fail)
    comparison = Comparison(session(MTP), prompt_of(MTP), options_of(20, "draft-mtp"), lanes)
    if isinstance(error, torch.OutOfMemoryError):
        ring, planes = finish(comparison).results()[2:]
        assert says in ring.error and not planes.error
        return
    with pytest.raises(DeviceLostError, match=says):
        finish(comparison)
    assert comparison.done
    assert not any("lane_error" in facts for facts in comparison.trace.runs.values())
    assert all(facts["stops"] for facts in comparison.trace.runs.values())


@pytest.mark.parametrize("lane", ["peer", "planes,compute=int8", "ring,free"])
def test_a_comparison_that_cannot_start_leaves_no_run_going_on(
    lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as if it were not installed
    opened = copy(session(MTP))
    if "int8" in lane:
        opened.path = None
        opened._loaded_again = {}
    if "free" in lane:  # whatever the last step is, here a drafter's memory
        made = iter([session(MTP).make_drafters])
        opened.make_drafters = lambda *args: next(made)(*args)
    trace = TraceStore()
    before = trace.begin_run({"lane": "of an earlier comparison"})
    options, lanes = options_of(8, "draft-mtp"), specs("planes", lane)
    with pytest.raises((OptionError, StopIteration)) as error:
        Comparison(opened, prompt_of(MTP), options, lanes, trace)
    assert "stops" not in trace.runs.pop(before)
    assert trace.runs
    why = str(error.value) or "StopIteration"
    for facts in trace.runs.values():
        assert (facts["stops"], facts["lane_error"]) == ([], why)


def test_an_opened_trace_is_judged_the_same(tmp_path) -> None:
    comparison = compared(MTP)
    export_csv(comparison.trace, tmp_path / "out")
    opened = open_trace(tmp_path / "out")
    noise = verdicts(comparison)["noise"].run_id
    assert noise_bound(opened, [noise]) == pytest.approx(comparison.bound)
    for verdict in comparison.results():
        again = judge(opened, verdict.run_id, comparison.bound)
        assert (again.lane, again.verdict, again.band) == (
            verdict.lane,
            verdict.verdict,
            verdict.band,
        )
        assert (again.first_pos, again.after_round) == (verdict.first_pos, verdict.after_round)


def test_stopping_early_keeps_what_was_recorded() -> None:
    comparison = Comparison(session(MTP), prompt_of(MTP), options_of(60, "draft-mtp"))
    assert comparison.step()
    assert comparison.step()
    comparison.stop()
    assert not comparison.step()
    assert 1 < len(comparison.emitted[0]) < 60
    assert comparison.results()[2].n_positions == len(comparison.emitted[0])
    assert comparison.trace.runs[0]["stops"] == ["stopped"]


def test_what_cannot_be_compared_is_refused() -> None:
    opened, prompt = session(MTP), prompt_of(MTP)
    with pytest.raises(OptionError, match="No drafter"):
        Comparison(opened, prompt, options_of(8))
    with pytest.raises(OptionError, match="given twice"):
        Comparison(opened, prompt, options_of(8, "draft-mtp"), specs("ring", "ring"))
    with pytest.raises(OptionError, match="needs an MTP head"):
        Comparison(session("qwen35-a-f32"), prompt, options_of(8, "draft-mtp"))
    with pytest.raises(ContextFullError):
        Comparison(opened, prompt, options_of(8, "draft-mtp", n_ctx=4))
