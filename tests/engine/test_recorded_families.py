"""Passes of every family are recorded on the processor, with the bits of plain ones."""

from __future__ import annotations

import numpy as np
import pytest

import engine.recorded_launches as on_processor
from engine.bench.random_families import RANDOM_FAMILIES
from engine.bench.random_model import write_random_model
from engine.graphs import VARIABLE
from engine.options import ROLLBACK_POLICIES, Prompt
from engine.session import Session
from kernels.dispatch import uses_llvm
from kernels.processor import has_feature
from tests.support.golden_runs import decode, options_of, tokens_of, tokens_table

# those of qwen4exp look at numbers on the host
FAMILIES = [arch for arch in RANDOM_FAMILIES if arch != "qwen4exp"]
POLICIES = list(ROLLBACK_POLICIES)
TOKENS = np.random.default_rng(3).integers(3, 250, 12).tolist()
PROMPT = Prompt(tuple(TOKENS * 3))


@pytest.mark.skipif(not uses_llvm(), reason="kernels that are not compiled")
@pytest.mark.skipif(not has_feature("avx2"), reason="experts in blocks need AVX2")
@pytest.mark.parametrize("arch", FAMILIES)
def test_recorded_runs_are_plain_ones(arch, tmp_path, monkeypatch):
    recorded: list[bool] = []

    class Recorder(on_processor.RecordOnProcessor):
        def __call__(self, compute):
            done = super().__call__(compute)
            recorded.append(True)
            return done

    monkeypatch.setattr(on_processor, "RecordOnProcessor", Recorder)
    path = tmp_path / "tiny.gguf"
    write_random_model(path, arch=arch, size="tiny", quant="q8_0")
    # each family with another policy
    policy = POLICIES[FAMILIES.index(arch) % len(POLICIES)]
    options = options_of(24, "ngram-mod", n_max=3, rollback=policy, ignore_eos=True)

    def run():
        return decode(Session.open(path, None, compute="q8"), [PROMPT], options)

    ours = run()
    assert recorded
    n_recorded = len(recorded)
    monkeypatch.setenv(VARIABLE, "off")
    theirs = run()
    assert len(recorded) == n_recorded
    assert tokens_of(ours) == tokens_of(theirs)
    sure = [tokens_table(one)["target_p"] for one in (ours, theirs)]
    assert np.array_equal(*sure, equal_nan=True)
