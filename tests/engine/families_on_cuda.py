"""Rounds of every family and drafter on fake CUDA tensors, through the kernels that a GPU runs.

test_rounds_on_cuda.py runs this in a process of its own (tests/support/as_on_cuda.py). A host that
looks at a number, tensors of two devices, and anything that crosses while a pass is recorded raise.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from engine.experiments.random_models.random_families import RANDOM_FAMILIES
from engine.experiments.random_models.random_model import write_random_model
from engine.machine import graphs
from engine.model.layers import ResidualBlock
from engine.options import KV_MODES, ROLLBACK_POLICIES, SPLITS, Prompt, SamplerOptions
from engine.session import Session
from kernels import moe
from kernels.linear.packed import BlockData
from tests.support.as_on_cuda import LAUNCHED
from tests.support.fake_cuda import DEVICE, fake_cuda, random_values
from tests.support.golden_drafters import TARGETS, drafter_file, there
from tests.support.golden_files import golden_file
from tests.support.golden_runs import MTP_MODELS, options_of

MODELS = [*MTP_MODELS, *(f"{name}-mtp-f32" for name in ("bailingmoe3-a", "deepseek4-a"))]
MODELS += ["glm5-next-b-mtp-f32", "nemotron_h_moe-b-mtp-f32", "qwen4exp-c-mtp-f32"]
DRAFTERS = [name for name in TARGETS if there(name)]
LAUNCHES = {
    "qwen35": {"DeltaNet Swiglu": 7, "Attention Swiglu": 7},
    "lfm2": {"ShortConv Swiglu": 6, "Attention Swiglu": 7},
    "kimi-linear": {
        "Kda Swiglu": 8,
        "Kda MixtureOfExperts": 11,
        "LatentAttention MixtureOfExperts": 16,
    },
    "lfm2moe": {
        "ShortConv Swiglu": 6,
        "ShortConv MixtureOfExperts": 7,
        "Attention MixtureOfExperts": 8,
    },
    "granitehybrid": {"Mamba2Mixer Swiglu": 7, "Attention Swiglu": 7},
    "nemotron_h": {"Mamba2Mixer None": 5, "None Relu2": 3, "Attention None": 5},
}
"""By the halves of a layer."""
ELSEWHERE = ("mamba", "mamba2", "plamo2")
"""Their layers are in jamba, granitehybrid and falcon-h1."""
TOKENS = tuple(np.random.default_rng(3).integers(3, 100, 6).tolist()) * 2

# rings differ by their addresses, which fake tensors do not have; either order computes
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


@pytest.fixture
def fake(monkeypatch):
    with fake_cuda(monkeypatch, random_values(5)) as seen:
        yield seen


def decode(fake, opened: Session, options, n: int = 1) -> None:
    options = replace(options, ignore_eos=True, parallel=n)
    run = opened.start([Prompt(TOKENS[: 12 - i]) for i in range(n)], options)
    while run.step():
        pass
    assert fake.recordings
    assert not fake.strays
    assert LAUNCHED


@pytest.mark.parametrize("name", list(RANDOM_FAMILIES))
def test_families(fake, tmp_path, name, pytestconfig):
    """Each in the blocks of its file, undone by one policy; every second one with the bits of
    every batch, with --all both ways. Without, those of test_launches_of_a_layer are left out, and
    those whose layers are in others."""
    if (name in LAUNCHES or name in ELSEWHERE) and not pytestconfig.getoption("all"):
        pytest.skip("another one decodes with its kernels")
    number = list(RANDOM_FAMILIES).index(name)
    policy = list(ROLLBACK_POLICIES)[number % len(ROLLBACK_POLICIES)]
    path = tmp_path / f"{name}.gguf"
    write_random_model(path, arch=name, size="tiny", quant="q4_k_m")
    options = options_of(5, "ngram-mod", n_max=2, rollback=policy)
    opened = Session.open(path, compute="auto", device="cuda")
    for invariant in (False, True) if pytestconfig.getoption("all") else (number % 2 == 1,):
        decode(fake, opened, replace(options, batch_invariant=invariant))
        fake.clear()


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_layer(fake, monkeypatch, tmp_path, name):
    """Launches of Triton kernels and operations of torch in a recorded pass of one token."""
    path, record, call = tmp_path / "model.gguf", graphs._RecordOnCuda(), ResidualBlock.advance
    found: dict[str, int] = {}

    def counted(block, *given):
        before = LAUNCHED.total() + fake.computed
        y = call(block, *given)
        halves = [type(half).__name__ for half in (block._mixer, block._ffn)]
        layer = " ".join(halves).replace("NoneType", "None")
        found[layer] = max(found.get(layer, 0), LAUNCHED.total() + fake.computed - before)
        return y

    def recorded(run):
        found.clear()
        return record(run)

    monkeypatch.setattr(graphs, "_RecordOnCuda", lambda: recorded)
    monkeypatch.setattr(ResidualBlock, "advance", counted)
    write_random_model(path, arch=name, size="tiny", quant="q4_k_m")
    decode(fake, Session.open(path, compute="q8", device="cuda"), options_of(6))
    assert found == LAUNCHES[name]


@pytest.mark.parametrize(
    ("name", "policy", "how"),
    [
        (name, list(ROLLBACK_POLICIES)[i % 5], list(product(SPLITS, KV_MODES))[i % 4])
        for i, name in enumerate(MODELS)
    ],
)
def test_mtp(fake, name, policy, how):
    split, kv = how
    options = options_of(8, "draft-mtp", n_max=2, rollback=policy, split=split, kv=kv)
    decode(
        fake, Session.open(golden_file(f"{name}.gguf"), compute="bf16", device="cuda"), options, 2
    )


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters(fake, name):
    target, draft = golden_file(f"{TARGETS[name]}.gguf"), drafter_file(f"{name}.gguf")
    options = options_of(10, f"draft-{name.split('-')[0].replace('dflash2', 'dflash')}", n_max=2)
    decode(fake, Session.open(target, draft, compute="f32", device="cuda"), options)


@pytest.mark.parametrize("name", [MTP_MODELS[0], MTP_MODELS[2]])
def test_a_temperature(fake, name):
    options = options_of(8, "draft-mtp", n_max=2, sampler=SamplerOptions(temp=0.8))
    decode(fake, Session.open(golden_file(f"{name}.gguf"), compute="f32", device="cuda"), options)


@pytest.mark.parametrize("mode", ["q8", "bf16"])
def test_experts_of_the_longest_pass(fake, mode):
    """A grid has fewer than 2^16 programs in all directions but the first."""
    n, n_experts, n_used, width = 1 << 16, 16, 8, 256
    blocks = torch.zeros(n_experts, width, width // 32 * 34, dtype=torch.uint8, device=DEVICE)
    numbers = torch.zeros(n_experts, width, width, device=DEVICE)
    if mode == "q8":
        packed = moe.pack_expert_blocks([BlockData(blocks, "Q8_0")] * 3, mode)
    else:
        packed = moe.pack_experts(numbers, numbers, numbers, mode)
    x, shares = torch.zeros(n, width, device=DEVICE), torch.zeros(n, n_used, device=DEVICE)
    assert moe.experts(x, shares, shares.long(), packed).shape == (n, width)
    assert LAUNCHED
