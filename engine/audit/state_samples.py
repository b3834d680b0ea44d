"""Copies of recurrent states that a run goes on from, at a few of its rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.memory.hybrid import HybridMemory
from engine.model.recurrence import StateKey

MOST_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class StateSample:
    """The states of one sequence after a round, with n_tokens tokens in memory, as a pass with all
    sequences that run would start from them."""

    round: int
    seq_id: int
    n_tokens: int
    states: Mapping[StateKey, torch.Tensor]


class _Thinned:
    """Rounds spread over a run of unknown length: every n-th, n doubled whenever there are too
    many. rounds: those kept."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self._stride, self._seen = 1, 0

    def takes(self, number: int, most: int) -> bool:
        """Whether the next round, which has this number, is one of them."""
        is_taken = self._seen % self._stride == 0
        self._seen += 1
        if is_taken:
            if len(self.rounds) >= most:
                self.rounds = self.rounds[::2]
                self._stride *= 2
                is_taken = (self._seen - 1) % self._stride == 0
            if is_taken:
                self.rounds.append(number)
        return is_taken


class StateSamples:
    """Up to n rounds, fewer where they would take more than MOST_BYTES: half of them after a
    rollback, the others anywhere; as well, the last round of every sequence."""

    def __init__(self, memory: HybridMemory, n: int) -> None:
        recurrent = memory.recurrent
        size = recurrent.layout.n_bytes * recurrent.n_seqs if recurrent else 0
        self._most = max(1, min(n, MOST_BYTES // size) // 2) if size else 0
        self._any, self._undone = _Thinned(), _Thinned()
        self._kept: dict[tuple[int, int], StateSample] = {}
        self._ended: set[tuple[int, int]] = set()

    def look(
        self,
        number: int,
        memory: HybridMemory,
        running: Mapping[int, tuple[int, int]],
        ended: Sequence[int],
        *,
        undone: bool,
    ) -> None:
        """Round `number` is over. running: memory sequence and tokens in memory, by seq_id; ended:
        those of them that go no further. undone: whether any of them was rolled back."""
        if not self._most or not running:
            return
        takes = self._any.takes(number, self._most)
        takes |= undone and self._undone.takes(number, self._most)
        if not takes and not ended:
            return
        seqs = [seq for seq, _ in running.values()]
        found = memory.inputs(seqs)
        for (seq_id, (_, n_tokens)), states in zip(running.items(), found, strict=True):
            if takes or seq_id in ended:
                copies = {key: state.clone() for key, state in states.items()}
                key = number, seq_id
                self._kept[key] = StateSample(number, seq_id, n_tokens, copies)
                if seq_id in ended:
                    self._ended.add(key)
        kept = {*self._any.rounds, *self._undone.rounds}
        for key in list(self._kept):
            if key[0] not in kept and key not in self._ended:
                del self._kept[key]

    def of(self, seq_id: int) -> list[StateSample]:
        """The samples of a sequence, in order."""
        return sorted(
            (one for one in self._kept.values() if one.seq_id == seq_id), key=lambda s: s.round
        )
