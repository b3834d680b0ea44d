"""What a model would cost before it is loaded: the sums against those done by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytestqt.qtbot import QtBot

from app.engine_thread.events import OpenedFiles
from app.looks.theme import load_theme
from app.panels.model.memory_estimate import estimate
from app.panels.model.model_map import ModelMapView
from engine.gguf.file import GgufFile
from engine.model.drafters.kinds import describe_draft
from engine.model.info import ModelInfo, describe
from engine.options import ROLLBACK_POLICIES, RunOptions, SpecOptions
from resources import DEMO_DRAFT, DEMO_TARGET
from tests.support.golden_drafters import drafter_file, drafters

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
    cell = info.kv_bytes_per_token + info.mtp_kv_bytes_per_token
    assert found.sizes == {
        "weights": info.weight_bytes,
        "KV": 200 * cell,
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


def test_the_panel_counts_loaded_weights(info: ModelInfo, qtbot: QtBot) -> None:
    view = ModelMapView(load_theme("dark"), [])
    qtbot.addWidget(view)
    files: Any = OpenedFiles(Path("a.gguf"), (), info, {})
    view.set_files(files)
    stored = view._memory_title.text()
    view.set_compute("f32")
    assert view._memory_title.text() != stored
    view.set_files(files)
    assert view._memory_title.text() == stored


def test_the_panel_follows_the_options(info: ModelInfo, qtbot: QtBot) -> None:
    view = ModelMapView(load_theme("dark"), [])
    qtbot.addWidget(view)
    files: Any = OpenedFiles(Path("a.gguf"), (), info, {})
    view.set_files(files)
    view.set_options(MTP, 1)
    one = dict(view.costs.lines)
    view.set_options(replace(MTP, parallel=4), 4)
    assert view.costs.lines["planes"].startswith(one["planes"].split(" = ")[0][:-1] + "4")
    view.set_options(replace(MTP, parallel=4), 1)
    assert view.costs.lines == one, "slots that no prompt fills cost nothing"
    view.set_options(RunOptions(), 1)
    assert view.costs.isHidden()


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
