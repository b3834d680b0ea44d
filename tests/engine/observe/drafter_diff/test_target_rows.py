"""What handed rows are said to be, for rows that were changed in a known way."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.model.layers import TargetRows
from engine.observe.drafter_diff.target_rows import CHANGES, MOVED, TextRows
from tests.support.drafter_diff_campaign import opened

_OWN, _LAYER = np.random.default_rng(1).standard_normal((2, 24, 32)).astype(np.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (np.zeros_like, "the target's rows are zeros"),
        (lambda x: x * np.nan, "rows are NaN or infinite"),
        (lambda x: x * 0.26, "the target's rows are about 0.25 times as large"),
        (lambda x: np.roll(x, 1, 0), "the target's rows are those of the previous position"),
        (lambda x: _LAYER, "rows are of layer 3 without a norm, not of the last layer"),
        (lambda x: x[:, ::-1], "the target's rows are in reverse order"),
        (lambda x: x * 2 + _LAYER[::-1], "rows are not those after its final norm"),
    ],
)
def test_rows_are_said_to_be_what_they_are(
    change: Callable[[np.ndarray], np.ndarray], words: str
) -> None:
    rows: Any = object.__new__(TextRows)
    rows.rows = TargetRows(torch.from_numpy(_OWN), {4: torch.from_numpy(_LAYER)})
    config = SimpleNamespace(n_layer=5)
    rows.taps, rows._model = (), SimpleNamespace(final_norm=(torch.ones(32), 1e-6), config=config)
    found = np.ascontiguousarray(change(_OWN))
    wrong = np.flatnonzero(~(np.abs(found - _OWN).sum(1) < 1e-3))
    assert rows.about(found, wrong).startswith(words)


def test_half_of_the_numbers_of_rows_may_be_zeros() -> None:
    rows = torch.ones(2, 4)
    assert CHANGES["zeros in the second half"](rows).tolist() == [[1, 1, 0, 0]] * 2
    assert CHANGES["zeros in the first half"](rows).tolist() == [[0, 0, 1, 1]] * 2


def test_rows_may_be_means_of_two() -> None:
    rows = torch.tensor([[2.0], [4.0], [8.0]])
    assert MOVED["means of the previous and their own position"](rows).flatten().tolist() == [
        2,
        3,
        6,
    ]


def test_rows_of_layers_may_lack_their_residual() -> None:
    rows = TextRows(opened("eagle3").model, [5, 9, 4], (2, 5), lambda: False)
    about = "rows are what each layer adds to the one before it, not their sum"
    found = {said: one for said, one, _ in rows.wrong(())}
    added, own, cut = found[about], rows.rows.taps, "the target's rows are clamped at about 0.5"
    assert max(float(x.abs().max()) for x in found[cut].taps.values()) == 0.5
    mean = found["rows are the mean of its layers instead of each layer's"].taps
    assert torch.allclose(mean[2], (own[2] + own[5]) / 2) and mean[5] is mean[2]
    assert all(torch.allclose(added.taps[i] + own[i - 1], own[i], atol=1e-4) for i in (2, 5))
