"""Mistakes planted into the index rules of this program's own kernels: each is found and named."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.conform import replays
from engine.conform.adapters import own
from engine.conform.cases import Shape
from engine.conform.checks import CHECKS, Fault, Player, check, has_check
from engine.conform.passes import SCRIPTS
from engine.conform.replays import elsewhere, smallest
from engine.conform.report import MEANINGS, paragraph
from engine.conform.subject import Kernel
from tests.engine.conform import planted_kernels as bad
from tests.engine.conform import wrong_formulas as form
from tests.engine.conform.drawn_rows import PACKAGE, SHAPES


def faults(kernel: Kernel, shape: Shape, names=CHECKS) -> list[Fault]:
    names = [name for name in names if has_check(kernel, name)]
    return [f for name in names for f in check(kernel, PACKAGE, shape, name, 3, "cpu", 12)]


PLANTED = [
    (form.FirstBeta, "kda", "other-row"),
    (bad.Shuffled, "gdn", "other-row"),
    (bad.NextHead, "gdn", "head-mapping"),
    (bad.Unscaled, "kda", "wrong-scale"),
    (bad.Rounded, "gdn", "wrong-return"),
    (bad.FirstColumn, "gdn", "stale-column"),
    (bad.FirstColumn, "kda", "stale-column"),
    (bad.NewestColumn, "gdn", "stale-column"),
    (bad.NotCommitted, "gdn", "state-not-committed"),
    (bad.CommitsToNull, "gdn", "state-not-committed"),
    (bad.OneRowShort, "kda", "stale-column"),
    (bad.Neighbour, "gdn", "other-sequence"),
    (bad.WritesNeighbour, "gdn", "other-sequence"),
    (bad.WritesAbsent, "gdn", "other-sequence-written"),
    (bad.GateAfterDelta, "gdn", "gate-order"),
    (form.FirstGate, "kda", "gate-of-other-row"),
    (bad.Unwritten, "gdn", "unused-memory"),
    (bad.Random, "gdn", "not-repeatable"),
    (bad.ByBatch, "gdn", "bits-depend-on-batch"),
    (bad.KeepsWindow, "conv", "window-not-rolled-back"),
    (bad.Forgets, "gdn", "lost-fold"),
    (bad.Raises, "gdn", "crash"),
    (bad.Chain, "gdn", "wrong-parent"),
    (bad.FirstTree, "kda", "wrong-parent"),
    (bad.Grandparent, "gdn", "wrong-parent"),
    (bad.OwnSibling, "gdn", "wrong-parent"),
    (bad.WritesNull, "gdn", "null-slot-written"),
    (bad.UpdatesNull, "kda", "null-slot-written"),
    (bad.WritesBefore, "kda", "padding-written"),
    (bad.WritesAfter, "gdn", "padding-written"),
    (bad.LosesCarry, "gdn", "wrong-chunk"),
    (bad.HalfCarry, "kda", "wrong-chunk"),
    (bad.RoundsCarry, "gdn", "drift"),
    (bad.DropsTail, "gdn", "wrong-chunk"),
    (bad.LongTail, "gdn", "wrong-chunk"),
    (bad.KeepsFirst, "kda", "state-not-committed"),
    (bad.RoundsStored, "kda", "drift"),
    (bad.CutsDigits, "gdn", "drift"),
]


def planted(adapter, recurrence) -> list[Fault]:
    chunk = 4 * issubclass(adapter, bad.Chunks)
    kernel = Kernel(
        "planted",
        (recurrence,),
        adapter,
        ring=16 * (adapter is bad.Forgets),
        trees=issubclass(adapter, bad.Trees),
        padding=issubclass(adapter, bad.Padded),
        chunk=chunk,
        dtypes=("float32",),
    )
    shape = SHAPES[recurrence]
    return faults(kernel, replace(shape, n_tokens=2 * chunk + 1) if chunk else shape)


@pytest.mark.parametrize("adapter", [bad.Trees, bad.Padded, bad.Chunks])
@pytest.mark.parametrize("recurrence", ["gdn", "kda"])
def test_what_the_mistakes_are_planted_in_passes(adapter, recurrence):
    assert not [f for f in planted(adapter, recurrence) if not f.note]


@pytest.mark.parametrize(("adapter", "recurrence", "cause"), PLANTED)
@pytest.mark.thinned(4)
def test_a_planted_mistake_is_named(adapter, recurrence, cause):
    found = planted(adapter, recurrence)
    assert found
    assert found[0].cause == cause, found[0].detail


@pytest.mark.parametrize("too_large", [0.004, 0.013])
def test_outputs_of_rounded_products_are_held_against_their_own_size(too_large):
    class Large(bad.Chunks):
        def run(self, rows, first):
            out, last = super().run(rows, first)
            assert out.abs().max() < 0.7  # of 1, 0.013 is more than the bound
            return out * (1 + too_large), last

    shape = replace(SHAPES["kda"], n_tokens=9)
    for rounds in (True, False):  # whether products are rounded
        kernel = Kernel("planted", ("kda",), Large, chunk=4, bf16_products=rounds)
        player = Player(kernel, PACKAGE, shape, 3, "cpu", named=False)
        assert bool(player.script("prompts", 2)) == (too_large > 0.01 or not rounds)


def test_a_fault_that_a_sequence_alone_has_not_is_of_another():
    kernel = Kernel("planted", ("gdn",), bad.Mixed, dtypes=("float32",))
    fault = faults(kernel, SHAPES["gdn"], ["depths"])[0]
    assert fault.cause == "wrong-output"
    player = Player(kernel, PACKAGE, SHAPES["gdn"], 3, "cpu")
    assert elsewhere(player, fault).cause == "other-sequence"


@pytest.mark.parametrize(
    ("named", "explain_all", "said"),
    [
        (["wrong-gate", "stale-column", "wrong-gate"], {"wrong-gate"}, {"wrong-gate"}),
        (["wrong-gate", "stale-column", "wrong-gate"], {"stale-column"}, {"stale-column"}),
        (["wrong-gate", "stale-column", "wrong-gate"], set(), {"wrong-gate", "stale-column"}),
        # a mistake itself before a size that was solved for, though more checks have that
        (
            ["wrong-scale", "wrong-norm", "wrong-scale"],
            {"wrong-scale", "wrong-norm"},
            {"wrong-norm"},
        ),
        (
            ["crash", "wrong-norm", "wrong-output"],
            {"wrong-norm"},
            {"crash", "wrong-norm", "wrong-output"},
        ),
    ],
)
def test_of_unlike_causes_one_that_explains_all_checks_is_that_of_all(named, explain_all, said):
    names = dict(zip(("depths", "lengths", "subsets"), named, strict=True))
    detail = {"wrong-scale": "q of head 0 is 0.9 times what it should be"}

    def steps(name, sought):
        cause = next(iter({*sought} & explain_all), names[name])
        of = cause, detail.get(cause, ""), SHAPES["gdn"], 1, 0, 0, 0, 1.0
        yield True, [Fault("kernel", name, *of)]

    last = {name: faults[0].cause for name, _, faults in replays.agreed([*names], steps)}
    assert (last.keys(), {*last.values()}) == (names.keys(), said)


def test_the_smallest_shape_keeps_the_cause():
    kernel = Kernel("planted", ("gdn",), bad.FirstColumn, dtypes=("float32",))
    shape = Shape("gdn", 8, 2, 32, 32, 8, 4)
    fault = faults(kernel, shape, ["no-drafts"])[0]
    least = smallest(fault, lambda s: check(kernel, PACKAGE, s, "no-drafts", 3, "cpu", 12))
    assert least.cause == "stale-column"
    assert least.shape == Shape("gdn", 2, 2, 16, 16, 2, 1)


def test_bf16_states_that_round_twice_drift():
    class Rounds(own._Slots):
        """Rounds the state at every verify pass to very few digits."""

        def accept(self, sequences, counts):
            super().accept(sequences, counts)
            if max(counts) > 1 and self.shape.state_dtype == "bfloat16":
                for s in sequences:
                    plane = self.pool[self.planes[s, self.live[s]]]
                    plane.copy_((plane * 4).round() / 4)

        def __init__(self, shape, memory, package):
            super().__init__(shape, memory, package)
            self.pool = self.pool.float()

    kernel = Kernel("planted", ("gdn",), Rounds)
    (fault,) = faults(kernel, SHAPES["gdn"], ["drift"])
    assert fault.cause == "drift"


def test_a_wrong_column_is_no_drift():
    (fault, *_) = faults(Kernel("planted", ("gdn",), bad.NewestColumn), SHAPES["gdn"], ["drift"])
    assert fault.cause == "stale-column"


def test_every_cause_has_a_meaning():
    causes = {parameters[-1] for parameters in PLANTED} | {"crash", "hang", "drift", "wrong-wrap"}
    assert causes <= MEANINGS.keys()
    for cause, meaning in MEANINGS.items():
        fault = Fault("kernel", "depths", cause, "", SHAPES["gdn"], 1, 0, 0, 0, 1.0)
        assert next(paragraph(fault)).endswith(f"depths: {cause} ({meaning})")


@pytest.mark.parametrize(
    ("adapter", "cause", "words", "n_sequences"),
    [
        (bad.In32Bits, "wrong-stride", "without far slots, whose places 32 bits do not", 2),
        (bad.FewSequences, "unused-memory", "no output is written for rows all of 2", 50),
        (bad.PlainShared, "head-mapping", "", 1),
    ],
)
def test_what_is_wrong_in_large_pools_and_batches_alone_is_found(
    adapter, cause, words, n_sequences
):
    kernel = Kernel("planted", ("gdn",), adapter, extras=("far slots",), dtypes=("float32",))
    *_, (named, (fault,)) = replays.checked(kernel, PACKAGE, "gdn", "depths", 1, "cpu")
    assert named
    assert (fault.cause, words in fault.detail) == (cause, True), fault.detail
    assert fault.shape.n_sequences == n_sequences


def test_counts_rise_and_fall_and_each_is_accepted():
    kernel = Kernel("kernel", ("gdn",), None)
    passes = SCRIPTS["depths"](Shape("gdn", 1, 1, 8, 8, 3, 3), random.Random(1), kernel)
    each = (dict(zip(one.sequences, one.accepted, strict=True)) for one in passes)
    first, second, *_ = each
    assert sorted(first.values()) == sorted(second.values()) == [1, 2, 3]
    assert {n < second[s] for s, n in first.items() if n != second[s]} == {True, False}
    assert [*first] == [*second][::-1]


def test_a_pass_of_all_sequences_has_any_order():
    kernel, shape = Kernel("kernel", ("gdn",), None), SHAPES["gdn"]
    orders = {one.sequences for one in SCRIPTS["lengths"](shape, random.Random(1), kernel)}
    assert orders - {(0, 1, 2)}
    assert {tuple(sorted(order)) for order in orders} == {(0, 1, 2)}
