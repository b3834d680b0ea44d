"""The MTP (nextn) head: one block that predicts the token after next from the trunk's hidden."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from engine.batch import UBatch
from engine.machine.device import inference_mode
from engine.model.layers import OutputHead, RopeTables, StepOutput
from engine.model.loaded_size import LEAST_GAIN, LEAST_VOCABULARY
from engine.model.memory import ModelMemory, RopeAndMemory
from engine.model.weights import Embedding, Weights
from kernels.dispatch import uses_llvm
from kernels.linear.dequant import dequantise
from kernels.linear.integer_blocks import integer_linear
from kernels.linear.two_bits import BLOCK, BLOCK_BYTES, two_bits
from kernels.norm import head_norm, rms_norm
from kernels.rows import join, take_rows
from kernels.rows.reductions import argmax, top_k


class MtpHead:
    """Combines the embedding of x_p with the hidden state of p-1, through one block, to logits of
    x_{p+1}.

    n_streams: of the trunk, which passes them raw; each is normed and joined separately. 1 for a
    row after the final norm.
    """

    def __init__(
        self,
        weights: Weights,
        embedding: Embedding,
        block: Callable[[Tensor, RopeAndMemory], Tensor],
        output: OutputHead,
        rope: RopeTables,
        eps: float,
        n_streams: int = 1,
    ) -> None:
        self._embedding = embedding
        self._block = block
        self._output = output
        self._rope = rope
        self._eps, self._n_streams = eps, n_streams
        self._enorm = weights.keep("nextn.enorm.weight")
        self._hnorm = weights.keep("nextn.hnorm.weight")
        if self._hnorm.dim() == 2:  # per stream: x / rms(x) is sqrt(d) x / |x|
            self._hnorm = self._hnorm.shape[1] ** 0.5 * self._hnorm
        # outputs of a single-token pass
        self._only = torch.zeros(1, dtype=torch.int64, device=embedding.device)
        self._join = weights.project("nextn.eh_proj.weight")

    @inference_mode
    def forward(
        self, ubatch: UBatch, hidden: Tensor, memory: ModelMemory, tokens: Tensor | None = None
    ) -> StepOutput:
        """Run the head over `ubatch`; its attention is layer 0 of `memory`.

        hidden: f32 [n_seqs, n_seq_tokens, n_handed], at each position p the hidden state of p - 1
        (zeros for p = 0): the trunk's (StepOutput), or this head's own while drafting.
        tokens: int64 [n_seqs, n_seq_tokens] on the device, in place of those of `ubatch`.
        """
        there = memory.begin(ubatch)
        reach = self._rope.reach(ubatch.last_position)
        if tokens is not None:
            there = there._replace(tokens=tokens)
        logits, own = memory.run((self, reach), (*there, hidden), partial(self._layers, memory))
        memory.commit()
        return StepOutput(logits, own)

    @inference_mode
    def logits(self, hidden: Tensor, *, invariant: bool) -> Tensor:
        """Logits f32 [n, n_vocab] of hidden rows [n, n_handed] returned by a pass."""
        return self._output.logits(hidden, invariant=invariant)

    @cached_property
    @inference_mode
    def draft_head(self) -> DraftHead | None:
        """Finds draft candidates faster than the full head; made on first use, None if there is no
        gain."""
        return DraftHead(self._output) if DraftHead.fits(self._output) else None

    def largest(self, n: int, *, invariant: bool) -> LargestLogits:
        """Finds draft candidates from the full logits."""
        return LargestLogits(self._output, n, invariant)

    @inference_mode
    def draft(
        self,
        ubatch: UBatch,
        hidden: Tensor,
        n_steps: int,
        memory: ModelMemory,
        head: DraftHead | LargestLogits | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Draft tokens of one sequence, each the most probable one after the previous one.

        ubatch: the tokens that `forward` would take, then n_steps - 1 unknown ones; outputs are the
        last known one and these. hidden: f32 [1, n_known, n_handed], of the known ones. head:
        replaces the full head. The whole draft is one pass of the memory; without `head`, or with
        LargestLogits, its bits equal n_steps calls of `forward`. Returns the tokens, int64
        [n_steps]; logits f32 [n_steps, n]; and the ids of these logits, int64 [n_steps, n], None
        for the whole vocabulary. On the CPU they are valid until the memory's next pass.
        """
        there = memory.begin(ubatch)
        reach = self._rope.reach(ubatch.last_position)
        compute = partial(self._steps, memory, n_steps, head)
        key, keeps = (self, reach, n_steps, type(head)), self._only.device.type != "cpu"
        found = memory.run(key, (*there, hidden), compute, keeps=keeps)
        memory.commit()
        logits, *ids, tokens = found
        if isinstance(head, LargestLogits):
            return tokens[:, 0], logits, tokens
        return tokens.flatten(), logits, ids[0] if head else None

    def _steps(
        self,
        memory: ModelMemory,
        n_steps: int,
        head: DraftHead | LargestLogits | None,
        tokens: Tensor,
        positions: Tensor,
        outputs: Tensor,
        hidden: Tensor,
    ) -> tuple[Tensor, ...]:
        start, n = 0, hidden.shape[1]
        tokens, outputs = tokens[:, :n], outputs[:1]
        drafted, logits, ids = [], [], []
        for _ in range(n_steps):
            memory.part(start, n)
            here = positions[:, start : start + n]
            around = RopeAndMemory(*self._rope.at(here), memory, self._rope.table)
            x = self._inside(tokens, around, hidden)
            if head is None:
                out: StepOutput | Candidates = self._output(x, outputs, invariant=around.invariant)
                drafted.append(argmax(out.logits).unsqueeze(0))
            else:
                out = head(x, outputs)
                ids.append(out.ids)
                drafted.append(take_rows(out.ids.view(-1, 1), argmax(out.logits)))
            logits.append(out.logits)
            start, n = start + n, 1
            tokens, outputs, hidden = drafted[-1], self._only, out.hidden[:, -1:]
        if isinstance(head, LargestLogits):  # the first ones are the draft
            return _rows(logits), _rows(ids)
        return tuple(_rows(parts) for parts in (logits, ids, drafted) if parts)

    def _layers(
        self,
        memory: ModelMemory,
        tokens: Tensor,
        positions: Tensor,
        outputs: Tensor,
        hidden: Tensor,
    ) -> StepOutput:
        around = RopeAndMemory(*self._rope.at(positions), memory, self._rope.table)
        x = self._inside(tokens, around, hidden)
        return self._output(x, outputs, invariant=around.invariant)

    def _inside(self, tokens: Tensor, around: RopeAndMemory, hidden: Tensor) -> Tensor:
        """Output of the head's block, f32 [n_seqs, n_seq_tokens, n_embd], with a stream axis before
        the last if there are several."""
        embedded = rms_norm(self._embedding(tokens), self._enorm, self._eps)
        if self._n_streams > 1:
            hidden = hidden.unflatten(2, (self._n_streams, -1))
            embedded = embedded.unsqueeze(2).expand_as(hidden)
        if self._hnorm.dim() == 2:
            carried = head_norm(hidden, self._hnorm, self._eps * hidden.shape[-1])
        else:
            carried = rms_norm(hidden, self._hnorm, self._eps)
        x = self._join(join((embedded, carried)), invariant=around.invariant)
        return self._block(x, around)


def _rows(parts: Sequence[Tensor]) -> Tensor:
    """Rows [1, n] of f32 or int64 one after the other: [len(parts), n]."""
    joined = join([part.view(torch.float32) for part in parts]).view(parts[0].dtype)
    return joined.view(len(parts), -1)


N_CANDIDATES = 256
_COPY = "Q2_K"
_SLICE = 1024


class Candidates(NamedTuple):
    """logits: f32 [1, n]; ids: int64 [1, n], their tokens; hidden: as in StepOutput."""

    logits: Tensor
    ids: Tensor
    hidden: Tensor


class LargestLogits(NamedTuple):
    """The n largest logits of one row in descending order, when only those are needed."""

    output: OutputHead
    n: int
    invariant: bool

    def __call__(self, x: Tensor, outputs: Tensor) -> Candidates:
        logits, hidden = self.output(x, outputs, invariant=self.invariant)
        return Candidates(*top_k(logits, min(self.n, logits.shape[-1])), hidden)


class DraftHead:
    """Draft candidates from a two-bit copy of the head, a third of a byte per weight, row by
    row."""

    def __init__(self, output: OutputHead) -> None:
        """For a head that `fits`."""
        self._output = output
        self._blocks, self._type = output.projection.packed.data
        n_vocab, width = output.projection.packed.shape
        n_bytes = width // BLOCK * BLOCK_BYTES
        # allocated beforehand: long-lived slices between temporary ones would fragment memory
        self._copy = torch.empty(n_vocab, n_bytes, dtype=torch.uint8)
        for rows, copy in zip(self._blocks.split(_SLICE), self._copy.split(_SLICE), strict=True):
            copy.copy_(self._rounded(rows, width))

    def _rounded(self, rows: Tensor, width: int) -> Tensor:
        numbers = dequantise(rows.flatten(), self._type, len(rows) * width)
        return two_bits(numbers.nan_to_num_().view(len(rows), width))

    @staticmethod
    def fits(output: OutputHead) -> bool:
        """Whether a head's rows are integer blocks of their own, and large enough."""
        packed, bias = output.projection.packed, output.projection.bias
        alone = bias is None and packed.factors is None
        if packed.mode != "q8" or not alone or not uses_llvm():
            return False
        n_vocab, width = packed.shape
        copied, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[_COPY]]
        gain = packed.n_bytes / (n_vocab * width / copied * n_bytes)
        large = n_vocab >= LEAST_VOCABULARY and gain >= LEAST_GAIN
        return large and width % BLOCK == 0 and packed.data.bytes.device.type == "cpu"

    def __call__(self, x: Tensor, outputs: Tensor) -> Candidates:
        """x [1, T, n_embd], not normed; candidates of the flat row in `outputs`, int64 [1]."""
        hidden = self._output.hidden(x)
        row = take_rows(hidden.flatten(0, 1), outputs)
        row = self._output.read(row, invariant=False)
        _, ids = top_k(integer_linear(row, self._copy, _COPY), N_CANDIDATES)
        own = take_rows(self._blocks, ids[0])
        logits = self._output.scaled(integer_linear(row, own, self._type))
        return Candidates(logits, ids, hidden)
