"""Mistakes planted into the index rules of this program's own kernels: each is found and named."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.conform import runner
from engine.conform.adapters import own
from engine.conform.cases import Rows, Shape
from engine.conform.checks import CHECKS, Fault, Player, check, has_check
from engine.conform.packages import Package
from engine.conform.passes import SCRIPTS
from engine.conform.replays import elsewhere, smallest
from engine.conform.report import MEANINGS, paragraph
from engine.conform.subject import Kernel, Prompts
from resources import help_page

PACKAGE = Package("kernels", Path("."), "")
SHAPES = {
    "gdn": Shape("gdn", 4, 2, 8, 8, 3, 3),
    "kda": Shape("kda", 4, 2, 8, 8, 3, 3),
    "mamba2": Shape("mamba2", 4, 2, 8, 8, 3, 3),
    "conv": Shape("conv", 6, 1, 4, 1, 3, 3),
}


def faults(kernel: Kernel, shape: Shape, names=CHECKS) -> list[Fault]:
    names = [name for name in names if has_check(kernel, name)]
    return [f for name in names for f in check(kernel, PACKAGE, shape, name, 3, "cpu", 12)]


class FirstColumn(own._Slots):
    """A step without drafts reads the first plane (vLLM #39273, #52942)."""

    def decode(self, rows: Rows) -> torch.Tensor:
        for sequence in rows.sequences:
            self.live[sequence] = 0
        return super().decode(rows)


class In32Bits(own._Slots):
    """Nothing is written where a slot's place has more than 32 bits."""

    def verify(self, rows):
        last = self.pool.stride(0) * (len(self.pool) - 1)
        return super().verify(rows) * (last < 2**31)


class FewSequences(own._Slots):
    """Outputs of sequences from the 49th on are not written."""

    def verify(self, rows):
        out = super().verify(rows)
        for part in rows.slices()[48:]:
            out[part] = 0
        return out


class NewestColumn(own._Slots):
    """The newest plane is read whatever was accepted."""

    def accept(self, sequences, counts):
        super().accept(sequences, [self.shape.n_tokens] * len(counts))


class NotCommitted(own._Log):
    """The fold is left out."""

    def accept(self, sequences, counts):
        pass


class OneRowShort(own._Log):
    """The last accepted row is not folded."""

    def accept(self, sequences, counts):
        taken = [(s, n - 1) for s, n in zip(sequences, counts, strict=True) if n > 1]
        super().accept([s for s, _ in taken], [n for _, n in taken])


class Neighbour(own._Slots):
    """The states of two sequences are exchanged in a batch."""

    def _run(self, parts, read, write):
        return super()._run(parts, read.flip(0), write)


class WritesNeighbour(own._Log):
    """A commit also writes the sequence after."""

    def accept(self, sequences, counts):
        super().accept(sequences, counts)
        self.states[(sequences[-1] + 1) % len(self.states)] = self.states[sequences[-1]]


class WritesAbsent(own._Log):
    """A commit also writes a sequence that is not in the pass."""

    def accept(self, sequences, counts):
        super().accept(sequences, counts)
        for s in set(range(len(self.states))) - set(sequences):
            self.states[s] *= 1.001


class GateAfterDelta(own._Slots):
    """The correction is read from the state before its decay."""

    def _run(self, parts, read, write):
        outs = []
        for i, p in enumerate(parts):
            state = self.pool[read[i]]
            rows = []
            each = self.shape.n_heads // self.shape.n_groups
            for t in range(len(p.v)):
                k, q = (
                    x[t].repeat_interleave(each, 0)[:, :, None] for x in (p.k_normed, p.q_normed)
                )
                u = p.beta[t][:, None] * (p.v[t] - (k * state).sum(1))
                state = p.g[t].exp().view(-1, 1, 1) * state + k * u[:, None, :]
                rows.append((q * state).sum(1) * self.shape.d_k**-0.5)
                self.pool[write[i].flip(0)[t]] = state
            outs.append(torch.stack(rows))
        return torch.stack(outs)


class FirstGate(own._Slots):
    """The decay of the first row is applied to all."""

    def _run(self, parts, read, write):
        for p in parts:
            p.tensors["g"] = p.g[:1].expand_as(p.g).contiguous()
        return super()._run(parts, read, write)


class Unwritten(own._Slots):
    """After a short pass a plane that was never written is read."""

    def verify(self, rows):
        self.short = {
            s: n < self.shape.n_tokens for s, n in zip(rows.sequences, rows.lengths, strict=True)
        }
        return super().verify(rows)

    def accept(self, sequences, counts):
        super().accept(sequences, counts)
        for s in sequences:
            if self.short[s]:
                self.live[s] = self.shape.n_tokens - 1


class Random(own._Slots):
    """Outputs that are other bits in each call."""

    def verify(self, rows):
        return super().verify(rows) + torch.rand(1) * 1e-6


class ByBatch(own._Slots):
    """Sums that depend on the number of rows."""

    def verify(self, rows):
        return super().verify(rows) * (1 + 1e-6 * len(rows.sequences))


class KeepsWindow(own._ConvSlots):
    """The window after a rejection still holds the rejected inputs."""

    def accept(self, sequences, counts):
        super().accept(sequences, [self.shape.n_tokens] * len(counts))


class Forgets(own._Log):
    """A log whose fold after four commits is lost."""

    def __init__(self, shape, memory, package):
        super().__init__(shape, memory, package)
        self.saved, self.commits = {}, dict.fromkeys(range(shape.n_sequences), 0)

    def load(self, sequence, state):
        super().load(sequence, state)
        self.saved[sequence] = state.clone()

    def accept(self, sequences, counts):
        super().accept(sequences, counts)
        for s in sequences:
            self.commits[s] += 1
            if self.commits[s] % 4 == 0:
                self.states[s] = self.saved[s]
            self.saved[s] = self.states[s].clone()


class Raises(own._Slots):
    def decode(self, rows):
        raise RuntimeError("grid of no programs")


class Trees(own._Slots):
    """Trees of drafts row by row, each from the plane of its parent; right."""

    def __init__(self, shape, memory, package):
        super().__init__(shape, memory, package)
        self.pool = memory.empty(len(self.pool) + 1, *self.pool.shape[1:])

    def parents(self, trees, i):
        return trees[i]

    def verify(self, rows):
        if not rows.parents:
            return super().verify(rows)
        outs, start = [], len(self.pool) - 1
        for i, s in enumerate(rows.sequences):
            self.pool[start] = self.pool[self.planes[s, self.live[s]]]
            for t, parent in enumerate(self.parents(rows.parents, i)):
                read = self.planes[s, parent : parent + 1] if parent >= 0 else torch.tensor([start])
                part = [rows.one(i).row(t)]
                outs.append(self._run(part, read, self.planes[s : s + 1, t : t + 1])[0])
        return torch.cat(outs)


class Chain(Trees):
    """Each row follows the one before it."""

    def parents(self, trees, i):
        return range(-1, len(trees[i]) - 1)


class FirstTree(Trees):
    """The first sequence's tree is taken for all."""

    def parents(self, trees, i):
        return trees[0]


class Grandparent(Trees):
    """Each row follows its parent's parent."""

    def parents(self, trees, i):
        return [trees[i][p] if p >= 0 else -1 for p in trees[i]]


class OwnSibling(Trees):
    """The last row follows its sibling, or no row where it has none."""

    def parents(self, trees, i):
        *others, last = trees[i]
        return [*others, others.index(last) if last in others else -1]


class Padded(own._Slots):
    """Rows of padding are left out, and the plane after the last belongs to no sequence; right."""

    def __init__(self, shape, memory, package):
        super().__init__(shape, memory, package)
        self.pool = memory.empty(len(self.pool) + 1, *self.pool.shape[1:])
        memory.keep("null-slot-written", "the last plane", self.pool[-1:])

    def verify(self, rows):
        for i, s in enumerate(rows.sequences):
            if s < 0:
                self.pad(rows.one(i))
        n = sum(s >= 0 for s in rows.sequences)
        return super().verify(
            Rows(rows.sequences[:n], rows.lengths[:n], rows.tensors, rows.parents)
        )

    def decode(self, rows):
        out = self.verify(rows)
        self.accept([s for s in rows.sequences if s >= 0], [1] * len(rows.sequences))
        return out

    def accept(self, sequences, counts):
        super().accept(sequences, counts[: len(sequences)])

    def pad(self, rows):
        pass


class WritesNull(Padded):
    """Padding's state is written to the slot of no sequence."""

    def pad(self, rows):
        self.pool[-1] = 0.0


class UpdatesNull(Padded):
    """Padding's pass reads the slot of no sequence, NaN, and writes NaN to it."""

    def pad(self, rows):
        self.pool[-1] *= 0.9


class WritesBefore(Padded):
    """Padding's slot -1 is taken for an address: one plane before the pool."""

    def pad(self, rows):
        self.pool.as_strided((8,), (1,), self.pool.storage_offset() - self.pool[0].numel()).fill_(0)


class WritesAfter(own._Slots):
    """A block of rows is stored whole where the last is shorter."""

    def verify(self, rows):
        end = self.pool.storage_offset() + self.pool.numel()
        self.pool.as_strided((8,), (1,), end).fill_(0)
        return super().verify(rows)


class Chunks(Prompts):
    """A prompt in chunks of four rows; right."""

    def run(self, rows, first):
        outs, last = [], torch.zeros(len(rows.sequences), *self.shape.state)
        for i in range(len(rows.sequences)):
            one = rows.one(i)
            state = torch.zeros(self.shape.state) if first is None else first[i]
            for start in range(0, one.lengths[0], 4):
                part = one._part(slice(start, min(start + 4, one.lengths[0])), one.sequences)
                pool = torch.stack([self.carried(state, start)] * part.lengths[0])
                write = torch.arange(part.lengths[0]).flip(0)[None]
                outs.append(own._Slots._run(_Pool(pool), [part], torch.tensor([0]), write)[0])
                state = self.kept(state, pool[-1], part.lengths[0])
            last[i] = state
        return torch.cat(outs), last

    def carried(self, state, start):
        return state

    def kept(self, before, after, count):
        return after


class _Pool:
    def __init__(self, pool):
        self.pool = pool


class LosesCarry(Chunks):
    """The second chunk and later ones start with an empty state."""

    def carried(self, state, start):
        return state * (start == 0)


class HalfCarry(Chunks):
    """Every later chunk decays the state once more."""

    def carried(self, state, start):
        return state if start == 0 else state * 0.5


class DropsTail(Chunks):
    """A last chunk that is not whole leaves no trace in the state."""

    def kept(self, before, after, count):
        return after if count == 4 else before


class LongTail(Chunks):
    """The state after a later chunk is too small by a tenth, and its outputs are right."""

    def run(self, rows, first):
        out, last = super().run(rows, first)
        late = torch.tensor([1.0 - 0.1 * (n > 4) for n in rows.lengths])
        return out, last * late.view(-1, 1, 1, 1)


class KeepsFirst(Chunks):
    """The state after a prompt is not stored."""

    def run(self, rows, first):
        out, last = super().run(rows, first)
        return out, torch.zeros_like(last) if first is None else first


class RoundsStored(own._Slots):
    """The accepted state is stored through float16."""

    def accept(self, sequences, counts):
        super().accept(sequences, counts)
        for s in sequences:
            plane = self.pool[self.planes[s, self.live[s]]]
            plane.copy_(plane.half())


class CutsDigits(own._Slots):
    """The state is read with the last two bytes of each value cut off."""

    def _run(self, parts, read, write):
        self.pool.view(torch.int32)[read] &= ~0xFFFF
        return super()._run(parts, read, write)


class FirstBeta(own._Slots):
    """The first row's beta is applied to all."""

    def _run(self, parts, read, write):
        for p in parts:
            p.tensors["beta"] = p.beta[:1].expand_as(p.beta).contiguous()
        return super()._run(parts, read, write)


class NextHead(own._Slots):
    """The last value head reads the first head's query, and its own key."""

    def _run(self, parts, read, write):
        each = self.shape.n_heads // self.shape.n_groups
        for p in parts:
            q, k = (x.repeat_interleave(each, 1) for x in (p.q_normed, p.k_normed))
            q[:, -1] = q[:, 0]
            p.tensors |= {"q_normed": q, "k_normed": k}
        return super()._run(parts, read, write)


class Unscaled(own._Slots):
    """Queries are not divided by the root of their size."""

    def verify(self, rows):
        return super().verify(rows) * self.shape.d_k**0.5


class Shuffled(own._Slots):
    """Outputs of the first two rows are exchanged."""

    def verify(self, rows):
        out = super().verify(rows)
        for part in rows.slices():
            out[part] = out[part].roll(1, 0)
        return out


class Mixed(own._Slots):
    """A pass of several sequences adds a bit of each to the others."""

    def verify(self, rows):
        out = super().verify(rows)
        return out + 0.01 * (out.sum() if len(rows.sequences) > 1 else 0.0)


class Rounded(own._Slots):
    """Outputs of less precision than the rows."""

    def verify(self, rows):
        return super().verify(rows).bfloat16()


PLANTED = [
    (FirstBeta, "kda", "other-row"),
    (Shuffled, "gdn", "other-row"),
    (NextHead, "gdn", "head-mapping"),
    (Unscaled, "kda", "wrong-scale"),
    (Rounded, "gdn", "wrong-return"),
    (FirstColumn, "gdn", "stale-column"),
    (FirstColumn, "kda", "stale-column"),
    (NewestColumn, "gdn", "stale-column"),
    (NotCommitted, "gdn", "state-not-committed"),
    (OneRowShort, "kda", "stale-column"),
    (Neighbour, "gdn", "other-sequence"),
    (WritesNeighbour, "gdn", "other-sequence-written"),
    (WritesAbsent, "gdn", "other-sequence-written"),
    (GateAfterDelta, "gdn", "gate-order"),
    (FirstGate, "kda", "gate-of-other-row"),
    (Unwritten, "gdn", "unused-memory"),
    (Random, "gdn", "not-repeatable"),
    (ByBatch, "gdn", "bits-depend-on-batch"),
    (KeepsWindow, "conv", "window-not-rolled-back"),
    (Forgets, "gdn", "lost-fold"),
    (Raises, "gdn", "crash"),
    (Chain, "gdn", "wrong-parent"),
    (FirstTree, "kda", "wrong-parent"),
    (Grandparent, "gdn", "wrong-parent"),
    (OwnSibling, "gdn", "wrong-parent"),
    (WritesNull, "gdn", "null-slot-written"),
    (UpdatesNull, "kda", "null-slot-written"),
    (WritesBefore, "kda", "padding-written"),
    (WritesAfter, "gdn", "padding-written"),
    (LosesCarry, "gdn", "wrong-chunk"),
    (HalfCarry, "kda", "wrong-chunk"),
    (DropsTail, "gdn", "wrong-chunk"),
    (LongTail, "gdn", "wrong-chunk"),
    (KeepsFirst, "kda", "state-not-committed"),
    (RoundsStored, "kda", "drift"),
    (CutsDigits, "gdn", "drift"),
]


def planted(adapter, recurrence) -> list[Fault]:
    chunk = 4 * issubclass(adapter, Chunks)
    kernel = Kernel(
        "planted",
        (recurrence,),
        adapter,
        ring=16 * (adapter is Forgets),
        trees=issubclass(adapter, Trees),
        padding=issubclass(adapter, Padded),
        chunk=chunk,
        dtypes=("float32",),
    )
    shape = SHAPES[recurrence]
    return faults(kernel, replace(shape, n_tokens=2 * chunk + 1) if chunk else shape)


@pytest.mark.parametrize("adapter", [Trees, Padded, Chunks])
@pytest.mark.parametrize("recurrence", ["gdn", "kda"])
def test_what_the_mistakes_are_planted_in_passes(adapter, recurrence):
    assert not [f for f in planted(adapter, recurrence) if not f.note]


@pytest.mark.parametrize(("adapter", "recurrence", "cause"), PLANTED)
@pytest.mark.thinned(2)
def test_a_planted_mistake_is_named(adapter, recurrence, cause):
    found = planted(adapter, recurrence)
    assert found
    assert found[0].cause == cause, found[0].detail


def test_a_fault_that_a_sequence_alone_has_not_is_of_another():
    kernel = Kernel("planted", ("gdn",), Mixed, dtypes=("float32",))
    fault = faults(kernel, SHAPES["gdn"], ["depths"])[0]
    assert fault.cause == "wrong-output"
    player = Player(kernel, PACKAGE, SHAPES["gdn"], 3, "cpu")
    assert elsewhere(player, fault).cause == "other-sequence"


def test_the_smallest_shape_keeps_the_cause():
    kernel = Kernel("planted", ("gdn",), FirstColumn, dtypes=("float32",))
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
    (fault, *_) = faults(Kernel("planted", ("gdn",), NewestColumn), SHAPES["gdn"], ["drift"])
    assert fault.cause == "stale-column"


def test_every_cause_has_a_meaning_that_the_page_of_help_has_too():
    page = help_page("conform")
    causes = {parameters[-1] for parameters in PLANTED} | {"crash", "hang", "drift", "wrong-wrap"}
    assert causes <= MEANINGS.keys()
    for cause, meaning in MEANINGS.items():
        assert f"\n| {cause} | {meaning}" in page, cause
        fault = Fault("kernel", "depths", cause, "", SHAPES["gdn"], 1, 0, 0, 0, 1.0)
        assert next(paragraph(fault)).endswith(f"depths: {cause} ({meaning})")


@pytest.mark.parametrize(
    ("adapter", "cause", "words", "n_sequences"),
    [
        (In32Bits, "wrong-stride", "right without far slots, whose places 32 bits do not", 2),
        (FewSequences, "unused-memory", "no output is written for rows all of 2", 50),
    ],
)
def test_what_is_wrong_in_large_pools_and_batches_alone_is_found(
    adapter, cause, words, n_sequences
):
    kernel = Kernel("planted", ("gdn",), adapter, extras=("far slots",), dtypes=("float32",))
    *_, (named, (fault,)) = runner._checked(kernel, PACKAGE, "gdn", "depths", 1, "cpu")
    assert named
    assert (fault.cause, words in fault.detail) == (cause, True), fault.detail
    assert fault.shape.n_sequences == n_sequences


def test_counts_rise_and_fall_and_each_is_accepted():
    kernel = Kernel("kernel", ("gdn",), None)
    passes = SCRIPTS["depths"](Shape("gdn", 1, 1, 8, 8, 3, 3), random.Random(1), kernel)
    first, second, *_ = (one.accepted for one in passes)
    assert sorted(first) == sorted(second) == [1, 2, 3]
    assert {a < b for a, b in zip(first, second, strict=True) if a != b} == {True, False}
