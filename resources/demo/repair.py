"""Greedy generation in batches and the marking of repeated text in it.

Small models fall into loops under greedy decoding.  They are trained out of it with
sequence-level unlikelihood (Welleck et al., "Neural text generation with unlikelihood training",
2020): tokens of the model's own continuations that complete an n-gram already seen in the same
sequence are made less likely.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from resources.demo.corpus import Corpus
from resources.demo.model import DemoModel

N_GRAM = 6


def marks(ids: Sequence[int], n_prompt: int, n: int = N_GRAM) -> list[bool]:
    """For each token: generated, and the end of an n-gram that occurred before it."""
    seen: set[tuple[int, ...]] = set()
    result = []
    for end in range(1, len(ids) + 1):
        gram = tuple(ids[max(0, end - n) : end])
        result.append(end > n_prompt and len(gram) == n and gram in seen)
        seen.add(gram)
    return result


@torch.no_grad()
def generate(model: DemoModel, prompts: Tensor, n_tokens: int) -> Tensor:
    """Continue prompts [B, P] greedily: [B, P + n_tokens]; end-of-text does not stop it."""
    hidden, caches = model.trunk(prompts)
    ids = [prompts, model.logits(hidden[:, -1:]).argmax(-1)]
    for position in range(prompts.shape[1], prompts.shape[1] + n_tokens - 1):
        hidden, caches = model.trunk(ids[-1], caches, position)
        ids.append(model.logits(hidden).argmax(-1))
    return torch.cat(ids, dim=1)


def cut_prompts(
    corpus: Corpus, seed: int, n: int, groups: Sequence[str], newline: np.ndarray
) -> list[Tensor]:
    """About n prompts of training text [B, P], from line starts, sorted into equal lengths.

    Half of them end at the end of a line, where a user's prompt usually ends.
    """
    rng = np.random.default_rng(seed)
    by_length: dict[int, list[np.ndarray]] = {}
    for _ in range(n):
        stream = corpus.train[str(rng.choice(list(groups)))]
        text = stream.window(int(rng.integers(1 << 30)), 64)
        length = int(rng.choice([8, 16, 32]))
        if rng.random() < 0.5:  # the text that ends a line there, shifted to the same length
            ends = np.flatnonzero(newline[text]) + 1
            ends = ends[ends >= length]
            if len(ends):
                text = text[ends[0] - length :]
        by_length.setdefault(length, []).append(text[:length])
    return [torch.from_numpy(np.stack(rows)) for _, rows in sorted(by_length.items())]


def generated_rows(
    model: DemoModel, prompts: Sequence[Tensor], length: int, layout: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Greedy rows [n, length] from all prompts and their marks (bool, same shape).

    Tokens of `layout` [V] are never marked: line ends and indentation repeat by nature, and a
    model that avoids them writes lines that begin anywhere.
    """
    rows = []
    flags: list[list[bool]] = []
    for batch in prompts:
        ids = generate(model, batch, length - batch.shape[1])
        rows.append(ids)
        flags.extend(marks(row, batch.shape[1]) for row in ids.tolist())
    ids = torch.cat(rows)
    return ids, torch.tensor(flags) & ~torch.from_numpy(layout)[ids]


def unlikelihood(logits: Tensor, targets: Tensor, marked: Tensor) -> Tensor:
    """-log(1 - p(target)) summed over marked positions, per position. [N, V], [N], [N]"""
    logp = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]
    penalty = -torch.log((1 - logp.exp()).clamp_min(1e-4))
    return (penalty * marked).sum() / len(targets)
