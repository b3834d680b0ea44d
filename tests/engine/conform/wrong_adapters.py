"""Adapters as a user writes them, row by row, with one mistake each."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize, silu, softplus

from engine.conform.subject import Prompts


class Delta:
    """The delta rule; right."""

    def __init__(self, shape, memory, package):
        self.shape, self.states, self.after = shape, {}, {}

    def load(self, sequence, state):
        self.states[sequence] = state.clone()

    def units(self, p):
        return p.q_normed, p.k_normed

    def inputs(self, p):
        """Of each row: q, k, v, the decay and beta."""
        each = self.shape.n_heads // self.shape.n_groups
        q, k = (x.repeat_interleave(each, 1) for x in self.units(p))
        decay = p.g.exp().view(len(p.v), self.shape.n_heads, -1, 1)
        return q * self.shape.d_k**-0.5, k, p.v, decay, p.beta[..., None]

    def before(self, after, t, parents):
        """The state before row t of a pass; after: the one before the pass, and of its rows."""
        return after[t]

    def run(self, state, p, parents=()):
        outs, after = [], [state]
        for t, (q, k, v, decay, beta) in enumerate(zip(*self.inputs(p), strict=True)):
            state = decay * self.before(after, t, parents)
            value = beta * (v - (k[:, :, None] * self.seen(state, after[0])).sum(1))
            after.append(state + k[:, :, None] * value[:, None])
            outs.append((q[:, :, None] * after[-1]).sum(1))
        return torch.stack(outs), after[1:]

    def seen(self, state, first):
        return state

    def parts(self, rows):
        return [rows.one(i) for i in range(len(rows.sequences))]

    def verify(self, rows):
        outs = []
        for i, (s, part) in enumerate(zip(rows.sequences, self.parts(rows), strict=True)):
            tree = rows.parents[i] if rows.parents else ()
            out, self.after[s] = self.run(self.states[s], part, tree)
            outs.append(out)
        return torch.cat(outs)

    def accept(self, sequences, counts):
        for s, n in zip(sequences, counts, strict=True):
            self.states[s] = self.after[s][n - 1]

    def decode(self, rows):
        out = self.verify(rows)
        self.accept(rows.sequences, [1] * len(rows.sequences))
        return out

    def state(self, sequence):
        return self.states[sequence]


class NormOverHeads(Delta):
    """Keys are normalized over the heads, not over their channels."""

    def units(self, p):
        return p.q_normed, normalize(p.k, dim=1)


class JointNorm(Delta):
    """q and k are divided by the length of both, as they lie side by side."""

    def units(self, p):
        return normalize(torch.cat([p.q, p.k], -1), dim=-1).chunk(2, -1)


class CentredKeys(Delta):
    """Keys are normalized without their mean."""

    def units(self, p):
        return p.q_normed, normalize(p.k - p.k.mean(-1, keepdim=True), dim=-1)


class StartDelta(Delta):
    """Corrections see of the state what was there before the pass, and nothing that it wrote."""

    def run(self, state, p, parents=()):
        self.faded = state
        return super().run(state, p)

    def inputs(self, p):
        self.decays = iter(super().inputs(p)[3])
        return super().inputs(p)

    def seen(self, state, first):
        self.faded = next(self.decays) * self.faded
        return self.faded


class LateCounts(Delta):
    """Counts arrive a pass late, as where they are copied while the next one is planned."""

    def __init__(self, *args):
        super().__init__(*args)
        self.late = {}

    def accept(self, sequences, counts):
        for s, n in zip(sequences, counts, strict=True):
            late, self.late[s] = self.late.get(s, n), n
            super().accept([s], [min(late, len(self.after[s]))])


class SortedOffsets(Delta):
    """The sequences of a pass begin where those in the order of their numbers would."""

    def parts(self, rows):
        length = dict(zip(rows.sequences, rows.lengths, strict=True))
        made, begin = {}, 0
        for s in sorted(rows.sequences):
            at = slice(begin, begin + length[s])
            made[s], begin = rows.at(at, torch.tensor([0, length[s]])), begin + length[s]
        return [made[s] for s in rows.sequences]


class PaddedOutputs(Delta):
    """Outputs come padded to the longest sequence, and only the end is cut off."""

    def verify(self, rows):
        each = super().verify(rows).split(rows.lengths)
        return torch.nn.utils.rnn.pad_sequence(each, True).flatten(0, 1)[: sum(rows.lengths)]


class UndecayedStep(Delta):
    """A step without drafts does not decay the state."""

    def decode(self, rows):
        rows.tensors["g"] = 0 * rows.g
        return super().decode(rows)


class FoldsOwnDecay(Delta):
    """A log is folded with cumulated decays in which each row's own is still contained."""

    def verify(self, rows):
        outs, self.log = [], {}
        for s, p in zip(rows.sequences, self.parts(rows), strict=True):
            out, after = self.run(self.states[s], p)
            outs.append(out)
            each = zip(self.inputs(p)[3], after, [self.states[s], *after], strict=False)
            self.log[s] = [(d, a - d * b) for d, a, b in each]
        return torch.cat(outs)

    def accept(self, sequences, counts):
        for s, n in zip(sequences, counts, strict=True):
            for decay, wrote in self.log[s][:n]:
                self.states[s] = decay * (self.states[s] + wrote)


class RefoldsAbsent(Delta):
    """Every commit takes the counts of all slots, of those that are not in the pass the last."""

    def __init__(self, *args):
        super().__init__(*args)
        self.counts, self.parts_of = {}, {}

    def verify(self, rows):
        self.parts_of |= zip(rows.sequences, self.parts(rows), strict=True)
        return super().verify(rows)

    def accept(self, sequences, counts):
        self.counts |= zip(sequences, counts, strict=True)
        for s, n in self.counts.items():
            self.states[s] = self.run(self.states[s], self.parts_of[s])[1][n - 1]


class LastSlot(Delta):
    """Padding's slot -1 counts from the end, and so is the last sequence's."""

    def __init__(self, *args):
        super().__init__(*args)
        self.states = [None] * self.shape.n_sequences
        self.after = [None] * self.shape.n_sequences


class TreeDepth(Delta):
    """A row of a tree follows the last row before it that is one draft less deep."""

    def before(self, after, t, parents):
        if not parents:
            return after[t]
        depths = [0]
        for parent in parents:
            depths.append(depths[parent + 1] + 1)
        return after[max(i for i in range(t + 1) if depths[i] == depths[t + 1] - 1)]


class MeanDecay(Delta):
    """A head has one decay, the mean of its channels'."""

    def inputs(self, p):
        q, k, v, decay, beta = super().inputs(p)
        return q, k, v, decay.mean(2, keepdim=True), beta


class TurnedQueries(Delta):
    """q is taken as [channels, heads]."""

    def units(self, p):
        n, groups, d_k = p.q.shape
        return normalize(p.q.reshape(n, d_k, groups).mT, dim=-1), p.k_normed


class RoundedValues(Delta):
    """v goes through bfloat16."""

    def inputs(self, p):
        q, k, v, decay, beta = super().inputs(p)
        return q, k, v.bfloat16().float(), decay, beta


class Prompt(Prompts):
    """Prompts in chunks of four rows, of which the last is filled up; right."""

    base = Delta

    def one(self, rows, first):
        state = torch.zeros(self.shape.state) if first is None else first
        kernel, outs = self.base(self.shape, self.memory, None), []
        for start in range(0, rows.lengths[0], 4):
            part = rows.one(0, slice(start, start + 4))
            out, after = kernel.run(state, part)
            outs.append(out)
            state = self.left(kernel, part, state, after)
        return torch.cat(outs), state

    def left(self, kernel, part, state, after):
        return after[-1]


class PaddedGate(Prompt):
    """The rows that fill a last chunk up have the decay of a gate of 0."""

    def left(self, kernel, part, state, after):
        gate = -part.A_log.exp() * softplus(part.dt_bias)
        return after[-1] * (gate * (4 - part.lengths[0])).exp()[:, None, None]


class ExclusiveDecay(Prompt):
    """A chunk keeps the state before it without the decay of its first row."""

    def left(self, kernel, part, state, after):
        right = kernel.run(state, part)[1][-1]
        decay = part.g.sum(0).exp()[..., None]
        return right + ((part.g[1:].sum(0).exp()[..., None]) - decay) * state


class Ssd(Delta):
    """Mamba-2; right."""

    def steps(self, p):
        dt = softplus(p.dt + p.dt_bias)
        return dt, dt

    def rate(self, p):
        return p.A

    def skipped(self, p):
        return p.x

    def run(self, state, p, parents=()):
        outs, after = [], [state]
        each = self.shape.n_heads // self.shape.n_groups
        B, C = (x.repeat_interleave(each, 1) for x in (p.B, p.C))
        fade, write = self.steps(p)
        for t in range(len(p.x)):
            decay = (self.rate(p) * fade[t]).exp()[:, None, None]
            wrote = B[t][:, :, None] * (write[t][:, None] * p.x[t])[:, None]
            after.append(decay * after[-1] + wrote)
            out = (C[t][:, :, None] * after[-1]).sum(1)
            outs.append(out + p.D[:, None] * self.skipped(p)[t])
        return torch.stack(outs), after[1:]


class StepLimit(Ssd):
    """dt ends at 0.5."""

    def steps(self, p):
        dt = softplus(p.dt + p.dt_bias).clamp(max=0.5)
        return dt, dt


class LateSkip(Ssd):
    """D is multiplied by the x of the row before, and in the first row by its own."""

    def skipped(self, p):
        return torch.cat([p.x[:1], p.x[:-1]])


class TwiceExp(Ssd):
    """A is taken as its logarithm."""

    def rate(self, p):
        return -p.A.exp()


class LateBias(Ssd):
    """The decay's dt has its bias after softplus."""

    def steps(self, p):
        return softplus(p.dt) + p.dt_bias, softplus(p.dt + p.dt_bias)


class Window(Delta):
    """Convolution; right."""

    def weights(self, p):
        return p.weight

    def run(self, state, p, parents=()):
        x = torch.cat([state, p.x.T], 1)
        taps = p.weight.shape[1]
        y = (x.unfold(1, taps, 1) * self.weights(p)[:, None]).sum(-1).T + p.bias
        return silu(y), [self.left(x, i + 1, taps - 1) for i in range(len(p.x))]

    def left(self, x, rows, width):
        return x[:, rows : rows + width]


class ShortWindow(Window):
    """A window of fewer new rows than it holds has zeros before them."""

    def left(self, x, rows, width):
        new = x[:, width : width + rows]
        return torch.nn.functional.pad(new, (width, 0))[:, -width:]


class ShiftedWeights(Window):
    """Channels have the weights of those two further on."""

    def weights(self, p):
        return p.weight.roll(-2, 0)


class TurnedInputs(Window):
    """The channels of new inputs are in reverse order."""

    def parts(self, rows):
        rows.tensors["x"] = rows.x.flip(1)
        return super().parts(rows)
