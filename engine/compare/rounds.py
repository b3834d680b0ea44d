"""What a leading lane did in a round, for the lanes that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from engine.batch import Span
from engine.compare.divergence import ReferenceLogits, ReferenceMemory
from engine.draft.drafter import Draft
from engine.memory.hybrid import HybridMemory
from engine.sampling.sampler import Sampler


@dataclass(frozen=True)
class SequenceRound:
    """One sequence in a round.

    seq: memory sequence of the lockstep lanes. pos0: position of tokens[0]. tokens: the prompt, or
    the newest token and the draft. chosen: the reference's tokens, [1] behind a prompt; the first
    n_emitted of them are output, the rest lies behind a stop. logits: float32
    [len(chosen), n_vocab], those of the leader. sampler: as it was before it chose.
    """

    seq_id: int
    seq: int
    pos0: int
    tokens: Sequence[int]
    draft: Draft | None
    chosen: Sequence[int]
    n_emitted: int
    logits: torch.Tensor
    sampler: Sampler
    is_prompt: bool = False

    @property
    def first_pos(self) -> int:
        """Position of chosen[0]."""
        return self.pos0 + (len(self.tokens) if self.is_prompt else 1)

    @property
    def decoded(self) -> list[int]:
        """The tokens that the target has decoded for good."""
        return list(self.tokens) if self.is_prompt else [self.tokens[0], *self.chosen[:-1]]

    @property
    def span(self) -> Span:
        """The batch of a lane that verifies the draft; of a prompt, only the end has logits."""
        n = len(self.tokens)
        return Span(self.seq, self.pos0, self.tokens, [n - 1] if self.is_prompt else range(n))

    @property
    def spans_alone(self) -> list[Span]:
        """The batches of a lane that decodes the prompt at once and every further token alone."""
        if self.is_prompt:
            return [self.span]
        places = enumerate(self.decoded, self.pos0)
        return [Span(self.seq, pos, [token], [0]) for pos, token in places]

    def sampled_from(self, i: int, logits: torch.Tensor) -> int:
        """The token that other logits [n_vocab] in place of those of chosen[i] would have given,
        by sampling; drafts that were accepted by rejection were chosen in another way."""
        sampler = self.sampler.clone()
        for j in range(i):
            sampler.draw(sampler.rows(self.logits[j : j + 1])(0))
        return sampler.draw(sampler.rows(logits.unsqueeze(0))(0))

    @cached_property
    def measure(self) -> ReferenceLogits:
        """The reference's logits, which followers' logits are compared with."""
        return ReferenceLogits(self.logits, self.chosen)


@dataclass(frozen=True)
class ReferenceRound:
    """All sequences of a round; `memory` is the leader's, at the round's end until the next one."""

    number: int
    parts: Sequence[SequenceRound]
    memory: HybridMemory
    _held: dict[int, ReferenceMemory] = field(default_factory=dict)

    @property
    def is_prompt(self) -> bool:
        """Whether this round decoded the prompts of all its sequences."""
        return self.parts[0].is_prompt

    def held(self, seq: int) -> ReferenceMemory:
        """The reference's memory of a sequence, which followers' memories are compared with."""
        if seq not in self._held:
            self._held[seq] = ReferenceMemory(self.memory, seq)
        return self._held[seq]
