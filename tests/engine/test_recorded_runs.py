"""Runs whose forward passes are recorded and replayed have the bits of runs that are not."""

from __future__ import annotations

import logging

import pytest
import torch

import engine.machine.graphs as on_processor
from engine.batch import Span
from engine.machine.graphs import MOST_GRAPHS, VARIABLE, PassInputs, StepGraphs, graphs_for
from engine.memory.hybrid import HybridMemory, MemoryShelf
from engine.options import Prompt, RunOptions, StateTypes
from engine.run import Run
from engine.session import Session
from kernels.dispatch import uses_llvm
from tests.support.golden_runs import DATA, decode, options_of, prompt_of, session, tokens_of
from tests.support.recorded_runs import assert_same

MTP = "qwen35-c-v2x-mtp-f32"
POLICIES = ["planes", "carry", "ring", "replay", "checkpoint"]

compiled = pytest.mark.skipif(not uses_llvm(), reason="kernels that are not compiled")


class Counts(on_processor.RecordOnProcessor):
    """Counts what it was asked to do."""

    n_recorded = n_replayed = 0

    def __call__(self, compute):
        outputs, run = super().__call__(compute)
        Counts.n_recorded += 1

        def replay() -> None:
            Counts.n_replayed += 1
            run()

        return outputs, replay


@pytest.fixture
def counts(monkeypatch) -> type[Counts]:
    Counts.n_recorded = Counts.n_replayed = 0
    monkeypatch.setattr(on_processor, "RecordOnProcessor", Counts)
    # what earlier runs of a session recorded would not be counted
    monkeypatch.setattr(MemoryShelf, "take", lambda self, key, make: make())
    return Counts


def both(
    monkeypatch, name: str, prompts: list[Prompt], options: RunOptions, draft: str | None = None
) -> tuple[Run, Run]:
    """The run as it is, and without recordings."""
    recorded = decode(session(name, draft), prompts, options)
    monkeypatch.setenv(VARIABLE, "off")
    plain = decode(session(name, draft), prompts, options)
    monkeypatch.delenv(VARIABLE)
    return recorded, plain


@compiled
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.thinned(4)
def test_speculation_with_the_mtp_head(policy, monkeypatch, counts):
    options = options_of(60, "draft-mtp", rollback=policy)
    recorded, plain = both(monkeypatch, MTP, [prompt_of(MTP)], options)
    assert_same(recorded, plain)
    depths = recorded.trace.rounds.column("rollback_depth")
    assert len(set(depths.tolist())) > 2, "drafts failed at several tokens"
    # few shapes, most passes replayed: a draft and a verification in every round
    assert counts.n_recorded <= 12
    assert counts.n_replayed >= 1.5 * len(depths)


@compiled
@pytest.mark.parametrize("policy", ["planes", "ring", "replay"])
@pytest.mark.parametrize("kv", ["per-seq", "unified"])
@pytest.mark.thinned(8)
def test_several_sequences(policy, kv, monkeypatch, counts):
    tokens = prompt_of(MTP).tokens
    prompts = [Prompt(tokens[:n]) for n in (len(tokens), 5, 9)]
    options = options_of(30, "draft-mtp", rollback=policy, parallel=2, kv=kv)
    assert_same(*both(monkeypatch, MTP, prompts, options))
    assert counts.n_replayed > 20


@compiled
def test_a_draft_model_and_growing_cells(monkeypatch, counts):
    name, draft = "qwen35-b-v2x-tied-f32", "qwen35-a-f32"
    # beyond the cells that are allocated at first
    options = options_of(300, "draft-simple", rollback="planes")
    assert_same(*both(monkeypatch, name, [prompt_of(name)], options, draft))
    assert counts.n_replayed > 100


@compiled
@pytest.mark.parametrize("policy", ["planes", "carry", "ring", "replay"])
def test_states_that_storage_rounds(policy, monkeypatch, counts):
    types = StateTypes("bf16", "f16", "bf16")
    options = options_of(40, "draft-mtp", rollback=policy, state_types=types)
    assert_same(*both(monkeypatch, MTP, [prompt_of(MTP)], options))
    assert counts.n_replayed > 10


@compiled
@pytest.mark.parametrize(
    "fault", ["plane-off-by-one", "no-conv-rollback", "stale-plane", "bf16-snapshots"]
)
def test_faults_show_all_the_same(fault, monkeypatch, counts):
    """A fault is in the rows that are chosen, which are no part of a recording."""
    options = options_of(40, "draft-mtp", rollback="planes", faults=(fault,))
    recorded, plain = both(monkeypatch, MTP, [prompt_of(MTP)], options)
    assert_same(recorded, plain)
    assert counts.n_replayed > 10


@compiled
@pytest.mark.parametrize("name", ["qwen3-f-f32", "qwen35-g-v2x-q4_k_m"])
@pytest.mark.parametrize("compute", ["f32", "blocks"])
@torch.inference_mode()
def test_logits_have_the_same_bits(name, compute, monkeypatch, counts):
    """Widths that alternate, tokens taken back, a sequence forgotten and started anew."""
    opened = session(name)
    model = opened.model_in(compute)
    outputs = []
    for graphs in ("", "off"):
        monkeypatch.setenv(VARIABLE, graphs)
        memory = HybridMemory.for_model(
            model.config, 1, 600, model.device, policy="carry", n_rs_seq=3
        )
        found, pos = [], 0
        for turn in range(24):
            width = (5, 1, 4, 2)[turn % 4]
            tokens = [(7 * turn + i) % model.config.n_vocab for i in range(width)]
            (ubatch,) = memory.split([Span(0, pos, tokens, range(width))], 16, "seq")
            found.append(model.forward(ubatch, memory))
            kept = max(1, width - turn % 3)
            assert memory.seq_rm(0, pos + kept)
            pos += kept
            if turn == 15:
                memory.clear(0)
                pos = 0
        outputs.append(found)
    for recorded, plain in zip(*outputs, strict=True):
        assert torch.equal(recorded.logits, plain.logits)
        assert torch.equal(recorded.hidden, plain.hidden)
    # a width each, and how many older states there were to carry
    assert 4 <= counts.n_recorded <= 6
    assert len({x.logits.data_ptr() for x in outputs[0]}) == len(outputs[0]), "all are still there"


@compiled
def test_what_cannot_be_recorded_runs_as_it_is(monkeypatch, counts, caplog):
    """Experts are chosen on the host; no one needs to hear of that."""
    name = "qwen35moe-d-v2x-mtp-f32"
    prompt = prompt_of(name)
    assert_same(*both(monkeypatch, name, [prompt], options_of(20, "draft-mtp")))
    assert counts.n_recorded == 0
    assert not [r for r in caplog.records if r.levelno > logging.INFO]


@compiled
@pytest.mark.parametrize("policy", ["planes", "ring", "replay"])
def test_invariant_runs(policy, monkeypatch, counts):
    prompts = [Prompt(prompt_of(MTP).tokens[:n]) for n in (12, 5)]
    options = options_of(
        20, "draft-mtp", rollback=policy, parallel=2, kv="unified", batch_invariant=True
    )
    assert_same(*both(monkeypatch, MTP, prompts, options))
    assert counts.n_replayed > 10


def counting(graphs: list[int]):
    def record(compute):
        graphs.append(0)
        outputs = compute()

        def replay() -> None:
            graphs[-1] += 1

        return outputs, replay

    return record


def test_a_pass_is_computed_recorded_replayed():
    made: list[int] = []
    graphs, x = StepGraphs(counting(made), 4), torch.zeros(2)
    calls = []

    def compute(y: torch.Tensor) -> tuple[torch.Tensor]:
        calls.append(y)
        return (y,)

    argument = torch.ones(2)
    for _ in range(4):
        graphs.run(PassInputs("a", (x,)), (argument,), compute)
    assert (len(calls), made) == (2, [3])
    # what was recorded reads tensors of its own for arguments, the given ones for inputs
    assert calls[1] is not argument
    (out,) = graphs.run(
        PassInputs("a", (torch.full((2,), 5.0),)), (torch.full((2,), 7.0),), compute
    )
    assert (x.tolist(), calls[1].tolist(), out.tolist()) == ([5, 5], [7, 7], [7, 7])
    assert argument.tolist() == [1, 1]
    assert out.data_ptr() != calls[1].data_ptr(), "the next pass would overwrite it"
    graphs.run(PassInputs("b", (x,)), (argument,), compute)
    graphs.run(PassInputs("a", (x,)), (torch.ones(3),), compute)
    assert (len(calls), len(made)) == (4, 1)


def test_other_threads_are_another_recording():
    made: list[int] = []
    graphs, before = StepGraphs(counting(made), 4), torch.get_num_threads()
    try:
        for n_threads in (1, 1, 3, 3, 1):
            torch.set_num_threads(n_threads)
            graphs.run(PassInputs("a"), (), lambda: (torch.ones(1),))
    finally:
        torch.set_num_threads(before)
    assert len(made) == 2


def test_recordings_are_given_up_for_new_ones():
    made: list[int] = []
    graphs = StepGraphs(counting(made), 4)
    for key in [*range(MOST_GRAPHS + 1)] * 2:
        graphs.run(PassInputs(key), (), lambda: (torch.ones(1),))
    assert len(made) == MOST_GRAPHS + 1
    graphs.run(PassInputs(1), (), lambda: (torch.ones(1),))
    assert len(made) == MOST_GRAPHS + 1, "the newest are kept"
    graphs.run(PassInputs(0), (), lambda: (torch.ones(1),))
    assert len(made) == MOST_GRAPHS + 2, "the oldest is not"


@pytest.mark.parametrize(
    ("error", "level"), [(RuntimeError, "WARNING"), (NotImplementedError, "INFO")]
)
def test_a_recording_that_fails_turns_them_off(error, level, caplog):
    def record(compute):
        raise error("operation not permitted")

    caplog.set_level(logging.INFO)
    graphs, calls = StepGraphs(record, 4), []
    assert graphs.takes(4) and not graphs.takes(5)
    for _ in range(4):
        graphs.run(PassInputs("a"), (), lambda: (calls.append(1) or torch.ones(1),))
    assert len(calls) == 4
    assert [r.levelname for r in caplog.records] == [level]
    assert "operation not permitted" in caplog.text
    assert not graphs.takes(1)


def test_they_can_be_turned_off(monkeypatch):
    devices = torch.device("cpu"), torch.device("cuda", 0)
    assert isinstance(graphs_for(devices[1]), StepGraphs)
    assert (graphs_for(devices[0]) is not None) == uses_llvm()
    for word in ("off", "0", "No"):
        monkeypatch.setenv(VARIABLE, word)
        assert [graphs_for(device) for device in devices] == [None, None]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_on_cuda(policy, monkeypatch, caplog):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    there = Session.open(DATA / f"{MTP}.gguf", compute="f32", device="cuda")
    options = options_of(60, "draft-mtp", rollback=policy)
    recorded = tokens_of(decode(there, [prompt_of(MTP)], options))
    assert not caplog.records, "nothing kept a pass from being recorded"
    monkeypatch.setenv(VARIABLE, "off")
    assert recorded == tokens_of(decode(there, [prompt_of(MTP)], options))
    assert recorded == tokens_of(decode(session(MTP), [prompt_of(MTP)], options_of(60)))
