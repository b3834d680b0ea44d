"""The recorder: turns the rounds of a run into rows of the trace."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.gguf.part_file import ModelFiles
from engine.machine.clock import run_clock
from engine.machine.device import read, upload
from engine.sampling.grammar import is_allowed
from engine.trace.facts import RunFacts
from engine.trace.records import MISSING, N_TOP, PHASES
from engine.trace.store import LOOK_S, TraceStore
from engine.trace.writer import TraceWriter
from kernels.rows.record import larger_than, on_host, row_record, weights

if TYPE_CHECKING:
    from engine.batch import UBatch
    from engine.decode.round import PhaseClock, Round
    from engine.draft.drafter import Draft
    from engine.memory.hybrid import HybridMemory
    from engine.memory.recurrent import SnapshotSlot


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The target's raw softmax at some positions, on the host.

    prob, rank: of the token asked about at each position, rank from 1. entropy in nats.
    top_ids, top_probs: the most probable tokens there.
    """

    prob: list[float]
    rank: list[int]
    entropy: list[float]
    top_ids: list[list[int]]
    top_probs: list[list[float]]

    @property
    def ratios(self) -> list[float]:
        """Of each probability to that of the most probable token there."""
        return [p / top[0] for p, top in zip(self.prob, self.top_probs, strict=True)]


Question = tuple[torch.Tensor, np.ndarray | None, Sequence[int], Sequence[int]]
"""Logits [n, n_vocab], their record if there is one, tokens, and the row where each is asked about.
Rows after the last one asked about are not looked at."""


def target_facts(
    logits: torch.Tensor, tokens: Sequence[int], rows: Sequence[int] | None = None
) -> TargetFacts:
    """Facts about `tokens`. logits: [n, n_vocab]. rows: where each token is asked about, one after
    the other if None."""
    asked = range(len(tokens)) if rows is None else rows
    if not len(tokens):
        return TargetFacts([], [], [], [], [])
    return TargetFacts(*(x.tolist() for x in all_target_facts([(logits, None, tokens, asked)])))


def all_target_facts(questions: Sequence[Question]) -> tuple[np.ndarray, ...]:
    """The fields of TargetFacts, of one question after the other, at least one. Logits are looked
    at for tokens alone that the record of their row (kernels.rows.record) does not know."""
    records = [_record(*one) for one in questions]
    starts = [0, *accumulate(map(len, records))]
    known = on_host(np.concatenate(records))
    at = np.array(
        [start + row for start, one in zip(starts, questions, strict=False) for row in one[3]]
    )
    tokens = np.array([token for one in questions for token in one[2]])
    totals = known.sums[:, 0]
    top_probs = (weights(known.values, known.values[:, :1]) / totals[:, None])[at]
    logs = totals.copy()
    torch.from_numpy(logs).log_()
    entropy = logs - known.sums[:, 1] / totals
    top_ids, largest = known.ids[at], known.values[at]
    is_it = top_ids == tokens[:, None]
    place, n = is_it.argmax(1), np.arange(len(at))
    prob = top_probs[n, place]
    rank = 1 + (largest == largest[n, place][:, None]).argmax(1)  # the first equal one
    (others,) = np.nonzero(~is_it.any(1))
    if others.size:
        own, n_larger = known.own[at], known.n_larger[at]
        every = [(one[0], row) for one in questions for row in one[3]]
        for i in others[known.asked[at[others]] != tokens[others]].tolist():
            logits, row = every[i]
            wanted = upload([[int(tokens[i])]], logits.device)
            (own[i],), (n_larger[i],) = (
                x[0] for x in read(*larger_than(logits[row : row + 1], wanted))
            )
        prob[others] = (weights(own, largest[:, 0]) / totals[at])[others]
        rank[others] = 1 + n_larger[others]
    return prob, rank, entropy[at], top_ids, top_probs


def _record(
    logits: torch.Tensor, record: np.ndarray | None, tokens: Sequence[int], rows: Sequence[int]
) -> np.ndarray:
    """Of the rows up to the last one asked about."""
    n = max(rows) + 1
    if record is not None:
        return record[:n]
    asked = [0] * n
    for row, token in zip(rows, tokens, strict=True):
        asked[row] = token
    k = min(N_TOP, logits.shape[1])
    found: np.ndarray = read(row_record(logits[:n], k, upload(asked, logits.device)))[0]
    return found


_PHASES = tuple(f"{phase}_ms" for phase in PHASES)
_OF_DRAFT = ("draft_p", "draft_top_id", "draft_top_p", "draft_conf")
_OF_TARGET = "rule_p", "rule_q", "target_top_forbidden"
_FACTS = "target_p", "target_rank", "target_entropy", "target_top_id", "target_top_p"
"""Columns of the fields of TargetFacts."""
_ROUND = ("round", "seq_id")
_COLUMNS = {
    "ubatches": (
        *("round", "ubatch", "n_seqs", "n_seq_tokens", "seq_ids"),
        *("n_padding", "purpose", "reason", "ms", "pos_gap"),
    ),
    "drafts": (
        *(*_ROUND, "drafter", "match_pos", "num_raw", "num_draft_tokens", "reason"),
        *("num_wrong_rows", "num_wrong_tokens", "block_length", "confidence", "draft_ms"),
    ),
    "tokens": (
        *(*_ROUND, "pos", "kind", "token_id", "draft_index", "draft_node", "draft_parent"),
        *(*_OF_DRAFT, "draft_top_forbidden", *_OF_TARGET, "fact"),
    ),
    "memory": (*_ROUND, "slot", "state", "age"),
    "rounds": (
        *(*_ROUND, "pos0", "accept_rule", "num_target_tokens", "rollback_depth"),
        *("memory_rollback", "rollback_path", "valid_depth", "rs_idx_before", "rs_idx_after"),
        *("replay_index", "state_bytes_restored", "checkpoint_bytes", "cache_wrong"),
        *("sampler_wrong", "sampler_draws", "drafter", "draft_n_max", "num_draft_tokens"),
        *("num_accepted_draft_tokens", "num_emitted", "stop_kind", "verify_width"),
        *("ubatch_ids", "t_ms", "total_ms", *_PHASES, "state_bytes_written"),
        *("state_bytes_copied", "attention_pos_max", "kv_cells_used", "kv_cells_duplicate"),
        *("memory_bytes_held", "n_rs_seq", "recurrent_pos_max"),
    ),
}
"""Columns of the rows of each table, in the order in which they are made here; fact: place in the
facts that are worked out together, -1 without any."""

TopIds = Sequence[Sequence[int]] | np.ndarray
NewRows = defaultdict[str, list[Any]]
"""Values to be written by table, row after row: tuples would keep the garbage collector busy."""


class Recorder:
    """Writes the rows of one run. `piece` gives the bytes of a token. files: of the model, looked
    at in rounds that end LOOK_S after the last that did, or later.

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
        self._resumed, self._looked = run_clock(), -math.inf
        self._n_ubatches = 0
        self._moved = (0, 0)
        self._round_ubatches: list[int] = []
        self._may_wait = False
        self._waiting: list[_Waiting] = []
        self._rows: NewRows = defaultdict(list)
        self._facts: tuple[np.ndarray, ...] = ()
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
        self._rows["ubatches"] += (
            *(round_, self._n_ubatches, ubatch.n_seqs, ubatch.n_seq_tokens),
            *(" ".join(map(str, seq_ids)), ubatch.n_padding, purpose, ubatch.reason, ms, pos_gap),
        )
        self._recorded()
        self._round_ubatches.append(self._n_ubatches)
        self._n_ubatches += 1

    def drafts(
        self, round_: int, asked: Sequence[tuple[int, Draft]], seq_ids: Mapping[int, int]
    ) -> None:
        """Every draft that was asked for, and its memory sequence, the empty ones too. seq_ids: the
        number of each memory sequence's prompt."""
        for seq, draft in asked:
            self._rows["drafts"] += (
                *(round_, seq_ids[seq], draft.drafter, draft.match_pos, draft.n_raw),
                *(len(draft.tokens), draft.reason, draft.n_wrong_rows, draft.n_wrong_tokens),
                *(draft.block, _mean(draft.sure or draft.probs), draft.ms),
            )
        self._recorded()

    @property
    def facts(self) -> RunFacts:
        """The facts of the run in the trace, which may be added to."""
        return self._writer.facts

    def prompt(self, round_: int, seq_id: int, pos0: int, tokens: Sequence[int]) -> None:
        """Record the tokens of a prompt, or of a part of it that starts at pos0."""
        self._write()  # in the order of the rounds
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

    def round(
        self,
        rounds: Sequence[Round],
        memory: HybridMemory | None,
        clock: PhaseClock,
        n_rs_seq: int | None = None,
    ) -> None:
        """Close a round: token, memory and round rows of its sequences, one at least.

        Without a memory, as of another program, nothing is observed of it but n_rs_seq.

        Each row carries the time spent on its sequence; what was spent on several is divided
        among them, so that the sum over rows is the time that passed.
        """
        now, number = run_clock(), rounds[0].number
        elapsed_ms = (now - self._resumed) * 1e3
        self._elapsed_ms += elapsed_ms
        self._resumed, self._last_round = now, number
        if self._files and now - self._looked >= LOOK_S:
            self._files.note(self.facts, number)
            self._looked = now
        before, ubatches, self._round_ubatches = self._moved, self._round_ubatches, []
        if memory and memory.recurrent:
            traffic = memory.recurrent.traffic
            self._moved = traffic.written, traffic.copied
        seen = [_look(memory, round_.seq, n_rs_seq) for round_ in rounds]
        self.bytes_waiting += sum(x.logits.nbytes for x in rounds if x.logits is not None)
        moved = [b - a for a, b in zip(before, self._moved, strict=True)] if memory else []
        self._waiting.append((rounds, seen, clock, elapsed_ms, self._elapsed_ms, moved, ubatches))
        self._recorded()

    def close(self) -> None:
        """Write what waits. The run has ended: whether its model files have changed since the last
        round is noted, too."""
        self.resume()
        if self._files:
            self._files.note(self.facts, None, self._last_round)

    def _recorded(self) -> None:
        if not self._may_wait:
            self._write()

    def _write(self) -> None:
        asked, n = [], 0
        for rounds, *_ in self._waiting:
            for round_ in rounds:
                if round_.logits is not None:
                    asked.append((round_.logits, round_.record, *round_.examined))
                    round_.fact = n
                    n += len(asked[-1][2])
        if asked:
            self._facts = all_target_facts(asked)
            self._writer.learn(sorted(set(self._facts[3].ravel().tolist())), self._piece)
        # only now: after an interruption they are still to be worked out
        waiting, self._waiting, self.bytes_waiting = self._waiting, [], 0
        rows, self._rows = self._rows, defaultdict(list)
        _add_rounds(waiting, self._facts[3] if self._facts else (), rows)
        self._write_tokens(rows)
        for table, new in rows.items():
            self._writer.append_rows(table, _COLUMNS[table], new)
        self._facts = ()

    def _write_tokens(self, rows: NewRows) -> None:
        """Rows of tokens so far, with what was worked out of the target at their places."""
        new, names = rows.pop("tokens", []), _COLUMNS["tokens"]
        places = new[len(names) - 1 :: len(names)]
        del new[len(names) - 1 :: len(names)]
        names = names[:-1]
        facts = {
            name: _with_blank(values)[places]
            for name, values in zip(_FACTS, self._facts, strict=False)
        }
        known = set(new[names.index("token_id") :: len(names)])
        known.update(*filter(None, new[names.index("draft_top_id") :: len(names)]))
        self._writer.learn(known, self._piece)
        self._writer.append_rows("tokens", names, new, facts)


_OF_ROUND = attrgetter(
    *("number", "seq_id", "pos0", "accept_rule", "n_own", "rollback_depth", "memory_rollback"),
    *("rollback_path", "valid_depth", "rs_idx_before", "rs_idx_after", "n_replays"),
    *("restored_bytes", "checkpoint_bytes", "cache_wrong", "sampler_wrong", "sampler_draws"),
)
_Seen = tuple[tuple[int | None, ...], "Sequence[SnapshotSlot]"]
_Waiting = tuple[
    "Sequence[Round]", list[_Seen], "PhaseClock", float, float, list[int], Sequence[int]
]
"""Rounds closed together, what memory holds of each, their times in ms, alone and since the run
began, the bytes moved and the numbers of the forward passes."""


def _add_rounds(waiting: Sequence[_Waiting], top_ids: TopIds, rows: NewRows) -> None:
    """Add rows of `tokens`, `memory` and `rounds`. top_ids: a field of TargetFacts."""
    tokens, slots, new = rows["tokens"], rows["memory"], rows["rounds"]
    for rounds, seen, clock, elapsed_ms, t_ms, moved, ubatches in waiting:
        n, ubatch_ids = len(rounds), " ".join(map(str, ubatches))
        phases = [clock.phases(round_.seq, n) for round_ in rounds]
        rest_ms = max(0.0, elapsed_ms - sum(map(sum, phases))) / n
        for i, (round_, ms, (held, its_slots)) in enumerate(zip(rounds, phases, seen, strict=True)):
            emitted, kinds = round_.emitted, round_.own_kinds
            n_accepted = len(round_.accepted) - round_.n_own
            _add_tokens(round_, emitted, n_accepted, kinds, top_ids, tokens)
            for slot in its_slots:
                slots += (round_.number, round_.seq_id, *slot)
            traffic = [whole // n + (i < whole % n) for whole in moved] or (None, None)
            times = ubatch_ids, t_ms, sum(ms) + rest_ms, *ms
            new += (
                *_OF_ROUND(round_),
                *_counts(round_, len(emitted), n_accepted, kinds),
                *times,
                *traffic,
                *held,
            )


def _look(memory: HybridMemory | None, seq: int, n_rs_seq: int | None) -> _Seen:
    """What the memory holds of a sequence, the last columns of a round row; its snapshot slots."""
    if memory is None:
        return (None, None, None, None, n_rs_seq, None), ()
    (used, duplicates, pos_max), recurrent = memory.attention.holding(seq), memory.recurrent
    held = pos_max, used, duplicates, memory.n_bytes()
    if not recurrent:
        return (*held, None, None), ()
    return (*held, recurrent.n_rs_seq, recurrent.seq_pos_max(seq)), recurrent.slots(seq)


def _with_blank(values: np.ndarray) -> np.ndarray:
    """Facts as columns have them, with one more in which nothing is observed, the last."""
    blank = MISSING if values.dtype.kind == "i" else np.nan
    shape = (len(values) + 1, *[N_TOP] * (values.ndim - 1))
    found = np.full(shape, blank, values.dtype)
    found[:-1].T[: values.T.shape[0]] = values.T
    return found


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _counts(
    round_: Round, n_emitted: int, n_accepted: int, kinds: Sequence[str]
) -> tuple[str, int | None, int | None, int | None, int, str, int]:
    """drafter to verify_width of a row of `rounds`. A round stops with the last of the target's own
    tokens or at an end before it, a part of a prompt that nothing is chosen after with neither."""
    draft, kind = round_.draft, "end" if round_.n_own else ""
    if round_.n_own and n_emitted > n_accepted:
        kind = kinds[n_emitted - n_accepted - 1]
    rest = n_emitted, kind, round_.n_rows or len(round_.tokens)
    if draft is None:
        return "", None, *((None, None) if round_.is_prompt else (0, n_accepted)), *rest
    return draft.drafter, draft.n_max, len(draft.tokens), n_accepted, *rest


_NO_NODE = (None,) * 2
_NO_DRAFT = (None,) * (len(_OF_DRAFT) + 1)
_NO_TARGET = (*(None,) * len(_OF_TARGET), -1)


def _add_tokens(
    round_: Round,
    emitted: Sequence[int],
    n_accepted: int,
    kinds: Sequence[str],
    top_ids: TopIds,
    to: list[Any],
) -> None:
    """Add rows of `tokens`: drafted, decoded again and the target's own, in the order in which they
    are written. kinds: of its own ones. top_ids: a field of TargetFacts."""
    number, seq_id, draft, tree = round_.number, round_.seq_id, round_.draft, round_.tree
    n_kept, pos = min(n_accepted, len(emitted)), round_.pos_next
    own = list(enumerate(zip(kinds, emitted[n_kept:], strict=False)))
    drafted = draft.tokens if draft else ()
    n_judged = min(len(drafted), n_accepted + 1)
    for i, token in enumerate(drafted):
        kind = "accepted" if i < n_kept else "ignored"
        if i == n_accepted and i < n_judged:
            kind = "rejected"
            if own and token == own[0][1][1]:
                # an end token inside the draft counts as the target's own (llama.cpp); and a
                # replay may choose what was drafted where the first verification did not
                kind = own.pop(0)[1][0]
        assert draft is not None  # it has this token
        of_draft, forbidden, of_target = _of_draft(draft, i), None, _NO_TARGET
        if i < n_judged:
            of_target = _of_target(round_, i, i, top_ids)
            if draft.probs:
                forbidden = _forbidden(round_, i, draft.top_ids[i])
        node = (round_.path[i], tree.parents[round_.path[i]]) if tree else _NO_NODE
        at: tuple[Any, ...] = number, seq_id, pos + i, kind, token, i
        to += (*at, *node, *of_draft, forbidden, *of_target)
    for i, token in enumerate(round_.unverified.tokens if round_.unverified else ()):
        assert round_.unverified is not None  # it has this token
        index, of_draft = len(drafted) + i, _of_draft(round_.unverified, i)
        at = number, seq_id, pos + index, "ignored", token, index
        to += (*at, *_NO_NODE, *of_draft, None, *_NO_TARGET)
    if tree:
        depths = tree.depths
        for i in sorted({*range(len(depths))} - {*round_.path}):
            at = number, seq_id, pos + depths[i], "side", tree.tokens[i], None
            to += (*at, i, tree.parents[i], *_of_draft(tree, i), None, *_NO_TARGET)
    if round_.n_replays:
        for i, token in enumerate(emitted[:n_kept]):
            at = number, seq_id, pos + i, "replayed", token, i
            to += (*at, *_NO_NODE, *_NO_DRAFT, *_NO_TARGET)
    for i, (kind, token) in own:
        of_target = _of_target(round_, n_judged + i, n_accepted + i, top_ids)
        at = number, seq_id, pos + n_kept + i, kind, token, None
        to += (*at, *_NO_NODE, *_NO_DRAFT, *of_target)


def _of_draft(draft: Draft, i: int) -> tuple[Any, ...]:
    """_OF_DRAFT of a drafted token."""
    sure = draft.sure[i] if draft.sure else None
    if not draft.probs:  # looked up: the drafter has no confidence in it
        return None, None, None, sure
    return draft.probs[i], draft.top_ids[i], draft.top_probs[i], sure


def _of_target(round_: Round, i: int, logits_row: int, top_ids: TopIds) -> tuple[Any, ...]:
    """_OF_TARGET and fact of the i-th examined token, judged or chosen by a row of the logits."""
    assert round_.fact is not None  # worked out before rows are written
    return (
        round_.rule_p[i] if i < len(round_.rule_p) else None,
        round_.rule_q[i] if i < len(round_.rule_q) else None,
        _forbidden(round_, logits_row, top_ids[round_.fact + i]) if round_.allowed else None,
        round_.fact + i,
    )


def _forbidden(round_: Round, logits_row: int, ids: Sequence[int]) -> list[int] | None:
    """1 for each token that the grammar forbids there; None without a grammar."""
    allowed = round_.allowed.get(logits_row)
    return None if allowed is None else [int(not is_allowed(allowed, int(token))) for token in ids]
