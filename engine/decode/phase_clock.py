"""The phase clock: milliseconds of a round by phase, and which sequences they were spent on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.machine.clock import run_clock
from engine.trace.records import PHASES


@dataclass(slots=True)
class PhaseClock:
    """Milliseconds spent per phase of a round, by all sequences together or by single ones."""

    _common: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _own: dict[int, dict[str, float]] = field(default_factory=dict)
    _since: float = 0.0

    def start(self) -> None:
        """Begin timing."""
        self._since = run_clock()

    def stop(self, phase: str, seqs: Sequence[int] = ()) -> float:
        """Book the time since `start` under a phase and begin anew; returns its milliseconds.

        seqs: memory sequences that it was spent on, an equal part for each entry; none = all.
        """
        now = run_clock()
        ms = (now - self._since) * 1e3
        if not seqs:
            self._common[phase] += ms
        for seq in seqs:
            self._own.setdefault(seq, dict.fromkeys(PHASES, 0.0))[phase] += ms / len(seqs)
        self._since = now
        return ms

    def columns(self, seq: int, n_seqs: int) -> dict[str, float]:
        """Milliseconds per phase: of this sequence alone, plus its n-th part (n_seqs) of the time
        that all sequences spent together."""
        own = self._own.get(seq, {})
        return {
            f"{phase}_ms": ms / n_seqs + own.get(phase, 0.0) for phase, ms in self._common.items()
        }
