"""Splits and steps on a small model: complete figures, and a model left as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch import Span, UBatch
from engine.experiments.bench.forward import (
    MODEL_SECTIONS,
    SectionClock,
    bench_splits,
    bench_steps,
    sections_timed,
)
from engine.gguf.file import GgufFile
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.model.layers import StepOutput
from engine.model.loader import load_model
from kernels.dispatch import uses_llvm

DATA = Path(__file__).parents[3] / "data"
DENSE, MIXTURE = DATA / "qwen35-c-v2x-mtp-f32.gguf", DATA / "qwen35moe-d-v2x-mtp-f32.gguf"


def load(path: Path) -> HybridModel:
    with GgufFile.open(path) as file:
        return load_model(file)


def attributes(model: HybridModel) -> list[object]:
    parts = [part for block in model._trunk._blocks for part in (block, block._mixer, block._ffn)]
    return [value for owner in (model, *parts) for value in vars(owner).values()]


@pytest.mark.parametrize("path", [DENSE, MIXTURE], ids=lambda path: path.stem)
def test_sections_add_up_and_leave_the_model_as_it_was(path: Path) -> None:
    model = load(path)
    memory = HybridMemory.for_model(model.config, 1, 16, torch.device("cpu"))
    assert memory.recurrent is not None
    before = attributes(model), set(vars(memory.recurrent))
    (ubatch,) = memory.split([Span(0, 0, [1, 2, 3], range(3))], 16, "equal")
    clock = SectionClock()
    with sections_timed(model, [memory], clock):
        clock.restart()
        timed = model.forward(ubatch, memory)
        ms = clock.ms()
    assert list(ms) == list(MODEL_SECTIONS)
    assert min(ms.values()) > 0
    after = attributes(model), set(vars(memory.recurrent))
    assert all(a is b for a, b in zip(before[0], after[0], strict=True))
    assert before[1] == after[1]
    memory.clear(0)
    assert torch.equal(timed.logits, model.forward(ubatch, memory).logits)


def test_the_clock_counts_a_section_inside_another_once() -> None:
    clock = SectionClock()
    now = 0.0

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    inner = clock.timed(work, "linears")

    def mixer() -> None:
        work(1.0)
        inner(2.0)
        work(4.0)

    outer = clock.timed(mixer, "attention")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.experiments.bench.forward.perf_counter", lambda: now)
        clock.restart()
        work(8.0)
        outer()
        work(16.0)
        ms = clock.ms()
    assert ms == {"linears": 2000, "recurrent core": 0, "attention": 5000, "head": 0, "rest": 24000}


def test_splits_decode_the_same_tokens_in_one_pass_and_in_one_per_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load(DENSE)
    passes: list[tuple[tuple[int, ...], torch.Tensor]] = []
    forward = model.forward

    def spy(ubatch: object, memory: object) -> StepOutput:
        out = forward(ubatch, memory)
        passes.append((ubatch.seq_ids, out.logits))
        return out

    monkeypatch.setattr(model, "forward", spy)
    result = bench_splits(model, n_seqs=3, n_draft=2, rounds=2)
    assert (result["n_seqs"], result["n_tokens"]) == (3, 3)
    assert result["figures"]["equal"]["n_ubatches"] == 1
    assert result["figures"]["seq"]["n_ubatches"] == 3
    for figures in result["figures"].values():
        assert list(figures["sections"]) == list(MODEL_SECTIONS)
        assert sum(figures["sections"].values()) == pytest.approx(figures["ms"])
        assert figures["tokens_per_second"] == pytest.approx(9000 / figures["ms"])
    assert result["ratio"] > 0
    together = [logits for seqs, logits in passes if seqs == (0, 1, 2)]
    alone = [[logits for seqs, logits in passes if seqs == (seq,)] for seq in range(3)]
    assert len(together) == 4  # two rounds and as many to warm up
    for turn, logits in enumerate(together):
        torch.testing.assert_close(
            logits, torch.cat([rows[turn] for rows in alone]), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("outputs", ["last", "all"])
def test_steps_have_every_width_once(monkeypatch: pytest.MonkeyPatch, outputs: str) -> None:
    model = load(DENSE)
    shapes: set[tuple[int, int, int]] = set()
    forward = model.forward

    def spy(ubatch: UBatch, memory: HybridMemory) -> StepOutput:
        pos = int(ubatch.positions[0, 0])
        assert pos == memory.seq_pos_max(0) + 1
        if pos:
            assert pos == 1
            shapes.add((*ubatch.tokens.shape, len(ubatch.outputs)))
        return forward(ubatch, memory)

    monkeypatch.setattr(model, "forward", spy)
    rows = bench_steps(model, (1, 7, 64), repeats=2, outputs=outputs)
    assert [row["width"] for row in rows] == [1, 7, 64]
    assert shapes == {(1, n, n if outputs == "all" else 1) for n in (1, 7, 64)}
    for row in rows:
        assert 0 < row["min_ms"] <= row["median_ms"]
        assert row["tokens_per_second"] == pytest.approx(1000 * row["width"] / row["median_ms"])
        assert (row["kernels_ms"] is not None) == uses_llvm()
        assert row["kernels_ms"] is None or 0 < row["kernels_ms"] <= row["median_ms"]
