"""Mistakes planted into the index rules of this program's own kernels: each is found and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.conform.adapters import own
from engine.conform.cases import Rows, Shape
from engine.conform.checks import CHECKS, Fault, check, has_check, smallest
from engine.conform.packages import Package
from engine.conform.subject import Kernel

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


@pytest.mark.parametrize(
    ("kernel", "recurrence"), [(k, r) for k in own.ENGINE.kernels for r in k.recurrences]
)
def test_our_kernels_pass(kernel, recurrence):
    assert not [f for f in faults(kernel, SHAPES[recurrence]) if not f.note]


class FirstColumn(own._Slots):
    """A step without drafts reads the first plane (vLLM #39273, #52942)."""

    def decode(self, rows: Rows) -> torch.Tensor:
        for sequence in rows.sequences:
            self.live[sequence] = 0
        return super().decode(rows)


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


PLANTED = [
    (FirstColumn, "gdn", "stale-column"),
    (FirstColumn, "kda", "stale-column"),
    (NewestColumn, "gdn", "stale-column"),
    (NotCommitted, "gdn", "state-not-committed"),
    (OneRowShort, "kda", "state-not-committed"),
    (Neighbour, "gdn", "other-sequence"),
    (WritesNeighbour, "gdn", "other-sequence"),
    (WritesAbsent, "gdn", "other-sequence-written"),
    (GateAfterDelta, "gdn", "gate-order"),
    (FirstGate, "kda", "gate-of-other-row"),
    (Unwritten, "gdn", "unused-memory"),
    (Random, "gdn", "not-repeatable"),
    (ByBatch, "gdn", "bits-depend-on-batch"),
    (KeepsWindow, "conv", "window-not-rolled-back"),
    (Forgets, "gdn", "lost-fold"),
    (Raises, "gdn", "crash"),
]


@pytest.mark.parametrize(("adapter", "recurrence", "cause"), PLANTED)
def test_a_planted_mistake_is_named(adapter, recurrence, cause):
    kernel = Kernel(
        "planted", (recurrence,), adapter, ring=16 * (adapter is Forgets), dtypes=("float32",)
    )
    found = faults(kernel, SHAPES[recurrence])
    assert found
    assert found[0].cause == cause


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
            if max(counts) > 1:
                for s in sequences:
                    plane = self.pool[self.planes[s, self.live[s]]]
                    plane.copy_((plane * 4).round() / 4)

        def __init__(self, shape, memory, package):
            super().__init__(shape, memory, package)
            self.pool = self.pool.float()

    kernel = Kernel("planted", ("gdn",), Rounds)
    (fault,) = faults(kernel, SHAPES["gdn"], ["drift"])
    assert fault.cause == "drift"
