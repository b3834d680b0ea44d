"""Kernels of this program with a wrong formula, input, offset or window."""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from engine.conform.adapters import own


def altered(change, base=own._Slots):
    """A kernel that takes other inputs or weights than those of its rows: change(rows) has them."""

    class Altered(base):
        def _run(self, parts, read, write):
            for rows in parts:
                rows.tensors |= change(rows)
            return super()._run(parts, read, write)

    return Altered


def gates(rows, made):
    """A decay's logarithm of this in place of softplus."""
    return {"g": -torch.exp(rows.A_log).view(-1, *[1] * (rows.a.dim() - 2)) * made}


def strided(x, stride):
    return torch.stack([x.flatten()[r * stride :][: x[0].numel()] for r in range(len(x))]).view_as(
        x
    )


def beside(rows):
    """Values that lie after q and k and advance by their own size."""
    whole = torch.cat([rows.tensors[x].flatten(1) for x in "qkv"], 1).flatten()
    n, size = rows.q[0].numel() + rows.k[0].numel(), rows.v[0].numel()
    return torch.stack([whole[n + r * size :][:size] for r in range(len(rows.v))]).view_as(rows.v)


def late(rows):
    """B as it lies a value too late between x and C."""
    whole, n = torch.cat([rows.tensors[x].flatten(1) for x in "xBC"], 1), rows.x[0].numel() + 1
    return whole[:, n : n + rows.B[0].numel()].view_as(rows.B)


def odd(x):
    """Rows of odd number have what the row before has."""
    rows = torch.arange(len(x))
    return x[rows - rows % 2]


NoBias = altered(lambda p: gates(p, softplus(p.a)))
TwiceBias = altered(lambda p: gates(p, softplus(p.a + 2 * p.dt_bias)))
OtherBias = altered(lambda p: gates(p, softplus(p.a + p.dt_bias[:1])))
Clipped = altered(lambda p: gates(p, softplus(p.a + p.dt_bias).clamp(max=1.5)))
LogOfNegative = altered(lambda p: gates(p, torch.log(1 - torch.exp(p.a + p.dt_bias))))
LowGates = altered(
    lambda p: gates(p, torch.where((x := p.a + p.dt_bias) < -1, torch.exp(x), softplus(x)))
)
StraightGates = altered(
    lambda p: gates(p, torch.where((x := p.a + p.dt_bias) > 1.5, x, softplus(x)))
)
LateInput = altered(lambda p: {"B": late(p)})
BaseTwo = altered(lambda p: {"g": p.g * 0.6931471805599453})
EndingDecay = altered(lambda p: {"g": p.g.clamp(min=-1)})
FirstGate = altered(lambda p: {"g": p.g[:1].expand_as(p.g).contiguous()})
LaterRows = altered(lambda p: {"g": torch.cat([p.g[:1], 0 * p.g[1:]])})
OddGates = altered(lambda p: {"g": odd(p.g)})
GateStride = altered(lambda p: {"g": strided(p.g, p.g.shape[1])})
RawBeta = altered(lambda p: {"beta": p.b})
TwiceSigmoid = altered(lambda p: {"beta": torch.sigmoid(p.beta)})
FirstBeta = altered(lambda p: {"beta": p.beta[:1].expand_as(p.beta).contiguous()})
OneHead = altered(lambda p: {"beta": torch.where(torch.arange(4) == 2, p.beta**2, p.beta)})
OtherBetas = altered(lambda p: {"beta": p.beta[:, [1, 0, 2, 3]]})
RawKeys = altered(lambda p: {"k_normed": p.k})
OtherKeys = altered(lambda p: {"k_normed": p.k_normed.flip(1)})
MeanSquares = altered(lambda p: {"k_normed": p.k_normed * p.k.shape[-1] ** 0.5})
NoZeros = altered(lambda p: {"k_normed": p.k / p.k.norm(dim=-1, keepdim=True)})
NoZerosAtAll = altered(
    lambda p: {f"{x}_normed": p.tensors[x] / p.tensors[x].norm(dim=-1, keepdim=True) for x in "qk"}
)
RootOfNegative = altered(
    lambda p: {"k_normed": p.k / (p.k.square().sum(-1, keepdim=True) - 40).sqrt()}
)
KeysForQueries = altered(lambda p: {"q_normed": p.k_normed})
Exchanged = altered(lambda p: {"k_normed": p.q_normed, "q_normed": p.k_normed})
ValueStride = altered(lambda p: {"v": strided(p.v, p.k.shape[1] * p.v.shape[2])})
SplitStride = altered(lambda p: {"v": beside(p)})
FirstSkip = altered(lambda p: {"D": p.D[:1].expand_as(p.D)}, own._SsdSlots)
Backwards = altered(lambda p: {"weight": p.weight.flip(-1)}, own._ConvSlots)
SameTap = altered(lambda p: {"weight": p.weight[:, [0, 2, 2, 3]]}, own._ConvSlots)


class SharedUndecayed(own._Slots):
    """The second half of the heads is not decayed where heads share keys."""

    def _run(self, parts, read, write):
        for p in parts if self.shape.n_groups < self.shape.n_heads else ():
            p.tensors["g"] = p.g * (torch.arange(self.shape.n_heads) < self.shape.n_heads // 2)
        return super()._run(parts, read, write)


class Forgotten(own._Slots):
    """Gates come from memory that was never written."""

    def _run(self, parts, read, write):
        for p in parts:
            p.tensors["g"] = self.memory.empty(*p.g.shape)
        return super()._run(parts, read, write)


class ExchangedBetas(OtherBetas):
    """States, and no outputs, have the betas of the first two heads exchanged."""

    def _run(self, parts, read, write):
        before = self.pool.clone()
        out = own._Slots._run(self, parts, read, write)
        self.pool.copy_(before)
        super()._run(parts, read, write)
        return out


class NotANumber(own._Slots):
    """The first output of a pass is computed of infinities, whatever its inputs are."""

    def verify(self, rows):
        out = super().verify(rows)
        out[0] += torch.inf - torch.full_like(out[0], torch.inf)
        return out


class Offset(own._ConvSlots):
    """Outputs are too large by one."""

    def verify(self, rows):
        return super().verify(rows) + 1


class WideWindow(own._ConvSlots):
    """The oldest input of the kept window is that of one row earlier."""

    def _run(self, parts, read, write):
        out = super()._run(parts, read, write)
        for i in range(len(write)):
            for newer, older in zip(write[i, :-1], write[i, 1:], strict=True):
                self.pool[newer, 0] = self.pool[older, 0]
        return out


class TurnedWindow(own._ConvSlots):
    """Windows are stored transposed, in the place of those that are not."""

    def _run(self, parts, read, write):
        out = super()._run(parts, read, write)
        for slot in write.flatten():
            self.pool[slot] = self.pool[slot].T.reshape(self.pool[slot].shape)
        return out


class OutputWindow(own._ConvSlots):
    """The newest input of a window is overwritten with its row's output."""

    def _run(self, parts, read, write):
        out = super()._run(parts, read, write)
        for planes, one in zip(write.flip(1), out, strict=True):
            for plane, output in zip(planes, one, strict=True):
                self.pool[plane, -1] = output
        return out
