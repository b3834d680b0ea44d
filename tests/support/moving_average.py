"""A made-up recurrent layer, to show that a policy takes any: two averages and a window of rows.

It has what no delta-net layer has: a state of one axis, an entry of the log that is not a part of
the output, a window that is not convolved, and three states in one layer but two in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.model.recurrence import Recurrence, RecurrentLayout, StateKey

N, WIDTH = 5, 2


class Rows(NamedTuple):
    """x, keep: [B, T, N]; keep: the share of the old average that stays."""

    x: torch.Tensor
    keep: torch.Tensor

    def part(self, rows: slice, tokens: slice) -> Rows:
        return Rows(self.x[rows, tokens], self.keep[rows, tokens])


class Average(Recurrence):
    """s <- keep s + (1 - keep) x, [N]; the output is s + x."""

    def __init__(self) -> None:
        super().__init__((N,), [(N,), (N,)])

    def into(self, inputs, start, slots: Sequence[torch.Tensor], *, invariant=False):
        states = [start]
        for x, keep in zip(inputs.x.unbind(1), inputs.keep.unbind(1), strict=True):
            states.append(keep * states[-1] + (1 - keep) * x)
        for slot, state in zip(slots, reversed(states[1:]), strict=False):
            slot.copy_(state)
        return torch.stack(states[1:], 1) + inputs.x

    def log(self, inputs, start, *, invariant=False):
        o = self.into(inputs, start, [torch.empty_like(start)])
        return o, ((1 - inputs.keep) * inputs.x, inputs.keep)

    def fold(self, start, entries, n_tokens, *, out=None, invariant=False):
        state = start.clone()
        counts = torch.as_tensor(n_tokens).expand(len(start))
        for t in range(entries[0].shape[1]):
            after = entries[1][:, t] * state + entries[0][:, t]
            state = torch.where((t < counts)[:, None], after, state)
        return state if out is None else out.copy_(state)


class LastRows(Recurrence):
    """The last WIDTH rows of x, newest first; the output is their sum with x."""

    is_window = True

    def __init__(self) -> None:
        super().__init__((WIDTH, N), [(N,)])

    def into(self, inputs, start, slots, *, invariant=False):
        rows = [*reversed(start.clone().unbind(1))]  # one of the slots may be `start`
        outputs = []
        for x in inputs.x.unbind(1):
            outputs.append(x + sum(rows[-WIDTH:]))
            rows.append(x)
        for back, slot in enumerate(slots):
            slot.copy_(torch.stack(rows[: len(rows) - back][-WIDTH:][::-1], 1))
        return torch.stack(outputs, 1)

    def log(self, inputs, start, *, invariant=False):
        return self.into(inputs, start, [torch.empty_like(start)]), (inputs.x,)

    def fold(self, start, entries, n_tokens, *, out=None, invariant=False):
        state = start.clone()
        counts = torch.as_tensor(n_tokens).expand(len(start))
        for t in range(entries[0].shape[1]):
            after = torch.cat((entries[0][:, t, None], state[:, :-1]), 1)
            state = torch.where((t < counts)[:, None, None], after, state)
        return state if out is None else out.copy_(state)


LAYOUT = RecurrentLayout(
    {
        StateKey(1, "fast"): Average(),
        StateKey(1, "slow"): Average(),
        StateKey(1, "rows"): LastRows(),
        StateKey(3, "slow"): Average(),
        StateKey(3, "rows"): LastRows(),
    }
)


def of_token(key: StateKey, token: int) -> tuple[torch.Tensor, ...]:
    seed = 1000 * key.layer + 100 * len(key.name) + token
    x, keep = torch.rand(2, N, generator=torch.Generator().manual_seed(seed))
    return x + 0.1, 0.5 + keep / 2 if key.name == "slow" else keep


def inputs(key: StateKey, tensors: tuple[torch.Tensor, ...]) -> Rows:
    del key
    return Rows(*tensors)


def step(
    key: StateKey, state: torch.Tensor, given: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    x, keep = given
    if key.name == "rows":
        return torch.cat((x[None], state[:-1])), x + state.sum(0)
    after = keep * state + (1 - keep) * x
    return after, after + x
