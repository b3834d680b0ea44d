"""Changes of tensors, as rows and halves that change places."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.observe.drafter_diff.tensor_changes import CHANGED, other_values, rows_on
from kernels.linear import linear, pack
from kernels.linear.blocks import pack_plain


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


def test_rows_are_rotated_as_caches_of_few_bits_have_them() -> None:
    rotate = CHANGED["rotated by a Hadamard matrix"]
    one = torch.eye(4)
    expected = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    assert torch.allclose(rotate(one), expected)
    x = torch.randn(3, 12, generator=torch.manual_seed(1))
    assert torch.allclose(rotate(rotate(x)), x, atol=1e-6)  # by blocks of four
    assert not torch.allclose(rotate(x), x)


def test_matrices_are_rounded_by_rows_and_by_blocks_or_in_another_order() -> None:
    x = torch.randn(4, 64, generator=torch.manual_seed(2))
    x[:, 40] = 90.0  # of one block of each row alone
    changes, packed = dict(other_values(pack_plain(x), False)), pack_plain(x)

    def numbers(about: str) -> torch.Tensor:
        return linear(torch.eye(64), changes[f"as if it were {about}"](packed)).T

    by_row, by_block = (
        numbers(f"rounded to about 4 bits{how}") for how in ("", " in blocks of 32")
    )
    assert not by_row[:, :32].any() and by_block[:, :32].any()
    assert torch.equal(by_row[:, 32:], by_block[:, 32:])
    moved = numbers("with halves of its results exchanged")
    assert torch.equal(moved, x[[2, 3, 0, 1]])
    assert changes["as if it were transposed"](packed) is packed  # it is not square
    large = replace(packed, shape=(1 << 12, 1 << 12))
    assert changes["as if it were rounded to about 2 bits"](large) is large


def test_matrices_of_any_width_are_other_ones() -> None:
    x = torch.randn(48, 80, generator=torch.manual_seed(4))
    changes, packed = dict(other_values(pack(x, "f32"), False)), pack(x, "f32")
    moved = changes["as if it were with halves of its results exchanged"](packed)
    found = linear(torch.eye(80), moved).T
    assert torch.allclose(found, x.roll(24, 0), atol=1e-6)


def test_rows_of_any_width_may_be_other_ones() -> None:
    for width in (1, 2, 3):
        for about, change in CHANGED.items():
            assert change(torch.ones(2, width)).shape == (2, width), about
