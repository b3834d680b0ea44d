"""llama.cpp as a lane: the same file and tokens, other kernels; and what its rounding explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from engine.compare.lane import ComparisonSetup, EngineFollower, Follower, Leader
from engine.compare.lane_spec import LaneSpec
from engine.compare.lanes import JITTER, JITTER_ROUNDED
from engine.compare.llama_cpp import LlamaCpp
from engine.compare.rounds import ReferenceRound
from engine.errors import OptionError
from engine.options import RunOptions
from engine.trace.writer import RunSource, TraceWriter

_FINE = 3


class PeerLane(Follower):
    """Decodes what the reference lane decodes, in the same batches: each sequence alone, prompts
    in ubatches, every further token by itself. Nothing is known of its memory.
    """

    def __init__(
        self, setup: ComparisonSetup, spec: LaneSpec, options: RunOptions, leader: Leader
    ) -> None:
        session = setup.session
        if session.path is None:
            raise OptionError(
                "The peer lane has no file to open: the model came from none.",
                "Open the model from a GGUF file.",
            )
        self._peer = LlamaCpp(session.path, setup.n_seqs, setup.n_ctx, options.n_ubatch)
        writer = TraceWriter.begin(
            setup.trace,
            RunSource("llama-cpp-python", self._peer.version),
            {
                "options": asdict(options),
                "compute": f"llama-cpp-python {self._peer.version}",
                "model": session.identity,
                "architecture": session.config.architecture,
                "n_ctx": setup.n_ctx,
                "n_rs_seq": 0,
                "weight_bytes": self._peer.n_bytes,
            },
        )
        super().__init__(setup, spec, writer.run_id)
        self._led_by(leader)

    def forget(self, seq: int) -> None:
        """A sequence has ended."""
        self._peer.forget(seq)

    def end(self, stops: Sequence[str]) -> None:
        """The comparison has ended."""
        super().end(stops)
        self._peer.close()

    def _follow(self, round_: ReferenceRound) -> None:
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


class PeerNoiseLane(EngineFollower):
    """Decodes what a peer lane decodes with this engine's kernels, rounding as llama.cpp does.

    Exact weights meet activations rounded for the types of the file (kernels.linear.as_llama_cpp),
    so its differences are those that a correct peer may have. Embeddings are jittered like those
    of a noise lane: the peer adds in another order, which tips a few roundings, and may tip a tie
    of two experts. The lane of seed 3 is jittered by no more than sums differ: what rounding itself
    tips, it tips as the peer does.
    """

    def __init__(
        self, setup: ComparisonSetup, spec: LaneSpec, options: RunOptions, leader: Leader
    ) -> None:
        session = setup.session
        rounds = set(session.info.quant_mix) != {"F32"}
        model = session.model_as_llama_cpp()
        jitter = JITTER_ROUNDED if rounds and spec.seed != _FINE else JITTER[model.compute]
        model = model.jittered(jitter, spec.seed)
        super().__init__(setup, spec, options, model, leader)
        self.facts["compute"] = f"{model.compute}, activations rounded as in llama.cpp"

    def _follow(self, round_: ReferenceRound) -> None:
        logits = self._one_by_one(round_)
        self._record_plain(round_, logits, self.memory, wide=False)
        for part in round_.parts:
            self._compare(round_, part, logits[part.seq])
