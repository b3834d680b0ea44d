"""exp and its kin in vectors, against float64: all exponents densely, and the edges."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels.llvm import F32, F32X16, Code, Program, Value, functions

EXACT = {
    "exp": np.exp,
    "sigmoid": lambda x: np.where(x < 0, np.exp(x) / (1 + np.exp(x)), 1 / (1 + np.exp(-x))),
    "silu": lambda x: x * np.where(x < 0, np.exp(x) / (1 + np.exp(x)), 1 / (1 + np.exp(-x))),
    "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "tanh": np.tanh,
}
# units in the last place; silu multiplies the rounding of a subnormal e^x, itself below 1e-45
TINY = {"exp": 0.0, "sigmoid": 0.0, "silu": 1e-43, "softplus": 0.0, "tanh": 0.0}
BOUNDS = {"exp": 1.0, "sigmoid": 2.5, "silu": 3.0, "softplus": 2.5, "tanh": 2.5}
NAMES = pytest.mark.parametrize("name", EXACT)


@functools.cache
def program(name: str) -> Program:
    function: Callable[[Code, Value], Value] = getattr(functions, name)

    def body(code, args, first, last):
        x, y = args
        with code.loop(first, last) as task:
            at = task * 64
            code.store(function(code, code.load(x + at, F32X16)), y + at)

    return Program(body, 2)


def values(name: str, x: np.ndarray) -> np.ndarray:
    padded = torch.zeros(-len(x) % 16 + len(x))
    padded[: len(x)] = torch.from_numpy(x)
    y = torch.full_like(padded, torch.nan)
    program(name).alone(len(padded) // 16, padded.data_ptr(), y.data_ptr())
    return y[: len(x)].numpy()


def assert_close(name: str, x: np.ndarray) -> None:
    y = values(name, x)
    with np.errstate(all="ignore"):
        exact = EXACT[name](x.astype(np.float64))
        rounded = exact.astype(np.float32)
        assert np.array_equal(np.isinf(y), np.isinf(rounded))
        finite = np.isfinite(rounded)
        unit = np.spacing(np.abs(rounded[finite])).astype(np.float64)
        off = np.abs(y[finite].astype(np.float64) - exact[finite]) - TINY[name]
        off /= unit
    worst = off.argmax()
    assert off[worst] <= BOUNDS[name], (x[finite][worst], y[finite][worst], off[worst])


@NAMES
def test_every_exponent_densely(name):
    """Each 4099th of all numbers, of either sign."""
    x = np.arange(0, 2**32, 4099, dtype=np.uint32).view(np.float32)
    assert_close(name, x[np.isfinite(x)])


@NAMES
def test_where_results_are_neither_zero_nor_infinite(name):
    assert_close(name, np.linspace(-110, 95, 1_000_003, dtype=np.float32))
    assert_close(name, np.linspace(-1, 1, 300_007, dtype=np.float32))


@NAMES
def test_nan_stays_nan(name):
    assert np.isnan(values(name, np.array([np.nan, -np.nan, 1.0], np.float32))).tolist() == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("exp", [0.0, 0.0, np.inf, np.inf]),
        ("sigmoid", [0.0, 0.0, 1.0, 1.0]),
        ("silu", [0.0, 0.0, 3e38, np.inf]),
        ("softplus", [0.0, 0.0, 3e38, np.inf]),
        ("tanh", [-1.0, -1.0, 1.0, 1.0]),
    ],
)
def test_far_away(name, ends):
    y = values(name, np.array([-np.inf, -3e38, 3e38, np.inf], np.float32))
    assert np.array_equal(y, np.array(ends, np.float32))


def test_exp_overflows_and_underflows_where_it_should():
    edges = np.array([88.72283, 88.72284, -87.33654, -103.97, -103.98], np.float32)
    y = values("exp", edges)
    assert np.isfinite(y[0]) and np.isinf(y[1])
    assert y[2] >= np.finfo(np.float32).tiny * (1 - 1e-6)
    assert y[3] == np.float32(1.4e-45) and y[4] == 0.0


def test_softplus_is_its_argument_from_20_on():
    x = np.linspace(20, 400, 100_001, dtype=np.float32)
    assert np.array_equal(values("softplus", x), x)


def test_a_number_has_the_same_bits_in_every_lane():
    x = np.repeat(np.linspace(-30, 30, 999, dtype=np.float32), 16)
    for name in EXACT:
        y = values(name, x).reshape(-1, 16)
        assert (y == y[:, :1]).all()


def test_a_number_by_itself_has_the_bits_it_has_in_a_vector():
    def body(code, args, first, last):
        code.store(functions.exp(code, code.load(args[0], F32X16)), args[1])
        code.store(functions.exp(code, code.load(args[0] + 4, F32)), args[1] + 64)

    x, out = torch.linspace(-110, 80, 16), torch.full((17,), torch.nan)
    Program(body, 2)(x.data_ptr(), out.data_ptr(), tasks=1, chunk=1, threads=1)
    assert out[16] == out[1] != 0
