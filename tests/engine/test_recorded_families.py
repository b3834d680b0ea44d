"""Passes of every family are recorded on the processor, with the bits of plain ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import engine.machine.graphs as on_processor
from engine.experiments.random_models.random_families import RANDOM_FAMILIES
from engine.experiments.random_models.random_model import write_random_model
from engine.machine.graphs import VARIABLE
from engine.options import ROLLBACK_POLICIES, Prompt
from engine.session import Session
from kernels.dispatch import uses_llvm
from kernels.processor import has_feature
from tests.support.golden_runs import decode, options_of, tokens_of, tokens_table

FAMILIES = list(RANDOM_FAMILIES)
POLICIES = list(ROLLBACK_POLICIES)
TOKENS = np.random.default_rng(3).integers(3, 250, 12).tolist()
PROMPT = Prompt(tuple(TOKENS * 3))


pytestmark = [
    pytest.mark.skipif(not uses_llvm(), reason="kernels that are not compiled"),
    pytest.mark.skipif(not has_feature("avx2"), reason="experts in blocks need AVX2"),
]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An entry for every pass that was to be recorded, and whether it was."""
    done: list[bool] = []

    class Recorder(on_processor.RecordOnProcessor):
        def __call__(self, compute):
            done.append(False)
            outputs = super().__call__(compute)
            done[-1] = True
            return outputs

    monkeypatch.setattr(on_processor, "RecordOnProcessor", Recorder)
    return done


def check(arch: str, policy: str, path, recorded, monkeypatch) -> None:
    write_random_model(path, arch=arch, size="tiny", quant="q8_0")
    options = options_of(24, "ngram-mod", n_max=3, rollback=policy, ignore_eos=True)

    def run():
        return decode(Session.open(path, None, compute="q8"), [PROMPT], options)

    ours = run()
    assert recorded and all(recorded)
    recorded.clear()
    monkeypatch.setenv(VARIABLE, "off")
    theirs = run()
    assert not recorded
    assert tokens_of(ours) == tokens_of(theirs)
    sure = [tokens_table(one)["target_p"] for one in (ours, theirs)]
    assert np.array_equal(*sure, equal_nan=True)


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.thinned(6)
def test_recorded_runs_are_plain_ones(arch, tmp_path, recorded, monkeypatch):
    # each family with another policy
    policy = POLICIES[FAMILIES.index(arch) % len(POLICIES)]
    check(arch, policy, tmp_path / "tiny.gguf", recorded, monkeypatch)


@pytest.mark.parametrize("policy", ["planes", "replay"])
@pytest.mark.thinned(4)
def test_where_queries_choose_among_blocks(policy, tmp_path, recorded, monkeypatch):
    tiny = RANDOM_FAMILIES["qwen4exp"]["tiny"]
    ratios = tiny.keys["attention.compress_ratios"] // 4
    few = {"attention.compress_ratios": ratios, "attention.indexer.top_k": 8}
    monkeypatch.setitem(RANDOM_FAMILIES["qwen4exp"], "tiny", replace(tiny, keys=tiny.keys | few))
    check("qwen4exp", policy, tmp_path / "tiny.gguf", recorded, monkeypatch)
