"""A drafter whose acceptance is chosen beforehand: k right tokens, the others wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import torch

from engine.draft.drafter import Draft, DraftRequest
from engine.errors import OptionError


class ScriptedDrafter:
    """Drafts as many tokens as it may. It knows the target's continuation of every prompt.

    n_right: right tokens in the first, second, … draft of a sequence, over and over.
    continue_: the tokens that follow a prompt, as an iterator. Confidence is not observed.
    Raises OptionError for numbers that are no lengths.
    """

    name = "scripted"

    def __init__(
        self,
        n_right: Sequence[int],
        n_vocab: int,
        continue_: Callable[[Sequence[int]], Iterator[int]],
    ) -> None:
        if not n_right or min(n_right) < 0:
            raise OptionError(
                f"{list(n_right)} are no numbers of right tokens.", "Give numbers from 0."
            )
        self._n_right, self._n_vocab, self._continue = tuple(n_right), n_vocab, continue_
        self._turns: dict[int, Iterator[int]] = {}
        self._rest: dict[int, Iterator[int]] = {}
        self._true: dict[int, list[int]] = {}

    def observe(self, seq: int, pos0: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """A prompt starts a sequence; true[p] is its token at position p."""
        if pos0 == 0:
            self._turns[seq], self._rest[seq] = cycle(self._n_right), self._continue(tokens)
            self._true[seq] = list(tokens)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request."""
        return [self._draft(request) for request in requests]

    def forget(self, seq: int) -> None:
        """Drop the sequence."""
        for kept in (self._turns, self._rest, self._true):
            kept.pop(seq, None)

    def _draft(self, request: DraftRequest) -> Draft:
        true, first = self._true[request.seq], request.pos0 + 1
        end = first + request.n_max
        while len(true) < end and (token := next(self._rest[request.seq], None)) is not None:
            true.append(token)
        tokens, n_right = true[first:end], next(self._turns[request.seq])
        tokens[n_right:] = [(token + 1) % self._n_vocab for token in tokens[n_right:]]
        n = len(tokens)
        return Draft(tokens, [math.nan] * n, [[]] * n, [[]] * n, self.name)
