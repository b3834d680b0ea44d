"""Snapshot planes: plane r holds the state r tokens before the newest.

Plain planes (llama.cpp #22400): after a ubatch of n tokens the planes 0 .. min(n, K) - 1 are fresh
and deeper ones keep what they held. Upstream accepts any rollback up to R = K - 1; here the bound
is what is truthful, so a stale plane is never read. A rollback only records which plane the next
ubatch reads, and a second one before that is refused (single use).

Planes with a rolling carry (llama.cpp #25004): a ubatch of n < K tokens leaves K - n planes free
of new states. They receive the states that were newest before it, so history survives ubatches of
any length. Rollbacks accumulate until the next ubatch. The price is a copy of every carried state.
"""

from __future__ import annotations

from engine.memory.plane_storage import PlaneMemory


class PlanesMemory(PlaneMemory):
    """K = n_rs_seq + 1 planes, of which one ubatch's own states are worth reading."""

    def valid_depth(self, seq: int) -> int:
        if self._pending[seq] or self.cells.shared(seq):
            return 0
        return self.n_rs_seq if "stale-plane" in self.faults else self._depth[seq]

    def guaranteed_depth(self, seq: int, n_last: int) -> int:
        return min(n_last, self._n_planes) - 1


class CarryMemory(PlaneMemory):
    """K = n_rs_seq + 1 planes; per sequence idx <= D <= R, D the deepest truthful plane."""

    accumulates = True

    def valid_depth(self, seq: int) -> int:
        return 0 if self.cells.shared(seq) else self._depth[seq] - self._pending[seq]

    def guaranteed_depth(self, seq: int, n_last: int) -> int:
        return min(self.n_rs_seq, max(0, self._depth[seq] - self._pending[seq]) + n_last)
