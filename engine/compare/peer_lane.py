"""llama.cpp as a lane: the same file and tokens, other kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from engine.compare.lane import ComparisonSetup, Follower, Leader
from engine.compare.lane_spec import LaneSpec
from engine.compare.llama_cpp import LlamaCpp
from engine.compare.rounds import Round
from engine.errors import OptionError
from engine.options import RunOptions
from engine.trace.writer import Source, TraceWriter

EXACT_TOLERANCE = 1e-6
"""NMSE to a peer when both multiply in float32: only the order of sums differs (1e-10 measured)."""
ROUNDED_TOLERANCE = 3e-2
"""NMSE otherwise: the peer rounds activations to the type that a weight type is multiplied with,
eight bits for quantised ones (1e-4 measured on trained weights, 6e-3 on random ones)."""


class PeerLane(Follower):
    """Decodes what the reference lane decodes, in the same batches: each sequence alone, prompts
    in ubatches, every further token by itself. Nothing is known of its memory.
    """

    def __init__(
        self, setting: ComparisonSetup, spec: LaneSpec, options: RunOptions, leader: Leader
    ) -> None:
        session = setting.session
        if session.path is None:
            raise OptionError(
                "The peer lane has no file to open: the model came from none.",
                "Open the model from a GGUF file.",
            )
        self._peer = LlamaCpp(session.path, setting.n_seqs, setting.n_ctx, options.n_ubatch)
        writer = TraceWriter.begin(
            setting.trace,
            Source("llama-cpp-python", self._peer.version),
            {
                "options": asdict(options),
                "compute": f"llama-cpp-python {self._peer.version}",
                "model": session.identity,
                "architecture": session.config.architecture,
                "n_ctx": setting.n_ctx,
                "n_rs_seq": 0,
                "weight_bytes": self._peer.n_bytes,
            },
        )
        super().__init__(setting, spec, writer.run_id)
        self._led_by(leader)
        is_float = set(session.info.quant_mix) == {"F32"} and session.compute == "f32"
        self.facts["lane_tolerance"] = EXACT_TOLERANCE if is_float else ROUNDED_TOLERANCE

    def forget(self, seq: int) -> None:
        """A sequence has ended."""
        self._peer.forget(seq)

    def end(self, stops: Sequence[str]) -> None:
        """The comparison has ended."""
        super().end(stops)
        self._peer.close()

    def _follow(self, round_: Round) -> None:
        logits = {
            part.seq: torch.cat(
                [self._peer.decode(part.seq, span.pos0, span.tokens) for span in part.spans_alone]
            )
            for part in round_.parts
        }
        self._clock.stop("verify")
        self._record_plain(round_, logits, None, wide=False)
        for part in round_.parts:
            self._compare(round_, part, logits[part.seq])
