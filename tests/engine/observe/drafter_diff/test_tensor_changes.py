"""Changes of tensors, as rows and halves that change places."""

from __future__ import annotations

import torch

from engine.observe.drafter_diff.tensor_changes import other_values, rows_on


def test_the_row_before_the_first_of_a_slice_is_that_of_the_whole() -> None:
    whole = torch.arange(12.0).view(1, 4, 3)
    assert torch.equal(rows_on(whole[:, 1:], 1), whole[:, :-1])
    assert rows_on(whole, 1)[0, :, 0].tolist() == [9, 0, 3, 6]


def test_a_number_may_be_its_own_square() -> None:
    changes = {about: change(0.125) for about, change in other_values(0.125, False)}
    assert changes["as about its square"] == 0.125**2
    assert {0.25 * 0.125, 4 * 0.125} <= {*changes.values()}


def test_every_other_value_of_rows_has_their_shape_and_differs() -> None:
    rows = torch.randn(4, 6)
    for is_weight in (False, True):
        changes = dict(other_values(rows, is_weight))
        assert len(changes) > 4
        for about, change in changes.items():
            assert change(rows).shape == rows.shape, about
            assert not torch.equal(change(rows), rows), about
