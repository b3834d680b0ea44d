"""An output head for drafts: a copy in two bits names candidates, the head itself judges them.

A draft is the most probable token after each, and needs no other logits than those of its first
candidates; a large head is most of what drafting reads. The copy is 31 % of a head in Q8_0, 40 % of
one in Q6_K. The candidates' logits have the bits that the whole head gives them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.model.layers import OutputHead
from kernels.dispatch import uses_llvm
from kernels.linear.dequant import dequantise
from kernels.linear.integer_blocks import integer_linear
from kernels.linear.two_bits import BLOCK, two_bits
from kernels.rows import take_rows
from kernels.rows.shortlist import shortlist

N_CANDIDATES = 256
_COPY = "Q2_K"
_LEAST_VOCABULARY = 2**15
_LEAST_GAIN = 1.5
"""Bytes of the head for one of the copy, below which reading the copy does not pay."""
_SLICE = 4096


class Candidates(NamedTuple):
    """logits: f32 [1, N_CANDIDATES]; ids: int64 [1, N_CANDIDATES], the tokens they are of; hidden:
    as in StepOutput."""

    logits: torch.Tensor
    ids: torch.Tensor
    hidden: torch.Tensor


class DraftHead:
    """The candidates of one row after the other. Its copy takes a third of a byte per weight."""

    def __init__(self, output: OutputHead) -> None:
        """For a head that `fits`."""
        self._output = output
        self._blocks, self._type = output.projection.packed.data
        width = output.projection.packed.shape[1]
        parts = [self._rounded(rows, width) for rows in self._blocks.split(_SLICE)]
        self._copy = torch.cat(parts)

    def _rounded(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        numbers = dequantise(rows.flatten(), self._type, len(rows) * width)
        return two_bits(numbers.nan_to_num_().view(len(rows), width))

    @staticmethod
    def fits(output: OutputHead) -> bool:
        """Whether a head is one whose rows stand alone in integer blocks, and large enough."""
        packed, bias = output.projection.packed, output.projection.bias
        if packed.mode != "q8" or bias is not None or not uses_llvm():
            return False
        n_vocab, width = packed.shape
        copied, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[_COPY]]
        gain = packed.n_bytes / (n_vocab * width / copied * n_bytes)
        large = n_vocab >= _LEAST_VOCABULARY and gain >= _LEAST_GAIN
        return large and width % BLOCK == 0 and packed.data.bytes.device.type == "cpu"

    def __call__(self, x: torch.Tensor, outputs: torch.Tensor) -> Candidates:
        """x [1, T, n_embd], not normed; of the flat row in `outputs`, int64 [1]."""
        hidden = self._output.normed(x)
        row = take_rows(hidden.flatten(0, 1), outputs)
        ids = shortlist(integer_linear(row, self._copy, _COPY), N_CANDIDATES)
        own = take_rows(self._blocks, ids[0])
        logits = self._output.scaled(integer_linear(row, own, self._type))
        return Candidates(logits, ids, hidden)
