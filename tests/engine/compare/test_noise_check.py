"""Bugs that noise lanes share with the lanes that they bound do not raise the bound."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import batch
from engine.analysis.findings.check import find, recorded
from engine.analysis.noise_ceiling import logits_ceiling, rows_beyond, tipped_share
from engine.analysis.verdict import judge_lanes
from engine.compare.comparison import Comparison
from engine.compare.lanes import ONE_BATCH, SHORT_BATCHES
from engine.memory.cells import CellTable
from engine.memory.planes import PlaneMemory
from engine.memory.recurrent import SnapshotPolicy
from engine.model.hybrid import HybridModel
from engine.model.recurrence import ConvWindow
from engine.model.recurrent_states import MatrixState
from engine.options import Prompt
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from tests.support.comparisons import finish, specs, verdicts
from tests.support.golden_runs import options_of, prompt_of, session

MODEL = "qwen35-c-v2x-mtp-f32"
LANES = ("checkpoint", "planes")
Patch = pytest.MonkeyPatch


def compared(n_seqs: int = 1, n: int = 16) -> Comparison:
    tokens = prompt_of(MODEL).tokens
    prompts = [Prompt(tokens[: 14 - 3 * i]) for i in range(n_seqs)]
    options = options_of(n, n_max=3, parallel=n_seqs, ignore_eos=True)
    lanes = specs(*LANES)
    return finish(Comparison(session(MODEL), prompts, options, lanes, draft_accept=[1, 0, 3]))


def wrapped(patch: Patch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    patch.setattr(owner, name, make(owner.__dict__[name]))


def short(ubatch: batch.UBatch) -> bool:
    return 1 < ubatch.n_seq_tokens <= 8


def restore_leaves_windows(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def put(self: SnapshotPolicy, seq: int, pos: int, states: Any) -> None:
            own = self.layout.states
            kept = {k: torch.zeros_like(s) if own[k].is_window else s for k, s in states.items()}
            original(self, seq, pos, kept)

        return put

    wrapped(patch, SnapshotPolicy, "put", make)


def restore_into_another_plane(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def put(self: PlaneMemory, seq: int, states: Any) -> None:
            layers = self.layout.layers
            fewer = {k: s for k, s in states.items() if k.layer != layers[1]}
            others = {k: torch.zeros_like(s) for k, s in states.items() if k not in fewer}
            original(self, seq, {**fewer, **others})

        return put

    wrapped(patch, PlaneMemory, "_put", make)


def mask_shows_the_next_token(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def visible(
            self: CellTable, seqs: Any, positions: np.ndarray, *rest: Any, **how: Any
        ) -> Any:
            return original(self, seqs, positions + (1 < positions.shape[1] <= 8), *rest, **how)

        return visible

    for name in ("visible", "seen"):  # by position, and by cell where cells are in order
        wrapped(patch, CellTable, name, make)


def windows_show_the_next_token(patch: Patch) -> None:
    def shifted(y: torch.Tensor) -> torch.Tensor:
        return torch.cat((y[:, 1:], y[:, -1:]), 1) if 1 < y.shape[1] <= 8 else y

    def make(original: Any) -> Any:
        def outputs(self: ConvWindow, *rest: Any, **how: Any) -> Any:
            y, history = original(self, *rest, **how)
            return shifted(y), history

        return outputs

    def make_by_index(original: Any) -> Any:
        return lambda self, *rest: shifted(original(self, *rest))

    wrapped(patch, ConvWindow, "outputs", make)
    wrapped(patch, ConvWindow, "by_index", make_by_index)


def one_gate_for_all(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def into(self: MatrixState, inputs: Any, *rest: Any, **how: Any) -> Any:
            first = {name: getattr(inputs, name)[:, :1] for name in ("g", "beta")}
            same = {name: x.expand_as(getattr(inputs, name)) for name, x in first.items()}
            return original(self, inputs._replace(**same), *rest, **how)

        return into

    wrapped(patch, MatrixState, "into", make)


def one_position_for_all(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def forward(self: HybridModel, ubatch: batch.UBatch, memory: Any, **how: Any) -> Any:
            rope = self._rope
            if short(ubatch):
                first = torch.from_numpy(ubatch.positions[:, :1].copy())

                self._rope = copy(rope)
                self._rope.at = lambda positions: rope.at(first.expand_as(positions))
            try:
                return original(self, ubatch, memory, **how)
            finally:
                self._rope = rope

        return forward

    wrapped(patch, HybridModel, "forward", make)


def rows_of_sequences_exchanged(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def make_ubatch(*of: Any) -> batch.UBatch:
            found = original(*of)
            if found.n_seqs > 1 and short(found):
                found.tokens[:2] = found.tokens[1::-1].copy()
            return found

        return make_ubatch

    patch.setattr(batch, "make_ubatch", make(batch.make_ubatch))


def prompts_see_the_next_token(patch: Patch) -> None:
    """In what prompts and verify batches share."""

    def make(original: Any) -> Any:
        def visible(
            self: CellTable, seqs: Any, positions: np.ndarray, *rest: Any, **how: Any
        ) -> Any:
            return original(self, seqs, positions + (positions.shape[1] > 1), *rest, **how)

        return visible

    for name in ("visible", "seen"):
        wrapped(patch, CellTable, name, make)


COPIES = "noise-beyond-rounding"
BATCHES = "batch-differs"


@pytest.mark.parametrize(
    ("bug", "finds", "n_seqs"),
    [
        (restore_leaves_windows, COPIES, 1),
        (restore_into_another_plane, COPIES, 1),
        (mask_shows_the_next_token, BATCHES, 1),
        (windows_show_the_next_token, BATCHES, 1),
        (one_gate_for_all, BATCHES, 1),
        (one_position_for_all, BATCHES, 1),
        (rows_of_sequences_exchanged, BATCHES, 2),
        (prompts_see_the_next_token, BATCHES, 1),
    ],
)
@pytest.mark.thinned(6)
def test_a_bug_of_the_noise_lane_is_named(
    monkeypatch: Patch, tmp_path: Path, bug: Callable[[Patch], None], finds: str, n_seqs: int
) -> None:
    session(MODEL)
    bug(monkeypatch)
    comparison = compared(n_seqs)
    found = verdicts(comparison)
    assert found["noise"].verdict == "suspect"
    assert found["planes"].bound <= 1e-5
    mine = {f.rule for f in recorded(comparison.trace) if f.run_id == found["noise"].run_id}
    assert mine == {finds}
    export_csv(comparison.trace, tmp_path / "out")
    opened = open_trace(tmp_path / "out")
    assert judge_lanes(opened, [found["noise"].run_id])[0].verdict == "suspect"
    assert {f.rule for f in find(opened, [found["noise"].run_id])} == {finds}


def test_figures_of_the_check_are_facts_of_the_lane() -> None:
    comparison = compared(2)
    check = comparison.trace.runs[verdicts(comparison)["noise"].run_id]["noise_check"]
    assert (check["ceiling"], check["share"]) == (logits_ceiling("f32"), 0.0)
    ways = [(one["seq_id"], one["batches"]) for one in check["batches"]]
    assert ways == [(seq, way) for seq in (0, 1) for way in (ONE_BATCH, SHORT_BATCHES)]
    for one in check["batches"]:
        assert one["rows"] == 12
        assert one["beyond"] == 0
        assert 0 <= one["worst"] < 1e-10


def test_ties_may_tip_a_few_rows_where_a_model_ranks() -> None:
    strict, ranks = (tipped_share("f32", ranks=ranks) for ranks in (False, True))
    assert tipped_share("bf16", ranks=False) == ranks > 0
    nmse = np.full(20, 1e-9)
    assert not rows_beyond(nmse, 1e-5, strict).size
    nmse[[3, 7]] = 0.1
    assert rows_beyond(nmse, 1e-5, strict).tolist() == [3, 7]
    assert not rows_beyond(nmse, 1e-5, ranks).size
    nmse[10:] = np.nan
    assert rows_beyond(nmse, 1e-5, ranks).size == 12
