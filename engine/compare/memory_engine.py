"""Memory scripts on a session's model, recorded as lanes of a comparison.

Every context is a run of the trace with its rounds, ubatches and snapshot slots. The left sides of
checks are their context's rows of the divergence table, compared with the right sides, which
together form the reference lane. If two checks cover the same position, the worse one is recorded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from engine.batch import Span, split_equal
from engine.compare.divergence import (
    DivergenceRows,
    LogitsDifference,
    MemoryDifference,
    ReferenceMemory,
)
from engine.compare.memory_player import MemoryContext, MemoryEngine, MemoryPlay
from engine.compare.memory_script import EXACT, CompareRanges, ContextSpec, MemoryScript, Statement
from engine.decode.forward import Forward
from engine.decode.recorder import Recorder, target_facts
from engine.decode.round import PhaseClock, Round
from engine.errors import ContextFullError, OutOfMemoryError
from engine.memory.hybrid import HybridMemory
from engine.memory.planes import PlaneMemory
from engine.memory.policies import memory_sizes
from engine.memory.state_file import SequenceCheckpoint, load_state, save_state
from engine.model.mixers import layout_of
from engine.options import RunOptions
from engine.session import Session
from engine.trace.records import POLICY, REFERENCE
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter, this_engine

FILLS = {"00": 0.0, "3E": torch.full((4,), 0x3E, dtype=torch.uint8).view(torch.float32).item()}
"""Fill values of storage before it is written: a byte, or `nan`."""
FILLS["nan"] = float("nan")


def play_script(
    session: Session,
    script: MemoryScript,
    policy: str,
    trace: TraceStore | None = None,
    *,
    fill: float = FILLS["nan"],
    batch_invariant: bool | None = None,
) -> MemoryPlay:
    """Prepare a script on the session's model.

    fill: initial contents of storage. batch_invariant: None = in every compute mode but f32, where
    batch widths alone would exceed what scripts allow. Raises OutOfMemoryError before anything is
    allocated.
    """
    if batch_invariant is None:
        batch_invariant = session.compute != "f32"
    layout = layout_of(session.config)
    script = script.for_models("rings" if layout and layout.by_position else "states")
    _check_size(session, script, policy)
    trace = TraceStore() if trace is None else trace
    first = len(trace.runs)
    try:
        engine = SessionEngine(session, script, policy, trace, fill, batch_invariant)
        return MemoryPlay(script, policy, engine, engine)
    except Exception as error:
        for run_id in range(first, len(trace.runs)):
            TraceWriter(trace, run_id).fail(str(error))
        raise


def _check_size(session: Session, script: MemoryScript, policy: str) -> None:
    if not hasattr(os, "sysconf"):  # as on Windows
        return
    n_bytes = 0
    for statement in script.for_policy(policy):
        spec = statement.action
        if isinstance(spec, ContextSpec):
            parts = memory_sizes(
                session.info, spec.n_seqs, spec.n_rs_seq, spec.n_ctx, spec.policy or policy
            )
            n_bytes += parts["total"] - parts["weights"]
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if n_bytes > there:
        raise OutOfMemoryError(
            f"The contexts of {script.name} take {n_bytes / 2**30:.1f} GiB with this model, more "
            f"than the {there / 2**30:.1f} GiB of the machine.",
            "Lower n_seqs, n_rs_seq or n_ctx of its contexts.",
        )


class SessionContext(MemoryContext):
    """A context of the session's model; `seq_id` in the trace is the sequence. rows: of its
    checks."""

    rows: DivergenceRows

    def __init__(
        self, engine: SessionEngine, spec: ContextSpec, options: RunOptions, memory: HybridMemory
    ) -> None:
        session, trace = engine.session, engine.trace
        self.memory = memory
        self.run_id = session.begin_run(trace, options, memory, spec.n_rs_seq)
        self._engine, self._spec = engine, spec
        self._recorder = Recorder(trace, self.run_id, session.tokenizer.piece, session.files)
        self._forward = Forward(session.model, memory, options, self._recorder, lambda seq: seq)
        self._clock = PhaseClock()
        self._open: list[Round] = []
        self._rounds: dict[tuple[int, int], int] = {}

    def decode(self, batch: Mapping[int, Sequence[int]]) -> Mapping[int, Tensor]:
        self.close_round()
        memory, spec = self.memory, self._spec
        starts = {seq: memory.seq_pos_max(seq) + 1 for seq in batch}
        spans = [Span(seq, starts[seq], ids, range(len(ids))) for seq, ids in batch.items()]
        if spec.keep is None:
            ubatches = self._forward.split(spans)
        else:
            ubatches = split_equal(spans, spec.n_ubatch, keep=spec.keep)
        if not memory.prepare(ubatches):
            raise ContextFullError(
                f"Context {spec.name} has no room for {sum(map(len, batch.values()))} more tokens "
                f"in {spec.n_ctx} cells.",
                "Raise its n_ctx.",
            )
        number, self._clock = self._engine.next_round(), PhaseClock()
        self._recorder.resume()
        self._clock.start()
        logits, _ = self._forward.run(ubatches, number, "prompt", self._clock)
        for span in spans:
            self._rounds |= {(span.seq, span.pos0 + i): number for i in range(len(span.tokens))}
            self._engine.later(self._recorder.prompt, number, span.seq, span.pos0, span.tokens)
        self._open = [
            Round(
                number,
                span.seq,
                span.seq,
                span.pos0,
                span.tokens,
                is_prompt=True,
                valid_depth=self.fact(span.seq, "valid"),
            )
            for span in spans
        ]
        return logits

    def round_of(self, seq: int, pos: int) -> int:
        """Number of the batch with this position; for a copy, that of the newest."""
        return self._rounds.get((seq, pos), max(self._rounds.values(), default=0))

    def close_round(self) -> None:
        """Record the last batch with its rollback."""
        if self._open:
            self._recorder.round(self._open, self.memory, self._clock)
        self._open = []

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        pos, pending = self.memory.seq_pos_max(seq), self.fact(seq, "pending")
        accepted = self.memory.seq_rm(seq, p0, p1)
        for round_ in self._open:
            if round_.seq == seq and not accepted and not round_.rollback_depth:
                round_.rollback_path = "refused"
            elif round_.seq == seq and accepted and 0 < p0 <= pos:
                round_.rollback_path = "seq_rm"
                round_.rollback_depth += pos - self.memory.seq_pos_max(seq)
                round_.memory_rollback = round_.rollback_depth
                round_.rs_idx_before, round_.rs_idx_after = pending, self.fact(seq, "pending")
        return accepted

    def operate(self, name: str, *numbers: int) -> None:
        getattr(self.memory, name)(*numbers)

    def copy(self, name: str, seq: int, place: Any) -> SequenceCheckpoint | None:
        if name == "checkpoint":
            return self.memory.save(seq)
        if name == "restore":
            self.memory.restore(seq, place)
        elif name == "save":
            save_state(os.fspath(place), self.memory.state(seq))
        else:
            self.memory.put(seq, load_state(os.fspath(place)))
        return None

    def fact(self, seq: int, name: str) -> int | None:
        memory, recurrent = self.memory, self.memory.recurrent
        if name == "pos":
            return memory.seq_pos_max(seq)
        if name == "cells":
            return memory.attention.used(seq)
        if name == "duplicates":
            return memory.attention.duplicates(seq)
        if recurrent is None:
            return None
        if name == "valid":
            return recurrent.valid_depth(seq)
        if name == "pending":
            return recurrent.pending(seq)
        return recurrent.cells.tail[seq] if isinstance(recurrent, PlaneMemory) else None

    def apart(self, seq: int, reference: SessionContext, reference_seq: int) -> MemoryDifference:
        return ReferenceMemory(reference.memory, reference_seq).difference(self.memory, seq)


class SessionEngine(MemoryEngine):
    """See memory_player.MemoryEngine."""

    def __init__(
        self,
        session: Session,
        script: MemoryScript,
        policy: str,
        trace: TraceStore,
        fill: float,
        batch_invariant: bool,
    ) -> None:
        self.session, self.trace = session, trace
        self.n_vocab = session.config.n_vocab
        self._fill, self._invariant = fill, batch_invariant
        checks = [
            s.action for s in script.for_policy(policy) if isinstance(s.action, CompareRanges)
        ]
        self._tolerances: dict[str, float] = {}
        for check in checks:
            name = check.left.context
            known = self._tolerances.get(name, 0.0)
            self._tolerances[name] = max(known, _tolerance(check))
        options = RunOptions(n_predict=-1, rollback=policy, batch_invariant=batch_invariant)
        self._reference = TraceWriter.begin(
            trace,
            this_engine(),
            {
                "lane": REFERENCE,
                "lane_kind": REFERENCE,
                "lane_against": None,
                "lane_about": "the states that the checks expect",
                "options": asdict(options),
                "compute": session.compute,
                "device": str(session.device),
                "model": session.identity,
                "architecture": session.config.architecture,
                "memory_script": script.name,
            },
        )
        self._contexts: dict[str, SessionContext] = {}
        self._worst: dict[tuple[str, int, int], _CheckedPosition] = {}
        self._states: dict[tuple[str, int, int], MemoryDifference] = {}
        self._n_rounds = 0
        self._later: list[tuple[int, Callable[[], None]]] = []

    def encode(self, text: str) -> list[int]:
        return list(self.session.prompt(text).tokens)

    def next_round(self) -> int:
        """Number of the next batch, counted over all contexts."""
        self._n_rounds += 1
        return self._n_rounds - 1

    def later(self, write: Callable[..., None], number: int, *values: Any) -> None:
        """Defer writing rows of a round to the end: a check refers to earlier rounds, and the
        rounds of a run must rise from row to row."""
        self._later.append((number, partial(write, number, *values)))

    def context(self, spec: ContextSpec, policy: str) -> SessionContext:
        options = RunOptions(
            parallel=spec.n_seqs,
            n_predict=-1,
            n_ctx=spec.n_ctx,
            n_batch=max(spec.n_ubatch, spec.n_ctx),
            n_ubatch=spec.n_ubatch,
            rollback=policy,
            n_rs_seq=spec.n_rs_seq,
            split=spec.split,
            kv=spec.kv,
            faults=(spec.fault,) if spec.fault else (),
            batch_invariant=self._invariant,
        )
        try:
            memory = self.session.make_memory(options, spec.n_seqs, spec.n_ctx, spec.n_rs_seq)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"The device has no room for context {spec.name}.",
                "Lower its n_seqs, n_rs_seq or n_ctx.",
            ) from error
        memory.poison(self._fill)
        context = self._contexts[spec.name] = SessionContext(self, spec, options, memory)
        facts = self.trace.runs[context.run_id]
        facts.lane = f"{policy} {spec.name}" + (f", {spec.fault}" if spec.fault else "")
        context.rows = DivergenceRows(self.trace, context.run_id, facts.lane)
        many = f"{spec.n_seqs} sequences, " if spec.n_seqs > 1 else ""
        facts.lane_about = f"{many}n_rs_seq {spec.n_rs_seq}"
        measured = spec.name in self._tolerances
        facts.lane_kind = POLICY if measured else REFERENCE
        facts.lane_against = self._reference.run_id if measured else None
        facts.lane_tolerance = self._tolerances.get(spec.name, 0.0)
        return context

    def compared(
        self, check: CompareRanges, logits: LogitsDifference, left: Tensor, right: Tensor
    ) -> None:
        for i, nmse in enumerate(logits.nmse):
            key = name, seq, pos = check.left.context, check.left.seq, check.left.start + i
            known = self._worst.get(key)
            if known is None or not nmse <= known[1].nmse[0]:
                number = self._contexts[name].round_of(seq, pos)
                self._worst[key] = number, logits.at(i), left[i : i + 1], right[i : i + 1]

    def states(self, check: CompareRanges, pos: int, found: MemoryDifference) -> None:
        self._states[check.left.context, check.left.seq, pos] = found

    def failed(self, statement: Statement, message: str) -> None:
        name = _context_of(statement)
        if name in self._contexts:
            facts = self.trace.runs[self._contexts[name].run_id]
            facts.setdefault("lane_error", f"line {statement.line}: {statement.text}: {message}.")

    def end(self) -> None:
        for context in self._contexts.values():
            context.close_round()
        chosen: set[tuple[int, int]] = set()
        for (name, seq, pos), row in sorted(self._worst.items(), key=itemgetter(0)):
            number, difference, left, right = row
            context, token = self._contexts[name], int(right.argmax())
            self.later(self._choose, number, context.run_id, seq, pos, token, left)
            if (seq, pos) not in chosen:
                self.later(self._choose, number, self._reference.run_id, seq, pos, token, right)
            chosen.add((seq, pos))
            states = self._states.pop((name, seq, pos), None)
            self.later(context.rows.append, number, seq, pos + 1, [token], difference, states)
        for (name, seq, pos), states in self._states.items():
            context = self._contexts[name]
            self.later(context.rows.states, context.round_of(seq, pos), seq, pos, states)
        for _, write in sorted(self._later, key=itemgetter(0)):
            write()
        for context in self._contexts.values():
            TraceWriter(self.trace, context.run_id).end(["end"])
        self._reference.end(["end"])

    def _choose(
        self, number: int, run_id: int, seq: int, pos: int, token: int, logits: Tensor
    ) -> None:
        """Record one side's logits [1, n_vocab], with the token chosen by the right side."""
        writer, facts = TraceWriter(self.trace, run_id), target_facts(logits, [token])
        writer.learn([token, *facts.top_ids[0]], self.session.tokenizer.piece)
        writer.append(
            "tokens",
            round=number,
            seq_id=seq,
            pos=pos + 1,
            kind="target",
            token_id=token,
            target_p=facts.prob[0],
            target_rank=facts.rank[0],
            target_entropy=facts.entropy[0],
            target_top_id=facts.top_ids[0],
            target_top_p=facts.top_probs[0],
        )


_CheckedPosition = tuple[int, LogitsDifference, Tensor, Tensor]
"""One position of a check: its batch, and both sides' logits [1, n_vocab]."""


def _tolerance(check: CompareRanges) -> float:
    """NMSE bound of a check for the lane view; 1 if it checks something else."""
    bound = check.bound
    if check.for_states:
        return 0.0
    return bound.limit if bound.measure == "nmse" or bound == EXACT else 1.0


def _context_of(statement: Statement) -> str:
    action = statement.action
    if isinstance(action, CompareRanges):
        return action.left.context
    return action.name if isinstance(action, ContextSpec) else action.context
