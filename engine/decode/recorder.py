"""The recorder: turns the rounds of a run into rows of the trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from engine.batch import UBatch
from engine.decode.round import PhaseClock, Round, TokenColumns, phases_of
from engine.draft.drafter import Draft
from engine.errors import DeviceLostError
from engine.gguf.part_file import LOOK_S, ModelFiles
from engine.machine.clock import run_clock
from engine.machine.device import CPU, meaning_of, read, upload
from engine.memory.hybrid import HybridMemory
from engine.trace.facts import RunFacts
from engine.trace.records import N_TOP, PHASES
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter
from kernels.rows.record import larger_than, on_host, row_record, weights


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The target's raw softmax at some positions, on the host.

    prob, rank: of the token in question at each position; ranks start at 1. entropy: nats. top_ids,
    top_probs: the most probable tokens there.
    """

    prob: list[float]
    rank: list[int]
    entropy: list[float]
    top_ids: list[list[int]]
    top_probs: list[list[float]]

    @property
    def ratios(self) -> list[float]:
        """Each token's probability divided by that of the most probable token at its position."""
        return [p / top[0] for p, top in zip(self.prob, self.top_probs, strict=True)]


Question = tuple[torch.Tensor, np.ndarray | None, Sequence[int], Sequence[int]]
"""Logits [n, n_vocab], their record if any, tokens, and the logits row of each token. Rows after
the last one named are ignored."""


def target_facts(
    logits: torch.Tensor, tokens: Sequence[int], rows: Sequence[int] | None = None
) -> TargetFacts:
    """Facts about `tokens`. logits: [n, n_vocab]. rows: the logits row of each token, 0, 1, … if
    None."""
    asked = range(len(tokens)) if rows is None else rows
    if not len(tokens):
        return TargetFacts([], [], [], [], [])
    return TargetFacts(*(x.tolist() for x in all_target_facts([(logits, None, tokens, asked)])))


def all_target_facts(questions: Sequence[Question]) -> tuple[np.ndarray, ...]:
    """The fields of TargetFacts for all questions in order, at least one. The logits themselves are
    read only for tokens that the record of their row (kernels.rows.record) does not contain."""
    records = [_record(*one) for one in questions]
    *starts, _ = [0, *accumulate(map(len, records))]
    known = on_host(np.concatenate(records))
    rows = [one[3] for one in questions]
    at = np.repeat(starts, [*map(len, rows)]) + np.array([*chain.from_iterable(rows)])
    tokens = np.array([*chain.from_iterable(one[2] for one in questions)])
    totals = known.sums[:, 0]
    top_probs = (weights(known.values, known.values[:, :1]) / totals[:, None])[at]
    logs = totals.copy()
    torch.from_numpy(logs).log_()
    entropy = logs - known.sums[:, 1] / totals
    top_ids, largest = known.ids[at], known.values[at]
    is_it = top_ids == tokens[:, None]
    place, n = is_it.argmax(1), np.arange(len(at))
    prob = top_probs[n, place]
    rank = 1 + (largest == largest[n, place][:, None]).argmax(1)  # ties: the first equal one
    (others,) = np.nonzero(~is_it[n, place])
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
    """The record of the rows up to the last one named; later ones may not be finite."""
    n = max(rows) + 1
    if record is not None:
        return record if len(record) == n else record[:n]
    asked = [0] * n
    for row, token in zip(rows, tokens, strict=True):
        asked[row] = token
    k = min(N_TOP, logits.shape[1])
    found: np.ndarray = read(row_record(logits[:n], k, upload(asked, logits.device)))[0]
    return found


_PHASES = tuple(f"{phase}_ms" for phase in PHASES)
_N_HELD, _N_NOTED = 7, 15
"""Values noted per round: the round, what the memory holds (`_look`), number of rounds closed
together, its index among them, their clock, time, noted pass values, bytes written and copied."""
_LATEST = slice(1 - _N_NOTED, 1 + _N_HELD - _N_NOTED)
"""Of the values noted, what the memory held at the last round."""
_ROUND = ("round", "seq_id")
_DRAFT = (
    *(*_ROUND, "drafter", "match_pos", "num_raw", "num_draft_tokens", "reason"),
    *("num_wrong_rows", "num_wrong_tokens", "block_length", "confidence", "draft_ms"),
)
_SLOT = (*_ROUND, "slot", "state", "age")
_PASS = "round", "ubatch", "seq_ids", "purpose", "ms", "pos_gap"
_OF_UBATCH = attrgetter("tokens.shape", "n_padding", "reason")
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
"""Columns of the tables, in the order in which their values are collected here."""
_ROUND_VALUES = attrgetter(
    *("number", "seq_id", "pos0", "accept_rule", "n_own", "rollback_depth", "memory_rollback"),
    *("rollback_path", "valid_depth", "rs_idx_before", "rs_idx_after", "n_replays"),
    *("restored_bytes", "checkpoint_bytes", "cache_wrong", "sampler_wrong", "sampler_draws"),
)
Columns = dict[str, Any]
Progress = tuple[int | None, float, int, tuple[int, int]]
"""State that later rows continue from: last round, elapsed ms, forward passes, bytes moved."""


class Recorder:
    """Writes the rows of one run. `piece` gives the bytes of a token. files: the model's files,
    checked for changes at most every LOOK_S.

    Rows may be held back and written for several rounds at once: after a forward pass the
    processor's caches are cold, and the second of two rounds takes a third of the time.
    """

    def __init__(
        self,
        store: TraceStore,
        run_id: int,
        piece: Callable[[int], bytes],
        files: ModelFiles | None = None,
    ) -> None:
        self._writer, self._piece, self._files = TraceWriter(store, run_id), piece, files
        self._resumed, self._looked = run_clock(), -math.inf
        self._may_wait = False
        self.go_on((None, 0.0, 0, (0, 0)))
        # flat values instead of tuples, which would keep the garbage collector busy
        self._noted: list[Any] = []
        self._passes: list[Any] = []
        self._drafts: list[Any] = []
        self.bytes_waiting = 0
        """Bytes of logits kept for rows that are held back."""

    @property
    def progress(self) -> Progress:
        """Of all rows so far."""
        self._write()
        return *self._closed[:2], self._n_ubatches, self._closed[3]

    def go_on(self, progress: Progress) -> None:
        """Continue as if this recorder had written the rows so far."""
        self._closed, self._n_ubatches = progress, progress[2]

    def resume(self, *, may_wait: bool = False) -> None:
        """Continue after a pause, whose time does not count.

        may_wait: rows from here on are held back until the next call writes them.
        """
        self._write()
        self._may_wait, self._resumed = may_wait, run_clock()

    def ubatch(
        self,
        round_: int,
        ubatch: UBatch,
        seq_ids: tuple[int, ...],
        purpose: str,
        ms: float,
        pos_gap: int,
    ) -> None:
        """Record one forward pass of the target, a row of `ubatches`.

        ms: its duration. pos_gap: see engine.decode.forward.Forward.
        """
        self._passes += round_, ubatch, seq_ids, purpose, ms, pos_gap

    def drafts(
        self, round_: int, asked: Sequence[tuple[int, Draft]], seq_ids: Mapping[int, int]
    ) -> None:
        """Record every requested draft, empty ones included. asked: memory sequence and draft.
        seq_ids: maps memory sequences to seq_ids."""
        for seq, draft in asked:
            self._drafts += (
                *(round_, seq_ids[seq], draft.drafter, draft.match_pos, draft.n_raw),
                *(len(draft.tokens), draft.reason, draft.n_wrong_rows, draft.n_wrong_tokens),
                *(draft.block, _mean(draft.sure or draft.probs), draft.ms),
            )

    @property
    def facts(self) -> RunFacts:
        """The facts of the run in the trace; they may be added to."""
        return self._writer.facts

    def prompt(self, round_: int, seq_id: int, pos0: int, tokens: Sequence[int]) -> None:
        """Record the tokens of a prompt, or of the part of it that starts at pos0."""
        self._write()  # keeps the order of rounds
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
        """Close a round: write token, memory and round rows of its sequences, at least one.

        memory: None for another engine's run, of which only n_rs_seq is known.

        Each row carries the time spent on its sequence; shared time is divided among the sequences,
        so that the rows add up to the elapsed time.
        """
        now, moved = run_clock(), (0, 0)
        if self._files and now - self._looked >= LOOK_S:
            self._files.note(self.facts, rounds[0].number)
            self._looked = now
        if memory and memory.recurrent:
            traffic = memory.recurrent.traffic
            moved = traffic.written, traffic.copied
        closed = clock, now, len(self._passes), *moved
        noted: list[Any] = []
        for i, round_ in enumerate(rounds):
            if round_.logits is not None:
                self.bytes_waiting += round_.logits.nbytes
            if memory and memory.was_ahead and self._noted:  # grown by one token, else the same
                pos_max, used, *same, rs_pos, slots = self._noted[_LATEST]
                held = pos_max + 1, used + 1, *same, None if rs_pos is None else rs_pos + 1, slots
            else:
                held = _look(memory, round_.seq, n_rs_seq)
            noted += round_, *held, len(rounds), i, *closed
        self._noted += noted  # in one step, because an interrupt may come
        if not self._may_wait:
            self._write()

    def close(self) -> None:
        """Write the rows held back at the end of the run, and note whether its model files have
        changed since the last round."""
        self.resume()
        if self._files:
            self._files.note(self.facts, None, self._closed[0])

    def _write(self) -> None:
        n_before, n_passes = self._n_ubatches, len(self._passes) // len(_PASS)
        passes = _sliced(_PASS, self._passes)
        if n_passes:
            parts = zip(*map(_OF_UBATCH, passes["ubatch"]), strict=True)
            shapes, passes["n_padding"], passes["reason"] = parts
            passes["n_seqs"], passes["n_seq_tokens"] = zip(*shapes, strict=True)
        passes["ubatch"] = range(n_before, n_before + n_passes)
        passes["seq_ids"] = [*map(_words, passes["seq_ids"])]
        tables = {"ubatches": passes, "drafts": _sliced(_DRAFT, self._drafts)}
        closed, resumed = self._closed, self._resumed
        if self._noted:
            rounds, *noted = (self._noted[i::_N_NOTED] for i in range(_N_NOTED))
            asked = [(x.logits, x.record, *x.examined) for x in rounds if x.logits is not None]
            try:
                examined = all_target_facts(asked) if asked else ()
            except RuntimeError as error:
                if isinstance(meaning_of(error, CPU), DeviceLostError):  # it answers no more
                    self._noted, self._passes, self._drafts, self.bytes_waiting = [], [], [], 0
                raise
            tables |= self._round_columns(rounds, noted, examined)
            drafted = filter(None, tables["tokens"].get("draft_top_id", ()))
            seen = (top_ids.ravel().tolist() for top_ids in examined[3:4])
            known = {*tables["tokens"].get("token_id", ())}.union(*drafted, *seen)
            self._writer.learn(known, self._piece)
            resumed, stop, *moved = self._noted[-4:]
            elapsed_ms = closed[1] + (resumed - self._resumed) * 1e3
            closed = rounds[-1].number, elapsed_ms, n_before + stop // len(_PASS), (*moved,)
        # only now, so that an interrupt before this point loses nothing
        self._noted, self._passes, self._drafts, self.bytes_waiting = [], [], [], 0
        self._closed, self._resumed, self._n_ubatches = closed, resumed, n_before + n_passes
        for table, columns in tables.items():
            if any(map(len, columns.values())):
                self._writer.extend(table, columns)

    def _round_columns(
        self, rounds: Sequence[Round], noted: Sequence[Sequence[Any]], facts: Sequence[np.ndarray]
    ) -> dict[str, Columns]:
        """Columns of `tokens`, `memory` and `rounds`. noted: values per round. facts: fields of
        TargetFacts for everything examined."""
        *held, its_slots = noted[:_N_HELD]
        *placed, clocks, ends, stops, written, copied = noted[_N_HELD:]
        tokens, (_, elapsed_ms, first_ubatch, moved) = TokenColumns(facts), self._closed
        values, of_tokens = [*zip(*map(_ROUND_VALUES, rounds), strict=True)], tokens.add(rounds)
        n_of, i = np.array(placed)
        (firsts,), of = np.nonzero(i == 0), (i == 0).cumsum() - 1
        phases = phases_of(clocks, [round_.seq for round_ in rounds], n_of)
        spent_ms, since_ms = phases.sum(1), (np.array(ends) - self._resumed) * 1e3
        passed_ms = _steps(0.0, since_ms[firsts])
        rest_ms = np.maximum(0.0, passed_ms - np.bincount(of, spent_ms))[of] / n_of
        stop = self._n_ubatches + np.array(stops) // len(_PASS)
        start = np.append(first_ubatch, stop[firsts])[of]
        passes = [*map(str, start.tolist())]
        for row in np.flatnonzero(stop - start != 1).tolist():
            passes[row] = " ".join(map(str, range(start[row], stop[row])))
        own = held[:2]  # nothing is known without a memory
        if own[0][0] is not None:
            now = zip(moved, np.array([written, copied])[:, firsts], strict=True)
            changes = [_steps(*one)[of] for one in now]
            own = [change // n_of + (i < change % n_of) for change in changes]
        rows = [*values, *of_tokens, passes, elapsed_ms + since_ms, spent_ms + rest_ms]
        rows += *phases.T, *own, *held
        n_slots = [*map(len, its_slots)]
        slots = zip(*chain.from_iterable(its_slots), strict=True)
        of_round = (np.repeat(np.array(ids), n_slots) for ids in values[:2])
        return {
            "tokens": tokens.filled(),
            "memory": dict(zip(_SLOT, (*of_round, *slots), strict=True)) if any(n_slots) else {},
            "rounds": dict(zip(_ROUNDS, rows, strict=True)),
        }


def _look(memory: HybridMemory | None, seq: int, n_rs_seq: int | None) -> tuple[Any, ...]:
    """What the memory holds of a sequence (the last columns of a round row), and its snapshot
    slots."""
    if memory is None:
        return None, None, None, None, n_rs_seq, None, ()
    (used, duplicates, pos_max), recurrent = memory.attention.holding(seq), memory.recurrent
    held = pos_max, used, duplicates, memory.n_bytes()
    if not recurrent:
        return *held, None, None, ()
    return *held, recurrent.n_rs_seq, recurrent.seq_pos_max(seq), recurrent.slots(seq)


def _steps(first: float, values: np.ndarray) -> np.ndarray:
    """What each value adds to the one before, the first one to `first`: [n]. np.diff is slower."""
    bounds = np.append(first, values)
    return bounds[1:] - bounds[:-1]


@lru_cache(1024)
def _words(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def _sliced(names: Sequence[str], rows: Sequence[Any]) -> Columns:
    """Columns of rows that are given as one flat list of values."""
    return {name: rows[i :: len(names)] for i, name in enumerate(names)}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
