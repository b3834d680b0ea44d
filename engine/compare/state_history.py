"""Which position a recurrent state belongs to, by the states of a lane that never rolls back.

Of each position the last recurrent layer is kept, which is enough to tell positions apart: its
state and its window depend on all tokens before, and rounding moves them far less than a token
does.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from engine.compare.state_blob import RecurrentState, relative_errors
from engine.model.recurrence import StateKey

_MUCH_NEARER = 4.0
_NEAR = 0.1


class StateHistory:
    """The last n positions of one sequence."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._known: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()

    def add(self, state: RecurrentState | None) -> None:
        """Keep the state of its position."""
        if state is None or not state.states:
            return
        self._known[state.pos] = _of_last_layer(state)
        while len(self._known) > self._n:
            self._known.popitem(last=False)

    def position_of(self, state: RecurrentState) -> int | None:
        """The position of the recurrent state, or of the window where a layer has no other state;
        None where it is none of those known, or two are too alike to tell."""
        positions = self.positions_of(state)
        return positions.get("state", positions.get("window"))

    def positions_of(self, state: RecurrentState) -> dict[str, int | None]:
        """The same for each state of the last recurrent layer, by its name."""
        return {name: self._nearest(name, row) for name, row in _of_last_layer(state).items()}

    def _nearest(self, name: str, found: np.ndarray) -> int | None:
        key = StateKey(0, name)
        errors = sorted(
            (relative_errors({key: known[name]}, {key: found})[key], pos)
            for pos, known in self._known.items()
        )
        if not errors or not errors[0][0] < _NEAR:
            return None
        if len(errors) > 1 and errors[1][0] <= _MUCH_NEARER * errors[0][0]:
            return None
        return errors[0][1]


def _of_last_layer(state: RecurrentState) -> dict[str, np.ndarray]:
    last = max((key.layer for key in state.states), default=-1)
    return {key.name: row for key, row in state.states.items() if key.layer == last}
