"""A run repeated next to a memory that decodes its text token by token: the second step of an
audit.

It finds the first round with a wrong state or logits, and what explains the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.audit.text_check import (
    AuditedTexts,
    EmittedRow,
    PlainPass,
    Redraw,
    StateSample,
    TextCheck,
    emitted_rows,
    state_errors,
)
from engine.compare.divergence import cells_that_differ
from engine.compare.state_origin import SequenceText, StateOrigin
from engine.decode.round import Round, RoundObserver
from engine.decode.sequences import DecodingSequence
from engine.memory.hybrid import HybridMemory
from engine.model.recurrence import StateKey
from engine.trace.store import TraceStore

_ROUNDS = 32
"""Rounds checked after the first suspect one."""
_ROOM = 128
"""Cells in addition to the text, for drafted tokens."""
_SAME_P = 1e-3
"""Largest difference of a probability in two equal passes."""
_TIE = 0.5
"""Relative error of a state that no flipped tie reaches."""


class Repetition(RoundObserver):
    """Repeats the audited run up to its last suspect round; an observer of that second run."""

    def __init__(
        self,
        texts: AuditedTexts,
        rows: Mapping[int, Sequence[EmittedRow]],
        suspects: Mapping[int, Sequence[int]],
        samples: Mapping[int, StateSample | None] | None,
        wide: Mapping[int, TextCheck],
    ) -> None:
        """suspects: suspect rounds by sequence. samples: for a run that cannot be repeated, the
        first suspect states of each sequence. wide: results of the wide passes."""
        self._audited, self._options, self._rows = texts, texts.options, rows
        self._suspects, self._samples, self._wide = suspects, samples, wide
        self._plain = {i: texts.passed(i) for i in sorted(suspects)}
        self._redraw = {i: Redraw(texts, i, rows.get(i, [])) for i in suspects}
        self._checks = {i: TextCheck() for i in suspects}
        self._states: dict[int, dict[str, Any]] = {}
        self._cells: dict[int, dict[str, Any]] = {}
        self._texts = {i: list(prompt.tokens) for i, prompt in enumerate(texts.prompts)}
        self._has_parted = False
        self._again: dict[int, list[EmittedRow]] = {}
        self.not_judged: list[str] = []

    def parts(self) -> Iterator[None]:
        """The second step, in small parts."""
        last = max(min(found[-1], found[0] + _ROUNDS) for found in self._suspects.values())
        if self._samples is None:
            trace, audited = TraceStore(), self._audited
            run = audited.session.start(audited.prompts, self._options, trace, observer=self)
            while not self._has_parted and run.step():
                yield
                if len(trace.rounds) and int(trace.rounds.column("round")[-1]) >= last:
                    break
            run.stop()
            self._again = emitted_rows(trace, 0)
            if self._has_parted:
                self.not_judged.append("Repeating the run gave other rounds.")
        for seq_id, plain in self._plain.items():
            for row in self._rows.get(seq_id, []):
                if row.round > last:
                    break
                while plain.n_tokens < row.pos:
                    self._advance(seq_id, row.pos)
                    yield
            if self._samples is not None:
                self._take_sampled(seq_id, self._samples[seq_id])

    def _take_sampled(self, seq_id: int, sample: StateSample | None) -> None:
        """Without a repetition, the states copied in the first run show which are wrong."""
        if sample is None:
            return
        plain = self._audited.passed(seq_id)
        while plain.n_tokens < sample.n_tokens:
            n = min(self._options.n_ubatch, sample.n_tokens - plain.n_tokens)
            plain.decode(n, sample.n_tokens)
        assert plain.memory.recurrent is not None
        clean = {key: x.clone() for key, x in plain.memory.inputs((0,))[0].items()}
        plain.memory.recurrent.put(0, sample.n_tokens - 1, sample.states)
        self._note_state(
            sample.round, seq_id, sample.n_tokens, clean, sample.states, plain.memory, 0, (0,), {}
        )

    # -- an observer of the second run -----------------------------------------------------

    def judged(self, sequence: DecodingSequence, round_: Round) -> None:
        text = self._texts[sequence.seq_id]
        text += round_.accepted
        self._has_parted |= text != self._audited.tokens[sequence.seq_id][: len(text)]

    def closed(
        self, number: int, memory: HybridMemory, running: Sequence[DecodingSequence]
    ) -> None:
        if self._has_parted:
            return
        seqs = [one.index for one in running]
        found = memory.inputs(seqs) if memory.recurrent and seqs else [{} for _ in seqs]
        for one, states in zip(running, found, strict=True):
            plain = self._plain.get(one.seq_id)
            if plain is None or one.in_prompt:
                continue
            n_tokens = self._n_decoded(one)
            while plain.n_tokens < n_tokens:
                self._advance(one.seq_id, n_tokens)
            self._compare_cells(number, one, memory, plain)
            if states and one.seq_id not in self._states:
                texts = {
                    each.seq_id: self._sequence_text(number, each.seq_id, self._n_decoded(each))
                    for each in running
                    if each is not one and not each.in_prompt
                }
                clean = plain.memory.inputs((0,))[0]
                self._note_state(
                    number, one.seq_id, n_tokens, clean, states, memory, one.index, seqs, texts
                )

    def _n_decoded(self, one: DecodingSequence) -> int:
        """Tokens of its text that are decoded, all but the newest; its own count may be wrong."""
        return len(self._texts[one.seq_id]) - 1

    def _note_state(
        self,
        number: int,
        seq_id: int,
        n_tokens: int,
        clean: Mapping[StateKey, torch.Tensor],
        states: Mapping[StateKey, torch.Tensor],
        memory: HybridMemory,
        seq: int,
        beside: Sequence[int],
        others: Mapping[int, SequenceText],
    ) -> None:
        """Note a sequence's states if any is wrong, and what explains it. memory: holds them as
        sequence `seq`, as a pass with the sequences `beside` reads it."""
        errors = state_errors(clean, states)
        wrong = [key for key, error in errors.items() if not error <= self._audited.state_limit]
        if not wrong:
            return
        key, plain = min(wrong), self._options.plain
        make = partial(self._audited.session.make_memory, plain, 1, n_tokens + _ROOM, 0)
        text = self._sequence_text(number, seq_id, n_tokens)
        where = {"round": number, "seq_id": seq_id}
        where["is_prompt"] = (number, seq_id) not in self._audited.batches
        records = StateOrigin(self._audited.session.model, make).of(
            text, memory, seq, beside, key.layer, others
        )
        self._states[seq_id] = {
            "round": number,
            "layer": key.layer,
            "name": key.name,
            "error": min(errors[key], 1e30),
            "n_layers": len({key.layer for key in wrong}),
            "n_recurrent": len({key.layer for key in errors}),
            "origins": [where | record for record in records],
        }

    def _sequence_text(self, number: int, seq_id: int, n_tokens: int) -> SequenceText:
        text = self._audited.tokens[seq_id]
        pos0, batch = self._audited.batches.get((number, seq_id), (0, text[:n_tokens]))
        return SequenceText(text[:pos0], text[pos0:n_tokens], batch, text[n_tokens])

    def _compare_cells(
        self, number: int, one: DecodingSequence, memory: HybridMemory, plain: PlainPass
    ) -> None:
        """Note the first round after which attention has other cells, or other keys."""
        if one.seq_id in self._cells:
            return
        mine, theirs = memory.attention.state(one.index), plain.memory.attention.state(0)
        n = cells_that_differ(theirs.positions.numpy(), mine.positions.numpy())
        if n:
            self._cells[one.seq_id] = {"round": number, "n_cells": n}
            return
        limit = self._audited.state_limit
        for kind in ("k", "v"):
            pairs = zip(getattr(mine, kind), getattr(theirs, kind), strict=True)
            for i, (a, b) in enumerate(pairs):
                apart = (a - b).flatten(1).norm(dim=1) > limit * b.flatten(1).norm(dim=1)
                if bool(apart.any()):
                    pos = int(mine.positions[int(apart.nonzero()[0, 0])])
                    where = {"pos": pos, "cache_layer": i, "kind": kind, "n": int(apart.sum())}
                    self._cells[one.seq_id] = {"round": number, "n_cells": 0, **where}
                    return

    # -- what comes of it ------------------------------------------------------------------

    def _advance(self, seq_id: int, stop: int) -> None:
        """Decode a prompt in the usual ubatches, then token by token, and compare with the
        records."""
        plain, n_prompt = self._plain[seq_id], len(self._audited.prompts[seq_id].tokens)
        n = min(self._options.n_ubatch, max(1, n_prompt - plain.n_tokens), stop - plain.n_tokens)
        part = plain.decode(n, n_prompt - 1)
        check = self._checks[seq_id]
        self._audited.compare(check, part, self._rows.get(seq_id, []))
        self._redraw[seq_id].compare(check, part)

    def _comes_again(self, seq_id: int, pos: int) -> bool | None:
        """Whether the second run gave the recorded probabilities at a position, as the same passes
        do; None without one."""
        if self._samples is not None:
            return None
        found = [rows.get(seq_id, ()) for rows in (self._rows, self._again)]
        mine, again = ([row.top_p for row in rows if row.pos == pos] for rows in found)
        return bool(again) and np.allclose(mine, again, atol=_SAME_P, equal_nan=True)

    def wrong(self, seq_id: int) -> dict[str, Any]:
        """What is certainly wrong with a sequence: round and kind of the earliest, and all
        findings; {} without any."""
        check, at = self._checks[seq_id], {row.pos: row.round for row in self._rows.get(seq_id, [])}
        found: dict[str, Any] = {}
        noise = self._audited.noise(check, self._wide[seq_id])
        if self._audited.has_ties and not noise <= self._audited.logits_limit:
            self.not_judged.append(
                f"Sequence {seq_id}: in this compute mode plain passes of different widths differ "
                f"by an NMSE of {noise:.1e}."
            )
            return {}
        first = self._audited.is_wrong(check.errors)
        if first is not None:
            error = check.errors[first]
            n = sum(not error <= self._audited.logits_limit for error in check.errors.values())
            found["logits"] = {"round": at[first], "pos": first, "error": error, "n_rows": n}
            found["logits"]["comes_again"] = self._comes_again(seq_id, first)
        state = self._states.get(seq_id)
        if state and (not self._audited.has_ties or first is not None or state["error"] > _TIE):
            found["state"] = state
        cells = self._cells.get(seq_id)
        if cells and (cells["n_cells"] or first is not None):
            found["cells"] = cells
        if check.token is not None:
            pos, token = check.token
            found["token"] = {"round": at[pos], "pos": pos, "expected_id": token}
        if not found:
            return {}
        # in one round: cells too many, a state, cells of later layers that follow from it, logits
        two = ("cells", "state") if cells and cells["n_cells"] else ("state", "cells")
        order = (*two, "logits", "token")
        what = min(found, key=lambda name: (found[name]["round"], order.index(name)))
        return {"round": found[what]["round"], "what": what, **found}
