"""What the width of a batch alone does to the logits, without speculation and without rollback.

The same tokens are decoded one by one and in batches of one width, beginning at every offset.
Sums come out in another order, and where activations are rounded to int8, a value at the edge
between two steps falls to the other side; the difference enters the recurrent state and stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.batch import Span
from engine.options import Prompt, RunOptions

if TYPE_CHECKING:
    from engine.session import Session


@dataclass(frozen=True, slots=True)
class WidthControl:
    """gap: logit of the expected token minus that of the other, decoded one by one. noise: by how
    much batches move the gap between the two most probable tokens, at most, over all positions of
    the output. A gap within the noise is a near tie: either token may come out."""

    gap: float
    noise: float

    @property
    def is_tie(self) -> bool:
        """Whether the width of a batch can turn one token into the other."""
        return abs(self.gap) <= self.noise


@torch.inference_mode()
def width_control(
    session: Session,
    prompt: Prompt,
    tokens: list[int],
    index: int,
    other: int,
    width: int,
    options: RunOptions,
) -> WidthControl:
    """Decode `tokens` behind the prompt; `other` came instead of tokens[index].

    It takes about as long as two plain runs. Raises what Session.context raises.
    """
    pairs: list[torch.Tensor] = []
    alone: list[torch.Tensor] = []
    gap = 0.0
    for row, logits in enumerate(_rows(session, prompt, tokens, 1, 0, options)):
        pairs.append(torch.topk(logits, 2).indices)
        alone.append(logits[pairs[-1]])
        if row == index:
            gap = float(logits[tokens[index]] - logits[other])
    noise = 0.0
    for offset in range(width if width > 1 else 0):
        rows = _rows(session, prompt, tokens, width, offset, options)
        for logits, pair, values in zip(rows, pairs, alone, strict=True):
            moved = logits[pair] - values
            noise = max(noise, abs(float(moved[0] - moved[1])))
    return WidthControl(gap, noise)


def _rows(
    session: Session,
    prompt: Prompt,
    tokens: list[int],
    width: int,
    offset: int,
    options: RunOptions,
) -> Iterator[torch.Tensor]:
    """Logits [n_vocab] that choose each of the tokens: the prompt as it comes in a run, then
    `offset` tokens in one batch, then batches of `width`."""
    memory = session.make_memory(options, 1, session.context([prompt], options), 0)
    n_prompt = len(prompt.tokens)
    spans = [Span(0, 0, prompt.tokens, [n_prompt - 1])]
    start, stop = 0, offset or width
    while start < len(tokens) - 1:
        batch = tokens[start : min(stop, len(tokens) - 1)]
        spans.append(Span(0, n_prompt + start, batch, range(len(batch))))
        start, stop = start + len(batch), start + len(batch) + width
    for span in spans:
        for ubatch in memory.split([span], options.n_ubatch, options.split):
            yield from session.model.forward(ubatch, memory).logits
