"""Frequencies per pair against small computations of their own."""

from __future__ import annotations

import math

import pytest
import torch

from engine.model.layers import RopeTables
from engine.model.rope import RopeConfig


def test_plain():
    got = RopeConfig(8, 10000.0).inverse_frequencies()
    assert got == pytest.approx([1.0, 0.1, 0.01, 0.001])


def test_linear():
    config = RopeConfig(8, 10000.0, scaling="linear", factor=4.0)
    assert config.inverse_frequencies() == pytest.approx([0.25, 0.025, 0.0025, 0.00025])
    assert config.magnitude == 1.0


def _yarn_by_wavelength(n_rot: int, theta: float, factor: float, n_orig: int) -> list[float]:
    """YaRN from the turns that each pair makes in the original context, pair by pair.

    A pair at index x makes n_orig theta^(-2x/n_rot) / 2 pi turns; solved for 32 and for 1 turn
    by bisection, which needs no logarithm of the formula under test.
    """

    def index_with(turns: float) -> float:
        low, high = -10.0 * n_rot, 10.0 * n_rot
        for _ in range(200):
            middle = (low + high) / 2
            made = n_orig * theta ** (-2 * middle / n_rot) / (2 * math.pi)
            low, high = (middle, high) if made > turns else (low, middle)
        return low

    first = max(0, math.floor(index_with(32)))
    last = min(n_rot - 1, math.ceil(index_with(1)))
    result = []
    for j in range(n_rot // 2):
        frequency = theta ** (-2 * j / n_rot)
        if j <= first:
            interpolated = 0.0
        elif j >= last:
            interpolated = 1.0
        else:
            interpolated = (j - first) / (last - first)
        result.append(frequency * (1 - interpolated) + frequency * interpolated / factor)
    return result


@pytest.mark.parametrize(
    ("n_rot", "theta", "factor", "n_orig"),
    [(32, 1e6, 4.0, 4096), (64, 1e7, 2.0, 262144), (8, 1e4, 8.0, 512), (128, 1e6, 4.0, 32768)],
)
def test_yarn(n_rot, theta, factor, n_orig):
    config = RopeConfig(n_rot, theta, scaling="yarn", factor=factor, n_ctx_orig=n_orig)
    got = config.inverse_frequencies()
    assert got == pytest.approx(_yarn_by_wavelength(n_rot, theta, factor, n_orig), rel=1e-9)
    plain = RopeConfig(n_rot, theta).inverse_frequencies()
    assert got[0] == plain[0]  # fast pairs keep their frequency
    assert got[-1] == pytest.approx(plain[-1] / factor)  # slow ones stretch
    assert config.magnitude == pytest.approx(1 + 0.1 * math.log(factor))


def test_yarn_ramp_settings():
    narrow = RopeConfig(32, 1e6, None, "yarn", 4.0, 4096, beta_fast=8.0, beta_slow=4.0)
    wide = RopeConfig(32, 1e6, None, "yarn", 4.0, 4096)
    assert narrow.inverse_frequencies() != wide.inverse_frequencies()


@pytest.mark.parametrize(
    ("sections", "turning"),
    [
        ((2, 1, 1, 0), [0, 1, 2, 3, 4, 5, 6, 7]),
        ((11, 11, 10, 0), [0, 1, 2, 3, 4, 5, 6, 7]),
        # s = j mod 4: 1 needs 1 < 3, 2 needs 2 < 0, 0 needs 0 < 3, 3 needs 3 < 3
        ((1, 1, 0, 2), [0, 1, 4, 5]),
        # s = j mod 4: 0 needs 0 < 0, 1 needs 1 < 0, 2 needs 2 < 3, 3 needs 3 < 0
        ((0, 0, 1, 3), [2, 6]),
        # s = j mod 8: the first pair of each stream only
        ((1, 1, 1, 5), [0, 1, 2]),
        ((0, 0, 0, 4), []),
    ],
)
def test_sections(sections, turning):
    config = RopeConfig(16, 10000.0, sections)
    plain = RopeConfig(16, 10000.0).inverse_frequencies()
    expected = [f if j in turning else 0.0 for j, f in enumerate(plain)]
    assert config.inverse_frequencies() == expected


def test_tables_grow_and_keep_their_values():
    config = RopeConfig(8, 10000.0, scaling="yarn", factor=4.0, n_ctx_orig=64)
    tables = RopeTables(config)
    positions = torch.tensor([[0, 1, 255, 256], [70000, 3, 2, 1]])
    assert tables.reach(99) == 4096
    before, _ = tables.at(positions[:, :2].remainder(100))
    assert tables.reach(70000) > 70000
    cos, sin = tables.at(positions)
    assert cos.shape == sin.shape == (2, 4, 4)
    assert before.shape == (2, 2, 4)
    for row in range(2):
        for column in range(4):
            position = int(positions[row, column])
            for pair, frequency in enumerate(config.inverse_frequencies()):
                angle = position * frequency
                assert cos[row, column, pair] == pytest.approx(
                    math.cos(angle) * config.magnitude, abs=1e-6
                )
                assert sin[row, column, pair] == pytest.approx(
                    math.sin(angle) * config.magnitude, abs=1e-6
                )
    again, _ = tables.at(torch.tensor([[1]]))
    assert torch.equal(again[0, 0], cos[0, 1])
