"""Kernels of this program with a wrong decay, log, fold, count or stride."""

from __future__ import annotations

import torch

from engine.conform.adapters import own


class Undecayed(own._Slots):
    """Outputs take what earlier rows of the pass wrote without its decay."""

    def _run(self, parts, read, write):
        out = super()._run(parts, read, write)
        each = self.shape.n_heads // self.shape.n_groups
        for i, p in enumerate(parts):
            planes = self.pool[write[i].flip(0)]
            state = self.pool[read[i]] if self.kept is None else self.kept[read[i]]
            plain, total = state, torch.zeros_like(state)
            for t in range(len(p.v)):
                decay = p.g[t].exp().view(len(state), -1, 1)
                before = planes[t - 1] if t else state
                plain, total = decay * plain, total + planes[t] - decay * before
                q = p.q_normed[t].repeat_interleave(each, 0)[:, :, None]
                out[i, t] = (q * (plain + total)).sum(1) * self.shape.d_k**-0.5
        return out

    def verify(self, rows):
        self.kept = self.pool.clone()
        return super().verify(rows)


class RawFold(own._Log):
    """The fold takes keys that are not normalized."""

    rows = slice(None)

    def _run(self, parts, states):
        out, log = super()._run(parts, states)
        keys = log[0].clone()
        keys[:, self.rows] = torch.stack([p.k for p in parts])[:, self.rows]
        return out, type(log)(keys, *log[1:])


class SecondRawFold(RawFold):
    rows = slice(1, 2)


class LastOnly(own._Slots):
    """Only the state after the last row of a pass is stored."""

    def _run(self, parts, read, write):
        kept = self.pool[write[:, 1:]].clone()
        out = super()._run(parts, read, write)
        self.pool[write[:, 1:]] = kept
        return out


class ByPlace(own._Slots):
    """Accepted counts are stored by place in the pass, not by sequence."""

    def accept(self, sequences, counts):
        super().accept(range(len(counts)), counts)


class NextColumn(own._Slots):
    """States are stored a plane late: the last one in the next sequence's first plane."""

    def _run(self, parts, read, write):
        planes = self.planes.flatten()
        late = planes.roll(-1)[planes.argsort()[write]]
        each = (slice(i, i + 1) for i in range(len(parts)))
        return torch.cat([super(NextColumn, self)._run(parts[i], read[i], late[i]) for i in each])


class Twice(own._Log):
    """After every fifth commit the rows of the one before are folded once more."""

    again = True

    def __init__(self, shape, memory, package):
        super().__init__(shape, memory, package)
        self.commits = 0

    def accept(self, sequences, counts):
        super().accept(sequences, counts)
        self.commits += 1
        if self.commits % 5 == 4:
            super().accept(sequences, counts)

    def state(self, sequence):
        return None


class ShortStride(own._Slots):
    """A sequence's planes begin at its number times the rows of the pass."""

    def __init__(self, shape, memory, package):
        super().__init__(shape, memory, package)
        self.planes = torch.arange(self.planes.numel()).view_as(self.planes)

    def verify(self, rows):
        out = []
        for i, s in enumerate(rows.sequences):
            n = rows.lengths[i]
            read = self.planes[s, self.live[s]].view(1)
            self.planes[s, :n] = torch.arange(s * n, s * n + n)
            out.append(self._run([rows.one(i)], read, self.planes[s : s + 1, :n].flip(1))[0])
        return torch.cat(out)


class FoldsDrafts(own._Log):
    """All rows of a pass are in the state before those that were accepted are folded."""

    def verify(self, rows):
        out = super().verify(rows)
        super().accept(rows.sequences, rows.lengths)
        return out


class FoldsUndecayed(own._Log):
    """Every third fold leaves out the last row's decay of what was there before."""

    def __init__(self, shape, memory, package):
        super().__init__(shape, memory, package)
        self.commits, self.heads = 0, shape.n_heads

    def verify(self, rows):
        self.rows = rows
        return super().verify(rows)

    def accept(self, sequences, counts):
        before = self.states.clone()
        self.commits += 1
        if self.commits % 3:
            return super().accept(sequences, counts)
        less = [(s, n - 1) for s, n in zip(sequences, counts, strict=True) if n > 1]
        super().accept([s for s, _ in less], [n for _, n in less])
        short = self.states.clone()
        self.states.copy_(before)
        super().accept(sequences, counts)
        for s, n, part in zip(sequences, counts, self.rows.slices(), strict=True):
            decay = self.rows.g[part][n - 1].exp().view(self.heads, -1, 1)
            self.states[s] += (1 - decay) * short[s]

    def state(self, sequence):
        return None


class ForgetsWithin(own._Log):
    """Every seventh row a sequence goes on from the state that was loaded, be it in a pass."""

    def __init__(self, shape, memory, package):
        super().__init__(shape, memory, package)
        self.taken, self.kept = dict.fromkeys(range(shape.n_sequences), 0), {}
        self.first, self.after = {}, {}

    def load(self, sequence, state):
        super().load(sequence, state)
        self.first[sequence] = state.clone()

    def verify(self, rows):
        outs = []
        for i, s in enumerate(rows.sequences):
            before, self.after[s] = self.states[s].clone(), []
            for t in range(rows.lengths[i]):
                outs.append(super().verify(rows.one(i, slice(t, t + 1))))
                super().accept([s], [1])
                if (self.taken[s] + t) % 7 == 6:
                    self.states[s] = self.first[s]
                self.after[s].append(self.states[s].clone())
            self.states[s] = before
        return torch.cat(outs)

    def accept(self, sequences, counts):
        for s, n in zip(sequences, counts, strict=True):
            self.states[s], self.taken[s] = self.after[s][n - 1], self.taken[s] + n

    def state(self, sequence):
        return None


class NotReset(own._Slots):
    """A step without drafts leaves the count of the pass before it."""

    def decode(self, rows):
        return self.verify(rows)


class StepsTwice(own._Slots):
    """A step without drafts is taken twice."""

    def decode(self, rows):
        out = super().decode(rows)
        super().decode(rows)
        return out


class NotKept(own._ConvSlots):
    """A step without drafts is not kept."""

    def decode(self, rows):
        return self.verify(rows)


class OtherChannels(own._ConvSlots):
    """Windows are found in the place of other channels."""

    def state(self, sequence):
        held = super().state(sequence)
        return held[(5 * torch.arange(len(held)) + 2) % len(held)]


class Refilled(own._Slots):
    """Counts of all sequences are set to 1 before those of a pass are."""

    def accept(self, sequences, counts):
        self.live = [0] * len(self.live)
        super().accept(sequences, counts)


class AsIfLongest(own._Slots):
    """A pass that is shorter than the longest one stores its states where that would."""

    def _run(self, parts, read, write):
        n, of = write.shape[1], {p[0]: p for p in self.planes.tolist()}
        late = [of[first][-n:][::-1] for first in write[:, -1].tolist()]
        return super()._run(parts, read, torch.tensor(late))


class ReadBase(own._Slots):
    """Outputs read the state before the pass with e for 2 in its decay."""

    def _run(self, parts, read, write):
        before = self.pool[read].clone()
        out = super()._run(parts, read, write)
        each = self.shape.n_heads // self.shape.n_groups
        for i, p in enumerate(parts):
            for t, g in enumerate(p.g.cumsum(0)):
                g = g.view(len(g), -1, 1)
                more = ((g / 0.6931471805599453).exp() - g.exp()) * before[i]
                q = p.q_normed[t].repeat_interleave(each, 0)[:, :, None]
                out[i, t] += (q * more).sum(1) * self.shape.d_k**-0.5
        return out


class Unscaled(own._Slots):
    """Outputs read what the pass wrote without the scale."""

    def _run(self, parts, read, write):
        before = self.pool[read].clone()
        out = super()._run(parts, read, write)
        each = self.shape.n_heads // self.shape.n_groups
        for i, p in enumerate(parts):
            for t, g in enumerate(p.g.cumsum(0)):
                wrote = self.pool[write[i].flip(0)[t]] - g.exp().view(len(g), -1, 1) * before[i]
                q = p.q_normed[t].repeat_interleave(each, 0)[:, :, None]
                out[i, t] += (q * wrote).sum(1) * (1 - self.shape.d_k**-0.5)
        return out


class AlongValues(own._Slots):
    """The decay of a channel is applied along v."""

    def _run(self, parts, read, write):
        out = super()._run(parts, read, write)
        each = self.shape.n_heads // self.shape.n_groups
        for i, p in enumerate(parts):
            state = self.kept[read[i]]
            for t, plane in enumerate(write[i].flip(0)):
                q, k = (x[t].repeat_interleave(each, 0) for x in (p.q_normed, p.k_normed))
                state = p.g[t].exp()[:, None] * state
                value = p.beta[t][:, None] * (p.v[t] - (k[:, :, None] * state).sum(1))
                state = state + k[:, :, None] * value[:, None]
                self.pool[plane] = state
                out[i, t] = (q[:, :, None] * state).sum(1) * self.shape.d_k**-0.5
        return out

    def verify(self, rows):
        self.kept = self.pool.clone()
        return super().verify(rows)


class HalfDecayed(own._Slots):
    """Outputs, and no states, see a decay in one half of the key channels alone."""

    def _run(self, parts, read, write):
        before, out = self.pool[read].clone(), super()._run(parts, read, write)
        each = self.shape.n_heads // self.shape.n_groups
        half = torch.arange(self.shape.d_k) < self.shape.d_k // 2
        for i, p in enumerate(parts):
            q = p.q_normed[0].repeat_interleave(each, 0)[:, :, None]
            more = (half * (1 - p.g[0].exp()))[:, :, None] * before[i]
            out[i, 0] += (q * more).sum(1) * self.shape.d_k**-0.5
        return out


class SomeRows(own._Slots):
    """The last row's output is not written."""

    def verify(self, rows):
        out = self.memory.empty(*rows.v.shape)
        made = super().verify(rows)
        for part in rows.slices():
            out[part.start : part.stop - 1] = made[part.start : part.stop - 1]
        return out


class FirstDecay(own._Slots):
    """What is kept of the state before a pass has the decay of the first sequence's rows."""

    def _run(self, parts, read, write):
        before = self.pool[read].clone()
        out = super()._run(parts, read, write)
        first = parts[0].g.cumsum(0)
        for i, p in enumerate(parts):
            for plane, g, other in zip(write[i].flip(0), p.g.cumsum(0), first, strict=True):
                g, other = (x.exp().view(len(x), -1, 1) for x in (g, other))
                self.pool[plane] += (other - g) * before[i]
        return out


class Shifted(own._Slots):
    """Outputs are too large by one, which no known mistake gives; what was played is counted."""

    played = 0

    def verify(self, rows):
        Shifted.played += sum(rows.lengths) * self.shape.n_heads
        return super().verify(rows) + 1


class LateWindow(own._Slots):
    """One row less is kept than was accepted, and something else is written wrongly by that."""

    def __init__(self, *args):
        super().__init__(*args)
        self.window = self.memory.zeros(4)
        self.memory.keep("window-not-rolled-back", "a window", self.window)

    def accept(self, sequences, counts):
        super().accept(sequences, [max(1, count - 1) for count in counts])
        self.window += 1


class OfFirst(own._Slots):
    """The state of the first sequence is that of all."""

    def state(self, sequence):
        return super().state(0)


class KeepsSlot(own._Slots):
    """A sequence in the slot of another one goes on from that one's state."""

    def load(self, sequence, state):
        self.known = {*getattr(self, "known", ())}
        if sequence not in self.known:
            super().load(sequence, state)
        self.known.add(sequence)


class KeepsCount(own._Slots):
    """A sequence in the slot of another one reads the plane that that one's count says."""

    def load(self, sequence, state):
        live = self.live[sequence]
        super().load(sequence, state)
        self.live[sequence] = live


class LateStale(own._Slots):
    """The first pass reads memory that was never written, where zeros do no harm; later ones read
    the newest plane whatever was accepted."""

    passes = 0

    def verify(self, rows):
        self.passes += 1
        more = self.memory.empty(1) if self.passes == 1 else 0.0
        return super().verify(rows) + more

    def accept(self, sequences, counts):
        super().accept(sequences, [self.shape.n_tokens] * len(counts))

    def state(self, sequence):
        return None


class NoOneRow(own._Slots):
    """Sequences of one row get no outputs."""

    def verify(self, rows):
        out = super().verify(rows)
        for length, part in zip(rows.lengths, rows.slices(), strict=True):
            out[part] *= length > 1
        return out


class CutByFirst(own._Slots):
    """No sequence has outputs of more rows than the first one has."""

    def verify(self, rows):
        out = super().verify(rows)
        for part in rows.slices():
            out[part.start + rows.lengths[0] : part.stop] = 0
        return out


class AllLost(own._Slots):
    """Where all rows were accepted nothing is kept."""

    def verify(self, rows):
        self.lengths = dict(zip(rows.sequences, rows.lengths, strict=True))
        self.before = {s: self.state(s).clone() for s in rows.sequences}
        return super().verify(rows)

    def accept(self, sequences, counts):
        super().accept(sequences, counts)
        for s, n in zip(sequences, counts, strict=True):
            if n == self.lengths[s]:
                self.load(s, self.before[s])


class Overflowing(own._Chunked):
    """Prompts with decays that are too strong for float32 have no outputs."""

    def run(self, rows, first):
        outputs, states = super().run(rows, first)
        return (outputs * torch.nan if rows.g.min() < -10 else outputs), states
