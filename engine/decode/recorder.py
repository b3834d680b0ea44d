"""The recorder: turns the rounds of a run into rows of the trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.decode.target_facts import all_target_facts, facts_in
from engine.gguf.model_files import ModelFiles
from engine.machine.clock import run_clock
from engine.trace.facts import RunFacts
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter

if TYPE_CHECKING:
    from engine.batch import UBatch
    from engine.decode.round import PhaseClock, Round
    from engine.draft.drafter import Draft
    from engine.memory.hybrid import HybridMemory
    from engine.memory.recurrent import SnapshotPolicy, SnapshotSlot


NewRows = defaultdict[str, list[dict[str, Any]]]
"""Rows to be written, by table."""


class Recorder:
    """Writes the rows of one run. `piece` gives the bytes of a token. files: of the model, looked
    at in every round.

    Rows may wait until several rounds are written together: after a forward pass, no code and no
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
        self._waiting: list[Callable[[NewRows], object]] = []
        self._unanswered: list[Round] = []
        self.bytes_waiting = 0
        """Bytes of logits whose rows wait."""

    @property
    def progress(self) -> tuple[int | None, float, int, tuple[int, int]]:
        """What later rows go on from: last round, time so far, forward passes, state moved."""
        return self._last_round, self._elapsed_ms, self._n_ubatches, self._moved

    def go_on(self, progress: tuple[int | None, float, int, tuple[int, int]]) -> None:
        """Go on as if it had written the rows so far."""
        self._last_round, self._elapsed_ms, self._n_ubatches, self._moved = progress

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
        self, round_: int, asked: Sequence[tuple[int, Draft]], seq_ids: Mapping[int, int]
    ) -> None:
        """Every draft that was asked for, and its memory sequence, the empty ones too. seq_ids: the
        number of each memory sequence's prompt."""
        for seq, draft in asked:
            self._append(
                "drafts",
                round=round_,
                seq_id=seq_ids[seq],
                drafter=draft.drafter,
                match_pos=draft.match_pos,
                num_raw=draft.n_raw,
                num_draft_tokens=len(draft.tokens),
                reason=draft.reason,
                num_wrong_rows=draft.n_wrong_rows,
                num_wrong_tokens=draft.n_wrong_tokens,
                block_length=draft.block,
                confidence=_mean(draft.sure or draft.probs),
                draft_ms=draft.ms,
            )

    @property
    def facts(self) -> RunFacts:
        """The facts of the run in the trace, which may be added to."""
        return self._writer.facts

    def prompt(self, round_: int, seq_id: int, pos0: int, tokens: Sequence[int]) -> None:
        """Record the tokens of a prompt, or of a part of it that starts at pos0."""
        self._record(partial(self._prompt, round_, seq_id, pos0, tokens))

    def round(
        self,
        rounds: Sequence[Round],
        memory: HybridMemory | None,
        clock: PhaseClock,
        told: Mapping[str, Any] | None = None,
    ) -> None:
        """Close a round: token, memory and round rows of its sequences, one at least.

        Without a memory, as of another program, nothing is observed of it but what it reports:
        columns of every row.

        Each row carries the time spent on its sequence; what was spent on several is divided
        among them, so that the sum over rows is the time that passed.
        """
        now = run_clock()
        elapsed_ms = (now - self._resumed) * 1e3
        self._elapsed_ms += elapsed_ms
        self._resumed = now
        number, n = rounds[0].number, len(rounds)
        if self._files:
            self._files.note(self.facts, number)
        self._last_round = number
        ubatch_ids, self._round_ubatches = self._round_ubatches, []
        phases = [clock.columns(round_.seq, n) for round_ in rounds]
        phase_ms = [sum(one.values()) for one in phases]
        rest_ms = max(0.0, elapsed_ms - sum(phase_ms)) / n
        traffic = self._traffic(memory.recurrent, n) if memory else []
        self._unanswered.extend(rounds)
        for round_ in rounds:
            self.bytes_waiting += 0 if round_.logits is None else round_.logits.nbytes
        for i, round_ in enumerate(rounds):
            columns: dict[str, Any] = {
                "round": number,
                "t_ms": self._elapsed_ms,
                "total_ms": phase_ms[i] + rest_ms,
                **phases[i],
                **(told or {}),
            }
            slots: Sequence[SnapshotSlot] = ()
            if memory:
                columns |= traffic[i]
                slots = _look(memory, round_.seq, columns)
            self._record(partial(self._round, round_, columns, slots, ubatch_ids))

    def close(self) -> None:
        """Write what waits. The run has ended: whether its model files have changed since the last
        round is noted, too."""
        self.resume()
        if self._files:
            self._files.note(self.facts, None, self._last_round)

    def _append(self, table: str, **row: Any) -> None:
        self._record(lambda rows: rows[table].append(row))

    def _record(self, add: Callable[[NewRows], object]) -> None:
        """add: puts rows with those that are to be written."""
        self._waiting.append(add)
        if not self._may_wait:
            self._write()

    def _write(self) -> None:
        waits = [(round_, round_.logits) for round_ in self._unanswered]
        asked = [(round_, logits) for round_, logits in waits if logits is not None]
        for round_, logits in asked:
            if round_.record is not None:
                round_.target = facts_in(round_.record, logits, *round_.examined)
        asked = [one for one in asked if one[0].record is None]
        found = all_target_facts([(logits, *round_.examined) for round_, logits in asked])
        for (round_, _), target in zip(asked, found, strict=True):
            round_.target = target
        self._unanswered = []  # only now: after an interruption they are still to be worked out
        waiting, self._waiting, self.bytes_waiting = self._waiting, [], 0
        rows: NewRows = defaultdict(list)
        for add in waiting:
            add(rows)
        for table, new in rows.items():
            self._writer.append_all(table, new)

    def _prompt(
        self, round_: int, seq_id: int, pos0: int, tokens: Sequence[int], rows: NewRows
    ) -> None:
        n = len(tokens)
        self._writer.append_all("tokens", rows.pop("tokens", []))
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
        round_: Round,
        columns: Mapping[str, Any],
        slots: Sequence[SnapshotSlot],
        ubatch_ids: Sequence[int],
        rows: NewRows,
    ) -> None:
        """The rows of one sequence. columns: others of its round row."""
        ids = {"round": round_.number, "seq_id": round_.seq_id}
        self._learn(round_)
        rows["tokens"] += ({**ids, **row} for row in _token_rows(round_))
        rows["memory"] += (
            {**ids, "slot": slot.slot, "state": slot.state, "age": slot.age} for slot in slots
        )
        is_prompt = round_.is_prompt
        row: dict[str, Any] = dict(
            seq_id=round_.seq_id,
            pos0=round_.pos0,
            drafter=round_.draft.drafter if round_.draft else "",
            accept_rule=round_.accept_rule,
            num_draft_tokens=None if is_prompt else len(round_.drafted),
            num_accepted_draft_tokens=None if is_prompt else round_.n_accepted,
            num_target_tokens=round_.n_own,
            num_emitted=len(round_.emitted),
            stop_kind=_stop_kind(round_),
            rollback_depth=round_.rollback_depth,
            memory_rollback=round_.memory_rollback,
            rollback_path=round_.rollback_path,
            valid_depth=round_.valid_depth,
            rs_idx_before=round_.rs_idx_before,
            rs_idx_after=round_.rs_idx_after,
            replay_index=round_.n_replays,
            verify_width=round_.n_rows or len(round_.tokens),
            draft_n_max=round_.draft.n_max if round_.draft else None,
            state_bytes_restored=round_.restored_bytes,
            checkpoint_bytes=round_.checkpoint_bytes,
            cache_wrong=round_.cache_wrong,
            sampler_wrong=round_.sampler_wrong,
            sampler_draws=round_.sampler_draws,
            ubatch_ids=" ".join(map(str, ubatch_ids)),
            **columns,
        )
        rows["rounds"].append(row)

    def _learn(self, round_: Round) -> None:
        target = round_.target
        for tokens in (round_.emitted, *(target.top_ids if target else ())):
            self._writer.learn(tokens, self._piece)
        for part in (round_.draft, round_.unverified, round_.tree):
            for tokens in (part.tokens, *part.top_ids) if part else ():
                self._writer.learn(tokens, self._piece)

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


def _stop_kind(round_: Round) -> str:
    """How the round ended: with the last of the target's own tokens, or at a stop before it.
    Empty for a part of a prompt that nothing is chosen after."""
    if not round_.n_own:
        return ""
    n_own = len(round_.emitted) - min(round_.n_accepted, len(round_.emitted))
    return round_.own_kinds[n_own - 1] if n_own else "end"


def _token_rows(round_: Round) -> Iterator[dict[str, Any]]:
    """The rows of `tokens`: drafted, decoded again and the target's own, in the order in which they
    are written. Their columns but run_id, round and seq_id."""
    n_kept = min(round_.n_accepted, len(round_.emitted))
    own = list(enumerate(zip(round_.own_kinds, round_.emitted[n_kept:], strict=False)))
    n_judged = round_.n_judged
    for i, token in enumerate(round_.drafted):
        kind = "accepted" if i < n_kept else "ignored"
        if i == round_.n_accepted and i < n_judged:
            kind = "rejected"
            if own and token == own[0][1][1]:
                # an end token inside the draft counts as the target's own (llama.cpp); and a
                # replay may choose what was drafted where the first verification did not
                kind = own.pop(0)[1][0]
        row = {"pos": round_.pos_next + i, "kind": kind, "token_id": token, "draft_index": i}
        assert round_.draft is not None  # it has this token
        _add_drafted(row, round_.draft, i)
        if round_.tree:
            _add_node(row, round_.tree, round_.path[i])
        if i < n_judged:
            _add_target(row, round_, i, i)
            if round_.draft.probs:
                row["draft_top_forbidden"] = _forbidden(round_, i, round_.draft.top_ids[i])
        yield row
    for i, token in enumerate(round_.unverified.tokens if round_.unverified else ()):
        assert round_.unverified is not None  # it has this token
        index = len(round_.drafted) + i
        pos = round_.pos_next + index
        row = {"pos": pos, "kind": "ignored", "token_id": token, "draft_index": index}
        _add_drafted(row, round_.unverified, i)
        yield row
    if round_.tree:
        depths = round_.tree.depths
        for i in sorted({*range(len(depths))} - {*round_.path}):
            pos = round_.pos_next + depths[i]
            row = {"pos": pos, "kind": "side", "token_id": round_.tree.tokens[i]}
            _add_drafted(row, round_.tree, i)
            _add_node(row, round_.tree, i)
            yield row
    if round_.n_replays:
        for i, token in enumerate(round_.emitted[:n_kept]):
            pos = round_.pos_next + i
            yield {"pos": pos, "kind": "replayed", "token_id": token, "draft_index": i}
    for i, (kind, token) in own:
        row = {"pos": round_.pos_next + n_kept + i, "kind": kind, "token_id": token}
        _add_target(row, round_, n_judged + i, round_.n_accepted + i)
        yield row


def _add_drafted(row: dict[str, Any], draft: Draft, i: int) -> None:
    if draft.probs:  # else looked up: the drafter has no confidence in it
        row["draft_p"] = draft.probs[i]
        row["draft_top_id"] = draft.top_ids[i]
        row["draft_top_p"] = draft.top_probs[i]
    if draft.sure:
        row["draft_conf"] = draft.sure[i]


def _add_node(row: dict[str, Any], tree: Draft, i: int) -> None:
    row["draft_node"], row["draft_parent"] = i, tree.parents[i]


def _add_target(row: dict[str, Any], round_: Round, i: int, logits_row: int) -> None:
    """Columns about the i-th examined token, judged or chosen by that row of the logits."""
    target = round_.target
    assert target is not None  # worked out before rows are written
    row["target_p"] = target.prob[i]
    row["rule_p"] = round_.rule_p[i] if i < len(round_.rule_p) else None
    row["rule_q"] = round_.rule_q[i] if i < len(round_.rule_q) else None
    row["target_rank"] = target.rank[i]
    row["target_entropy"] = target.entropy[i]
    row["target_top_id"] = target.top_ids[i]
    row["target_top_p"] = target.top_probs[i]
    row["target_top_forbidden"] = _forbidden(round_, logits_row, target.top_ids[i])


def _forbidden(round_: Round, logits_row: int, ids: Sequence[int]) -> list[int] | None:
    """1 for each token that the grammar forbids there; None without a grammar."""
    allowed = round_.allowed.get(logits_row)
    return None if allowed is None else [int(not allowed.holds(token)) for token in ids]
