"""Context checkpoints: copies of a recurrent state along a prompt, to start a later prompt from.

A recurrent state cannot be cut back like attention cells, so a prompt that continues an earlier
one from somewhere in its middle needs a state saved there (llama.cpp's `--ctx-checkpoints`). They
have nothing to do with the checkpoints taken before a draft, which live for one round.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.memory.hybrid import SequenceCheckpoint
from engine.memory.options import CacheOptions

N_BEFORE_END = 4
"""Tokens between the end of a prompt and its last checkpoint: what a chat template puts there
comes back changed as soon as the answer is a part of the history."""


def cuts(n_prompt: int, n_ubatch: int, message_starts: Sequence[int] = ()) -> list[int]:
    """Places, ascending, at which a prompt of n_prompt tokens is cut to leave a checkpoint.

    They are those of llama.cpp: the starts of a user's messages, and N_BEFORE_END tokens, with
    and without n_ubatch more, before the end.
    """
    end = n_prompt - N_BEFORE_END
    return sorted({at for at in (end - n_ubatch, end, *message_starts) if 0 < at < n_prompt})


class ContextCheckpoints:
    """Checkpoints of one sequence, by the tokens that they cover."""

    def __init__(self, options: CacheOptions) -> None:
        self._n_max, self._min_step = options.ctx_checkpoints, options.checkpoint_min_step
        self._by_length: dict[int, SequenceCheckpoint] = {}
        self._earlier: set[int] = set()
        self.evicted: set[int] = set()
        """Tokens that checkpoints covered which had to make room, as far as the text still has
        them."""

    @property
    def is_off(self) -> bool:
        """Whether none is ever kept."""
        return not self._n_max

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Tokens covered and bytes of each, ascending."""
        return [(n, self._by_length[n].n_bytes) for n in self.lengths]

    @property
    def lengths(self) -> list[int]:
        """Tokens that each checkpoint covers, ascending."""
        return sorted(self._by_length)

    @property
    def n_bytes(self) -> int:
        """Bytes that the checkpoints hold."""
        return sum(checkpoint.n_bytes for checkpoint in self._by_length.values())

    def newest(self, n_tokens: int) -> SequenceCheckpoint | None:
        """The checkpoint that covers most tokens, but no more than n_tokens; None without one."""
        length = max((n for n in self._by_length if n <= n_tokens), default=0)
        return self._by_length.get(length)

    def begin(self, n_tokens: int) -> list[int]:
        """A prompt is decoded that has n_tokens in common with the text so far: those that cover
        more describe it no longer and are erased. Returns what these covered."""
        erased = [n for n in self.lengths if n > n_tokens]
        self._by_length = {n: one for n, one in self._by_length.items() if n <= n_tokens}
        self._earlier = set(self._by_length)
        self.evicted = {n for n in self.evicted if n <= n_tokens}
        return erased

    def wants(
        self, n_done: int, n_prompt: int, n_ubatch: int, message_starts: Sequence[int]
    ) -> bool:
        """Whether to save the state after n_done tokens of a prompt, before more is decoded."""
        if not self._n_max or not 0 < n_done < n_prompt or n_done in self._by_length:
            return False
        if n_done >= n_prompt - N_BEFORE_END - n_ubatch or n_done == max(message_starts, default=0):
            return True
        return n_done - max(self._by_length, default=0) > self._min_step

    def add(self, checkpoint: SequenceCheckpoint) -> int | None:
        """Keep one more. In a full list it takes the place of one that an earlier prompt left too
        close after another, else of the oldest. Returns what that one covered."""
        length, evicted = checkpoint.pos_max + 1, None
        if len(self._by_length) == self._n_max and length not in self._by_length:
            evicted = self._least()
            del self._by_length[evicted]
            self.evicted.add(evicted)
        self._by_length[length] = checkpoint
        self.evicted.discard(length)
        return evicted

    def _least(self) -> int:
        lengths = self.lengths
        for before, length in zip([0, *lengths], lengths, strict=False):
            if length in self._earlier and length - before < self._min_step:
                return length
        return lengths[0]
