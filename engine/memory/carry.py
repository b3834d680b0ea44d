"""Planes with a rolling carry (llama.cpp #25004): history survives ubatches of any length.

A ubatch of n < K tokens leaves K - n planes free of new states. They receive the states that
were newest before it, so plane r is the state r tokens ago however the tokens were cut into
ubatches. Rollbacks accumulate until the next ubatch. The price is a copy of every carried state.
"""

from __future__ import annotations

from engine.memory.plane_storage import PlaneMemory


class CarryMemory(PlaneMemory):
    """K = n_rs_seq + 1 planes; per sequence idx <= D <= R, D the deepest truthful plane."""

    accumulates = True

    def valid_depth(self, seq: int) -> int:
        return 0 if self.cells.shared(seq) else self._depth[seq] - self._pending[seq]

    def guaranteed_depth(self, seq: int, n_last: int) -> int:
        return min(self.n_rs_seq, max(0, self._depth[seq] - self._pending[seq]) + n_last)
