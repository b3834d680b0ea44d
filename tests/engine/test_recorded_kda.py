"""Passes of Kimi Delta Attention and latent attention are recorded, with the bits of plain ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import engine.machine.graphs as on_processor
from engine.machine.graphs import VARIABLE
from engine.session import Session
from kernels.dispatch import uses_llvm
from tests.support.golden_files import golden_file
from tests.support.golden_runs import decode, options_of, prompt_of, tokens_of
from tests.support.rewrite_gguf import DROP, rewrite

LING = "bailingmoe3-a-mtp-f32"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden model with its first feed-forward part in every block, and without the queries'
    bottleneck, which is too narrow for a compiled product."""

    def edit(tensors):
        for i in (3, 4):
            for name in ("a", "a_norm", "b"):
                del tensors[f"blk.{i}.attn_q_{name}.weight"]
            values = np.random.default_rng(i).standard_normal((96, 64), np.float32)
            tensors[f"blk.{i}.attn_q.weight"] = values / 8
        experts = ("_exps", "_shexp", "gate_inp", "exp_probs_b")
        for name in [name for name in tensors if any(word in name for word in experts)]:
            del tensors[name]
        for name in ("gate", "up", "down"):
            for i in range(1, 5):
                tensors[f"blk.{i}.ffn_{name}.weight"] = tensors[f"blk.0.ffn_{name}.weight"]

    path = tmp_path_factory.mktemp("dense") / "dense.gguf"
    keys = {"{arch}.leading_dense_block_count": 5, "{arch}.attention.q_lora_rank": DROP}
    return rewrite(golden_file(f"{LING}.gguf"), path, keys, edit)


@pytest.mark.skipif(not uses_llvm(), reason="kernels that are not compiled")
@pytest.mark.parametrize("policy", ["planes", "carry", "ring", "replay", "checkpoint"])
@pytest.mark.thinned(4)
def test_recorded_runs_are_plain_ones(dense, policy, monkeypatch):
    recorded: list[bool] = []

    class Recorder(on_processor.RecordOnProcessor):
        def __call__(self, compute):
            done = super().__call__(compute)
            recorded.append(True)
            return done

    monkeypatch.setattr(on_processor, "RecordOnProcessor", Recorder)
    options = options_of(30, "draft-mtp", rollback=policy)
    prompts = [prompt_of(LING)]
    ours = tokens_of(decode(Session.open(dense, None, compute="f32"), prompts, options))
    # of the trunk and of the head
    assert len(recorded) >= 2
    monkeypatch.setenv(VARIABLE, "off")
    theirs = tokens_of(decode(Session.open(dense, None, compute="f32"), prompts, options))
    assert ours == theirs
