"""Runs whose forward passes are recorded and replayed: the tokens are those of runs that compute.

The processor stands for a CUDA device (tests.support.recorded_pass). Models with experts are left
out: their products on the processor look at what the router chose.
"""

from __future__ import annotations

import pytest
import torch

from engine.graphs import MOST_GRAPHS, PassInputs, StepGraphs, graphs_for
from engine.session import Session
from tests.support.golden_runs import DATA, decode, options_of, prompt_of, session, tokens_of
from tests.support.recorded_pass import use_recordings

MTP = "qwen35-c-v2x-mtp-f32"
POLICIES = ["planes", "carry", "ring", "replay", "checkpoint"]


def opened(name: str = MTP, draft: str | None = None) -> Session:
    return session(name, draft)


@pytest.mark.parametrize("policy", POLICIES)
def test_speculation_keeps_the_tokens(policy, monkeypatch):
    prompt = prompt_of(MTP)
    plain = decode(opened(), [prompt], options_of(60))
    recorder = use_recordings(monkeypatch)
    run = decode(opened(), [prompt], options_of(60, "draft-mtp", rollback=policy))
    assert tokens_of(run) == tokens_of(plain)
    depths = run.trace.rounds.column("rollback_depth")
    assert len(set(depths.tolist())) > 2, "drafts failed at several tokens"
    # few shapes, most passes replayed: three draft steps and a verification in every round
    assert recorder.n_recorded <= 12
    assert recorder.n_replayed >= 2 * len(depths)


@pytest.mark.parametrize("policy", ["planes", "ring"])
@pytest.mark.parametrize("kv", ["per-seq", "unified"])
def test_several_sequences(policy, kv, monkeypatch):
    data = prompt_of(MTP).tokens
    prompts = [type(prompt_of(MTP))(data[:n]) for n in (len(data), 5, 9)]
    options = options_of(30, "draft-mtp", rollback=policy, parallel=2, kv=kv)
    plain = decode(opened(), prompts, options_of(30))
    recorder = use_recordings(monkeypatch)
    assert tokens_of(decode(opened(), prompts, options)) == tokens_of(plain)
    assert recorder.n_replayed > 20


def test_a_draft_model_and_growing_cells(monkeypatch):
    name, draft = "qwen35-b-v2x-tied-f32", "qwen35-a-f32"
    prompt = prompt_of(name)
    n = 300  # beyond the cells that are allocated at first
    plain = decode(session(name), [prompt], options_of(n))
    recorder = use_recordings(monkeypatch)
    options = options_of(n, "draft-simple", rollback="planes")
    assert tokens_of(decode(session(name, draft), [prompt], options)) == tokens_of(plain)
    assert recorder.n_replayed > 100


def test_faults_show_all_the_same(monkeypatch):
    """A fault is in the rows that are chosen, which are no part of a recording."""
    options = options_of(40, "draft-mtp", rollback="planes", faults=("plane-off-by-one",))
    prompt = prompt_of(MTP)
    wrong = tokens_of(decode(opened(), [prompt], options))
    use_recordings(monkeypatch)
    assert tokens_of(decode(opened(), [prompt], options)) == wrong
    assert wrong != tokens_of(decode(opened(), [prompt], options_of(40)))


def test_invariant_runs_are_not_recorded(monkeypatch):
    recorder = use_recordings(monkeypatch)
    decode(opened(), [prompt_of(MTP)], options_of(8, batch_invariant=True))
    assert recorder.n_recorded == 0


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
    graphs, x = StepGraphs(counting(made)), torch.zeros(2)
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


def test_recordings_are_given_up_for_new_ones():
    made: list[int] = []
    graphs = StepGraphs(counting(made))
    for key in [*range(MOST_GRAPHS + 1)] * 2:
        graphs.run(PassInputs(key), (), lambda: (torch.ones(1),))
    assert len(made) == MOST_GRAPHS + 1
    graphs.run(PassInputs(1), (), lambda: (torch.ones(1),))
    assert len(made) == MOST_GRAPHS + 1, "the newest are kept"
    graphs.run(PassInputs(0), (), lambda: (torch.ones(1),))
    assert len(made) == MOST_GRAPHS + 2, "the oldest is not"


def test_a_recording_that_fails_turns_them_off(caplog):
    def record(compute):
        raise RuntimeError("operation not permitted")

    graphs, calls = StepGraphs(record), []
    for _ in range(4):
        graphs.run(PassInputs("a"), (), lambda: (calls.append(1) or torch.ones(1),))
    assert len(calls) == 4
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "operation not permitted" in caplog.text


def test_only_a_cuda_device_has_them(monkeypatch):
    cuda = torch.device("cuda", 0)
    assert graphs_for(torch.device("cpu")) is None
    assert isinstance(graphs_for(cuda), StepGraphs)
    monkeypatch.setenv("DRAFTSCOPE_CUDA_GRAPHS", "off")
    assert graphs_for(cuda) is None


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_on_cuda(policy, monkeypatch, caplog):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    there = Session.open(DATA / f"{MTP}.gguf", compute="f32", device="cuda")
    options = options_of(60, "draft-mtp", rollback=policy)
    recorded = tokens_of(decode(there, [prompt_of(MTP)], options))
    assert not caplog.records, "nothing kept a pass from being recorded"
    monkeypatch.setenv("DRAFTSCOPE_CUDA_GRAPHS", "off")
    assert recorded == tokens_of(decode(there, [prompt_of(MTP)], options))
    assert recorded == tokens_of(decode(opened(), [prompt_of(MTP)], options_of(60)))
