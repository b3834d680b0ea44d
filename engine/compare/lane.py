"""Lanes: their common base, and the round of the leading lane that others follow.

Each lane is a run of its own in the trace, with rounds, tokens, ubatches and snapshot slots,
described by its facts: lane (name), lane_kind, lane_against (run id of the lane it is compared
with, None = it leads), lane_free, lane_error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from engine.analysis.noise_ceiling import logits_ceiling, state_ceiling
from engine.batch import Span
from engine.compare.divergence import (
    DivergenceRows,
    MemoryDifference,
    ReferenceLogits,
    ReferenceMemory,
)
from engine.compare.lane_spec import LaneSpec
from engine.compare.state_origin import LEAST, SequenceText, StateOrigin
from engine.decode.failure import HeldSequence, note_failure
from engine.decode.forward import Forward, RowsBySequence, TargetRowsBySequence
from engine.decode.recorder import Recorder
from engine.decode.round import PhaseClock, Round
from engine.decode.verify_loop import valid_depth
from engine.errors import (
    ContextFullError,
    DeviceLostError,
    PeerLibraryError,
    RollbackRefusedError,
    StateBlobError,
)
from engine.machine.device import meaning_of
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.options import Prompt, RunOptions
from engine.options.llama_cpp import DEFAULT_SETTINGS, LlamaSettings
from engine.sampling.grammar import Grammar
from engine.session import Session
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter


@dataclass(frozen=True)
class ReferenceRound:
    """A round of all sequences; `memory` is the leader's at the end of the round, valid until the
    next one.

    parts: rounds by sequence. accepted: the reference's tokens, [1] after a prompt; tokens after a
    stop are not emitted. logits: float32 [len(accepted), n_vocab], the leader's. before: the
    reference's sampler.
    """

    number: int
    parts: Sequence[Round]
    memory: HybridMemory
    _held: dict[int, ReferenceMemory] = field(default_factory=dict)
    _logits: dict[int, ReferenceLogits] = field(default_factory=dict)

    @property
    def is_prompt(self) -> bool:
        """Whether this round decoded the prompts of its sequences."""
        return self.parts[0].is_prompt

    def held(self, seq: int) -> ReferenceMemory:
        """The reference's memory of a sequence, for comparison with followers."""
        if seq not in self._held:
            self._held[seq] = ReferenceMemory(self.memory, seq)
        return self._held[seq]

    def measure(self, part: Round) -> ReferenceLogits:
        """The reference's logits of a part, for comparison with followers."""
        if part.seq not in self._logits:
            self._logits[part.seq] = ReferenceLogits(part.rows, part.accepted)
        return self._logits[part.seq]


def spans_alone(part: Round) -> list[Span]:
    """Batches of a lane that decodes the prompt at once and every further token alone."""
    if part.is_prompt:
        return [part.span]
    return [Span(part.seq, pos, [token], [0]) for pos, token in enumerate(part.decoded, part.pos0)]


@dataclass(frozen=True, slots=True)
class LaneSetup:
    """Setup of a lane: spec, options and n_rs_seq (its snapshot planes) are its own, the rest is
    shared by all lanes. n_seqs: sequences decoded together. llama_library: for lanes of llama.cpp,
    None = an installed package. grammar: applies to every text."""

    session: Session
    trace: TraceStore
    prompts: Sequence[Prompt]
    spec: LaneSpec
    options: RunOptions
    n_seqs: int
    n_ctx: int
    n_rs_seq: int = 0
    llama_library: Path | None = None
    llama_settings: LlamaSettings = DEFAULT_SETTINGS
    grammar: Grammar | None = None


_STOPS = (
    ContextFullError,
    RollbackRefusedError,
    PeerLibraryError,
    StateBlobError,
    ArithmeticError,
    AssertionError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that end one lane and not the others; the last ones are faults of this program."""


class Lane:
    """A run in the trace that takes part in the comparison. round: its latest round; a leader's is
    what others are compared with."""

    round: ReferenceRound

    def __init__(self, setup: LaneSetup, run_id: int) -> None:
        spec = setup.spec
        self.name, self.run_id = spec.name, run_id
        self.facts = setup.trace.runs[run_id]
        self.facts |= {"lane": spec.name, "lane_kind": spec.kind, "lane_against": None}
        self._trace = setup.trace
        session = setup.session
        self._device = session.device
        self._recorder = Recorder(setup.trace, run_id, session.tokenizer.piece, session.files)
        self._clock = PhaseClock()

    def begin(self) -> None:
        """Start a round and its timing."""
        self._recorder.resume()
        self._clock = PhaseClock()
        self._clock.start()

    def forget(self, seq: int) -> None:
        """A sequence has ended."""
        raise NotImplementedError

    def settle(self) -> None:
        """Called after the last round; `end` follows once findings are recorded."""
        self._recorder.close()

    def end(self, stops: Sequence[str]) -> None:
        """End the run. stops: why each sequence ended."""
        TraceWriter(self._trace, self.run_id).end(stops)

    def _record_plain(
        self,
        round_: ReferenceRound,
        logits: RowsBySequence,
        memory: HybridMemory | None,
        *,
        wide: bool,
    ) -> None:
        """Record a round in which the target chose every token itself, in one batch or one by
        one."""
        rounds = []
        for part in round_.parts:
            if part.is_prompt:
                self._recorder.prompt(round_.number, part.seq_id, part.pos0, part.tokens)
            rounds.append(
                Round(
                    round_.number,
                    part.seq_id,
                    part.seq,
                    part.pos0,
                    part.tokens if wide or part.is_prompt else part.tokens[:1],
                    is_prompt=part.is_prompt,
                    logits=logits[part.seq],
                    valid_depth=valid_depth(memory, part.seq) if memory else None,
                    accepted=list(part.accepted),
                    n_own=len(part.accepted),
                    n_emitted=part.n_emitted,
                )
            )
        self._recorder.round(rounds, memory, self._clock)


class EngineLane(Lane):
    """A lane with a memory, decoding with the session's model in some compute mode.

    taps: layers whose rows are needed in addition to the hidden ones. has_trees: whether it
    verifies whole trees, else the branch that the leader followed.
    """

    has_trees: ClassVar[bool] = False

    def __init__(self, setup: LaneSetup, model: HybridModel, taps: Sequence[int] = ()) -> None:
        session, n_rs_seq = setup.session, setup.n_rs_seq
        self.options = options = setup.options
        n_seqs = setup.n_seqs * (options.spec.n_branches if self.has_trees else 1)
        self.memory = session.make_memory(options, n_seqs, setup.n_ctx, n_rs_seq, model.device)
        run_id = session.begin_run(setup.trace, options, self.memory, n_rs_seq, model)
        super().__init__(setup, run_id)
        self._holders: dict[int, int] = {}
        holder = self._holders.__getitem__
        self._forward = Forward(
            model, self.memory, options, self._recorder, holder, taps=taps, n_slots=setup.n_seqs
        )

    def forget(self, seq: int) -> None:
        self.memory.clear(seq)

    def _run(
        self, number: int, spans: Sequence[Span], *, is_prompt: bool
    ) -> tuple[RowsBySequence, TargetRowsBySequence]:
        purpose = "prompt" if is_prompt else "verify"
        return self._forward.run(self._forward.split(spans), number, purpose, self._clock)


class Follower(Lane):
    """A lane that follows a leader's tokens and is compared with it."""

    def _led_by(self, leader: Lane) -> None:
        """Set the leader, once."""
        self.facts.lane_against = leader.run_id
        self._leader = leader
        self._rows = DivergenceRows(self._trace, self.run_id, self.name)

    @property
    def error(self) -> str:
        """The error that stopped the lane, empty while it runs."""
        return self.facts.lane_error or ""

    def follow(self) -> None:
        """Decode the leader's round in this lane's way; stops with an error if that fails."""
        if self.error:
            return
        self.begin()
        try:
            self._follow(self._leader.round)
        except _STOPS as error:
            meant = meaning_of(error, self._device)
            if isinstance(meant, DeviceLostError):  # that of all lanes
                raise
            self._fail(error)
            self.facts.lane_error = str(meant or error)

    def _fail(self, error: Exception) -> None:
        """Stop the lane with an error."""

    def _follow(self, round_: ReferenceRound) -> None:
        raise NotImplementedError

    def _compare(
        self,
        round_: ReferenceRound,
        part: Round,
        logits: torch.Tensor,
        memory: HybridMemory | None = None,
    ) -> MemoryDifference | None:
        """Append a row per chosen token; the last one holds the difference of the memories."""
        held = None
        if memory:
            seqs = [each.seq for each in round_.parts]
            held = round_.held(part.seq).difference(memory, part.seq, seqs)
        measured = round_.measure(part).difference(logits)
        limit = logits_ceiling(self.facts.compute or "")
        known = self.facts.logit_rows or []
        wrong = next((i for i, nmse in enumerate(measured.nmse) if not nmse <= limit), None)
        if wrong is not None and all(one.seq_id != part.seq_id for one in known):
            of = round_.measure(part).row_of(logits[wrong], limit)
            row = {"round": round_.number, "seq_id": part.seq_id, "row": wrong, "of": of}
            self.facts.add_to("logit_rows", row)
        self._rows.append(round_.number, part.seq_id, part.pos_next, part.accepted, measured, held)
        return held


class EngineFollower(EngineLane, Follower):
    """A following lane with a memory."""

    def __init__(self, setup: LaneSetup, model: HybridModel, leader: Lane) -> None:
        super().__init__(setup, model)
        self._led_by(leader)
        plain = replace(setup.options, rollback="checkpoint", kv="per-seq", faults=())
        alone = partial(setup.session.make_memory, plain, 1, setup.n_ctx, 0, model.device)
        self._origin = StateOrigin(model, alone)
        self._least_wrong = max(LEAST, state_ceiling(model.compute))
        self._text: dict[int, list[int]] = {}
        """Tokens in memory, by sequence."""

    def follow(self) -> None:
        self._holders.update((part.seq, part.seq_id) for part in self._leader.round.parts)
        super().follow()

    def _fail(self, error: Exception) -> None:
        round_ = self._leader.round
        held: list[HeldSequence] = [(part.seq_id, part.seq, part.pos0, {}) for part in round_.parts]
        note_failure(self.facts, error, self.memory, round_.number, held)

    def _compare(
        self,
        round_: ReferenceRound,
        part: Round,
        logits: torch.Tensor,
        memory: HybridMemory | None = None,
    ) -> MemoryDifference | None:
        """Like Follower._compare; also explains the first wrong state of a sequence in the
        facts."""
        held = super()._compare(round_, part, logits, memory)
        earlier = self._text.get(part.seq, [])
        before = earlier if part.pos0 else []
        self._text[part.seq] = [*before, *part.decoded]
        known = self.facts.state_origins or []
        layer = held.first_wrong(self._least_wrong) if held else None
        if memory is None or layer is None or len(before) != part.pos0:
            return held
        if all(one.seq_id != part.seq_id for one in known):
            where = {"round": round_.number, "seq_id": part.seq_id, "is_prompt": part.is_prompt}
            seqs = [one.seq for one in round_.parts]
            texts = {one.seq: self._sequence_text(one) for one in round_.parts}
            text = texts.pop(part.seq)
            if part.pos0:
                earlier = []
            found = self._origin.of(text, memory, part.seq, seqs, layer, texts, earlier)
            self.facts.add_to("state_origins", *(where | one for one in found))
        return held

    def _sequence_text(self, part: Round) -> SequenceText:
        before = self._text.get(part.seq, [])[: part.pos0]
        return SequenceText(before, part.decoded, part.tokens, part.accepted[-1])

    def _one_by_one(self, round_: ReferenceRound) -> RowsBySequence:
        """Decode each sequence alone, as the reference lane does: logits [len(chosen), n_vocab]."""
        return {
            part.seq: torch.cat(
                [
                    self._run(round_.number, [span], is_prompt=part.is_prompt)[0][part.seq]
                    for span in spans_alone(part)
                ]
            )
            for part in round_.parts
        }

    def _prompt(self, round_: ReferenceRound) -> None:
        logits, _ = self._run(round_.number, [part.span for part in round_.parts], is_prompt=True)
        self._record_plain(round_, logits, self.memory, wide=True)
        for part in round_.parts:
            self._compare(round_, part, logits[part.seq], self.memory)
