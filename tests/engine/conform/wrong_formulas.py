"""Kernels of this program with a wrong formula, input, offset or window."""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from engine.conform.adapters import own


class Altered(own._Slots):
    """Rows that are changed before the kernel takes them."""

    def change(self, p):
        raise NotImplementedError

    def _run(self, parts, read, write):
        for p in parts:
            self.change(p)
        return super()._run(parts, read, write)


class NoBias(Altered):
    times = 0

    def change(self, p):
        rate = torch.exp(p.A_log).view(-1, *[1] * (p.a.dim() - 2))
        p.tensors["g"] = -rate * softplus(p.a + self.times * p.dt_bias)


class TwiceBias(NoBias):
    times = 2


class BaseTwo(Altered):
    def change(self, p):
        p.tensors["g"] = p.g * 0.6931471805599453


class OtherBias(Altered):
    """All heads take the first one's dt_bias."""

    def change(self, p):
        rate = torch.exp(p.A_log).view(-1, *[1] * (p.a.dim() - 2))
        p.tensors["g"] = -rate * softplus(p.a + p.dt_bias[:1])


class RawBeta(Altered):
    def change(self, p):
        p.tensors["beta"] = p.b


class EndingDecay(Altered):
    def change(self, p):
        p.tensors["g"] = p.g.clamp(min=-1)


class TwiceSigmoid(Altered):
    def change(self, p):
        p.tensors["beta"] = torch.sigmoid(p.beta)


class SharedUndecayed(Altered):
    """The second half of the heads is not decayed where heads share keys."""

    def change(self, p):
        if self.shape.n_groups < self.shape.n_heads:
            half = torch.arange(self.shape.n_heads) < self.shape.n_heads // 2
            p.tensors["g"] = p.g * half


class RawKeys(Altered):
    def change(self, p):
        p.tensors["k_normed"] = p.k


class Exchanged(Altered):
    def change(self, p):
        p.tensors |= {"k_normed": p.q_normed, "q_normed": p.k_normed}


class Offset(own._ConvSlots):
    """Outputs are too large by one, which no known mistake gives."""

    def verify(self, rows):
        return super().verify(rows) + 1


class OtherKeys(Altered):
    """Heads have the keys of other heads."""

    def change(self, p):
        p.tensors["k_normed"] = p.k_normed.flip(1)


class MeanSquares(Altered):
    """Keys have a mean square of 1, not a length of 1."""

    def change(self, p):
        p.tensors["k_normed"] = p.k_normed * p.k.shape[-1] ** 0.5


class OneHead(Altered):
    """Head 2 alone has beta twice."""

    def change(self, p):
        p.tensors["beta"] = torch.where(torch.arange(4) == 2, p.beta**2, p.beta)


class LaterRows(Altered):
    """Rows after the first do not decay."""

    def change(self, p):
        p.tensors["g"] = torch.cat([p.g[:1], 0 * p.g[1:]])


class KeysForQueries(Altered):
    def change(self, p):
        p.tensors["q_normed"] = p.k_normed


class FirstSkip(own._SsdSlots):
    """All heads take the first one's D."""

    def _run(self, parts, read, write):
        for p in parts:
            p.tensors["D"] = p.D[:1].expand_as(p.D)
        return super()._run(parts, read, write)


class Backwards(own._ConvSlots):
    """The taps are read from the other end."""

    def _run(self, parts, read, write):
        for p in parts:
            p.tensors["weight"] = p.weight.flip(-1)
        return super()._run(parts, read, write)


class SameTap(own._ConvSlots):
    """Tap 1 has the weight of tap 2."""

    def _run(self, parts, read, write):
        for p in parts:
            p.tensors["weight"] = p.weight[:, [0, 2, 2, 3]]
        return super()._run(parts, read, write)


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
