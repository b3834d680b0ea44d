"""Greedy generation in batches, repeated text in it, and the way out of it.

Small models fall into loops under greedy decoding.  They are trained out of it on their own
continuations: where the next token would complete an n-gram already seen in the same sequence, it
is made less likely (sequence-level unlikelihood, Welleck et al., "Neural text generation with
unlikelihood training", 2020), and the best token that does not repeat is made more likely.  The
continuation goes on with either, by chance, so that rows hold loops of every depth and the ways out
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.demo_training.corpus import Corpus
from tests.demo_training.model import DemoModel
from tests.demo_training.tokenizer import EOT

N_GRAM = 6
NONE = -1
P_REPEAT = 0.7  # a loop of k repeated tokens is met with probability P_REPEAT ** k


@dataclass(frozen=True, slots=True)
class Repaired:
    """Continuations `ids` [n, L], and what would repair them: where the greedy token completes a
    repeated n-gram it is in `avoided` [n, L] and the best one that does not in `better` [n, L];
    NONE elsewhere."""

    ids: Tensor
    avoided: Tensor
    better: Tensor


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


def whole_texts(texts: Sequence[Tensor], length: int) -> Tensor:
    """Texts [T] up to their ends, one after another in rows [m, length].

    Each row begins with a text.
    """
    made: list[list[int]] = [[]]
    for text in texts:
        row = text.tolist()
        if len(made[-1]) >= length:
            made.append([])
        made[-1].extend(row[: row.index(EOT) + 1] if EOT in row else row)
    return torch.tensor([row[:length] for row in made if len(row) >= length])


class _Row:
    """The n-grams of one growing sequence."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.tail = list(ids)
        self.followers: dict[tuple[int, ...], set[int]] = {}
        for end in range(N_GRAM, len(ids) + 1):
            self._note(ids[end - N_GRAM : end])

    def _note(self, gram: Sequence[int]) -> None:
        self.followers.setdefault(tuple(gram[:-1]), set()).add(gram[-1])

    def append(self, token: int) -> None:
        self.tail = [*self.tail, token][-N_GRAM:]
        if len(self.tail) == N_GRAM:
            self._note(self.tail)

    def repeats(self) -> set[int]:
        """The tokens that would complete an n-gram seen before."""
        return self.followers.get(tuple(self.tail[1 - N_GRAM :]), set())


@torch.no_grad()
def generate_repaired(
    model: DemoModel,
    prompts: Tensor,
    n_tokens: int,
    layout: np.ndarray,
    rng: np.random.Generator,
    p_repeat: float = P_REPEAT,
) -> Repaired:
    """Continue prompts [B, P] greedily; a token that would complete a repeated n-gram is kept with
    probability p_repeat.

    Tokens of `layout` [V] may repeat: line ends and indentation do so by nature, and a model that
    avoids them writes lines that begin anywhere.
    """
    rows = [_Row(row) for row in prompts.tolist()]
    none = torch.full_like(prompts, NONE)
    ids, avoided, better = [prompts], [none], [none]
    hidden, caches = model.trunk(prompts)
    for position in range(prompts.shape[1], prompts.shape[1] + n_tokens):
        logits = model.logits(hidden[:, -1])
        greedy = logits.argmax(-1)
        for i, row in enumerate(rows):
            banned = [t for t in row.repeats() if not layout[t]]
            logits[i, banned] = -torch.inf
        best = logits.argmax(-1)
        kept = torch.from_numpy(rng.random(len(rows)) < p_repeat)
        ids.append(torch.where(kept, greedy, best)[:, None])
        for row, token in zip(rows, ids[-1][:, 0].tolist(), strict=True):
            row.append(token)
        avoided.append(torch.where(best == greedy, NONE, greedy)[:, None])
        better.append(torch.where(best == greedy, NONE, best)[:, None])
        hidden, caches = model.trunk(ids[-1], caches, position)
    return Repaired(torch.cat(ids, 1), torch.cat(avoided, 1), torch.cat(better, 1))


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


def repair_loss(logits: Tensor, better: Tensor, avoided: Tensor) -> Tensor:
    """-log p(better) - log(1 - p(avoided)) summed where a token is to be avoided, per position.

    logits [N, V], better [N], avoided [N].
    """
    at = (avoided != NONE).nonzero()[:, 0]
    logp = torch.log_softmax(logits[at], dim=-1)
    wanted = logp.gather(1, better[at, None])
    unwanted = logp.gather(1, avoided[at, None])
    penalty = -torch.log((1 - unwanted.exp()).clamp_min(1e-4))
    return (penalty - wanted).sum() / len(better)
