"""Lanes: memories of their own over one model, all led by the tokens of the reference lane.

Each lane is a run of its own in the trace, with rounds, tokens, ubatches and snapshot slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.compare.divergence import MemoryDifference, compare_logits, compare_memories
from engine.compare.lane_spec import NOISE, REFERENCE
from engine.decode.forward import Forward
from engine.decode.rollback import Rollback, Undone
from engine.decode.sampler import Sampler
from engine.decode.verify import Acceptance, target_facts
from engine.draft.chain import Asked
from engine.draft.drafter import Draft
from engine.errors import ContextFullError, RollbackRefusedError
from engine.memory.batch import Span
from engine.options import RunOptions
from engine.session import Session
from engine.trace.recorder import PhaseClock, Recorder, RoundFacts
from engine.trace.records import MISSING
from engine.trace.store import TraceStore


@dataclass(frozen=True, slots=True)
class Round:
    """What the reference lane did, for the others to follow.

    pos0: position of tokens[0]. tokens: the prompt, or the newest token and the draft. chosen:
    the reference's tokens, [1] behind a prompt. logits: float32 [len(chosen), n_vocab].
    """

    number: int
    pos0: int
    tokens: Sequence[int]
    draft: Draft | None
    chosen: list[int]
    logits: torch.Tensor
    is_prompt: bool = False

    @property
    def first_pos(self) -> int:
        """Position of chosen[0]."""
        return self.pos0 + (len(self.tokens) if self.is_prompt else 1)


class Lane:
    """A memory with its own way of decoding, and its rows in the trace. Has one sequence, 0."""

    def __init__(
        self, name: str, session: Session, options: RunOptions, n_ctx: int, n_rs_seq: int,
        trace: TraceStore,
    ) -> None:  # fmt: skip
        self.name, self.options = name, options
        self.memory = session.make_memory(options, 1, n_ctx, n_rs_seq)
        self.run_id = session.begin_run(trace, options, self.memory, n_rs_seq)
        self._trace = trace
        trace.runs[self.run_id]["lane"] = name
        self._recorder = Recorder(trace, self.run_id, session.tokenizer.piece)
        self._forward = Forward(
            session.model, self.memory, options, self._recorder, lambda seq: seq
        )
        self._clock = PhaseClock()

    @property
    def error(self) -> str:
        """Why the lane had to stop, empty while it goes on."""
        return str(self._trace.runs[self.run_id].get("lane_error", ""))

    def begin(self) -> None:
        """A round starts: time counts from now."""
        self._recorder.resume()
        self._clock = PhaseClock()
        self._clock.start()

    def _run(self, number: int, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        purpose = "verify" if span.pos0 else "prompt"
        ubatches = self._forward.split([span])
        logits, hidden = self._forward.run(ubatches, number, purpose, self._clock)
        return logits[0], hidden[0]

    def _record_plain(self, round_: Round, logits: torch.Tensor, width: int) -> None:
        """A round in which the target chose every token itself. logits: [len(chosen), n_vocab]."""
        if round_.is_prompt:
            self._recorder.prompt(round_.number, 0, round_.pos0, round_.tokens)
        facts = RoundFacts(
            0, 0, round_.pos0, round_.first_pos, width, None, round_.chosen,
            None if round_.is_prompt else 0, ["target"] * len(round_.chosen),
            target_facts(logits, round_.chosen), valid_depth=self._valid_depth(),
        )  # fmt: skip
        self._recorder.round(round_.number, [facts], self.memory, self._clock)

    def _valid_depth(self) -> int | None:
        return self.memory.recurrent.valid_depth(0) if self.memory.recurrent else None


class ReferenceLane(Lane):
    """Decodes the prompt in the usual ubatches and every further token alone."""

    def __init__(
        self, session: Session, options: RunOptions, n_ctx: int, trace: TraceStore
    ) -> None:
        super().__init__(REFERENCE, session, options, n_ctx, 0, trace)

    def decode(
        self, number: int, pos0: int, tokens: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [1, n_vocab] behind the last of the tokens, hidden rows of all."""
        return self._run(number, Span(0, pos0, tokens, [len(tokens) - 1]))

    def record_drafts(self, number: int, asked: Sequence[Asked]) -> None:
        """Every drafter that was asked on behalf of all lanes."""
        self._recorder.drafts(number, asked, {0: 0})

    def close(self, round_: Round) -> None:
        """Record what was chosen."""
        self._record_plain(round_, round_.logits, len(round_.tokens) if round_.is_prompt else 1)


class FollowingLane(Lane):
    """A lane that is compared with the reference lane."""

    def __init__(
        self, name: str, session: Session, options: RunOptions, n_ctx: int, n_rs_seq: int,
        trace: TraceStore, reference: ReferenceLane,
    ) -> None:  # fmt: skip
        super().__init__(name, session, options, n_ctx, n_rs_seq, trace)
        self._reference = reference

    def follow(self, round_: Round) -> None:
        """Decode the round in this lane's way. A lane that cannot go on stops with an error."""
        if self.error:
            return
        self.begin()
        try:
            self._follow(round_)
        except (ContextFullError, RollbackRefusedError) as error:
            self._trace.runs[self.run_id]["lane_error"] = str(error)

    def _follow(self, round_: Round) -> None:
        raise NotImplementedError

    def _prompt(self, round_: Round) -> None:
        logits, _ = self._run(
            round_.number, Span(0, round_.pos0, round_.tokens, [len(round_.tokens) - 1])
        )
        self._record_plain(round_, logits, len(round_.tokens))
        self._compare(round_, logits, with_memory=True)

    def _compare(self, round_: Round, logits: torch.Tensor, *, with_memory: bool) -> None:
        """Append a row per chosen token; the last carries the difference of the memories."""
        measured = compare_logits(round_.logits, logits, round_.chosen)
        n = len(round_.chosen)
        columns: dict[str, list[Any]] = {
            "run_id": [self.run_id] * n, "lane": [self.name] * n, "round": [round_.number] * n,
            "seq_id": [0] * n, "pos": list(range(round_.first_pos, round_.first_pos + n)),
            "token_id": round_.chosen, "max_abs": measured.max_abs, "nmse": measured.nmse,
            "kl": measured.kl, "top1_equal": measured.top1_equal, "rank": measured.rank,
            "top2_gap": measured.top2_gap,
        }  # fmt: skip
        no_state = [math.nan] * (n - 1)
        last = {"state_error": math.nan, "conv_error": math.nan, "cells_differ": MISSING}
        if with_memory:
            memories = compare_memories(self._reference.memory, self.memory)
            last["cells_differ"] = memories.n_cells
            if memories.layers:
                last["state_error"] = max(memories.state)
                last["conv_error"] = max(memories.conv)
                self._record_states(round_, memories)
        columns["state_error"] = [*no_state, last["state_error"]]
        columns["conv_error"] = [*no_state, last["conv_error"]]
        columns["cells_differ"] = [*[MISSING] * (n - 1), last["cells_differ"]]
        self._trace.divergence.extend(columns)

    def _record_states(self, round_: Round, memories: MemoryDifference) -> None:
        n = len(memories.layers)
        self._trace.states.extend({
            "run_id": [self.run_id] * n, "lane": [self.name] * n, "round": [round_.number] * n,
            "seq_id": [0] * n, "pos": [self.memory.seq_pos_max(0)] * n,
            "layer": list(memories.layers), "state_error": memories.state,
            "conv_error": memories.conv,
        })  # fmt: skip


class NoiseLane(FollowingLane):
    """Decodes batches of the same widths without speculation.

    Before every round it stands in the reference lane's own state, so that its differences come
    from the width of the batch alone. Rows behind the first rejected token are not looked at: a
    token's logits do not depend on later ones.
    """

    def _follow(self, round_: Round) -> None:
        if round_.is_prompt:
            self._prompt(round_)
        else:
            span = Span(0, round_.pos0, round_.tokens, range(len(round_.tokens)))
            logits, _ = self._run(round_.number, span)
            logits = logits[: len(round_.chosen)]
            self.memory.put(0, self._reference.memory.state(0))
            self._record_plain(round_, logits, len(round_.tokens))
            self._compare(round_, logits, with_memory=False)


class PolicyLane(FollowingLane):
    """Verifies every draft and rolls back by its own policy.

    With the fault stale-logits, the row compared behind a rejection is the one that the lane
    would choose from: the last row of the rejected batch.
    """

    def __init__(
        self, name: str, session: Session, options: RunOptions, n_ctx: int, n_rs_seq: int,
        trace: TraceStore, reference: ReferenceLane,
    ) -> None:  # fmt: skip
        super().__init__(name, session, options, n_ctx, n_rs_seq, trace, reference)
        self._rollback = Rollback(self._forward, options, ())
        self._sampler = Sampler(options.sampler)

    def _follow(self, round_: Round) -> None:
        if round_.is_prompt:
            self._prompt(round_)
            return
        clock, recurrent, number = self._clock, self.memory.recurrent, round_.number
        span = Span(0, round_.pos0, round_.tokens, range(len(round_.tokens)))
        before = recurrent.pending(0) if recurrent else None
        ubatches = self._forward.split([span])
        save = self._rollback.checkpoints([span], ubatches).get(0)
        clock.stop("save")
        logits, hidden = self._forward.run(ubatches, number, "verify", clock)
        valid_depth = self._valid_depth()
        undone = self._rollback.undo(
            span, Acceptance(round_.chosen), hidden[0], save, self._sampler, self._sampler, number,
            clock,
        )  # fmt: skip
        rows = self._rows_chosen_from(round_, logits[0])
        facts = self._facts(round_, rows, undone)
        facts.valid_depth, facts.rs_idx_before = valid_depth, before
        facts.rs_idx_after = recurrent.pending(0) if recurrent else None
        if save:
            facts.checkpoint_bytes = save.n_bytes
            facts.restored_bytes = save.n_bytes * undone.n_replays
        self._recorder.round(number, [facts], self.memory, clock)
        self._compare(round_, rows, with_memory=True)

    def _rows_chosen_from(self, round_: Round, logits: torch.Tensor) -> torch.Tensor:
        n = len(round_.chosen)
        if "stale-logits" in self.options.faults and n < len(round_.tokens):
            return torch.cat((logits[: n - 1], logits[-1:]))
        return logits[:n]

    def _facts(self, round_: Round, rows: torch.Tensor, undone: Undone) -> RoundFacts:
        drafted, chosen = round_.tokens[1:], round_.chosen
        n_judged = min(len(drafted), len(chosen))
        kind = "target" if round_.draft is None else "replacement"
        if round_.draft is not None and len(chosen) > len(drafted):
            kind = "bonus"
        rows = torch.cat((rows[:n_judged], rows[-1:]))
        return RoundFacts(
            0, 0, round_.pos0, round_.first_pos, len(round_.tokens), round_.draft, chosen,
            len(chosen) - 1, [kind], target_facts(rows, [*drafted[:n_judged], chosen[-1]]),
            rollback_depth=len(round_.tokens) - len(chosen),
            memory_rollback=len(round_.tokens) - len(chosen), rollback_path=undone.path,
            n_replays=undone.n_replays,
            accept_rule=self.options.spec.accept if round_.draft else "",
        )  # fmt: skip


def following_lane(
    name: str, session: Session, options: RunOptions, n_ctx: int, n_rs_seq: int,
    trace: TraceStore, reference: ReferenceLane,
) -> FollowingLane:  # fmt: skip
    """The noise lane or a policy lane, by name."""
    kind = NoiseLane if name == NOISE else PolicyLane
    return kind(name, session, options, n_ctx, n_rs_seq, trace, reference)
