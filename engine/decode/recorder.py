"""The recorder: turns the rounds of a run into rows of the trace."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
_OF_DRAFT = {
    "draft_p": "probs",
    "draft_top_id": "top_ids",
    "draft_top_p": "top_probs",
    "draft_conf": "sure",
}
"""Columns of drafted tokens that are fields of a Draft."""
_FACTS = "target_p", "target_rank", "target_entropy", "target_top_id", "target_top_p"
"""Columns of the fields of TargetFacts."""
_ROUND = ("round", "seq_id")
_DRAFT = (
    *(*_ROUND, "drafter", "match_pos", "num_raw", "num_draft_tokens", "reason"),
    *("num_wrong_rows", "num_wrong_tokens", "block_length", "confidence", "draft_ms"),
)
_SLOT = (*_ROUND, "slot", "state", "age")
_PASS = ("round", "ubatch", "of", "seq_ids", "purpose", "ms", "pos_gap")
_ROUNDS = (
    *(*_ROUND, "pos0", "accept_rule", "num_target_tokens", "rollback_depth"),
    *("memory_rollback", "rollback_path", "valid_depth", "rs_idx_before", "rs_idx_after"),
    *("replay_index", "state_bytes_restored", "checkpoint_bytes", "cache_wrong"),
    *("sampler_wrong", "sampler_draws", "drafter", "draft_n_max", "num_draft_tokens"),
    *("num_accepted_draft_tokens", "num_emitted", "stop_kind", "verify_width"),
    *("ubatch_ids", "t_ms", "total_ms", *_PHASES, "state_bytes_written"),
    *("state_bytes_copied", "attention_pos_max", "kv_cells_used", "kv_cells_duplicate"),
    *("memory_bytes_held", "n_rs_seq", "recurrent_pos_max"),
)
"""Columns of the rows of tables, in the order in which their values are kept here."""
_ROUND_VALUES = attrgetter(
    *("number", "seq_id", "pos0", "accept_rule", "n_own", "rollback_depth", "memory_rollback"),
    *("rollback_path", "valid_depth", "rs_idx_before", "rs_idx_after", "n_replays"),
    *("restored_bytes", "checkpoint_bytes", "cache_wrong", "sampler_wrong", "sampler_draws"),
)
Columns = dict[str, Any]


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
        self._n_ubatches = self._first_ubatch = 0
        self._moved = (0, 0)
        self._may_wait = False
        self._waiting: list[_Waiting] = []
        # values, row after row: tuples would keep the garbage collector busy
        self._passes: list[Any] = []
        self._drafts: list[Any] = []
        self.bytes_waiting = 0
        """Bytes of logits whose rows wait."""

    @property
    def progress(self) -> tuple[int | None, float, int, tuple[int, int]]:
        """What later rows go on from: last round, time so far, forward passes, state moved."""
        return self._last_round, self._elapsed_ms, self._n_ubatches, self._moved

    def go_on(self, progress: tuple[int | None, float, int, tuple[int, int]]) -> None:
        """Go on as if it had written the rows so far."""
        self._last_round, self._elapsed_ms, self._n_ubatches, self._moved = progress
        self._first_ubatch = self._n_ubatches

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
        self._passes += (round_, self._n_ubatches, ubatch, seq_ids, purpose, ms, pos_gap)
        self._n_ubatches += 1

    def drafts(
        self, round_: int, asked: Sequence[tuple[int, Draft]], seq_ids: Mapping[int, int]
    ) -> None:
        """Every draft that was asked for, and its memory sequence, the empty ones too. seq_ids: the
        number of each memory sequence's prompt."""
        for seq, draft in asked:
            self._drafts += (
                *(round_, seq_ids[seq], draft.drafter, draft.match_pos, draft.n_raw),
                *(len(draft.tokens), draft.reason, draft.n_wrong_rows, draft.n_wrong_tokens),
                *(draft.block, _mean(draft.sure or draft.probs), draft.ms),
            )

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
        passes = self._first_ubatch, self._n_ubatches
        before, self._first_ubatch = self._moved, self._n_ubatches
        if memory and memory.recurrent:
            traffic = memory.recurrent.traffic
            self._moved = traffic.written, traffic.copied
        seen = [_look(memory, round_.seq, n_rs_seq) for round_ in rounds]
        for round_ in rounds:
            if round_.logits is not None:
                self.bytes_waiting += round_.logits.nbytes
        moved = (*zip(before, self._moved, strict=True),) if memory else ()
        self._waiting.append((rounds, seen, clock, elapsed_ms, self._elapsed_ms, moved, passes))
        if not self._may_wait:
            self._write()

    def close(self) -> None:
        """Write what waits. The run has ended: whether its model files have changed since the last
        round is noted, too."""
        self.resume()
        if self._files:
            self._files.note(self.facts, None, self._last_round)

    def _write(self) -> None:
        rounds = [round_ for closed in self._waiting for round_ in closed[0]]
        asked = [(x.logits, x.record, *x.examined) for x in rounds if x.logits is not None]
        facts = all_target_facts(asked) if asked else ()
        tables = {"ubatches": _pass_columns(self._passes), "drafts": _sliced(_DRAFT, self._drafts)}
        tables |= _round_columns(self._waiting, facts)
        drafted = filter(None, tables["tokens"].get("draft_top_id", ()))
        known = {*tables["tokens"].get("token_id", ())}.union(*drafted)
        known.update(*(top_ids.ravel().tolist() for top_ids in facts[3:4]))
        self._writer.learn(known, self._piece)
        # only now: after an interruption they are still to be worked out
        self._waiting, self._passes, self._drafts, self.bytes_waiting = [], [], [], 0
        for table, columns in tables.items():
            if any(map(len, columns.values())):
                self._writer.extend(table, columns)


_Seen = tuple[tuple[int | None, ...], "Sequence[SnapshotSlot]"]
_Waiting = tuple[
    *("Sequence[Round]", list[_Seen], "PhaseClock", float, float),
    *(Sequence[tuple[int, int]], tuple[int, int]),
]
"""Rounds closed together, what memory holds of each, their times in ms, alone and since the run
began, each number of bytes moved, before and after them, and the first and last + 1 of their
forward passes."""


def _look(memory: HybridMemory | None, seq: int, n_rs_seq: int | None) -> _Seen:
    """What the memory holds of a sequence, the last columns of a round row; its snapshot slots."""
    if memory is None:
        return (None, None, None, None, n_rs_seq, None), ()
    (used, duplicates, pos_max), recurrent = memory.attention.holding(seq), memory.recurrent
    held = pos_max, used, duplicates, memory.n_bytes()
    if not recurrent:
        return (*held, None, None), ()
    return (*held, recurrent.n_rs_seq, recurrent.seq_pos_max(seq)), recurrent.slots(seq)


def _sliced(names: Sequence[str], rows: Sequence[Any]) -> Columns:
    """Columns of rows that come as values, one after the other."""
    return {name: rows[i :: len(names)] for i, name in enumerate(names)}


def _pass_columns(passes: Sequence[Any]) -> Columns:
    """`ubatches` of passes as `Recorder.ubatch` keeps them."""
    columns = _sliced(_PASS, passes)
    ubatches = columns.pop("of")
    for name in ("n_seqs", "n_seq_tokens", "n_padding", "reason"):
        columns[name] = [getattr(ubatch, name) for ubatch in ubatches]
    columns["seq_ids"] = [" ".join(map(str, seq_ids)) for seq_ids in columns["seq_ids"]]
    return columns


def _round_columns(waiting: Sequence[_Waiting], facts: Sequence[np.ndarray]) -> dict[str, Columns]:
    """`tokens`, `memory` and `rounds`. facts: fields of TargetFacts, of all that was examined."""
    tokens, slots, values = _TokenColumns(facts), list[Any](), list[Any]()
    for rounds, seen, clock, elapsed_ms, t_ms, moved, passes in waiting:
        n, ubatch_ids = len(rounds), " ".join(map(str, range(*passes)))
        phases = [clock.phases(round_.seq, n) for round_ in rounds]
        rest_ms = max(0.0, elapsed_ms - sum(map(sum, phases))) / n
        for i, (round_, ms, (held, its_slots)) in enumerate(zip(rounds, phases, seen, strict=True)):
            traffic = [(b - a) // n + (i < (b - a) % n) for a, b in moved] or (None, None)
            values += _ROUND_VALUES(round_)
            values += tokens.add_round(round_)
            values += (ubatch_ids, t_ms, sum(ms) + rest_ms, *ms, *traffic, *held)
            for slot in its_slots:
                slots += (round_.number, round_.seq_id, *slot)
    return {
        "tokens": tokens.filled(),
        "memory": _sliced(_SLOT, slots),
        "rounds": _sliced(_ROUNDS, values),
    }


class _TokenColumns(defaultdict[str, list[Any]]):
    """Columns of `tokens`, round after round; in one that is shorter than others, nothing is
    observed in the last rows. facts: fields of TargetFacts, of all that the rounds examined."""

    def __init__(self, facts: Sequence[np.ndarray]) -> None:
        super().__init__(list)
        self._facts, self._n_examined = facts, 0

    def add_round(self, round_: Round) -> tuple[Any, ...]:
        """Add the tokens of a round in the order in which they are written: drafted, decoded again
        and the target's own. Returns drafter to verify_width of its row of `rounds`."""
        draft, emitted, kinds, n_own = round_.draft, round_.emitted, round_.own_kinds, round_.n_own
        n_accepted, n_emitted = len(round_.accepted) - n_own, len(emitted)
        n_kept, n_judged, first = min(n_accepted, n_emitted), 0, 0
        if draft:
            n_judged, of_drafted = round_.n_judged, ["accepted"] * n_kept
            of_drafted += ["ignored"] * (len(draft.tokens) - n_kept)
            if n_accepted < n_judged:
                of_drafted[n_accepted] = "rejected"
                if n_kept < n_emitted and draft.tokens[n_accepted] == emitted[n_kept]:
                    # an end token inside the draft counts as the target's own (llama.cpp); and a
                    # replay may choose what was drafted where the first verification did not
                    of_drafted[n_accepted], first = kinds[0], 1
            others = self._examined(round_, 0, range(n_judged))
            if round_.allowed and draft.probs:
                top_ids = enumerate(draft.top_ids[:n_judged])
                others["draft_top_forbidden"] = [_forbidden(round_, i, ids) for i, ids in top_ids]
            if tree := round_.tree:
                others["draft_node"] = round_.path
                others["draft_parent"] = [tree.parents[node] for node in round_.path]
            self._add_draft(round_, 0, of_drafted, draft, others)
        if round_.unverified:
            ignored = ["ignored"] * len(round_.unverified.tokens)
            self._add_draft(round_, len(round_.drafted), ignored, round_.unverified)
        if tree := round_.tree:
            depths, names = tree.depths, _OF_DRAFT.items()
            for i in sorted({*range(len(depths))} - {*round_.path}):
                others = {name: getattr(tree, values)[i : i + 1] for name, values in names}
                others |= {"draft_node": [i], "draft_parent": [tree.parents[i]]}
                self._add(round_, depths[i], ["side"], [tree.tokens[i]], others)
        if round_.n_replays:
            again = {"draft_index": range(n_kept)}
            self._add(round_, 0, ["replayed"] * n_kept, emitted[:n_kept], again)
        rows = range(n_accepted + first, n_accepted + n_emitted - n_kept)
        others = self._examined(round_, n_judged + first, rows)
        self._add(round_, n_kept + first, kinds[first:], emitted[n_kept + first :], others)
        self._n_examined += n_judged + n_own
        # it stops with the last of the target's own tokens or at an end before it, a part of a
        # prompt that nothing is chosen after with neither
        kind = "end" if n_own else ""
        if n_own and n_emitted > n_accepted:
            kind = kinds[n_emitted - n_accepted - 1]
        rest = n_emitted, kind, round_.n_rows or len(round_.tokens)
        if draft is None:
            return "", None, *((None, None) if round_.is_prompt else (0, n_accepted)), *rest
        return draft.drafter, draft.n_max, len(draft.tokens), n_accepted, *rest

    def filled(self) -> Columns:
        """All columns, equally long."""
        n = len(self["pos"])
        for column in self.values():
            column += [None] * (n - len(column))
        places = [-1 if fact is None else fact for fact in self.pop("fact", ())]
        facts = zip(_FACTS, self._facts, strict=False)
        return {**self, **{name: _with_blank(values)[places] for name, values in facts}}

    def _add(
        self,
        round_: Round,
        place: int,
        kinds: Sequence[str],
        tokens: Sequence[int],
        others: Mapping[str, Sequence[Any]],
    ) -> None:
        """Add tokens at places in turn from the one of the first accepted token on. others: columns
        as far as there are values."""
        n_before, n, pos = len(self["pos"]), len(tokens), round_.pos_next + place
        self["round"] += [round_.number] * n
        self["seq_id"] += [round_.seq_id] * n
        self["pos"] += range(pos, pos + n)
        self["kind"] += kinds[:n]
        self["token_id"] += tokens
        for name, values in others.items():
            if values:
                column = self[name]
                column += [None] * (n_before - len(column))
                column += values

    def _add_draft(
        self,
        round_: Round,
        place: int,
        kinds: Sequence[str],
        draft: Draft,
        others: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        index = range(place, place + len(draft.tokens))
        of_draft = {name: getattr(draft, values) for name, values in _OF_DRAFT.items()}
        self._add(
            round_, place, kinds, draft.tokens, {"draft_index": index, **of_draft, **(others or {})}
        )

    def _examined(self, round_: Round, at: int, rows: range) -> dict[str, Sequence[Any]]:
        """Columns of examined tokens from number `at` of the round's on, by rows of its logits."""
        first, stop = self._n_examined + at, at + len(rows)
        rule = round_.rule_p[at:stop], round_.rule_q[at:stop]
        found = {"fact": range(first, first + len(rows)), "rule_p": rule[0], "rule_q": rule[1]}
        if round_.allowed:
            top_ids = self._facts[3][first : first + len(rows)]
            found["target_top_forbidden"] = [*map(partial(_forbidden, round_), rows, top_ids)]
        return found


def _forbidden(round_: Round, logits_row: int, ids: Sequence[int]) -> list[int] | None:
    """1 for each token that the grammar forbids there; None without a grammar."""
    allowed = round_.allowed.get(logits_row)
    return None if allowed is None else [int(not is_allowed(allowed, int(token))) for token in ids]


def _with_blank(values: np.ndarray) -> np.ndarray:
    """Facts as columns have them, with one more in which nothing is observed, the last."""
    blank = MISSING if values.dtype.kind == "i" else np.nan
    shape = (len(values) + 1, *[N_TOP] * (values.ndim - 1))
    found = np.full(shape, blank, values.dtype)
    found[:-1].T[: values.T.shape[0]] = values.T
    return found


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
