"""What a model would cost before it is loaded: the sums against those done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.draft.row_drafter import PairedRows
from engine.gguf.file import GgufFile
from engine.machine.device import CPU
from engine.memory.hybrid import HybridMemory
from engine.memory.options import CacheOptions
from engine.memory_need import estimate, fits_text, server_estimate
from engine.model.drafters.config import describe_draft
from engine.model.families import read_config
from engine.model.info import ModelInfo, describe
from engine.options import ROLLBACK_POLICIES, RunOptions, SpecOptions
from resources import DEMO_DRAFT, DEMO_TARGET
from tests.support.golden_drafters import drafter_file, drafters
from tests.support.golden_files import golden_file

MTP = RunOptions(spec=SpecOptions(types=("draft-mtp",), n_max=3), n_ctx=100)


@pytest.fixture(scope="module")
def info() -> ModelInfo:
    with GgufFile.open(DEMO_TARGET) as file:
        return describe(file)


def test_every_policy_is_a_product(info: ModelInfo) -> None:
    found = estimate(info, {}, MTP, n_seqs=2)
    costs = {cost.policy: cost for cost in found.policies}
    assert list(costs) == list(ROLLBACK_POLICIES)
    for name in ("planes", "carry", "ring"):
        assert costs[name].total == info.state_bytes * 3 * 2
        assert (costs[name].unit_bytes, costs[name].n_units) == (info.state_bytes, 3)
    assert costs["replay"].total == info.log_bytes_per_token * 4 * 2
    assert costs["checkpoint"].total == info.state_bytes * 2
    assert found.sizes == {
        "weights": info.weight_bytes,
        "KV": 200 * info.kv_bytes_per_token,
        "MTP KV": 200 * info.mtp_kv_bytes_per_token,
        "MTP rows": 200 * info.mtp_row_bytes,
        "state": 2 * info.state_bytes,
        "planes": 6 * info.state_bytes,
    }


def test_without_snapshots_checkpoints_are_taken(info: ModelInfo) -> None:
    found = estimate(info, {}, replace(MTP, n_rs_seq=0), n_seqs=1)
    assert {cost.total for cost in found.policies} == {info.state_bytes}
    assert found.sizes["checkpoint"] == info.state_bytes
    assert "planes" not in found.sizes


def test_without_a_drafter_nothing_is_kept(info: ModelInfo) -> None:
    found = estimate(info, {}, RunOptions(), n_seqs=1)
    assert found.policies == ()
    assert set(found.sizes) == {"weights", "KV", "state"}
    assert found.n_ctx == min(info.n_ctx_train, 4096)


def test_a_draft_model_counts_where_it_is_used(info: ModelInfo) -> None:
    with GgufFile.open(DEMO_DRAFT) as file:
        draft = describe(file)
    assert "draft model" not in estimate(info, {"draft-simple": draft}, MTP, 1).sizes
    options = replace(MTP, spec=SpecOptions(types=("draft-simple",)))
    needed = estimate(info, {"draft-simple": draft}, options, 1).sizes["draft model"]
    cells = 100 * (draft.kv_bytes_per_token + draft.mtp_kv_bytes_per_token)
    assert needed == draft.weight_bytes + cells + 4 * draft.state_bytes


def test_weights_are_counted_as_they_are_loaded(info: ModelInfo) -> None:
    for mode in ("f32", "bf16", "int8"):
        assert estimate(info, {}, MTP, 1, mode).sizes["weights"] == info.loaded_bytes[mode]
    options = replace(MTP, spec=SpecOptions(types=("draft-simple",)))
    stored = estimate(info, {"draft-simple": info}, options, 1).sizes["draft model"]
    loaded = estimate(info, {"draft-simple": info}, options, 1, "f32").sizes["draft model"]
    assert loaded - stored == info.loaded_bytes["f32"] - info.weight_bytes


@pytest.mark.skipif(not drafters("eagle3"), reason="the golden drafters are not there")
def test_a_drafter_that_reads_layers_counts_with_their_rows(info: ModelInfo) -> None:
    with GgufFile.open(drafter_file("eagle3-a-shared.gguf")) as file:
        drafter, figures = describe_draft(file)
    options = replace(MTP, spec=SpecOptions(types=(drafter,)), n_ctx=100, n_batch=64)
    sizes = estimate(info, {drafter: figures}, options, 2).sizes
    cell = 4 * (2 * 2 * 16 + 64)  # keys and values of two heads, and a feature row
    assert sizes["EAGLE-3 drafter"] == figures.weight_bytes + 2 * 100 * cell
    assert sizes["layer rows"] == 64 * 3 * 64 * 4
    assert "layer rows" not in estimate(info, {drafter: figures}, MTP, 2).sizes


@pytest.mark.parametrize(
    "name",
    [
        "qwen35-c-v2x-mtp-f32",
        "bailingmoe3-a-mtp-f32",
        "nemotron_h_moe-b-mtp-f32",
        "lfm2-a-tied-f32",
    ],
)
@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
def test_it_is_what_memories_take(name: str, policy: str) -> None:
    with GgufFile.open(golden_file(f"{name}.gguf")) as file:
        figures, config = describe(file), read_config(file)
    spec = SpecOptions(types=("draft-mtp",) if config.mtp else ("draft-simple",), n_max=4)
    options = RunOptions(spec=spec, n_ctx=100, rollback=policy, parallel=3)
    found = estimate(figures, {}, options, 3)
    memory = HybridMemory.for_model(config, 3, 100, CPU, policy=policy, n_rs_seq=options.snapshots)
    kept = found.sizes["KV"] + found.sizes["state"]
    kept += found.sizes.get(policy, 0) if options.snapshots else 0
    assert memory.n_bytes() == kept
    if config.mtp:
        of_head = HybridMemory.for_layers(config.mtp_cells(), 3, 100, CPU)
        assert of_head.n_bytes() == found.sizes["MTP KV"]
        rows = PairedRows.empty(0, 100, config.n_handed, CPU).rows
        assert 3 * rows[1:].nbytes == found.sizes["MTP rows"]
    assert found.later["context checkpoints"] == 32 * 3 * memory.save(0).n_bytes


SERVER = {
    # MiB as llama-server of October 2026 (xllamacpp 2026.10.11549) logs them, by model, -c, -np,
    # drafters and types of cells: its weights, KV, MTP KV, recurrent states with planes
    ("qwen35-c-v2x-mtp-f32", 3000, 3, "draft-mtp", "f16", "f16"): (1.02, 0.75, 0.75, 0.19),
    ("qwen35-c-v2x-mtp-f32", 3000, 3, "", "q8_0", "q4_0"): (0.80, 0.30, 0, 0.05),
    ("qwen3next-e-v2x-f32", 512, 1, "", "f16", "f16"): (0.99, 0.12, 0, 0.02),
    ("bailingmoe3-a-mtp-f32", 2048, 2, "draft-mtp", "f16", "f16"): (1.18, 0.31, 0.16, 0.15),
    ("nemotron_h_moe-b-mtp-f32", 2048, 2, "draft-mtp", "f16", "f16"): (0.86, 0.50, 0.50, 0.16),
    ("bailingmoe3-a-mtp-f32", 2048, 2, "", "f16", "f16"): (0.97, 0.31, 0, 0.04),
    ("kimi-linear-a-f32", 2048, 2, "", "f16", "f16"): (0.82, 0.16, 0, 0.04),
    ("lfm2-a-tied-f32", 2048, 2, "", "f16", "f16"): (0.73, 0.50, 0, 0.00),
    ("falcon-h1-a-f32", 2048, 2, "", "f16", "f16"): (0.86, 0.75, 0, 0.06),
    ("granitehybrid-a-f32", 2048, 2, "", "f16", "f16"): (0.75, 0.25, 0, 0.06),
    ("demo", 1024, 2, "draft-mtp", "f16", "f16"): (9.05, 1.00, 0.50, 3.28),
}


@pytest.mark.parametrize("flags", SERVER, ids=lambda flags: f"{flags[0]}-{flags[4]}")
def test_it_is_what_llama_server_takes(flags: tuple[Any, ...]) -> None:
    name, n_ctx, n_slots, drafter, k, v = flags
    path = DEMO_TARGET if name == "demo" else golden_file(f"{name}.gguf")
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    with GgufFile.open(path) as file:
        figures = describe(file)
    spec = SpecOptions(types=(drafter,) if drafter else (), n_max=3)
    options = RunOptions(spec=spec, n_ctx=n_ctx, parallel=n_slots)
    sizes = server_estimate(figures, {}, options, (k, v)).sizes
    states = sizes["state"] + sizes.get("planes", 0)
    found = sizes["weights"], sizes["KV"], sizes.get("MTP KV", 0), states
    assert [n / 2**20 for n in found] == pytest.approx(SERVER[flags], abs=0.0051)


def test_llama_server_without_planes_takes_a_checkpoint_for_each_slot() -> None:
    with GgufFile.open(golden_file("qwen3next-e-v2x-f32.gguf")) as file:
        figures = describe(file)
    options = RunOptions(spec=SpecOptions(types=("ngram-mod", "draft-simple")), parallel=2)
    found = server_estimate(figures, {}, options, cache=CacheOptions(ctx_checkpoints=5))
    assert found.n_rs_seq == 0
    assert found.sizes["checkpoint"] == 2 * figures.state_bytes
    assert found.later["context checkpoints"] == 2 * 5 * figures.state_bytes
    assert found.n_ctx * 2 == figures.n_ctx_train


def test_whether_it_fits(info: ModelInfo) -> None:
    found = {"here": estimate(info, {}, MTP, 1)}
    total = found["here"].total
    assert "fits here, 1 KiB left" in fits_text(found, total + 1024)
    assert "does not fit here, 2 KiB missing" in fits_text(found, total - 2048)
    assert fits_text(found, 0) == "the available memory is not known"
