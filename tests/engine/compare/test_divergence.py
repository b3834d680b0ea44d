"""Measures against NumPy in float64, and on cases whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.batch import Span
from engine.compare.divergence import ReferenceLogits, ReferenceMemory, cells_that_differ
from engine.memory.hybrid import HybridMemory
from tests.support.golden_runs import prompt_of, session

MODEL = "qwen35-c-v2x-mtp-f32"


def test_measures_of_logits_are_numpys() -> None:
    random = np.random.default_rng(3)
    a = (random.standard_normal((6, 97)) * 4).astype(np.float32)
    b = a + (random.standard_normal((6, 97)) * np.logspace(-4, 1.5, 6)[:, None]).astype(np.float32)
    chosen = random.integers(0, 97, 6)
    found = ReferenceLogits(torch.from_numpy(a), chosen.tolist()).difference(torch.from_numpy(b))
    for i, (x, y) in enumerate(zip(a.astype(np.float64), b.astype(np.float64), strict=True)):
        p, q = np.exp(x) / np.exp(x).sum(), np.exp(y) / np.exp(y).sum()
        assert found.max_abs[i] == pytest.approx(np.abs(x - y).max(), rel=1e-12)
        assert found.nmse[i] == pytest.approx(((x - y) ** 2).mean() / (x**2).mean(), rel=1e-12)
        assert found.kl[i] == pytest.approx((p * np.log(p / q)).sum(), rel=1e-9, abs=1e-15)
        assert found.top1_equal[i] == (x.argmax() == y.argmax())
        assert found.rank[i] == sorted(y, reverse=True).index(y[chosen[i]]) + 1
        assert found.top2_gap[i] == pytest.approx(np.diff(np.sort(x)[-2:])[0], rel=1e-12)
    assert set(found.top1_equal) == {True, False}


def test_equal_logits_differ_by_nothing() -> None:
    logits = torch.randn(3, 50)
    logits[1] = 0
    found = ReferenceLogits(logits, [0, 1, 2]).difference(logits.clone())
    assert found.max_abs == found.nmse == [0.0] * 3
    assert max(found.kl) < 1e-15
    assert found.top1_equal == [True] * 3


def test_logits_that_are_not_finite_stay_visible() -> None:
    lane = torch.zeros(1, 8)
    lane[0, 3] = math.nan
    found = ReferenceLogits(torch.ones(1, 8), [3]).difference(lane)
    assert math.isnan(found.nmse[0])
    assert math.isnan(found.max_abs[0])
    assert math.isnan(found.kl[0])


def test_logits_that_should_be_nothing() -> None:
    assert ReferenceLogits(torch.zeros(1, 8), [0]).difference(torch.ones(1, 8)).nmse == [math.inf]


@pytest.mark.parametrize(
    ("reference", "lane", "expected"),
    [
        ([0, 1, 2], [0, 1, 2], 0),
        ([0, 1, 2], [0, 1, 2, 2, 3], 2),
        ([0, 1, 2], [1], 2),
        ([], [4, 4], 2),
        ([], [], 0),
        ([5, 6], [6, 7], 2),
    ],
)
def test_cells_without_a_partner(reference: list[int], lane: list[int], expected: int) -> None:
    found = cells_that_differ(np.array(reference, np.int64), np.array(lane, np.int64))
    assert found == expected


def filled(**settings) -> HybridMemory:
    opened, tokens = session(MODEL), prompt_of(MODEL).tokens[:9]
    memory = HybridMemory.for_model(opened.config, 1, 64, torch.device("cpu"), **settings)
    for ubatch in memory.split([Span(0, 0, tokens, [8])], 512, "equal"):
        opened.model.forward(ubatch, memory)
    return memory


def test_memories_that_hold_the_same() -> None:
    found = ReferenceMemory(filled()).difference(filled())
    assert found.state == found.conv == [0.0] * len(found.layers)
    assert found.layers == filled().recurrent.layout.layers
    assert found.n_cells == 0


def test_a_pending_rollback_counts_as_done() -> None:
    lane = filled(policy="planes", n_rs_seq=3)
    assert lane.seq_rm(0, 7)
    reference = filled()
    found = ReferenceMemory(reference).difference(lane)
    assert found.n_cells == 2
    mine, theirs = reference.recurrent.live(0), lane.recurrent.live(0)
    for i, layer in enumerate(found.layers):
        for errors, name in ((found.state, "state"), (found.conv, "window")):
            a, b = (live[layer, name].numpy().astype(np.float64) for live in (mine, theirs))
            assert errors[i] == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a))
            assert errors[i] > 1e-2
