"""Adapters as a user writes them, each with one mistake: it is named; right ones pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.conform.checks import CHECKS, Player, check, has_check
from engine.conform.replays import placed
from engine.conform.subject import Kernel
from tests.engine.conform import wrong_adapters as wrong
from tests.engine.conform.drawn_rows import PACKAGE, SHAPES


def kernel_of(adapter, recurrence, name=""):
    chunk = 4 if issubclass(adapter, wrong.Prompt) else 0
    some = {"trees": name == "trees", "padding": name == "padding", "chunk": chunk}
    return Kernel("planted", (recurrence,), adapter, dtypes=("float32",), **some)


@pytest.mark.parametrize(
    ("adapter", "recurrence", "name", "cause", "words"),
    [
        (wrong.NormOverHeads, "gdn", "depths", "wrong-norm", "k is divided by the length over the"),
        (wrong.JointNorm, "gdn", "depths", "wrong-norm", "by the length of q and k together"),
        (wrong.CentredKeys, "gdn", "depths", "wrong-norm", "k is normalized without the mean"),
        (wrong.StartDelta, "gdn", "depths", "wrong-term", "see nothing of what earlier rows wrote"),
        (wrong.LateCounts, "gdn", "depths", "stale-column", "state after 1 of 3 rows, 3 accepted"),
        (wrong.SortedOffsets, "gdn", "lengths", "other-sequence", "all inputs of the row after in"),
        (wrong.PaddedOutputs, "gdn", "lengths", "other-row", "of the pass is that of row 1 of"),
        (wrong.UndecayedStep, "gdn", "no-drafts", "gate-order", "the decay is left out; in a step"),
        (wrong.FoldsOwnDecay, "gdn", "depths", "gate-order", "with its own row's decay too"),
        (wrong.RefoldsAbsent, "gdn", "subsets", "other-sequence-written", ""),
        (wrong.LastSlot, "gdn", "padding", "other-sequence", "all inputs of the rows of padding"),
        (wrong.TreeDepth, "gdn", "trees", "wrong-parent", "row 4 follows row 3 and not row 2"),
        (wrong.PaddedGate, "gdn", "prompts", "wrong-chunk", "where all prompts have whole chunks"),
        (wrong.MeanDecay, "kda", "depths", "wrong-gate", "channels of a head decay alike: mean"),
        (wrong.TurnedQueries, "kda", "depths", "wrong-stride", "q is read transposed"),
        (wrong.RoundedValues, "kda", "depths", "drift", "as of rounding to bfloat16"),
        (wrong.ExclusiveDecay, "kda", "prompts", "gate-order", "without the first decay"),
        (wrong.StepLimit, "mamba2", "depths", "wrong-gate", "softplus ends at 0.5"),
        (wrong.LateSkip, "mamba2", "depths", "other-row", "x of the row before, in D x"),
        (wrong.TwiceExp, "mamba2", "depths", "wrong-gate", ""),
        (wrong.LateBias, "mamba2", "depths", "wrong-gate", "added after softplus, in the decay"),
        (wrong.ShortWindow, "conv", "depths", "window-not-rolled-back", "holds inputs nothing, -1"),
        (wrong.ShiftedWeights, "conv", "depths", "head-mapping", "takes the weight of channel 2"),
        (wrong.TurnedInputs, "conv", "depths", "head-mapping", "takes the input of channel 5"),
    ],
)
@pytest.mark.thinned(4)
def test_a_mistake_is_named(adapter, recurrence, name, cause, words):
    kernel = kernel_of(adapter, recurrence, name)
    shape = replace(SHAPES[recurrence], n_tokens=5 if name == "trees" else 3)
    fault = check(kernel, PACKAGE, shape, name, 3, "cpu", 12)[0]
    fault = placed(Player(kernel, PACKAGE, shape, 3, "cpu"), fault)
    assert (fault.cause, words in fault.detail) == (cause, True), fault.detail


@pytest.mark.parametrize(
    ("adapter", "recurrence"),
    [
        (wrong.Delta, "gdn"),
        (wrong.Delta, "kda"),
        (wrong.Prompt, "kda"),
        (wrong.Ssd, "mamba2"),
        (wrong.Window, "conv"),
    ],
)
def test_right_ones_pass(adapter, recurrence):
    kernel = kernel_of(adapter, recurrence)
    for name in CHECKS:
        if has_check(kernel, name):
            found = check(kernel, PACKAGE, SHAPES[recurrence], name, 1, "cpu", 6)
            assert not [fault for fault in found if not fault.note]
