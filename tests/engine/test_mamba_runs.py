"""Families of Mamba: logits against their definition; no token changes, whatever undoes drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import Span
from engine.experiments.random_models.random_model import write_random_model
from engine.gguf.file import GgufFile
from engine.memory.hybrid import HybridMemory
from engine.model.info import describe
from engine.options import KV_MODES, ROLLBACK_POLICIES, SPLITS, Prompt
from engine.session import Session
from tests.support.closeness import nmse
from tests.support.golden_runs import decode, options_of, tokens_of
from tests.support.naive_mamba import logits
from tests.support.rewrite_gguf import rewrite

TOKENS = np.random.default_rng(3).integers(3, 250, 12).tolist()
PROMPTS = [Prompt(tuple(TOKENS * 2)), Prompt(tuple(TOKENS[:5] * 3))]
ARCHS = "mamba", "mamba2", "jamba", "plamo2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mamba")
    for arch in ARCHS:
        write_random_model(folder / f"{arch}.gguf", arch=arch, size="tiny", quant="f32")
    return folder


@pytest.fixture(scope="module")
def sessions(folder) -> dict[str, Session]:
    paths = {arch: folder / f"{arch}.gguf" for arch in ARCHS}
    return {arch: Session.open(path, path) for arch, path in paths.items()}


def _weighted(tensors):
    rng = np.random.default_rng(5)
    for name, data in tensors.items():
        if name.removesuffix(".weight").endswith("norm"):
            tensors[name] = rng.uniform(0.5, 2, data.shape).astype("f4")


@pytest.mark.parametrize("width", [1, 5, 24])
@pytest.mark.parametrize(
    ("arch", "keys", "normed"),
    [
        ("mamba", {}, False),
        ("mamba", {"mamba.ssm.dt_b_c_rms": True}, True),
        ("jamba", {}, True),
        ("plamo2", {}, True),
        # as the converter writes it
        ("plamo2", {"plamo2.attention.head_count": [0, 4, 0, 4]}, True),
    ],
)
@pytest.mark.thinned(8)
def test_logits_are_those_of_the_definition(folder, tmp_path, arch, keys, normed, width):
    path = rewrite(folder / f"{arch}.gguf", tmp_path / "x.gguf", keys, _weighted)
    with GgufFile.open(path) as file:
        tensors = {
            name: file.raw(name).view(np.float32).astype(np.float64).reshape(info.shape)
            for name, info in file.tensors.items()
        }
        meta = {k.removeprefix(f"{arch}."): v for k, v in file.metadata.items()}
    model, tokens = Session.open(path, compute="f32").model, TOKENS * 2
    memory = HybridMemory.for_model(model.config, 1, 64, model.device)
    found = []
    for start in range(0, len(tokens), width):
        part = tokens[start : start + width]
        (ubatch,) = memory.split([Span(0, start, part, range(len(part)))], width, "seq")
        found.append(model.forward(ubatch, memory).logits)
    wanted = logits(tensors, meta, tokens, normed)
    assert nmse(torch.cat(found), torch.from_numpy(wanted)) < 1e-10


@pytest.fixture(scope="module")
def plain(sessions) -> dict[str, list[list[int]]]:
    return {
        arch: [tokens_of(decode(opened, [prompt], options_of(12)))[0] for prompt in PROMPTS]
        for arch, opened in sessions.items()
    }


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
@pytest.mark.parametrize("kv", KV_MODES)
@pytest.mark.thinned(8)
def test_no_token_changes(sessions, plain, arch, policy, kv):
    split = list(SPLITS)[list(ROLLBACK_POLICIES).index(policy) % len(SPLITS)]
    options = options_of(12, "ngram-simple", rollback=policy, kv=kv, split=split, parallel=2)
    assert tokens_of(decode(sessions[arch], PROMPTS, options)) == plain[arch]
    # a drafter that is always right, and whose own states are undone
    options = options_of(12, "draft-simple", rollback=policy, kv=kv, split=split, parallel=2)
    assert tokens_of(decode(sessions[arch], PROMPTS, options)) == plain[arch]


def test_what_is_said_of_the_file(folder):
    with GgufFile.open(folder / "jamba.gguf") as file:
        info = describe(file)
    assert [layer.kind for layer in info.layers] == ["mamba"] * 4 + ["attention", "mamba"]
    # of five layers 16 and 3 numbers for each of 512 channels
    assert info.state_bytes == 5 * 4 * (16 + 3) * 512
    # the log has the states, and a row of the window
    assert info.log_bytes_per_token == 5 * 4 * (16 + 1) * 512
    assert "no partial rollback" in info.llama_cpp
    with GgufFile.open(folder / "plamo2.gguf") as file:
        info = describe(file)
    assert [layer.kind for layer in info.layers] == ["mamba-2", "attention"] * 2
    # of two layers the states of 8 heads, and 3 numbers for each of 512 channels
    assert info.state_bytes == 2 * 4 * (8 * 64 * 64 + 3 * 512)
    assert "attention.head_count begins with 0" in info.llama_cpp
