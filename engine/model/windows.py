"""Windows: states that are the last rows of an input, of a short convolution or of tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.model.recurrence import InputsT, Recurrence, RowNumbers
from kernels.pointwise import multiply
from kernels.recurrence.conv import causal_conv, causal_conv_slots, fold_window
from kernels.rows import take_rows
from kernels.rows.ngrams import recent_tokens


class ConvInputs(NamedTuple):
    """x: rows to convolve [B, T, C]. weight: taps [C, K]. bias: [C], if there is one. gate: what x
    is still to be multiplied by, on a GPU."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    gate: torch.Tensor | None = None

    def finished(self) -> ConvInputs:
        """The same with nothing to be done."""
        if self.gate is None:
            return self
        return self._replace(x=multiply(self.gate, self.x), gate=None)

    def part(self, rows: slice, tokens: slice) -> ConvInputs:
        """See engine.model.recurrence.RecurrenceInputs."""
        gate = None if self.gate is None else self.gate[rows, tokens]
        return ConvInputs(self.x[rows, tokens], self.weight, self.bias, gate)


class InputWindow(Recurrence[InputsT]):
    """Window [width, n_channels], oldest row first; a token's log entry is its row."""

    is_window = True

    def __init__(self, width: int, n_channels: int) -> None:
        self._width = width
        super().__init__((width, n_channels), [(n_channels,)])

    @abstractmethod
    def rows(self, inputs: InputsT) -> torch.Tensor:
        """What the tokens leave in the window, [B, T, n_channels]."""

    @abstractmethod
    def outputs(
        self, inputs: InputsT, window: torch.Tensor, *, invariant: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output [B, T, ...], and window and rows joined [B, width + T, n_channels]."""

    def into(
        self,
        inputs: InputsT,
        start: torch.Tensor,
        slots: Sequence[torch.Tensor],
        *,
        invariant: bool = False,
    ) -> torch.Tensor:
        y, history = self.outputs(inputs, start, invariant=invariant)
        n = history.shape[1] - self._width
        for back, slot in enumerate(slots):
            slot.copy_(history[:, n - back : n - back + self._width])
        return y

    def log(
        self, inputs: InputsT, start: torch.Tensor, *, invariant: bool = False
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        y, _ = self.outputs(inputs, start, invariant=invariant)
        return y, (self.rows(inputs),)

    def fold(
        self,
        start: torch.Tensor,
        entries: Sequence[torch.Tensor],
        n_tokens: int | torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        invariant: bool = False,
    ) -> torch.Tensor:
        (columns,), width = entries, self._width
        if isinstance(n_tokens, int) and n_tokens >= width:
            window = columns[:, n_tokens - width : n_tokens]
        elif isinstance(n_tokens, int):
            window = torch.cat((start[:, n_tokens:], columns[:, :n_tokens]), 1)
        else:
            return fold_window(
                start, columns, n_tokens, torch.empty_like(start) if out is None else out
            )
        return window if out is None else out.copy_(window)

    def in_rows(
        self,
        inputs: InputsT,
        pool: torch.Tensor,
        rows: Sequence[torch.Tensor],
        read: Sequence[int | None],
        write: Sequence[Sequence[int]],
        in_order: torch.Tensor,
        *,
        invariant: bool = False,
    ) -> torch.Tensor:
        starts = [torch.zeros_like(rows[0]) if i is None else rows[i] for i in read]
        start = starts[0] if len(starts) == 1 else torch.cat(starts)
        y, history = self.outputs(inputs, start, invariant=invariant)
        self._keep(history, pool, in_order)
        return y

    def by_index(self, inputs: InputsT, pool: torch.Tensor, rows: RowNumbers) -> torch.Tensor:
        y, history = self.outputs(inputs, pool[rows.read], invariant=False)
        self._keep(history, pool, rows.in_order)
        return y

    def _keep(self, history: torch.Tensor, pool: torch.Tensor, in_order: torch.Tensor) -> None:
        after_each = history.unfold(1, self._width, 1).transpose(2, 3)
        pool[in_order] = after_each[:, -in_order.shape[1] :]


class ConvWindow(InputWindow[ConvInputs]):
    """The d_conv - 1 rows before a convolution's input.

    Advancing gives silu of the convolution, or the convolution itself unless `activate`, [B, T, C].
    """

    def __init__(self, d_conv: int, n_channels: int, *, activate: bool = True) -> None:
        self._activate = activate
        super().__init__(d_conv - 1, n_channels)

    def rows(self, inputs: ConvInputs) -> torch.Tensor:
        return inputs.finished().x

    def by_index(self, inputs: ConvInputs, pool: torch.Tensor, rows: RowNumbers) -> torch.Tensor:
        x, weight, bias, gate = inputs
        gated = {} if gate is None else {"gate": gate}
        return causal_conv_slots(
            x, weight, pool, rows.read, rows.in_order, bias, activate=self._activate, **gated
        )

    def outputs(
        self, inputs: ConvInputs, window: torch.Tensor, *, invariant: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, bias, _ = inputs.finished()
        return causal_conv(x, weight, window, bias, activate=self._activate, invariant=invariant)


class TokenInputs(NamedTuple):
    """x: tokens int64 [B, T]."""

    x: torch.Tensor

    def part(self, rows: slice, tokens: slice) -> TokenInputs:
        """See engine.model.recurrence.RecurrenceInputs."""
        return TokenInputs(self.x[rows, tokens])


class TokenWindow(InputWindow[TokenInputs]):
    """The last n_gram - 1 tokens, oldest first.

    Advancing gives int64 [B, T, n_gram], each token and those before it, newest first; -1 before
    the beginning of the sequence.

    A row is a token plus one, in float32 as every state: exact below 2^24, and 0, with which
    sequences begin, is none.
    """

    is_exact = True

    def __init__(self, n_gram: int) -> None:
        # the convolution that keeps windows in rows of a pool; what it computes is the newest row
        self._newest = torch.tensor([[*[0.0] * (n_gram - 1), 1.0]])
        super().__init__(n_gram - 1, 1)

    def rows(self, inputs: TokenInputs) -> torch.Tensor:
        return (inputs.x + 1).to(torch.float32)[..., None]

    def outputs(
        self, inputs: TokenInputs, window: torch.Tensor, *, invariant: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return recent_tokens(inputs.x, window)

    def log(
        self, inputs: TokenInputs, start: torch.Tensor, *, invariant: bool = False
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        context, history = recent_tokens(inputs.x, start)
        return context, (history[:, self.shape[0] :],)

    def by_index(self, inputs: TokenInputs, pool: torch.Tensor, rows: RowNumbers) -> torch.Tensor:
        context, history = recent_tokens(inputs.x, take_rows(pool, rows.read))
        # kept there: a recorded pass uploads nothing
        self._newest = self._newest.to(pool.device)
        new = history[:, self.shape[0] :]
        causal_conv_slots(new, self._newest, pool, rows.read, rows.in_order, activate=False)
        return context
