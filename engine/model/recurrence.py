"""Recurrences: the state that a recurrent layer keeps per sequence, and how tokens advance it.

A layer has one or more states: S of a delta rule, the input window of a convolution. Each is
described by a Recurrence, which defines the maths but not where states are stored; that is the task
of a snapshot policy (engine.memory), which in turn handles rows of storage whatever they mean. A
family with new states adds a Recurrence and no policy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.model.parts import StateKey as StateKey
from engine.model.parts import StateSize
from kernels.pointwise import multiply
from kernels.recurrence.conv import causal_conv, causal_conv_slots, fold_window
from kernels.rows import take_rows
from kernels.rows.ngrams import recent_tokens

RecurrenceInputs = Any
"""A recurrence's inputs for the tokens of a ubatch: a NamedTuple with part(rows, tokens), which
selects some sequences and some of their tokens."""


class RowNumbers(NamedTuple):
    """Rows of a pool by numbers on the device, int64.

    read: [n_seqs], input rows. write: [n_seqs, n_new], rows for the newest states, newest first;
    in_order: the same oldest first. No sequence reads a row that another one writes.
    """

    read: Tensor
    write: Tensor
    in_order: Tensor


LogPart = tuple[Tensor, Sequence[Tensor], int | Tensor]
"""States [B, *shape] before a log, the log, and how many of its tokens to apply: one number, or
int64 [B]."""
RowViews = tuple[Tensor, Sequence[Tensor], Sequence[int | None], Sequence[Sequence[int]], Tensor]
"""A pool [n_rows, *shape]; its rows as batches of one; per sequence the input row, None for zeros,
and rows for its newest states, oldest first; the last as a tensor."""


class Recurrence(ABC):
    """One kind of state. B sequences of T tokens advance together; all tensors are float32.

    shape: of one sequence's state. entry: shapes of the log rows of one token, from which `fold`
    computes the state after it; by default the state itself. n_bytes, entry_bytes: of both.
    invariant: bits must not depend on how tokens and sequences are batched.
    """

    is_window: bool = False
    """Whether the state consists of the last input rows only, as a convolution window does."""

    by_position: bool = False
    """Whether rows of the state are addressed by position, so that the state of a text may serve
    for a shorter one (`serves`)."""

    llama_cpp_turns: bool = True
    """Whether llama.cpp stores the last two dimensions transposed."""

    is_exact: bool = False
    """Whether the state holds integers, which no storage type may round."""

    def __init__(self, shape: tuple[int, ...], entry: Sequence[tuple[int, ...]]) -> None:
        self.shape, self.entry = shape, tuple(entry)
        size = StateSize(shape, self.entry)
        self.n_bytes, self.entry_bytes = size.n_bytes, size.entry_bytes

    @abstractmethod
    def into(
        self, inputs: Any, start: Tensor, slots: Sequence[Tensor], *, invariant: bool = False
    ) -> Tensor:
        """Advance from `start` [B, *shape] and return the layer's output [B, T, ...].

        slots: 1 .. T tensors [B, *shape]; slots[s] receives the state s tokens before the last one.
        One of them may be `start` itself.
        """

    @abstractmethod
    def log(
        self, inputs: Any, start: Tensor, *, invariant: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Advance without keeping a state: the output, and per member of `entry` [B, T, ...]."""

    @abstractmethod
    def fold(self, *log: *LogPart, out: Tensor | None = None, invariant: bool = False) -> Tensor:
        """The states [B, *shape] after some tokens of a log; later tokens are ignored. out: result
        buffer, which may be the input states."""

    def serves(self, n_tokens: int, n_written: int) -> bool:
        """Whether the state after n_written tokens can replace the state after the first n_tokens:
        every row that will be read is either equal or overwritten before."""
        return n_tokens == n_written

    def needed(self, state: Tensor, n_tokens: int) -> Tensor:
        """A state [*shape] after n_tokens tokens with zeros in all places that will not be read
        again, so that equal texts give equal results whatever else the state has seen."""
        return state

    def in_order(self, state: Tensor, n_tokens: int) -> Tensor:
        """The needed rows of the last tokens in a window, oldest first."""
        return state

    def stored(self, state: Tensor) -> Tensor:
        """A state [..., *shape] as storage holds it: unchanged, or rounded to the storage type."""
        return state

    def in_rows(self, inputs: Any, *views: *RowViews, invariant: bool = False) -> Tensor:
        """Advance from rows of a pool to rows of it, chosen by the host. A sequence may write what
        an earlier one reads, so they run one after another."""
        _, rows, read, write, _ = views
        outputs = []
        for row, (source, new) in enumerate(zip(read, write, strict=True)):
            start = torch.zeros_like(rows[0]) if source is None else rows[source]
            one = inputs.part(slice(row, row + 1), slice(None))
            slots = [rows[i] for i in reversed(new)]
            outputs.append(self.into(one, start, slots, invariant=invariant))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def by_index(self, inputs: Any, pool: Tensor, rows: RowNumbers) -> Tensor:
        """Like `in_rows`, with row numbers on the device, so that the pass can be recorded."""
        n_seqs, n_new = rows.write.shape
        slots = pool.new_empty(n_new, n_seqs, *self.shape)
        o = self.into(inputs, pool[rows.read], slots.unbind(0))
        pool[rows.write.t()] = slots
        return o


class RecurrentLayout:
    """The recurrent states of a model per sequence.

    layers: trunk layers, ascending. n_bytes, entry_bytes: of one snapshot, and of one token's log
    entries, per sequence over all layers.
    """

    def __init__(self, states: Mapping[StateKey, Recurrence]) -> None:
        self.states = dict(states)
        self.layers = tuple(sorted({key.layer for key in states}))
        self.n_bytes = sum(recurrence.n_bytes for recurrence in self.states.values())
        self.entry_bytes = sum(recurrence.entry_bytes for recurrence in self.states.values())
        self.by_position = all(recurrence.by_position for recurrence in self.states.values())

    @classmethod
    def alike(cls, layers: Sequence[int], **states: Recurrence) -> RecurrentLayout:
        """Layers that all have the same states, by name."""
        return cls({StateKey(i, name): one for name, one in states.items() for i in layers})

    def n_spare(self, n_tokens: int, n_written: int, most: int) -> int:
        """How many tokens before n_tokens are also served by states that have seen n_written, up to
        `most` (Recurrence.serves)."""
        found, most = 0, min(most, n_tokens - 1) if self.by_position else 0
        while found < most and all(
            one.serves(n_tokens - found - 1, n_written) for one in self.states.values()
        ):
            found += 1
        return found

    def fits(self, tensors: Mapping[StateKey, Tensor]) -> bool:
        """Whether tensors have the names and shapes of one sequence's states."""
        return tensors.keys() == self.states.keys() and all(
            tensors[key].shape == recurrence.shape for key, recurrence in self.states.items()
        )

    def worst(self, errors: Mapping[StateKey, float], *, windows: bool) -> list[float]:
        """Per layer the largest error of its states or windows, NaN if it has none."""
        return [
            max(
                (
                    errors[key]
                    for key, recurrence in self.states.items()
                    if key.layer == layer and recurrence.is_window == windows
                ),
                default=math.nan,
            )
            for layer in self.layers
        ]


class ConvInputs(NamedTuple):
    """x: rows to convolve [B, T, C]. weight: taps [C, K]. bias: [C], if any. gate: factor of x that
    is still to be applied, on a GPU."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    gate: Tensor | None = None

    def finished(self) -> ConvInputs:
        """The same with pending operations applied."""
        if self.gate is None:
            return self
        return self._replace(x=multiply(self.gate, self.x), gate=None)

    def part(self, rows: slice, tokens: slice) -> ConvInputs:
        gate = None if self.gate is None else self.gate[rows, tokens]
        return ConvInputs(self.x[rows, tokens], self.weight, self.bias, gate)


class InputWindow(Recurrence):
    """Window [width, n_channels], oldest row first; a token's log entry is its row."""

    is_window = True

    def __init__(self, width: int, n_channels: int) -> None:
        self._width = width
        super().__init__((width, n_channels), [(n_channels,)])

    @abstractmethod
    def rows(self, inputs: Any) -> Tensor:
        """The rows that tokens add to the window, [B, T, n_channels]."""

    @abstractmethod
    def outputs(self, inputs: Any, window: Tensor, *, invariant: bool) -> tuple[Tensor, Tensor]:
        """The layer's output [B, T, ...], and window and rows concatenated, [B, width + T,
        n_channels]."""

    def into(
        self, inputs: Any, start: Tensor, slots: Sequence[Tensor], *, invariant: bool = False
    ) -> Tensor:
        y, history = self.outputs(inputs, start, invariant=invariant)
        n = history.shape[1] - self._width
        for back, slot in enumerate(slots):
            slot.copy_(history[:, n - back : n - back + self._width])
        return y

    def log(
        self, inputs: Any, start: Tensor, *, invariant: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, _ = self.outputs(inputs, start, invariant=invariant)
        return y, (self.rows(inputs),)

    def fold(self, *log: *LogPart, out: Tensor | None = None, invariant: bool = False) -> Tensor:
        (start, (columns,), n_tokens), width = log, self._width
        if isinstance(n_tokens, int) and n_tokens >= width:
            window = columns[:, n_tokens - width : n_tokens]
        elif isinstance(n_tokens, int):
            window = torch.cat((start[:, n_tokens:], columns[:, :n_tokens]), 1)
        else:
            return fold_window(
                start, columns, n_tokens, torch.empty_like(start) if out is None else out
            )
        return window if out is None else out.copy_(window)

    def in_rows(self, inputs: Any, *views: *RowViews, invariant: bool = False) -> Tensor:
        pool, rows, read, _, in_order = views
        starts = [torch.zeros_like(rows[0]) if i is None else rows[i] for i in read]
        start = starts[0] if len(starts) == 1 else torch.cat(starts)
        y, history = self.outputs(inputs, start, invariant=invariant)
        self._keep(history, pool, in_order)
        return y

    def by_index(self, inputs: Any, pool: Tensor, rows: RowNumbers) -> Tensor:
        y, history = self.outputs(inputs, pool[rows.read], invariant=False)
        self._keep(history, pool, rows.in_order)
        return y

    def _keep(self, history: Tensor, pool: Tensor, in_order: Tensor) -> None:
        after_each = history.unfold(1, self._width, 1).transpose(2, 3)
        pool[in_order] = after_each[:, -in_order.shape[1] :]


class ConvWindow(InputWindow):
    """The d_conv - 1 rows before a convolution's input.

    Advancing gives silu of the convolution, or the convolution itself unless `activate`, [B, T, C].
    """

    def __init__(self, d_conv: int, n_channels: int, *, activate: bool = True) -> None:
        self._activate = activate
        super().__init__(d_conv - 1, n_channels)

    def rows(self, inputs: ConvInputs) -> Tensor:
        return inputs.finished().x

    def by_index(self, inputs: ConvInputs, pool: Tensor, rows: RowNumbers) -> Tensor:
        x, weight, bias, gate = inputs
        gated = {} if gate is None else {"gate": gate}
        return causal_conv_slots(
            x, weight, pool, rows.read, rows.in_order, bias, activate=self._activate, **gated
        )

    def outputs(
        self, inputs: ConvInputs, window: Tensor, *, invariant: bool
    ) -> tuple[Tensor, Tensor]:
        x, weight, bias, _ = inputs.finished()
        return causal_conv(x, weight, window, bias, activate=self._activate, invariant=invariant)


class TokenInputs(NamedTuple):
    """x: tokens int64 [B, T], or [B, T, …] what was made of them. positions: int64 [B, T],
    consecutive in a sequence."""

    x: Tensor
    positions: Tensor

    def part(self, rows: slice, tokens: slice) -> TokenInputs:
        return TokenInputs(self.x[rows, tokens], self.positions[rows, tokens])


class TokenWindow(InputWindow):
    """The last n_gram - 1 tokens, oldest first.

    Advancing gives int64 [B, T, n_gram], each token and its predecessors, newest first; -1 before
    the beginning of the sequence.

    A row is a token id plus one, in float32 like every state: exact below 2^24; 0, the initial
    value, means none.
    """

    is_exact = True

    def __init__(self, n_gram: int) -> None:
        # a convolution that copies the newest row moves windows within the rows of a pool
        self._newest = torch.tensor([[*[0.0] * (n_gram - 1), 1.0]])
        super().__init__(n_gram - 1, 1)

    def rows(self, inputs: TokenInputs) -> Tensor:
        return (inputs.x + 1).to(torch.float32)[..., None]

    def outputs(
        self, inputs: TokenInputs, window: Tensor, *, invariant: bool
    ) -> tuple[Tensor, Tensor]:
        return recent_tokens(inputs.x, window)

    def log(
        self, inputs: TokenInputs, start: Tensor, *, invariant: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        context, history = recent_tokens(inputs.x, start)
        return context, (history[:, self.shape[0] :],)

    def by_index(self, inputs: TokenInputs, pool: Tensor, rows: RowNumbers) -> Tensor:
        context, history = recent_tokens(inputs.x, take_rows(pool, rows.read))
        # kept on the device: a recorded pass cannot upload
        self._newest = self._newest.to(pool.device)
        new = history[:, self.shape[0] :]
        causal_conv_slots(new, self._newest, pool, rows.read, rows.in_order, None, activate=False)
        return context
