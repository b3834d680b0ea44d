"""Which position a recurrent state belongs to, told by the states of a lane that never rolls back.

Of each position the last recurrent layer is kept, which is enough to tell positions apart: its
state and its window depend on all tokens before, and rounding moves them far less than a token
does.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from engine.compare.state_blob import RecurrentState, relative_errors

_MUCH_NEARER = 4.0
_NEAR = 0.1


class StateHistory:
    """The last n positions of one sequence."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._known: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def add(self, state: RecurrentState | None) -> None:
        """Keep the state of its position."""
        if state is None or not state.s:
            return
        self._known[state.pos] = state.s[-1], state.r[-1]
        while len(self._known) > self._n:
            self._known.popitem(last=False)

    def positions_of(self, state: RecurrentState) -> tuple[int | None, int | None]:
        """The positions whose S and R these are; None where it is none of those known, or two
        are too alike to tell."""
        if not state.s:
            return None, None
        return self._nearest(state.s[-1], 0), self._nearest(state.r[-1], 1)

    def _nearest(self, found: np.ndarray, which: int) -> int | None:
        errors = sorted(
            (relative_errors([known[which]], [found])[0], pos) for pos, known in self._known.items()
        )
        if not errors or not errors[0][0] < _NEAR:
            return None
        if len(errors) > 1 and errors[1][0] <= _MUCH_NEARER * errors[0][0]:
            return None
        return errors[0][1]
