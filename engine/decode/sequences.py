"""Sequences being decoded, and the assignment of memory slots to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from engine.draft.drafter import DraftRequest
from engine.options import Prompt, RunOptions
from engine.sampling.grammar import Grammar
from engine.sampling.sampler import Sampler


@dataclass(slots=True)
class DecodingSequence:
    """A prompt that is decoding, waiting for a slot, or finished.

    seq_id: number of the prompt in the trace. index: sequence in memory. n_tokens: tokens in
    memory. last: newest token, chosen but not decoded. stop: why the sequence ended: "" while it
    runs, end, limit, context, grammar, stopped or error.
    """

    seq_id: int
    index: int
    prompt: Prompt
    sampler: Sampler
    n_tokens: int = 0
    last: int = -1
    emitted: list[int] = field(default_factory=list)
    stop: str = ""

    @property
    def in_prompt(self) -> bool:
        """Whether prompt tokens are still to be decoded."""
        return self.n_tokens < len(self.prompt.tokens)

    def draft_request(self, longest: int, options: RunOptions, n_ctx: int) -> DraftRequest | None:
        """The request to the drafters: up to `longest` tokens within context and token limit, or
        None if nothing is left."""
        limit = min(longest, n_ctx - self.n_tokens - 2)
        if options.n_predict >= 0:
            limit = min(limit, options.n_predict - len(self.emitted) - 1)
        return DraftRequest(self.index, self.n_tokens, self.last, limit) if limit > 0 else None

    def emit(
        self,
        tokens: list[int],
        n_decoded: int,
        options: RunOptions,
        n_ctx: int,
        end_tokens: Collection[int],
    ) -> int:
        """Append tokens until a stop condition holds; returns how many were emitted.

        n_decoded: tokens that the target had decoded when it chose the first of them. Tokens chosen
        after a grammar error are not emitted.
        """
        grammar = self.sampler.grammar
        if grammar and grammar.error:
            tokens = tokens[: max(0, grammar.n_good - len(self.emitted))]
        for count, token in enumerate(tokens):
            self.emitted.append(token)
            if token in end_tokens:
                self.stop = "end"
            elif 0 <= options.n_predict <= len(self.emitted):
                self.stop = "limit"
            elif n_decoded + count + 1 >= n_ctx:
                self.stop = "context"
            if self.stop:
                return count + 1
        if grammar and grammar.error:
            self.stop = "grammar"
        return len(tokens)


def sampler_for(
    prompt: Prompt, options: RunOptions, end_tokens: Collection[int], grammar: Grammar | None
) -> Sampler:
    """The sampler of a prompt in its state before the first token."""
    banned, start = end_tokens if options.ignore_eos else (), grammar.start() if grammar else None
    return Sampler(options.sampler, banned, prompt.tokens, start)


ChooseSlot = Callable[[Sequence[int], Sequence[int]], int]
"""Chooses one of the free slots for a prompt with these tokens."""


class SlotAssignment:
    """Slot assignment in order of arrival; a sequence gets the slot that has been free longest,
    unless `choose` picks another.

    holders: memory slot -> seq_id of its current or last sequence.
    """

    def __init__(
        self, sequences: Sequence[DecodingSequence], n_slots: int, choose: ChooseSlot | None = None
    ) -> None:
        self.sequences = sequences
        self._choose = choose or (lambda free, tokens: free[0])
        self.holders: dict[int, int] = {}
        self._waiting = deque(sequences)
        self._free = list(range(n_slots))

    @property
    def running(self) -> list[DecodingSequence]:
        """Sequences that hold a slot and have not stopped."""
        return [s for s in self.sequences if s.index >= 0 and not s.stop]

    @property
    def is_busy(self) -> bool:
        """Whether any sequence runs or waits."""
        return bool(self._waiting or self.running)

    def admit(self) -> list[DecodingSequence]:
        """Give free slots to the sequences that have waited longest, and return those."""
        admitted = []
        while self._waiting and self._free:
            sequence = self._waiting.popleft()
            sequence.index = self._choose(self._free, sequence.prompt.tokens)
            self._free.remove(sequence.index)
            self.holders[sequence.index] = sequence.seq_id
            admitted.append(sequence)
        return admitted

    def release(self) -> list[int]:
        """Free the slots of stopped sequences; returns their indices."""
        released = [s for s in self.sequences if s.stop and s.index >= 0]
        indices = [sequence.index for sequence in released]
        self._free.extend(indices)
        for sequence in released:
            sequence.index = -1
        return indices

    def cancel(self, seq_id: int) -> None:
        """End one sequence, whether it runs or waits."""
        sequence = self.sequences[seq_id]
        sequence.stop = sequence.stop or "stopped"
        self._waiting = deque(s for s in self._waiting if s is not sequence)

    def stop(self) -> None:
        """End running sequences and drop waiting ones."""
        for sequence in self.sequences:
            self.cancel(sequence.seq_id)
