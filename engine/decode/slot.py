"""One sequence being decoded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from engine.options import Prompt, RunOptions
from engine.sampling.sampler import Sampler


@dataclass(slots=True)
class Slot:
    """A sequence in a memory slot.

    seq_id: number of the prompt, as the trace shows it. index: sequence in memory.
    n_tokens: tokens in memory. last: the newest token, chosen but not decoded. stop: why the
    sequence ended ("" while it goes on; end, limit, context, stopped or error).
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

    def draft_limit(self, longest: int, options: RunOptions, n_ctx: int) -> int:
        """What context and token limit leave of a draft of `longest` tokens, 0 = none."""
        limit = min(longest, n_ctx - self.n_tokens - 2)
        if options.n_predict >= 0:
            limit = min(limit, options.n_predict - len(self.emitted) - 1)
        return max(0, limit)

    def emit(
        self,
        tokens: list[int],
        n_decoded: int,
        options: RunOptions,
        n_ctx: int,
        end_tokens: Collection[int],
    ) -> int:
        """Append tokens until a stop condition holds; returns how many were emitted.

        n_decoded: tokens that the target had decoded when it chose the first of them.
        """
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
        return len(tokens)
