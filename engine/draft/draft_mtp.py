"""draft-mtp: the target's own multi-token-prediction head drafts.

The head reads the pair (token x_p, target hidden of p - 1) at position p and predicts x_{p+1};
while drafting it feeds on its own hidden rows. Its attention cells for accepted positions are
made again from the target's hidden rows, together with the first step of the next draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import Span, UBatch
from engine.draft.drafter import DraftRequest
from engine.draft.model_drafter import ModelDrafter, single_tokens
from engine.draft.spec import DrafterInputs
from engine.draft.with_model import ModelDraftOptions, TokenDraws
from engine.errors import OptionError
from engine.memory.hybrid import HybridMemory
from engine.model.mtp import MtpHead
from engine.model.taps import TargetRows
from engine.transfer import upload

_N_MARKS = 4
"""Numbers by which a hidden row is known again; as it is only ever copied, they stay equal."""


@dataclass(slots=True)
class _ObservedRows:
    """What the target has decoded.

    inputs: float32 [capacity, n_embd]; row p pairs with the token at position p, so there is one
    more row in use than tokens. n_decoded: positions below this are in the head's memory with
    true inputs.
    """

    inputs: torch.Tensor
    tokens: list[int] = field(default_factory=list)
    n_decoded: int = 0

    def write(self, pos0: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """Put tokens at pos0 and the target's hidden rows behind them."""
        self.tokens[pos0:] = tokens
        n_rows, capacity = len(self.tokens) + 1, len(self.inputs)
        if n_rows > capacity:
            more = self.inputs.new_empty(max(n_rows, 2 * capacity) - capacity, hidden.shape[1])
            self.inputs = torch.cat((self.inputs, more))
        self.inputs[pos0 + 1 : n_rows] = hidden


class DraftMtp(ModelDrafter):
    """Drafts with an MTP head. `memory` holds the head's own attention cells."""

    name = "draft-mtp"

    def __init__(
        self,
        head: MtpHead,
        memory: HybridMemory,
        n_embd: int,
        n_ubatch: int,
        options: ModelDraftOptions,
        draws: TokenDraws | None = None,
    ) -> None:
        super().__init__(options, draws)
        self._head, self._memory, self._n_ubatch = head, memory, n_ubatch
        self._device = memory.attention.device
        self._n_embd = n_embd
        self._observed: dict[int, _ObservedRows] = {}
        self._marks: dict[int, torch.Tensor] = {}
        self._hidden = torch.empty(0)

    def observe(self, seq: int, pos0: int, tokens: Sequence[int], rows: TargetRows) -> None:
        """Keep the pairs; cells of drafted tokens are removed."""
        observed = self._of(seq)
        self._memory.seq_rm(seq, observed.n_decoded)
        observed.write(pos0, tokens, rows.hidden)

    def decoded(self, ubatch: UBatch, rows: TargetRows) -> None:
        """Remember each row by its first numbers where the target computed it. The pairs come
        another way, through acceptance and `observe`: a row of a rejected token shows."""
        for i, seq in enumerate(ubatch.seq_ids):
            first, n = int(ubatch.positions[i, 0]), ubatch.n_seq_tokens
            marks = self._marks.get(seq)
            if marks is None:
                marks = torch.zeros(1, _N_MARKS, device=self._device)  # before the first token
            if (lack := first + 1 + n - len(marks)) > 0:
                more = marks.new_full((max(lack, len(marks)), _N_MARKS), math.nan)
                self._marks[seq] = marks = torch.cat((marks, more))
            marks[first + 1 : first + 1 + n] = rows.hidden[i, :, :_N_MARKS]

    def resume(self, seq: int, n_tokens: int) -> None:
        """Remove the cells behind these tokens."""
        super().resume(seq, n_tokens)
        observed = self._of(seq)
        observed.n_decoded = min(observed.n_decoded, n_tokens)
        self._memory.seq_rm(seq, observed.n_decoded)
        del observed.tokens[n_tokens:]

    def forget(self, seq: int) -> None:
        """Drop the sequence."""
        super().forget(seq)
        self._observed.pop(seq, None)
        self._marks.pop(seq, None)
        self._memory.clear(seq)

    def _first(self, requests: Sequence[DraftRequest]) -> torch.Tensor:
        spans, inputs = [], {}
        for request in requests:
            observed = self._observed[request.seq]
            tokens = [*observed.tokens[observed.n_decoded :], request.last]
            spans.append(Span(request.seq, observed.n_decoded, tokens, [len(tokens) - 1]))
            inputs[request.seq] = observed.inputs
            observed.n_decoded += len(tokens)
        logits, hidden = {}, {}
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        wrong = {request.seq: none for request in requests}
        for ubatch in self._memory.split(spans, self._n_ubatch, "equal"):
            pairs = [_rows(inputs[s], ubatch, i) for i, s in enumerate(ubatch.seq_ids)]
            for i, seq in enumerate(ubatch.seq_ids):
                if seq in self._marks:
                    marks = _rows(self._marks[seq], ubatch, i)
                    wrong[seq] = wrong[seq] + (pairs[i][:, :_N_MARKS] != marks).any(1).sum()
            out = self._head.forward(ubatch, torch.stack(pairs), self._memory)
            flat = out.hidden.flatten(0, 1)
            for i, row in enumerate(ubatch.outputs.tolist()):
                seq = ubatch.seq_ids[row // ubatch.n_seq_tokens]
                logits[seq], hidden[seq] = out.logits[i], flat[row]
        if self._marks:
            self._n_wrong = torch.stack([wrong[request.seq] for request in requests])
        self._hidden = torch.stack([hidden[request.seq] for request in requests])
        return torch.stack([logits[request.seq] for request in requests])

    def _next(
        self,
        requests: Sequence[DraftRequest],
        n_drafted: int,
        tokens: torch.Tensor,
        rows: Sequence[int],
    ) -> torch.Tensor:
        if len(rows) < self._hidden.shape[0]:
            self._hidden = self._hidden[upload(rows, self._device)]
        ubatch = single_tokens(requests, n_drafted)
        hidden = self._hidden.unsqueeze(1)
        out = self._head.forward(ubatch, hidden, self._memory, tokens.unsqueeze(1))
        self._hidden = out.hidden.squeeze(1)
        return out.logits

    def _of(self, seq: int) -> _ObservedRows:
        if seq not in self._observed:
            # the first token has no hidden row before it
            self._observed[seq] = _ObservedRows(torch.zeros(1, self._n_embd, device=self._device))
        return self._observed[seq]


def _rows(inputs: torch.Tensor, ubatch: UBatch, row: int) -> torch.Tensor:
    first = int(ubatch.positions[row, 0])
    return inputs[first : first + ubatch.n_seq_tokens]


def make(inputs: DrafterInputs) -> DraftMtp:
    """A drafter with an attention memory of its own for the MTP head.

    Raises OptionError for a model without such a head.
    """
    config, head = inputs.target.config, inputs.target.head
    if head is None:
        raise OptionError(
            f"draft-mtp needs an MTP head, and {config.name} has none.",
            "Choose draft-simple with a draft model, or a file with nextn tensors.",
        )
    memory = HybridMemory.for_head(
        config,
        inputs.n_slots,
        inputs.n_ctx,
        inputs.target.device,
        batch_invariant=inputs.batch_invariant,
    )
    return DraftMtp(head, memory, config.n_embd, inputs.n_ubatch, inputs.options, inputs.draws)
