"""The sampler chain: top-k, top-p, min-p, temperature, one random draw per token.

The order is llama.cpp's. Speculation examines positions one by one with the same sampler, so a
run draws as many random numbers as plain decoding does, in the same order.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from engine.options import SamplerOptions


class Candidates:
    """Logits of several positions, brought to the host once, the largest first.

    ids: int64 [n, k]. logits: float32 [n, k], descending.
    """

    def __init__(self, ids: np.ndarray, logits: np.ndarray) -> None:
        self.ids, self.logits = ids, logits


class Sampler:
    """Samples one sequence. The generator is seeded per sequence, as a server does per request.

    banned: token ids that are never chosen (--ignore-eos bans the end-of-generation tokens).
    """

    def __init__(self, options: SamplerOptions, banned: Collection[int] = ()) -> None:
        self._options = options
        self._banned = torch.tensor(sorted(banned), dtype=torch.int64)
        self._random = np.random.Generator(np.random.PCG64(options.seed))

    def clone(self) -> Sampler:
        """A sampler that will draw the same numbers."""
        other = Sampler(self._options, self._banned.tolist())
        other.copy_from(self)
        return other

    def copy_from(self, other: Sampler) -> None:
        """Draw from here on what `other` would draw."""
        self._random.bit_generator.state = other._random.bit_generator.state

    def candidates(self, logits: torch.Tensor) -> Candidates:
        """What may be drawn at each row of logits [n, n_vocab]; the only host transfer."""
        if self._banned.numel():
            logits = logits.index_fill(1, self._banned.to(logits.device), -torch.inf)
        k = logits.shape[1]
        if self._options.temp <= 0:
            k = 1
        elif self._options.top_k:
            k = min(k, self._options.top_k)
        values, ids = (logits.max(1, keepdim=True) if k == 1 else torch.topk(logits, k))[:2]
        return Candidates(ids.cpu().numpy(), values.cpu().numpy())

    def pick(self, candidates: Candidates, row: int) -> int:
        """Sample one row. Rows must be examined in order: each draws once from the generator."""
        ids = candidates.ids[row]
        if self._options.temp <= 0:
            return int(ids[0])
        logits = candidates.logits[row].astype(np.float64)
        probs = _softmax(logits)
        kept = int(np.searchsorted(np.cumsum(probs), self._options.top_p)) + 1
        kept = min(kept, int((probs >= self._options.min_p * probs[0]).sum()))
        probs = _softmax(logits[: max(kept, 1)] / self._options.temp)
        drawn = np.searchsorted(np.cumsum(probs), self._random.random(), side="right")
        return int(ids[min(int(drawn), len(probs) - 1)])


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits[0])
    return np.asarray(weights / weights.sum())
