"""The f64 recurrences against the naive kernels, which are written independently of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from engine.conform.cases import Shape, Source
from engine.conform.reference import Reference, linear, play
from kernels.recurrence.conv import causal_conv_naive
from kernels.recurrence.delta_rule import naive as delta
from kernels.recurrence.ssd import naive as ssd
from tests.engine.conform.drawn_rows import drawn


def played(shape: Shape):
    source = Source(shape, 7)
    first = source.state()
    reference = Reference(shape, [first])
    rows = source.rows([0], [shape.n_tokens])
    return rows, first.double(), reference.verify(rows), reference.depths(0)


@pytest.mark.parametrize("recurrence", ["gdn", "kda"])
def test_the_delta_rules_are_the_naive_kernels(recurrence):
    rows, first, outputs, states = played(Shape(recurrence, 4, 2, 8, 6, 5, 1))
    inputs = [t.double()[None] for t in (rows.q_normed, rows.k_normed, rows.v, rows.g, rows.beta)]
    wanted, snapshots = delta.gated_delta_rule(*inputs, first[None], grouped=True, n_snapshots=5)
    # gates and norms of the rows are computed in f32
    torch.testing.assert_close(outputs, wanted[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.stack(states), snapshots[0].flip(0), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("recurrence", ["gdn", "kda", "mamba2"])
def test_what_rows_make_of_a_change_of_the_state_is_linear(recurrence):
    shape, state, rows = drawn(recurrence, 3)
    change = torch.randn(shape.state, generator=torch.Generator().manual_seed(4)).double()
    right, other = (play(shape, x, rows)[1][-1] for x in (state, state + change))
    torch.testing.assert_close(right + linear(shape, rows) @ change, other)


def test_mamba2_is_the_naive_kernel():
    rows, first, outputs, states = played(Shape("mamba2", 4, 2, 8, 6, 5, 1))
    t = {k: v.double() for k, v in rows.tensors.items()}
    dt = torch.nn.functional.softplus(t["dt"] + t["dt_bias"])
    wanted, snapshots = ssd.ssd(
        *(x[None] for x in (t["x"], dt, dt * t["A"], t["B"], t["C"])),
        t["D"],
        first.transpose(-1, -2)[None],
        n_snapshots=5,
    )
    torch.testing.assert_close(outputs, wanted[0])
    torch.testing.assert_close(torch.stack(states).transpose(-1, -2), snapshots[0].flip(0))


def test_a_convolution_is_the_naive_kernel():
    rows, first, outputs, states = played(Shape("conv", 6, 1, 4, 1, 5, 1))
    t = {k: v.double() for k, v in rows.tensors.items()}
    wanted, history = causal_conv_naive(t["x"][None], t["weight"], first.T[None], t["bias"])
    torch.testing.assert_close(outputs, wanted[0])
    for i, state in enumerate(states):
        torch.testing.assert_close(state, history[0, i + 1 : i + 4].T)


def test_a_seed_draws_the_same_in_every_process():
    # strings of a set come in another order under these two
    code = (
        "from engine.conform.cases import Shape, Source\n"
        "rows = Source(Shape('gdn', 4, 2, 8, 8, 3, 3), 1, large=True).rows([0], [3])\n"
        "print({name: t.tolist() for name, t in rows.tensors.items()})"
    )
    made = {
        subprocess.check_output(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": x}
        )
        for x in "03"
    }
    assert len(made) == 1
