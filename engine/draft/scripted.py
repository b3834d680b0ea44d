"""A scripted drafter with a given acceptance, to provoke rare cases.

It knows the target's own continuation, because plain decoding runs ahead of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.draft.drafter import Draft, Drafter, DraftRequest
from engine.errors import OptionError


@dataclass(slots=True)
class _Script:
    """State of one sequence. n_prompt: position of true[0]; n_drafts: drafts made so far."""

    n_prompt: int
    rest: Iterator[int]
    true: list[int] = field(default_factory=list)
    n_drafts: int = 0

    def up_to(self, pos: int) -> None:
        """Extend the true tokens to a position, if the continuation is that long."""
        while self.n_prompt + len(self.true) <= pos:
            token = next(self.rest, None)
            if token is None:
                return
            self.true.append(token)


class ScriptedDrafter(Drafter):
    """Drafts n_max tokens of which the first k are right and the others wrong.

    n_right: k of the first, second, … draft of each sequence, repeated. n_max: tokens of a draft;
    fewer only at the end of context or output. continue_: tokens of plain decoding after a prompt,
    as an iterator. Confidence and alternatives are not observed. Raises OptionError for numbers out
    of range.
    """

    name = "scripted"

    def __init__(
        self,
        n_right: Sequence[int],
        n_max: int,
        n_vocab: int,
        continue_: Callable[[Sequence[int]], Iterator[int]],
    ) -> None:
        if not n_right or not all(0 <= n <= n_max for n in n_right):
            raise OptionError(
                f"--draft-accept {','.join(map(str, n_right))} is not within drafts of {n_max}.",
                "Give numbers from 0, for example 0,3,1, or raise --spec-draft-n-max.",
            )
        self.n_max = n_max
        self._n_right, self._n_vocab, self._continue = tuple(n_right), n_vocab, continue_
        self._scripts: dict[int, _Script] = {}

    def begin(self, seq: int, prompt: Sequence[int]) -> None:
        """A prompt starts a script."""
        self._scripts[seq] = _Script(len(prompt), self._continue(prompt))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(self._scripts[request.seq], request) for request in requests]

    def forget(self, seq: int) -> None:
        self._scripts.pop(seq, None)

    def _draft(self, script: _Script, request: DraftRequest) -> Draft:
        k = self._n_right[script.n_drafts % len(self._n_right)]
        script.n_drafts += 1
        first = request.pos0 + 1
        script.up_to(first + request.n_max - 1)
        tokens = script.true[first - script.n_prompt :][: request.n_max]
        tokens += [0] * (request.n_max - len(tokens))  # beyond the end nothing is verified
        tokens[k:] = [(token + 1) % self._n_vocab for token in tokens[k:]]
        return Draft(tokens, drafter=self.name)
