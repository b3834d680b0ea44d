"""Snapshot planes (llama.cpp #22400): plane r holds the state r tokens before the newest.

After a ubatch of n tokens the planes 0 .. min(n, K) - 1 are fresh and deeper ones keep what they
held. Upstream accepts any rollback up to R = K - 1; here the bound is what is truthful, so a stale
plane is never read. A rollback only records which plane the next ubatch reads, and a second one
before that is refused (single use).
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
