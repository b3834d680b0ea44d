"""One sequence being decoded, and which sequences hold a memory slot or wait for one."""

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
    """A prompt that is decoded: in a memory slot, waiting for one, or ended.

    seq_id: number of the prompt, as the trace shows it. index: sequence in memory.
    n_tokens: tokens in memory. last: the newest token, chosen but not decoded. stop: why the
    sequence ended ("" while it goes on; end, limit, context, grammar, stopped or error).
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
        """Whether tokens of the prompt are still to be decoded."""
        return self.n_tokens < len(self.prompt.tokens)

    def draft_request(self, longest: int, options: RunOptions, n_ctx: int) -> DraftRequest | None:
        """What is asked of drafters: what context and token limit leave of a draft of `longest`
        tokens, None = nothing."""
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

        n_decoded: tokens that the target had decoded when it chose the first of them. What was
        chosen after an error of the grammar is not emitted.
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
    """The sampler of a prompt's text as it is before the first token."""
    banned, start = end_tokens if options.ignore_eos else (), grammar.start() if grammar else None
    return Sampler(options.sampler, banned, prompt.tokens, start)


ChooseSlot = Callable[[Sequence[int], Sequence[int]], int]
"""Which of the free slots to give to a prompt of these tokens."""


class SlotAssignment:
    """Sequences in the order they are admitted in; each takes the slot that is free longest,
    unless `choose` finds a better one.

    holders: memory slot -> seq_id of the sequence that holds it, or held it last.
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
        """Give free slots to the sequences that have waited longest; returns these sequences."""
        admitted = []
        while self._waiting and self._free:
            sequence = self._waiting.popleft()
            sequence.index = self._choose(self._free, sequence.prompt.tokens)
            self._free.remove(sequence.index)
            self.holders[sequence.index] = sequence.seq_id
            admitted.append(sequence)
        return admitted

    def release(self) -> list[int]:
        """Take the slots of sequences that have stopped; returns their indices."""
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
        """End what runs and drop what waits."""
        for sequence in self.sequences:
            self.cancel(sequence.seq_id)
