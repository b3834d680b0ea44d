"""Forward passes of the target, timed and recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.batch import GreedyTokens, Span, UBatch, make_ubatch
from engine.decode.recorder import Recorder
from engine.decode.round import PhaseClock
from engine.draft.drafter import PendingDrafts
from engine.machine.device import read, upload, wait_for
from engine.memory.cells import MAX_SEQS
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.model.layers import TargetRows, join_rows
from engine.options import RunOptions
from engine.trace.records import N_TOP

RowsBySequence = dict[int, torch.Tensor]
"""Logits [n_outputs, n_vocab] by memory sequence."""

RecordsBySequence = dict[int, np.ndarray]

TargetRowsBySequence = dict[int, TargetRows]
"""Rows of all tokens, [n_tokens, n_embd], by memory sequence."""


class Forward:
    """Runs batches through the target. `seq_id_of` maps a memory sequence to its seq_id in the
    trace. `watch` is called with every pass and its rows. taps: layers whose rows drafters read.

    n_ubatch: most tokens in one pass, at most n_batch. n_slots: branch i of the text in memory
    sequence s is sequence s + i * n_slots. with_record: a pass also computes the record of its
    logits rows, and the host waits for that instead of the logits.

    records: of the latest batch, by memory sequence, int32 [n_outputs, width].
    """

    def __init__(
        self,
        model: HybridModel,
        memory: HybridMemory,
        options: RunOptions,
        recorder: Recorder,
        seq_id_of: Callable[[int], int],
        watch: Callable[[UBatch, TargetRows], None] | None = None,
        taps: Sequence[int] = (),
        n_slots: int = MAX_SEQS,
        *,
        with_record: bool = False,
    ) -> None:
        self.memory = memory
        self.n_ubatch = min(options.n_ubatch, options.n_batch)
        self._model, self._options, self._recorder = model, options, recorder
        self._seq_id_of, self._watch, self._taps = seq_id_of, watch, taps
        self.n_slots = n_slots
        self._n_top = N_TOP if with_record else 0
        self.records: RecordsBySequence = {}
        self.ahead: GreedyTokens | None = None
        """How many of the next single-token passes to decode at once, and the tokens that end a
        text."""
        self.ms = 0.0
        """Duration of the latest pass, ms."""

    def split(self, spans: Sequence[Span]) -> list[UBatch]:
        """Split a batch into ubatches."""
        return self.memory.split(spans, self.n_ubatch, self._options.split)

    def run(
        self,
        ubatches: Sequence[UBatch],
        round_: int,
        purpose: str,
        clock: PhaseClock,
        pending: Sequence[PendingDrafts] = (),
    ) -> tuple[RowsBySequence, TargetRowsBySequence]:
        """Decode ubatches; returns the requested logits and the rows of all tokens, by sequence.
        The time of a pass is divided among its sequences by their tokens. pending: drafts whose
        tokens are still on the device; they arrive with the record of the only ubatch."""
        phase = "replay" if purpose == "replay" else "verify"
        logits: dict[int, list[torch.Tensor]] = {}
        of_tokens: dict[int, list[TargetRows]] = {}
        records: dict[int, list[np.ndarray]] = {}
        for ubatch in ubatches:
            gap = self._gap(ubatch)
            tokens = self._with(pending, ubatch) if pending else None
            out = self._model.forward(
                ubatch,
                self.memory,
                tokens=tokens,
                taps=self._taps,
                n_top=self._n_top,
                ahead=self.ahead,
            )
            if self._watch and max(ubatch.seq_ids) < self.n_slots:
                self._watch(ubatch, out.rows)
            if out.record is None:
                wait_for(self._model.device)  # sampling would wait anyway; this books it here
                record = None
            else:
                parts = [part for one in pending for part in one.parts]
                record, *values = read(out.record, *parts)
                for one in pending:
                    one.fill(values[: len(one.parts)])
                    del values[: len(one.parts)]
            n_tokens = ubatch.n_seq_tokens
            rows = [row // n_tokens for row in ubatch.outputs.tolist()]
            for i, seq in enumerate(ubatch.seq_ids):
                of_tokens.setdefault(seq, []).append(out.rows[i])
                if count := rows.count(i):
                    first = rows.index(i)
                    alone = count == len(rows)
                    part = slice(first, first + count)
                    logits.setdefault(seq, []).append(out.logits if alone else out.logits[part])
                    if record is not None:
                        records.setdefault(seq, []).append(record if alone else record[part])
            seqs = [seq % self.n_slots for seq in ubatch.seq_ids]
            ms = self.ms = clock.stop(phase, seqs)
            for one in pending:
                late = one.late()
                clock.move(late, phase, "draft", seqs)
                ms -= late
            seq_ids = tuple([self._seq_id_of(seq) for seq in seqs])
            self._recorder.ubatch(round_, ubatch, seq_ids, purpose, ms, gap)
        self.records = {
            seq: parts[0] if len(parts) == 1 else np.concatenate(parts)
            for seq, parts in records.items()
        }
        return _joined(logits), {seq: join_rows(parts) for seq, parts in of_tokens.items()}

    def _with(self, pending: Sequence[PendingDrafts], ubatch: UBatch) -> torch.Tensor:
        """Token ids of a ubatch on the device, with pending drafts filled in; filler repeats the
        last token."""
        tokens = upload(ubatch.tokens.copy(), self._model.device)
        flat, of = tokens.view(-1), np.repeat(ubatch.seq_ids, ubatch.n_seq_tokens)
        for one in pending:
            for seq, drafted in one.tokens.items():
                (places,) = np.nonzero(of == seq)
                first, stop = int(places[0]) + 1, int(places[-1]) + 1
                flat[first : first + len(drafted)] = drafted
                if first + len(drafted) < stop:
                    flat[first + len(drafted) : stop] = drafted[-1:]
        return tokens

    def show(self, span: Span, rows: TargetRows) -> None:
        """Call the watch with the verified branch of a tree, as the text's own sequence: its tokens
        and their rows [n, n_embd]. Passes with several branches are not shown."""
        if self._watch:
            ubatch = make_ubatch([span], (0,), (0,), len(span.tokens), "")
            taps = {layer: row[None] for layer, row in rows.taps.items()}
            self._watch(ubatch, TargetRows(rows.hidden[None], taps))

    def _gap(self, ubatch: UBatch) -> int:
        """The largest gap, in positions, between what memory holds of a sequence and its first
        token in this ubatch."""
        if ubatch.n_seqs == 1:
            return int(ubatch.positions[0, 0]) - 1 - self.memory.seq_pos_max(ubatch.seq_ids[0])
        last: dict[int, int] = {}
        gaps = []
        starts, ends = (ubatch.positions[:, at].tolist() for at in (0, -1))
        for seq, start, end in zip(ubatch.seq_ids, starts, ends, strict=True):
            held = last[seq] if seq in last else self.memory.seq_pos_max(seq)
            gaps.append(start - 1 - held)
            last[seq] = end  # in a pool, a sequence may have several rows
        return max(gaps, key=abs)


def _joined(parts: dict[int, list[torch.Tensor]]) -> RowsBySequence:
    return {seq: rows[0] if len(rows) == 1 else torch.cat(rows) for seq, rows in parts.items()}
