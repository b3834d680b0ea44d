"""What is added to logits: the bias of some tokens, and penalties that make tokens of the recent
past less likely.

The repeat penalty is that of CTRL (arXiv 1909.05858) with llama.cpp's rule for negative logits.
The history is the prompt and every token accepted since; its last n tokens count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch

from engine.machine.transfer import upload
from engine.sampling.options import SamplerOptions


class Penalties:
    """Penalties of one sequence, and the history that they look at.

    history: tokens looked at, the last of them; kept only while a penalty is in force.
    """

    def __init__(self, options: SamplerOptions, history: Sequence[int] = ()) -> None:
        self._last_n = options.repeat_last_n
        self._repeat = options.repeat_penalty
        self._presence = options.presence_penalty
        self._frequency = options.frequency_penalty
        changed = (self._repeat, self._presence, self._frequency) != (1.0, 0.0, 0.0)
        self.active = changed and self._last_n != 0
        self.history = list(history) if self.active else []

    def accept(self, token: int) -> None:
        """A token was chosen."""
        if self.active:
            self.history.append(token)

    def retract(self) -> None:
        """The newest token was not chosen after all."""
        if self.active:
            self.history.pop()

    def copy_from(self, other: Penalties) -> None:
        """Look at the same history from here on."""
        self.history = other.history.copy()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Penalised logits [n_vocab]; the logits given are not changed."""
        recent = self.history if self._last_n < 0 else self.history[-self._last_n :]
        counts = Counter(recent)
        both = torch.tensor([list(counts), list(counts.values())], dtype=torch.int64)
        ids, times = upload(both, logits.device).unbind()
        of_ids = logits[ids]
        of_ids = torch.where(of_ids > 0, of_ids / self._repeat, of_ids * self._repeat)
        of_ids -= times * self._frequency + self._presence
        return logits.index_copy(0, ids, of_ids)


class LogitBias:
    """Biases of one run.

    biases: token id and what is added to its logit; those of one token add up. banned: token ids
    that get -inf, which is how llama.cpp ignores end tokens.
    """

    def __init__(self, biases: Sequence[tuple[int, float]], banned: Collection[int] = ()) -> None:
        entries = [*biases, *((token, -torch.inf) for token in sorted(banned))]
        self._ids = torch.tensor([token for token, _ in entries], dtype=torch.int64)
        self._values = torch.tensor([bias for _, bias in entries])

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Biased logits [n, n_vocab]; the logits given are not changed."""
        if not self._ids.numel():
            return logits
        if self._ids.device != logits.device:
            self._ids, self._values = self._ids.to(logits.device), self._values.to(logits)
        return logits.index_add(1, self._ids, self._values.expand(logits.shape[0], -1))
