"""The round of a leading lane, for the lanes that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.batch import Span
from engine.compare.divergence import ReferenceLogits, ReferenceMemory
from engine.decode.round import Round
from engine.memory.hybrid import HybridMemory


@dataclass(frozen=True)
class ReferenceRound:
    """All sequences of a round; `memory` is the leader's, at the round's end until the next one.

    parts: their rounds. accepted: the reference's tokens, [1] after a prompt; what is not emitted
    of them lies after a stop. logits: float32 [len(accepted), n_vocab], those of the leader.
    before: the reference's sampler.
    """

    number: int
    parts: Sequence[Round]
    memory: HybridMemory
    _held: dict[int, ReferenceMemory] = field(default_factory=dict)
    _logits: dict[int, ReferenceLogits] = field(default_factory=dict)

    @property
    def is_prompt(self) -> bool:
        """Whether this round decoded the prompts of all its sequences."""
        return self.parts[0].is_prompt

    def held(self, seq: int) -> ReferenceMemory:
        """The reference's memory of a sequence, which followers' memories are compared with."""
        if seq not in self._held:
            self._held[seq] = ReferenceMemory(self.memory, seq)
        return self._held[seq]

    def measure(self, part: Round) -> ReferenceLogits:
        """The reference's logits of a part, which followers' logits are compared with."""
        if part.seq not in self._logits:
            self._logits[part.seq] = ReferenceLogits(part.rows, part.accepted)
        return self._logits[part.seq]


def spans_alone(part: Round) -> list[Span]:
    """The batches of a lane that decodes the prompt at once and every further token alone."""
    if part.is_prompt:
        return [part.span]
    return [Span(part.seq, pos, [token], [0]) for pos, token in enumerate(part.decoded, part.pos0)]
