"""Comparisons of what a kernel gave with what a mistake would give."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import softplus

from engine.conform.causes import Situation
from engine.conform.fits import activated, misplaced, nearest, summed, tapped, wrong_heads
from engine.conform.mistakes import formulas, in_parts
from engine.conform.reference import Reference, play
from tests.engine.conform.drawn_rows import KERNEL, drawn


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_explains_no_head(value):
    seen, made = torch.ones(1, 2, 3), torch.ones(1, 2, 3)
    made[0, 1, 0] = value
    assert wrong_heads(seen, made, 1e-3).tolist() == [False, True]


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ([0, 1, 2, 3], ""),
        ([0, 2, 1, 3], "the output of row 1 is that of row 2"),
        ([0, -1, 0, 1], "the output of row 2 is that of row 0"),
        ([3, 1, -1, 0], ""),  # of rows that are not asked for
    ],
)
def test_a_row_that_has_another_ones_output_is_found(at, said):
    wanted = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(1))
    seen = torch.stack([wanted[i] if i >= 0 else torch.full((2, 3), math.nan) for i in at])
    assert misplaced(seen, wanted, slice(1, 3), 1e-6, "row {}") == said
    assert not misplaced(seen.nan_to_num() * 0, wanted * 0, slice(1, 3), 1e-6, "row {}")


def test_a_tap_that_takes_another_input_is_named():
    torch.manual_seed(2)
    known, weight, bias = torch.randn(5, 6), torch.randn(6, 4), torch.randn(6)
    rows = [{"x": x, "weight": weight, "bias": bias} for x in known[3:]]
    of = torch.tensor([[0, 1, 2, 3], [1, 3, 3, 4]])  # inputs of each row's taps
    y = bias + torch.einsum("rtc,ct->rc", known[of], weight)
    seen = torch.nn.functional.silu(y)
    found = tapped(list(known), rows, seen, 1e-6)
    assert found == ("other-row", "tap 1 of row 1 takes input 0 (0: the first row's)")
    assert tapped(list(known), rows, seen + 1, 1e-6) is None


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda own, bias: own + bias, ("wrong-term", "the bias is taken 2 times")),
        (
            lambda own, bias: torch.stack([own[0], own[0] + own[1] - bias]),
            ("other-row", "the bias is taken 0 times, in rows 1; the sum of row r - 1 is taken 1"),
        ),
        (lambda own, bias: own * own, None),
    ],
)
def test_a_convolutions_sums_in_other_shares_are_named(made, said):
    torch.manual_seed(3)
    known, weight, bias = (torch.randn(*n).double() for n in ((5, 40), (40, 4), (40,)))
    rows = [{"x": x, "weight": weight, "bias": bias} for x in known[3:]]
    own = torch.stack([(known[i : i + 4].T * weight).sum(1) + bias for i in range(2)])
    seen = torch.nn.functional.silu(made(own, bias))
    found = summed(list(known), rows, seen, 1e-6)
    assert (found and (found[0], found[1].replace(" of 2", "")[: len(said[1])])) == said


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda y: y, "silu is left out"),
        (lambda y: y * (1 + torch.erf(y / 2**0.5)) / 2, "gelu is taken for silu"),
        (lambda y: y * torch.tanh(torch.log(1 + torch.exp(y))), "mish is taken for silu"),
        (lambda y: y.clamp(min=0), "relu is taken for silu"),
        (lambda y: y / (1 + y.abs()), "outputs are another function of their sums than SiLU"),
        (lambda y: y * (y > 0.3), "outputs are another function of their sums than SiLU"),
    ],
)
def test_the_activation_of_a_convolution_is_named(made, said):
    shape, state, rows = drawn("conv", 3, n_heads=40)
    inputs = torch.cat([state, *(row["x"][:, None] for row in rows)], 1)
    sums = [(inputs[:, i : i + 4] * r["weight"]).sum(1) + r["bias"] for i, r in enumerate(rows)]
    seen = made(torch.stack(sums))
    situation = Situation(KERNEL, Reference(shape, [state]), 0, rows)
    cause, words = situation.explain_outputs(seen, 1e-5)
    assert (cause, words[: len(said)]) == ("wrong-term", said)
    other = seen + torch.randn(seen.shape, generator=torch.Generator().manual_seed(5)).double()
    assert activated(list(inputs.T), rows, other, 1e-5) is None


@pytest.mark.parametrize(
    ("recurrence", "words"),
    [
        ("kda", "the decay's logarithm ends at -0.37"),
        ("kda", "the decay is taken to the power of 0.6"),
        ("gdn", "beta ends at 0.43, in what is taken off v"),
        ("gdn", "k is divided by the squared length"),
        ("gdn", "q is divided by the root of d_v, not of d_k"),
        ("kda", "beta is the sigmoid of 1.7 times its input"),
        ("mamba2", "C is taken 1.7 times"),
        ("gdn", "softplus has a beta of 1.7"),
        ("mamba2", "the sigmoid of 1.7 times z is taken"),
        ("kda", "k is divided with an eps of 0.25"),
        ("kda", "q is divided by the length and 0.4"),
        ("gdn", "A divides, as where A_log has the other sign"),
        ("mamba2", "softplus ends at 0.71, in the decay"),
        ("conv", "the sigmoid of 1.7 times its input is taken"),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_a_formula_is_named_with_its_number(recurrence, words, last):
    shape, state, rows = drawn(recurrence, 3, extras=("z",) if " z " in words else (), d_v=6)
    numbers = (float(x) for x in words.replace(",", "").split() if x[-1].isdigit())
    number = next(numbers, 0.0)
    ways = in_parts(shape, rows, formulas(shape, rows, abs(number)))
    (wrong,) = (made for _, said, made in ways if said == words)
    outputs, states = play(shape, state, wrong)
    situation = Situation(KERNEL, Reference(shape, [state]), 0, rows)
    if last and recurrence != "conv" and " z " not in words and words[:2] not in ("q ", "C "):
        # the state alone may not say which part of a row it is wrong in
        cause, said = situation.explain_state(states[-1], 3, 1e-5)
        assert (cause[:6], said.split(",")[0]) == ("wrong-", words.split(",")[0])
    else:
        cause, said = situation.explain_outputs(torch.stack(outputs), 1e-5)
        assert (cause[:6], said.split(", in the state")[0]) == ("wrong-", words)


def test_the_nearest_of_some_quantities_is_taken():
    each = [(0.9, "near"), (0.6, "as near"), (0.2, "nearer"), (0.15, "as near"), (2.0, "far")]
    assert nearest(((x, ("", words)) for x, words in each), 1.0) == ("", "nearer")
    assert nearest(((x, ("", words)) for x, words in each), 0.1) is None


def test_heads_that_read_what_heads_before_have_stored_are_named():
    shape, state, rows = drawn("gdn", 3)
    pool, seen = state.clone(), []
    for head, of in enumerate((0, 0, 1, 1)):
        read = pool.clone()
        read[head] = pool[of]
        outputs, states = play(shape, read, rows)
        seen.append(torch.stack(outputs)[:, head])
        pool[head] = states[0][head]
    situation = Situation(KERNEL, Reference(shape, [state]), 0, rows)
    found = situation.explain_outputs(torch.stack(seen, 1), 1e-5)
    assert found == ("head-mapping", "the state of its key head, as far as it is stored anew")


def test_a_number_that_explains_all_rows_comes_before_rows_that_differ():
    shape, state, rows = drawn("gdn", 4)
    (wrong,) = (made for _, x, made in formulas(shape, rows, 0.5) if "is left out above" in x)
    outputs = torch.stack(play(shape, state, wrong)[0])
    situation = Situation(KERNEL, Reference(shape, [state]), 0, rows)
    cause, said = situation.explain_outputs(outputs, 1e-5)
    assert (cause, said[:27]) == ("wrong-gate", "softplus is left out above ")


@pytest.mark.parametrize(("recurrence", "n"), [("gdn", 3), ("mamba2", 4)])
def test_a_number_that_one_value_alone_shows_is_found(recurrence, n):
    shape, state, rows = drawn(recurrence, n)
    name = "a" if recurrence == "gdn" else "dt"
    least, next_ = torch.stack([softplus(r[name] + r["dt_bias"]) for r in rows]).unique()[:2]
    number = float(least + next_) / 2
    words = f"softplus is {number:.4g} at least"
    (wrong,) = (made for _, said, made in formulas(shape, rows, number) if said == words)
    seen = torch.stack(play(shape, state, wrong)[0])
    cause, said = Situation(KERNEL, Reference(shape, [state]), 0, rows).explain_outputs(seen, 1e-6)
    assert (cause, said[:14]) == ("wrong-gate", "softplus is 0.")
