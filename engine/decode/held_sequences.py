"""What the slots of a memory still hold when their sequences have ended, and how to use it again.

A new prompt starts from what it has in common with the old text. First choice is the live state,
cut by as many tokens as its snapshots reach back; then a context checkpoint; else nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.memory.context_checkpoints import ContextCheckpoints, cuts
from engine.memory.hybrid import HybridMemory, SequenceCheckpoint
from engine.options import CacheOptions, Prompt


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """n_tokens: tokens of a new prompt that need no processing. checkpoint: what to restore for
    it; None: removing the tokens behind them is enough."""

    n_tokens: int
    checkpoint: SequenceCheckpoint | None = None


class HeldSequences:
    """Tokens and context checkpoints of every sequence of a memory.

    n_ubatch: most tokens of a forward pass. device: where checkpoints are kept, None = where the
    states are.
    """

    def __init__(
        self,
        memory: HybridMemory,
        options: CacheOptions,
        n_ubatch: int,
        device: torch.device | None,
    ) -> None:
        self.memory = memory
        n_seqs = memory.attention.n_seqs
        self.tokens: list[list[int]] = [[] for _ in range(n_seqs)]
        self.checkpoints = [ContextCheckpoints(options) for _ in range(n_seqs)]
        self._n_ubatch, self._device = n_ubatch, device
        self._makes_any = memory.recurrent is not None and options.ctx_checkpoints > 0

    def best(self, free: Sequence[int], tokens: Sequence[int]) -> int:
        """Of these sequences the one that spares a prompt most work, the first of equal ones."""
        return max(free, key=lambda seq: self.reuse(seq, tokens).n_tokens)

    def reuse(self, seq: int, tokens: Sequence[int]) -> PromptReuse:
        """What a sequence can give to a prompt; changes nothing. The prompt's last token is always
        decoded again, because nobody keeps logits."""
        held, recurrent = self.tokens[seq], self.memory.recurrent
        n = min(n_common(held, tokens), len(tokens) - 1)
        depth = len(held) - n
        if depth == 0 or recurrent is None or depth <= recurrent.valid_depth(seq):
            return PromptReuse(n)
        checkpoint = self.checkpoints[seq].newest(n)
        return PromptReuse(checkpoint.pos_max + 1, checkpoint) if checkpoint else PromptReuse(0)

    def resume(self, seq: int, tokens: Sequence[int]) -> PromptReuse:
        """Bring a sequence to where a prompt can go on; what does not belong to it is gone."""
        found = self.reuse(seq, tokens)
        if found.checkpoint:
            self.memory.restore(seq, found.checkpoint)
        else:
            self.memory.seq_rm(seq, found.n_tokens)
        self.checkpoints[seq].begin(n_common(self.tokens[seq], tokens))
        self.tokens[seq] = list(tokens[: found.n_tokens])
        return found

    def observe(self, seq: int, tokens: Sequence[int]) -> None:
        """Note that a sequence's memory now holds these tokens behind the earlier ones."""
        self.tokens[seq].extend(tokens)

    def part_end(self, prompt: Prompt, n_done: int) -> int:
        """Where the part of a prompt that starts at token n_done ends: at the next place that
        wants a checkpoint, else at the end of the prompt."""
        n_prompt = len(prompt.tokens)
        if not self._makes_any:
            return n_prompt
        places = cuts(n_prompt, self._n_ubatch, prompt.message_starts)
        return next((at for at in places if at > n_done), n_prompt)

    def checkpoint(self, seq: int, prompt: Prompt, n_done: int) -> int:
        """Save the state behind n_done tokens of a prompt if that place is worth it; bytes."""
        kept = self.checkpoints[seq]
        if not self._makes_any or not kept.wants(
            n_done, len(prompt.tokens), self._n_ubatch, prompt.message_starts
        ):
            return 0
        save = self.memory.save(seq, self._device)
        kept.add(save)
        return save.n_bytes


def n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
