"""Recurrent states that storage rounds to a shorter type, whatever keeps them.

A recurrence writes states of float32 into rows of a policy; here they are rounded in those rows,
where the next pass reads them. Within a pass a state goes from token to token in float32, as in
kernels that keep it in registers: a batch of n tokens rounds once, n batches of one token n times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self, runtime_checkable

import torch

from engine.model.recurrence import Recurrence, RecurrentLayout, RowNumbers
from kernels.linear.rounding import round_in_place, round_rows, rounded

EXACT = "f32"


def stored_as(
    layout: RecurrentLayout, s: str = EXACT, r: str = EXACT, gates: str = EXACT, older: str = EXACT
) -> RecurrentLayout:
    """A layout whose states and windows are stored as `s` and `r`; states of whole numbers stay.
    gates, older: see StoredState."""

    def stored(one: Recurrence[Any]) -> Recurrence[Any]:
        type = r if one.is_window else s
        of_gates = EXACT if one.is_window else gates
        if one.is_exact or {type, of_gates, older} == {EXACT}:
            return one
        return StoredState(one, type, older, of_gates)

    return RecurrentLayout({key: stored(one) for key, one in layout.states.items()})


@runtime_checkable
class GatedInputs(Protocol):
    """Inputs of a recurrence that has gates."""

    def with_gates(self, type: str) -> Self:
        """The same with the gates rounded to a type."""


class StoredState(Recurrence[Any]):
    """`inner`, whose states are stored as `type`, those before the newest of a pass as `older` (as
    well), and which reads gates rounded to `gates`: each "f32", "bf16" or "f16".

    A log of inputs is kept as it is; what is folded from it is a state, and rounded.
    """

    def __init__(
        self, inner: Recurrence[Any], type: str = EXACT, older: str = EXACT, gates: str = EXACT
    ) -> None:
        super().__init__(inner.shape, inner.entry)
        self.is_window, self.is_exact = inner.is_window, inner.is_exact
        self.by_position = inner.by_position
        self._inner, self._type, self._older, self._gates = inner, type, older, gates

    def _read(self, inputs: Any) -> Any:
        if self._gates == EXACT or not isinstance(inputs, GatedInputs):
            return inputs
        return inputs.with_gates(self._gates)

    def into(
        self,
        inputs: Any,
        start: torch.Tensor,
        slots: Sequence[torch.Tensor],
        *,
        invariant: bool = False,
    ) -> torch.Tensor:
        o = self._inner.into(self._read(inputs), start, slots, invariant=invariant)
        for type, written in ((self._type, slots), (self._older, slots[1:])):
            for slot in written if type != EXACT else ():
                round_in_place(slot, type)
        return o

    def log(
        self, inputs: Any, start: torch.Tensor, *, invariant: bool = False
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return self._inner.log(self._read(inputs), start, invariant=invariant)

    def fold(
        self,
        start: torch.Tensor,
        entries: Sequence[torch.Tensor],
        n_tokens: int | torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        invariant: bool = False,
    ) -> torch.Tensor:
        state = self._inner.fold(start, entries, n_tokens, out=out, invariant=invariant)
        if out is None:  # may be a view of the log
            return self.stored(state)
        if self._type != EXACT:
            round_in_place(out, self._type)
        return out

    def in_rows(
        self,
        inputs: Any,
        pool: torch.Tensor,
        rows: Sequence[torch.Tensor],
        read: Sequence[int | None],
        write: Sequence[Sequence[int]],
        in_order: torch.Tensor,
        *,
        invariant: bool = False,
    ) -> torch.Tensor:
        given = self._read(inputs)
        o = self._inner.in_rows(given, pool, rows, read, write, in_order, invariant=invariant)
        self._round_rows(pool, in_order, in_order[:, :-1])
        return o

    def by_index(self, inputs: Any, pool: torch.Tensor, rows: RowNumbers) -> torch.Tensor:
        o = self._inner.by_index(self._read(inputs), pool, rows)
        self._round_rows(pool, rows.write, rows.write[:, 1:])
        return o

    def serves(self, n_tokens: int, n_written: int) -> bool:
        return self._inner.serves(n_tokens, n_written)

    def needed(self, state: torch.Tensor, n_tokens: int) -> torch.Tensor:
        return self._inner.needed(state, n_tokens)

    def in_order(self, state: torch.Tensor, n_tokens: int) -> torch.Tensor:
        return self._inner.in_order(state, n_tokens)

    def stored(self, state: torch.Tensor) -> torch.Tensor:
        return state if self._type == EXACT else rounded(state, self._type)

    def _round_rows(self, pool: torch.Tensor, new: torch.Tensor, older: torch.Tensor) -> None:
        for type, numbers in ((self._type, new), (self._older, older)):
            if type != EXACT and numbers.numel():
                round_rows(pool, numbers, type)
