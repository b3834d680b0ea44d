"""Two faults as they were reported: duplicate cells (llama.cpp #19493) and stale planes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.analysis.findings.check import find, record_findings, recorded
from engine.batch import Span
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.decode.forward import Forward
from engine.decode.recorder import Recorder
from engine.decode.round import PhaseClock, Round
from engine.draft.scripted import ScriptedDrafter
from engine.options import RunOptions, SpecOptions
from engine.session import Session
from engine.trace.store import TraceStore
from tests.support.golden_runs import decode, options_of, prompt_of, session, tokens_of
from tests.support.observed_texts import CAPTURED_TARGET

MTP = "qwen35-c-v2x-mtp-f32"
TEXTS = (
    "def quicksort(arr):",
    "class Node:\n    def __init__(self",
    "import os\n\ndef read_file(path):",
)


def columns(trace: TraceStore, run_id: int, *names: str) -> list[np.ndarray]:
    mine = trace.rounds.column("run_id") == run_id
    return [trace.rounds.column(name)[mine] for name in names]


def test_duplicate_cells_grow_with_every_restore_while_acceptance_holds() -> None:
    """n + 1 cells per restore in which nothing was accepted, logits adrift, acceptance as good."""
    opened, prompt = session(MTP), prompt_of(MTP)
    options = options_of(60, n_max=4, ignore_eos=True)
    plain = tokens_of(decode(opened, [prompt], options))[0]
    drafter = ScriptedDrafter([4, 0, 2], 4, opened.config.n_vocab, lambda _: iter(plain))
    lanes = [NOISE_LANE, *map(LaneSpec.parse, ("checkpoint", "checkpoint,fault=keep-stale-kv"))]
    comparison = Comparison(opened, prompt, options, lanes, drafter=drafter)
    while comparison.step():
        pass
    trace = comparison.trace
    used, width, depth, duplicates = columns(
        trace, 3, "kv_cells_used", "verify_width", "rollback_depth", "kv_cells_duplicate"
    )
    clean, accepted = columns(trace, 2, "kv_cells_used", "num_accepted_draft_tokens")
    surplus = np.diff(used - clean)
    assert (surplus == np.where(depth[1:] > 0, width[1:], 0)).all()
    assert set(surplus[1:-1].tolist()) == {0, 5}
    (finding,) = (f for f in recorded(trace) if f.severity != "info")
    assert (finding.rule, finding.round) == ("duplicate-kv-cells", 2)  # round 1 accepts all
    assert (np.diff(duplicates) >= 0).all()
    rows = trace.divergence
    nmse = rows.column("nmse")[rows.column("run_id") == 3]
    at = rows.column("round")[rows.column("run_id") == 3]
    assert nmse[at <= 2].max() < 1e-9 < 1e-3 < nmse[at > 2].max()
    # the lane is led by the reference; on its own the drafts of a run fare as well as before
    assert accepted[1:-1].tolist() == ([4, 0, 2] * 9)[: len(accepted) - 2]


def test_acceptance_of_runs_with_duplicates_does_not_fall() -> None:
    """On a trained model, where a draft is more than luck: the text changes, acceptance holds."""
    demo = Session.open(CAPTURED_TARGET, compute="f32")
    prompts = [demo.prompt(text) for text in TEXTS]
    options = replace(
        options_of(60, "draft-mtp", n_max=4, n_ctx=2048, ignore_eos=True), rollback="checkpoint"
    )
    clean = decode(demo, prompts, options)
    faulty = decode(demo, prompts, replace(options, faults=("keep-stale-kv",)))
    rates = [run.summary()["draft_acceptance_rate"] for run in (clean, faulty)]
    assert rates[1] >= rates[0]
    assert tokens_of(faulty) != tokens_of(clean)
    found = [f for f in recorded(faulty.trace) if f.rule == "duplicate-kv-cells"]
    assert [f.seq_id for f in found] == [0, 1, 2]
    assert "duplicate-kv-cells" not in {f.rule for f in recorded(clean.trace)}


@pytest.mark.parametrize("faults", [(), ("stale-plane",)])
@torch.inference_mode()
def test_a_single_token_behind_a_rollback_and_then_a_deep_one(faults: tuple[str, ...]) -> None:
    """Decode 9, undo 2, decode 1, undo 3: one plane is fresh, the fault accepts it."""
    opened, tokens = session(MTP), prompt_of(MTP).tokens
    options = RunOptions(spec=SpecOptions(n_max=8), faults=faults)
    memory = opened.make_memory(options, 1, 64, 8)
    trace = TraceStore()
    run_id = opened.begin_run(trace, options, memory, 8)
    recorder = Recorder(trace, run_id, opened.tokenizer.piece)
    forward = Forward(opened.model, memory, options, recorder, lambda seq: seq)
    recurrent = memory.recurrent
    assert recurrent is not None

    def step(number: int, pos0: int, new: tuple[int, ...], undo: int) -> bool:
        clock = PhaseClock()
        clock.start()
        span = Span(0, pos0, new, [len(new) - 1])
        logits, _ = forward.run(forward.split([span]), number, "verify", clock)
        valid = recurrent.valid_depth(0)
        accepted = memory.seq_rm(0, pos0 + len(new) - undo) if undo else True
        round_ = Round(
            number,
            0,
            0,
            pos0,
            new,
            logits=logits[0],
            accepted=[int(logits[0].argmax())],
            n_own=1,
            rollback_depth=undo,
            memory_rollback=undo,
            rollback_path="seq_rm" if accepted else "refused",
            valid_depth=valid,
            rs_idx_before=0,
            rs_idx_after=recurrent.pending(0),
        )
        recorder.round([round_], memory, clock)
        return accepted

    assert step(0, 0, tokens[:9], 2)
    assert find(trace) == []
    assert step(1, 7, tokens[7:8], 3) == bool(faults)
    record_findings(trace, [run_id])
    assert [(f.rule, f.round) for f in recorded(trace)] == [("stale-plane", 1)] * len(faults)
    if faults:  # and the state is another one than that of the five tokens that are left
        truth = opened.make_memory(options, 1, 64, 8)
        span = Span(0, 0, tokens[:5], [4])
        for ubatch in truth.split([span], 512, "equal"):
            opened.model.forward(ubatch, truth)
        mine, true = (next(iter(r.live(0).values())) for r in (recurrent, truth.recurrent))
        assert memory.seq_pos_max(0) == truth.seq_pos_max(0) == 4
        assert (mine - true).norm() > 1e-2 * true.norm()
