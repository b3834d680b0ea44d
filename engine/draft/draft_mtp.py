"""draft-mtp: the target's own multi-token-prediction head drafts.

The head reads the pair (token x_p, target hidden of p - 1) at position p and predicts x_{p+1};
while drafting it feeds on its own hidden rows. Its attention cells for accepted positions are
made again from the target's hidden rows, together with the first step of the next draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.draft.drafter import Draft, DraftRequest
from engine.draft.model_drafter import ModelDrafter, single_tokens
from engine.draft.token_draws import TokenDraws
from engine.memory.batch import Span, UBatch
from engine.memory.hybrid import HybridMemory
from engine.model.mtp import MtpHead
from engine.options import SpecOptions
from engine.transfer import upload


@dataclass(slots=True)
class _Backlog:
    """Tokens that the target has decoded and the head has not; inputs[i] pairs with tokens[i].

    n_decoded: positions below this are in the head's memory with true inputs.
    carry: the target's hidden row that pairs with the next token.
    """

    carry: torch.Tensor
    n_decoded: int = 0
    tokens: list[int] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)


class DraftMtp(ModelDrafter):
    """Drafts with an MTP head. `memory` holds the head's own attention cells."""

    name = "draft-mtp"

    def __init__(
        self, head: MtpHead, memory: HybridMemory, n_embd: int, n_ubatch: int, options: SpecOptions,
        draws: TokenDraws | None = None,
    ) -> None:  # fmt: skip
        super().__init__(options, draws)
        self._head, self._memory, self._n_ubatch = head, memory, n_ubatch
        self._device = memory.attention.device
        self._start = torch.zeros(n_embd, device=self._device)
        self._backlogs: dict[int, _Backlog] = {}
        self._hidden = torch.empty(0)

    def observe(self, seq: int, pos0: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """Queue the pairs that the head has not seen; drafted cells are removed."""
        backlog = self._backlogs.setdefault(seq, _Backlog(self._start))
        self._memory.seq_rm(seq, backlog.n_decoded)
        known = max(0, backlog.n_decoded - pos0)
        inputs = torch.cat([backlog.carry.unsqueeze(0), hidden[:-1]])
        backlog.tokens.extend(tokens[known:])
        backlog.inputs.append(inputs[known:])
        backlog.carry = hidden[-1]

    def forget(self, seq: int) -> None:
        """Drop the sequence."""
        super().forget(seq)
        self._backlogs.pop(seq, None)
        self._memory.clear(seq)

    def _first(self, requests: Sequence[DraftRequest]) -> torch.Tensor:
        spans, inputs = [], {}
        for request in requests:
            backlog = self._backlogs[request.seq]
            tokens = [*backlog.tokens, request.last]
            spans.append(Span(request.seq, backlog.n_decoded, tokens, [len(tokens) - 1]))
            rows = torch.cat([*backlog.inputs, backlog.carry.unsqueeze(0)])
            inputs[request.seq] = (backlog.n_decoded, rows)
            backlog.n_decoded += len(tokens)
            backlog.tokens, backlog.inputs = [], []
        logits, hidden = {}, {}
        for ubatch in self._memory.split(spans, self._n_ubatch, "equal"):
            pairs = [_rows(*inputs[s], ubatch, i) for i, s in enumerate(ubatch.seq_ids)]
            out = self._head.forward(ubatch, torch.stack(pairs), self._memory)
            flat = out.hidden.flatten(0, 1)
            for i, row in enumerate(ubatch.outputs.tolist()):
                seq = ubatch.seq_ids[row // ubatch.n_seq_tokens]
                logits[seq], hidden[seq] = out.logits[i], flat[row]
        self._hidden = torch.stack([hidden[request.seq] for request in requests])
        return torch.stack([logits[request.seq] for request in requests])

    def _next(
        self, requests: Sequence[DraftRequest], drafts: Sequence[Draft], rows: Sequence[int]
    ) -> torch.Tensor:
        if len(rows) < self._hidden.shape[0]:
            self._hidden = self._hidden[upload(rows, self._device)]
        ubatch = single_tokens(requests, drafts)
        out = self._head.forward(ubatch, self._hidden.unsqueeze(1), self._memory)
        self._hidden = out.hidden.squeeze(1)
        return out.logits


def _rows(pos0: int, inputs: torch.Tensor, ubatch: UBatch, row: int) -> torch.Tensor:
    first = int(ubatch.positions[row, 0]) - pos0
    return inputs[first : first + ubatch.n_seq_tokens]
