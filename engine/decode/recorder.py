"""Turns what a round did into rows of the trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.decode.round_facts import RoundFacts
from engine.decode.token_rows import token_rows
from engine.decode.verify import FactsRequest, TargetFacts, all_target_facts
from engine.gguf.model_files import ModelFiles
from engine.machine.clock import run_clock
from engine.trace.records import PHASES
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter

if TYPE_CHECKING:
    from engine.batch import UBatch
    from engine.draft.chain import DrafterAnswer
    from engine.memory.hybrid import HybridMemory
    from engine.memory.recurrent import SnapshotPolicy, SnapshotSlot


@dataclass(slots=True)
class PhaseClock:
    """Milliseconds spent per phase of a round, by all sequences together or by single ones."""

    _common: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _own: dict[int, dict[str, float]] = field(default_factory=dict)
    _since: float = 0.0

    def start(self) -> None:
        """Begin timing."""
        self._since = run_clock()

    def stop(self, phase: str, seqs: Sequence[int] = ()) -> float:
        """Book the time since `start` under a phase and begin anew; returns its milliseconds.

        seqs: memory sequences that it was spent on, an equal part for each entry; none = all.
        """
        now = run_clock()
        ms = (now - self._since) * 1e3
        if not seqs:
            self._common[phase] += ms
        for seq in seqs:
            self._own.setdefault(seq, dict.fromkeys(PHASES, 0.0))[phase] += ms / len(seqs)
        self._since = now
        return ms

    def columns(self, seq: int, n_seqs: int) -> dict[str, float]:
        """Milliseconds per phase: of this sequence alone, plus its n-th part (n_seqs) of the time
        that all sequences spent together."""
        own = self._own.get(seq, {})
        return {
            f"{phase}_ms": ms / n_seqs + own.get(phase, 0.0) for phase, ms in self._common.items()
        }


class Recorder:
    """Writes the rows of one run. `piece` gives the bytes of a token. files: of the model, looked
    at in every round.

    Rows may wait until several rounds are written together: behind a forward pass, no code and no
    table is in the processor's caches any more, and the second round takes a third of the time.
    """

    def __init__(
        self,
        store: TraceStore,
        run_id: int,
        piece: Callable[[int], bytes],
        files: ModelFiles | None = None,
    ) -> None:
        self._writer, self._piece, self._files = TraceWriter(store, run_id), piece, files
        self._last_round: int | None = None
        self._elapsed_ms = 0.0
        self._resumed = run_clock()
        self._n_ubatches = 0
        self._moved = (0, 0)
        self._round_ubatches: list[int] = []
        self._may_wait = False
        self._waiting: list[Callable[[], object]] = []
        self._unanswered: list[RoundFacts] = []

    def resume(self, *, may_wait: bool = False) -> None:
        """The run goes on: time since its last round was a pause and does not count.

        may_wait: rows from here on wait for the next call without it, which writes them.
        """
        self._may_wait = may_wait
        if not may_wait:
            self._write()
        self._resumed = run_clock()

    def ubatch(
        self,
        round_: int,
        ubatch: UBatch,
        seq_ids: Sequence[int],
        purpose: str,
        ms: float,
        pos_gap: int,
    ) -> None:
        """Record one forward pass of the target: a row of `ubatches`.

        ms: its duration. pos_gap: see engine.decode.forward.Forward.
        """
        self._append(
            "ubatches",
            round=round_,
            ubatch=self._n_ubatches,
            n_seqs=ubatch.n_seqs,
            n_seq_tokens=ubatch.n_seq_tokens,
            seq_ids=" ".join(map(str, seq_ids)),
            n_padding=ubatch.n_padding,
            purpose=purpose,
            reason=ubatch.reason,
            ms=ms,
            pos_gap=pos_gap,
        )
        self._round_ubatches.append(self._n_ubatches)
        self._n_ubatches += 1

    def drafts(
        self, round_: int, asked: Sequence[DrafterAnswer], seq_ids: Mapping[int, int]
    ) -> None:
        """Every drafter that was asked. seq_ids: the number of each memory sequence's prompt."""
        for answer in asked:
            draft = answer.draft
            self._append(
                "drafts",
                round=round_,
                seq_id=seq_ids[answer.seq],
                drafter=draft.drafter,
                match_pos=draft.match_pos,
                num_raw=draft.n_raw,
                num_draft_tokens=len(draft.tokens),
                reason=draft.reason,
                num_wrong_rows=draft.n_wrong_rows,
                num_wrong_tokens=draft.n_wrong_tokens,
                block_length=draft.block,
                confidence=_mean(draft.sure or draft.probs),
                draft_ms=answer.ms,
            )

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the run in the trace, which may be added to."""
        return self._writer.facts

    def prompt(self, round_: int, seq_id: int, pos0: int, tokens: Sequence[int]) -> None:
        """Record the tokens of a prompt, or of a part of it that starts at pos0."""
        self._record(partial(self._prompt, round_, seq_id, pos0, tokens))

    def round(
        self,
        round_: int,
        all_facts: Sequence[RoundFacts],
        memory: HybridMemory | None,
        clock: PhaseClock,
        told: Mapping[str, Any] | None = None,
    ) -> None:
        """Close a round: token, memory and round rows of every sequence in it.

        Without a memory, as of another program, nothing is observed of it but what is told:
        columns of every row.

        Each row carries the time spent on its sequence; what was spent on several is divided
        among them, so that the sum over rows is the time that passed.
        """
        now = run_clock()
        self._elapsed_ms += (now - self._resumed) * 1e3
        self._resumed = now
        if self._files:
            self._files.note(self.facts, round_)
        self._last_round = round_
        n = len(all_facts)
        ubatch_ids, self._round_ubatches = self._round_ubatches, []
        traffic = self._traffic(memory.recurrent, n) if memory else []
        self._unanswered.extend(all_facts)
        for i, facts in enumerate(all_facts):
            columns: dict[str, Any] = {"round": round_, "t_ms": self._elapsed_ms, **(told or {})}
            slots: Sequence[SnapshotSlot] = ()
            if memory:
                columns |= traffic[i]
                slots = _look(memory, facts.seq, columns)
            self._record(partial(self._round, facts, columns, slots, ubatch_ids, clock, n))

    def close(self) -> None:
        """Write what waits. The run has ended: whether its model files have changed since the last
        round is noted, too."""
        self.resume()
        if self._files:
            self._files.note(self.facts, None, self._last_round)

    def _append(self, table: str, **row: Any) -> None:
        self._record(partial(self._writer.append, table, **row))

    def _record(self, write: Callable[[], object]) -> None:
        self._waiting.append(write)
        if not self._may_wait:
            self._write()

    def _write(self) -> None:
        waits = self._unanswered
        asked = [(f, f.target) for f in waits if isinstance(f.target, FactsRequest)]
        targets = all_target_facts([rows for _, rows in asked])
        for (facts, _), target in zip(asked, targets, strict=True):
            facts.target = target
        self._unanswered = []  # only now: whoever interrupts this finds them still to be asked
        waiting, self._waiting = self._waiting, []
        for write in waiting:
            write()

    def _prompt(self, round_: int, seq_id: int, pos0: int, tokens: Sequence[int]) -> None:
        n = len(tokens)
        self._writer.learn(tokens, self._piece)
        self._writer.extend(
            "tokens",
            {
                "round": [round_] * n,
                "seq_id": [seq_id] * n,
                "pos": list(range(pos0, pos0 + n)),
                "kind": ["prompt"] * n,
                "token_id": list(tokens),
            },
        )

    def _round(
        self,
        facts: RoundFacts,
        columns: Mapping[str, Any],
        slots: Sequence[SnapshotSlot],
        ubatch_ids: Sequence[int],
        clock: PhaseClock,
        n: int,
    ) -> None:
        """The rows of one sequence, out of n in this round. columns: others of its round row."""
        ids = {"round": columns["round"], "seq_id": facts.seq_id}
        self._tokens(ids, facts)
        for slot in slots:
            self._writer.append("memory", **ids, slot=slot.slot, state=slot.state, age=slot.age)
        self._writer.append(
            "rounds",
            seq_id=facts.seq_id,
            pos0=facts.pos0,
            drafter=facts.draft.drafter if facts.draft else "",
            accept_rule=facts.accept_rule,
            num_draft_tokens=_n_drafted(facts),
            num_accepted_draft_tokens=facts.n_accepted,
            num_target_tokens=len(facts.own_kinds),
            num_emitted=len(facts.tokens),
            stop_kind=_stop_kind(facts),
            rollback_depth=facts.rollback_depth,
            memory_rollback=facts.memory_rollback,
            rollback_path=facts.rollback_path,
            valid_depth=facts.valid_depth,
            rs_idx_before=facts.rs_idx_before,
            rs_idx_after=facts.rs_idx_after,
            replay_index=facts.n_replays,
            verify_width=facts.verify_width,
            state_bytes_restored=facts.restored_bytes,
            checkpoint_bytes=facts.checkpoint_bytes,
            cache_wrong=facts.cache_wrong,
            sampler_wrong=facts.sampler_wrong,
            sampler_draws=facts.sampler_draws,
            ubatch_ids=" ".join(map(str, ubatch_ids)),
            **columns,
            **clock.columns(facts.seq, n),
        )

    def _tokens(self, ids: Mapping[str, int], facts: RoundFacts) -> None:
        draft, target = facts.draft, facts.target
        assert isinstance(target, TargetFacts)  # worked out before rows are written
        for tokens in (facts.tokens, *target.top_ids):
            self._writer.learn(tokens, self._piece)
        for part in (draft, facts.unverified):
            for tokens in (part.tokens, *part.top_ids) if part else ():
                self._writer.learn(tokens, self._piece)
        for row in token_rows(facts, target):
            self._writer.append("tokens", **ids, **row)

    def _traffic(self, recurrent: SnapshotPolicy | None, n: int) -> list[dict[str, int]]:
        """State written and copied since the last round, in n parts that add up."""
        if recurrent is None:
            return [{"state_bytes_written": 0, "state_bytes_copied": 0}] * n
        traffic = recurrent.traffic
        written, copied = traffic.written - self._moved[0], traffic.copied - self._moved[1]
        self._moved = (traffic.written, traffic.copied)
        return [
            {
                "state_bytes_written": written // n + (i < written % n),
                "state_bytes_copied": copied // n + (i < copied % n),
            }
            for i in range(n)
        ]


def _look(memory: HybridMemory, seq: int, columns: dict[str, Any]) -> Sequence[SnapshotSlot]:
    """Add to the columns what the memory holds of a sequence; returns its snapshot slots."""
    cells, recurrent = memory.attention.holding(seq), memory.recurrent
    columns["attention_pos_max"] = cells.pos_max
    columns["kv_cells_used"] = cells.used
    columns["kv_cells_duplicate"] = cells.duplicates
    columns["memory_bytes_held"] = memory.n_bytes()
    if not recurrent:
        return ()
    columns["n_rs_seq"] = recurrent.n_rs_seq
    columns["recurrent_pos_max"] = recurrent.seq_pos_max(seq)
    return recurrent.slots(seq)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _stop_kind(facts: RoundFacts) -> str:
    """How the round ended: with the last of the target's own tokens, or at a stop before it.
    Empty for a part of a prompt, behind which nothing is chosen."""
    if not facts.own_kinds:
        return ""
    n_own = len(facts.tokens) - min(facts.n_accepted or 0, len(facts.tokens))
    return facts.own_kinds[n_own - 1] if n_own else "end"


def _n_drafted(facts: RoundFacts) -> int | None:
    if facts.n_accepted is None:
        return None
    return len(facts.draft.tokens) if facts.draft else 0
