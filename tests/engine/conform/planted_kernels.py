"""Kernels of this program with one mistake each, or with what such mistakes are planted in."""

from __future__ import annotations

import torch

from engine.conform.adapters import own
from engine.conform.cases import Rows
from engine.conform.subject import Prompts


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


class PlainShared(own._Slots):
    """Heads that share a key have the first one's outputs where a shape has no extras."""

    def verify(self, rows):
        shared = not self.shape.extras and self.shape.n_groups < self.shape.n_heads
        out = super().verify(rows)
        return out[:, [0] * self.shape.n_heads] if shared else out


class NewestColumn(own._Slots):
    """The newest plane is read whatever was accepted."""

    def accept(self, sequences, counts):
        super().accept(sequences, [self.shape.n_tokens] * len(counts))


class NotCommitted(own._Log):
    """The fold is left out."""

    def accept(self, sequences, counts):
        pass


class CommitsToNull(own._Log):
    """The first sequence's state after a pass is written to a slot of no sequence."""

    def __init__(self, shape, memory, package):
        super().__init__(shape, memory, package)
        self.states = memory.empty(len(self.states) + 1, *self.states.shape[1:])
        memory.keep("null-slot-written", "the last slot", self.states[-1:])

    def accept(self, sequences, counts):
        first, before = sequences[0], self.states.clone()
        super().accept(sequences, counts)
        self.states[-1], self.states[first] = self.states[first].clone(), before[first]


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
                part = [rows.one(i, slice(t, t + 1))]
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
            state = torch.zeros(self.shape.state) if first is None else first[i]
            for start in range(0, rows.lengths[i], 4):
                part = rows.one(i, slice(start, start + 4))
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


class RoundsCarry(Chunks):
    """The state goes through bfloat16 from a chunk to the next."""

    def carried(self, state, start):
        return state if start == 0 else state.bfloat16().float()


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
